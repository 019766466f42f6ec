"""Small bodies that would be much work: refused by what can be counted, before any of it is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from http_asks import CHAT, error_of, post

from quire.frontend.fake import MAX_MODEL_LEN, FakeServer

MANY = MAX_MODEL_LEN + 1
USER = {"role": "user", "content": "a"}
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
        ("/v1/embeddings", {"messages": [USER] * MANY}, f"messages holds {MANY} messages"),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL] * 100}, "tools are"),
        (
            "/v1/chat/completions",
            {**CHAT, **{f"x{n}": 1 for n in range(2000)}},
            "the body has 2002 fields, over the limit of 1000",
        ),
        ("/v1/chat/completions", {"messages": [{**USER, **{f"x{n}": 1 for n in range(2000)}}]}, "has 2002 fields"),
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
