"""Logprobs, forms, beams and best_of over HTTP, with the real stack and the demo model behind it."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import stack

PROMPT = "One, two, three,"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HI = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.2, "seed": 11, "logprobs": 3, "return_token_ids": True}
CHAT = {
    "messages": [{"role": "user", "content": "Tell me of 🐙 and é."}], "max_tokens": 12, "seed": 5, "logprobs": True,
    "top_logprobs": 3, "return_token_ids": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[stack.Server]:
    made = stack.Server("--override-generation-config", '{"max_new_tokens": 64}')
    yield made
    made.close()


def ask(server: stack.Server, path: str, body: dict[str, Any]) -> Any:
    status, answer, _ = server.post(path, body)
    assert status == 200, answer
    return answer


def stream(server: stack.Server, path: str, body: dict[str, Any]) -> list[Any]:
    """The choices of a stream's chunks."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        blocks = answer.read().decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [choice for block in blocks[:-2] for choice in json.loads(block[6:])["choices"]]


def close(values: list[float | None]) -> list[Any]:
    return [value if value is None else pytest.approx(value, abs=1e-4) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("echo", [False, True])
def test_completion_logprobs_streamed_and_not(server: stack.Server, echo: bool) -> None:
    (whole,) = ask(server, COMPLETIONS, {**HI, "echo": echo})["choices"]
    parts = stream(server, COMPLETIONS, {**HI, "echo": echo})
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [i for part in parts for i in part.get("token_ids", ())] == whole["token_ids"]
    found = whole["logprobs"]
    for name in ("tokens", "text_offset"):
        assert [x for part in parts if part["logprobs"] for x in part["logprobs"][name]] == found[name]
    values = [x for part in parts if part["logprobs"] for x in part["logprobs"]["token_logprobs"]]
    assert values == close(found["token_logprobs"])
    assert "".join(found["tokens"]) == whole["text"]
    prompt = len(whole["prompt_token_ids"]) if echo else 0
    assert len(found["tokens"]) == prompt + 12
    for offset, token, value, top in zip(
        found["text_offset"], found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert whole["text"][offset : offset + len(token)] == token
        if value is not None:
            assert top[token] == value
            assert 3 <= len(top) <= 4
            assert sum(map(math.exp, top.values())) < 1.001


@pytest.mark.slow
def test_chat_logprobs_streamed_and_not(server: stack.Server) -> None:
    answer = ask(server, CHATS, CHAT)
    (whole,) = answer["choices"]
    parts = stream(server, CHATS, CHAT)
    assert "".join(part["delta"].get("content", "") for part in parts) == whole["message"]["content"]
    streamed = [token for part in parts if part["logprobs"] for token in part["logprobs"]["content"]]
    content = whole["logprobs"]["content"]
    assert [token["bytes"] for token in streamed] == [token["bytes"] for token in content]
    assert [token["logprob"] for token in streamed] == close([token["logprob"] for token in content])
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == whole["message"]["content"]
    for token in content:
        values = [each["logprob"] for each in token["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert token["logprob"] <= values[0]


def test_a_prompt_is_scored(server: stack.Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    answer = ask(server, COMPLETIONS, body)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT
    assert answer["usage"]["completion_tokens"] == 0
    scored = [next(iter(each.values()))["logprob"] for each in choice["prompt_logprobs"][1:]]
    assert choice["logprobs"]["token_logprobs"] == [None, *scored]
    greedy = ask(server, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 0})
    (continued,) = greedy["choices"]
    again = ask(server, COMPLETIONS, {**body, "prompt": PROMPT + continued["text"]})["choices"][0]["logprobs"]
    assert again["token_logprobs"][-4:] == close(continued["logprobs"]["token_logprobs"])


def test_a_schema_is_kept(server: stack.Server) -> None:
    schema = {
        "type": "object", "properties": {"n": {"type": "integer"}, "ok": {"enum": ["yes", "no"]}},
        "required": ["n", "ok"], "additionalProperties": False,
    }  # fmt: skip
    body = {"messages": CHAT["messages"], "temperature": 1, "seed": 3, "max_tokens": 60}

    def check(text: str) -> None:
        answer = json.loads(text)
        assert isinstance(answer.pop("n"), int)
        assert answer.pop("ok") in ("yes", "no")
        assert not answer

    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    choices = ask(server, CHATS, {**body, "response_format": form, "n": 16})["choices"]
    finished = [choice["message"]["content"] for choice in choices if choice["finish_reason"] == "stop"]
    assert finished  # a model may well spend all it has on blanks
    for text in finished:
        check(text)
    for fields in (
        {"guided_json": schema, "guided_whitespace_pattern": " ?"},
        {"structured_outputs": {"json": json.dumps(schema), "disable_any_whitespace": True}},
    ):
        (choice,) = ask(server, CHATS, {**body, **fields})["choices"]
        assert choice["finish_reason"] == "stop"
        check(choice["message"]["content"])
        parts = stream(server, CHATS, {**body, **fields})
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
    (choice,) = ask(server, COMPLETIONS, {"prompt": "x", "guided_choice": ["alpha", "beta"]})["choices"]
    assert choice["text"] in ("alpha", "beta")


def test_beams_and_best_of(server: stack.Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "use_beam_search": True, "n": 3, "ignore_eos": True, "logprobs": 0}
    choices = ask(server, COMPLETIONS, body)["choices"]
    scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    assert len({choice["text"] for choice in choices}) == 3
    assert scores == sorted(scores, reverse=True)
    body = {"prompt": PROMPT, "max_tokens": 6, "n": 2, "temperature": 1.5, "seed": 1, "logprobs": 0, "ignore_eos": True}
    every = ask(server, COMPLETIONS, {**body, "n": 6})["choices"]
    best = ask(server, COMPLETIONS, {**body, "best_of": 6})["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]


NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_regex": "(["}, "guided_regex"),
        ({"response_format": NO_SCHEMA}, "response_format"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stream": True, "structured_outputs": {"grammar": "start: ("}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_refusals_name_the_requests_own_field(server: stack.Server, fields: dict[str, Any], param: str) -> None:
    status, answer, _ = server.post(CHATS, {"messages": CHAT["messages"], **fields})
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert param in answer["error"]["message"]


@pytest.mark.slow
def test_the_models_own_limit(server: stack.Server) -> None:
    body = {"messages": CHAT["messages"], "ignore_eos": True}
    assert ask(server, CHATS, body)["usage"]["completion_tokens"] == 64
    assert ask(server, CHATS, {**body, "max_tokens": 100})["usage"]["completion_tokens"] == 64
