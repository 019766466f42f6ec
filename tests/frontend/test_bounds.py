"""Small bodies that would be much work: refused by what can be counted, before any of it is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from http_asks import CHAT, ask, error_of, post

from quire.frontend.bounds import check_size
from quire.frontend.errors import ApiError
from quire.frontend.fake import MAX_MODEL_LEN, FakeServer

MANY = MAX_MODEL_LEN + 1
USER = {"role": "user", "content": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "a"}] * 20_001
TOOL = {"type": "function", "function": {"name": "f", "description": "d" * 5000, "parameters": {}}}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {"messages": [USER] * MANY}, f"messages holds {MANY} messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PARTS}]}, "messages holds 20001 parts"),
        ("/v1/responses", {"input": [USER] * 2 * MANY}, f"input holds {2 * MANY} items"),
        ("/v1/messages", {"messages": [USER] * MANY, "max_tokens": 3}, f"messages holds {MANY} messages"),
        ("/v1/messages/count_tokens", {"messages": [USER] * MANY}, f"messages holds {MANY} messages"),
        ("/api/chat", {"messages": [USER] * MANY, "model": "fake"}, f"messages holds {MANY} messages"),
        ("/tokenize", {"messages": [USER] * MANY}, f"messages holds {MANY} messages"),
        ("/apply-template", {"messages": [USER] * MANY}, f"messages holds {MANY} messages"),
        ("/invocations", {"messages": [USER] * MANY}, f"messages holds {MANY} messages"),
        ("/v1/embeddings", {"messages": [USER] * MANY}, f"messages holds {MANY} messages"),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL] * 100}, "tools are"),
        ("/api/chat", {**CHAT, "tools": [TOOL] * 100}, "tools are"),
        (
            "/v1/chat/completions",
            {**CHAT, **{f"x{n}": 1 for n in range(2000)}},
            "the body has 2002 fields, over the limit of 1000",
        ),
        ("/v1/chat/completions", {"messages": [{**USER, **{f"x{n}": 1 for n in range(2000)}}]}, "has 2002 fields"),
        (
            "/v1/chat/completions",
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * MANY}]},
            f"messages hold {MANY} tool_calls, over the limit of {MAX_MODEL_LEN}",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "chat_template_kwargs": {f"x{n}": 1 for n in range(2000)}},
            "chat_template_kwargs has 2000 fields",
        ),
        ("/v1/completions", {"prompt": "a", **{f"x{n}": 1 for n in range(2000)}}, "the body has 2001 fields"),
    ],
)
def test_what_cannot_fit_is_refused_by_its_count(server: FakeServer, path: str, body: Any, said: str) -> None:
    status, answer = post(server, body, path)
    assert status == 400 and said in str(answer), answer
    assert not server.engine.requests, "nothing of it has gone on"


def test_what_may_fit_goes_on(server: FakeServer) -> None:
    body = {"messages": [USER] * MAX_MODEL_LEN, "max_tokens": 1}
    assert "over the limit" not in str(post(server, body, "/v1/chat/completions")[1])
    assert error_of(post(server, {**CHAT, "messages": []}, "/v1/chat/completions"), 400)["param"] == "messages"
    server.engine.requests.clear()


def test_others_are_answered_while_such_bodies_come(server: FakeServer) -> None:
    statuses: list[int] = []
    body = {"messages": [USER] * 100_000}
    senders = [
        threading.Thread(target=lambda: statuses.append(post(server, body, "/v1/chat/completions")[0]))
        for _ in range(4)
    ]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        assert ask(server, "GET", "/health")[0] == 200
    for sender in senders:
        sender.join()
    assert statuses == [400] * 4
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("body", "context"),
    [
        ({"messages": [USER] * 8000, "truncate_prompt_tokens": -1}, 2048),
        ({"input": [USER] * 4000}, 2048),
        ({"input": ["a"] * 30_000}, 2048),  # of prompts, which are counted elsewhere
        ({"messages": [USER] * 20_000}, 0),
        ({"messages": [USER], "tools": [TOOL] * 1000}, 131_072),
        ({"messages": [USER], "tools": [TOOL] * 1000, "tool_choice": "none"}, 2048),
        ({"messages": [USER], "tools": [TOOL] * 1000}, 0),
    ],
)
def test_what_may_fit_or_is_cut_or_not_told_is_let_in(body: dict[str, Any], context: int) -> None:
    check_size(body, 6_000_000, context)


@pytest.mark.parametrize("context", [0, 10_000_000])
def test_messages_are_bounded_whatever_the_context(context: int) -> None:
    with pytest.raises(ApiError, match="messages holds 100001 messages, over the limit of"):
        check_size({"messages": [USER] * 100_001}, 0, context)
