"""Anthropic's dialect over HTTP, streamed and not, over an engine of scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from http_asks import ask, post
from spoken import says

from quire.client.generation import OpenGeneration
from quire.client.results import RequestError
from quire.frontend.dialects.anthropic import MessagesRequest
from quire.frontend.fake import FakeServer
from quire.proto.messages import Finish

PATH = "/v1/messages"
TOOLS = [
    {"name": "get_weather", "description": "d", "input_schema": {"type": "object"}},
    {"name": "get_time", "input_schema": {}},
]
CHAT: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi there"}]}
TEXT = (
    '<think>Hm.</think>Let me see.<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
)


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer(tool_parser="hermes", reasoning_parser="qwen3", api_key="secret") as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.engine.requests.clear()
    return shared


def send(server: FakeServer, path: str = PATH, key: str = "secret", **more: Any) -> tuple[int, Any]:
    return ask(server, "POST", path, {**CHAT, **more}, {"X-Api-Key": key})[:2]


def events(server: FakeServer, **more: Any) -> list[Any]:
    status, body = send(server, stream=True, **more)
    assert status == 200
    told = []
    for block in body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def test_a_thought_a_text_and_two_calls(server: FakeServer) -> None:
    server.engine.script = says(TEXT)
    status, body = send(server, tools=TOOLS)
    assert status == 200
    thinking, text, first, second = body["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert (second["name"], second["input"]) == ("get_time", {}) and first["id"] != second["id"]
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "tool_use")
    assert body["usage"]["input_tokens"] == 2 and body["usage"]["output_tokens"] > 3


def test_a_stream_tells_the_same_in_blocks(server: FakeServer) -> None:
    server.engine.script = says(TEXT)
    told = events(server, tools=TOOLS)
    assert [told[0]["type"], told[-2]["type"], told[-1]["type"]] == ["message_start", "message_delta", "message_stop"]
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    blocks: list[Any] = []
    for event in told[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append((event["content_block"]["type"], event["content_block"].get("name"), []))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            blocks[-1][2].append(delta.get("text") or delta.get("thinking") or delta.get("partial_json"))
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
    assert [(kind, name, "".join(pieces)) for kind, name, pieces in blocks] == [
        ("thinking", None, "Hm."), ("text", None, "Let me see."), ("tool_use", "get_weather", '{"city": "Paris"}'),
        ("tool_use", "get_time", "{}"),
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", ["[" * 5000, '{"a": ' * 5000, "[1]", "5", '{"a": '])
def test_what_has_arguments_that_are_no_object_is_text(server: FakeServer, arguments: str) -> None:
    text = f"<tool_call>{json.dumps({'name': 'get_time', 'arguments': arguments})}</tool_call>"
    server.engine.script = says(text, step=900)
    status, body = send(server, tools=TOOLS)
    assert (status, body["content"], body["stop_reason"]) == (200, [{"type": "text", "text": text}], "end_turn")
    told = [event["delta"]["text"] for event in events(server, tools=TOOLS) if "text_delta" in str(event)]
    assert "".join(told) == text


@pytest.mark.parametrize(
    "finish, stop, reason",
    [(Finish.STOP, None, "end_turn"), (Finish.STOP, "x", "stop_sequence"), (Finish.LENGTH, None, "max_tokens")],
)
def test_why_it_ended(server: FakeServer, finish: Finish, stop: str | None, reason: str) -> None:
    server.engine.script = says("Text.", finish, stop)
    _, body = send(server, stop_sequences=["x"])
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)
    assert body["content"] == [{"type": "text", "text": "Text."}]
    assert events(server)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}


@pytest.mark.parametrize(
    "finish, stop, reason",
    [(Finish.STOP, "ris", "stop_sequence"), (Finish.STOP, None, "end_turn"), (Finish.LENGTH, None, "max_tokens")],
)
def test_a_call_that_is_not_whole_is_no_tool_use(
    server: FakeServer, finish: Finish, stop: str | None, reason: str
) -> None:
    server.engine.script = says('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa', finish, stop)
    _, body = send(server, stop_sequences=["ris"], tools=TOOLS)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)
    assert body["content"][0]["input"] == {"_raw": '{"city": "Pa'}
    told = events(server, stop_sequences=["ris"], tools=TOOLS)[-2]
    assert told["delta"] == {"stop_reason": reason, "stop_sequence": stop}


def test_the_answer_goes_on_with_a_last_message_of_the_assistants(server: FakeServer) -> None:
    """Counted so too. A call that waits for its result is not gone on with, nor is a thought without an answer."""
    server.engine.script = says(" Paris.")
    question = {"role": "user", "content": "Where?"}
    use = {"type": "tool_use", "name": "f", "id": "1", "input": {}}
    for content, goes_on in (
        ("It is in", True), ([{"type": "text", "text": "It is in"}], True), ([use], False), ("", False),
        ([{"type": "text", "text": "Let me"}, use], False), ([{"type": "thinking", "thinking": "Hm."}], False),
    ):  # fmt: skip
        messages = [question, {"role": "assistant", "content": content}]
        for path in (PATH, PATH + "/count_tokens"):
            server.engine.requests.clear()
            status, body = send(server, path, messages=messages)
            assert status == 200, body
            template = server.engine.requests[0].message.template
            assert template is not None
            assert (template["continue_final_message"], template["add_generation_prompt"]) == (goes_on, not goes_on)
    _, body = send(server, messages=[question, {"role": "assistant", "content": "It is in"}])
    assert body["content"] == [{"type": "text", "text": " Paris."}]
    with FakeServer(says(" Paris."), reasoning_parser="deepseek_r1", api_key="secret") as always_thinks:
        _, body = send(always_thinks, messages=[question, {"role": "assistant", "content": "It is in"}])
        assert body["content"] == [{"type": "text", "text": " Paris."}]  # its thought is behind it
        _, body = send(always_thinks, messages=[question, {"role": "assistant", "content": "<think>It is in"}])
        assert body["content"][0]["type"] == "thinking"


def test_what_a_conversation_becomes(server: FakeServer) -> None:
    server.engine.script = says("Yes.")
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "noon"}]}
    more = {"type": "text", "text": "And then?"}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, call]},
        {"role": "user", "content": [result, more]},
    ]
    choice = {"type": "tool", "name": "get_time", "disable_parallel_tool_use": True}
    system = [{"type": "text", "text": "Be brief."}]
    assert (
        send(server, messages=messages, system=system, tools=TOOLS, tool_choice=choice, thinking={"type": "disabled"})[
            0
        ]
        == 200
    )
    (request,) = server.engine.requests
    assert request.message.messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": {"name": "get_time", "arguments": '{"a":1}'}}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "noon"}, {"role": "user", "content": "And then?"},
    ]  # fmt: skip
    template = request.message.template
    assert template is not None and template["chat_template_kwargs"] == {"enable_thinking": False}
    function = {"name": "get_weather", "description": "d", "parameters": {"type": "object"}}
    assert template["tools"][0] == {"type": "function", "function": function}
    assert isinstance(request, OpenGeneration)
    form = request.work.params.structured_outputs
    assert form is not None and "get_weather" not in str(form.structural_tag)
    assert request.work.params.thinking_token_budget is None


def test_an_output_has_an_effort_and_a_form(server: FakeServer) -> None:
    server.engine.script = says("{}")
    config = {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    more = {"metadata": {"user_id": "x"}, "service_tier": "auto", "context_management": {"edits": []}}
    assert send(server, output_config=config, **more)[1]["content"] == [{"type": "text", "text": "{}"}]
    (request,) = server.engine.requests
    assert request.message.template["chat_template_kwargs"]["reasoning_effort"] == "high"
    assert "object" in str(request.work.params.structured_outputs.structural_tag)
    for bad in ({"effort": "some"}, {"effort": 5}, {"format": {"type": "text"}}, {"format": 5}):
        status, body = send(server, output_config=bad)
        assert status == 400 and "output_config" in body["error"]["message"]


def test_a_budget_holds_where_thoughts_are_told_apart(server: FakeServer) -> None:
    """Clients send one to any model: where its thoughts are not known apart there is nothing to hold to it."""
    server.engine.script = says("Yes.")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert send(server, thinking=thinking)[0] == 200
    assert server.engine.requests[0].work.params.thinking_token_budget == 1024
    assert MessagesRequest(**CHAT, thinking=thinking).chat(thinks=False).thinking_token_budget is None
    assert send(server, thinking={**thinking, "type": "disabled", "budget_tokens": "x"})[0] == 200
    assert send(server, thinking={**thinking, "budget_tokens": "x"})[0] == 400


def test_tokens_are_counted_without_an_answer(server: FakeServer) -> None:
    server.engine.script = says("Never " * 1000)
    assert send(server, PATH + "/count_tokens", max_tokens=None) == (200, {"input_tokens": 2})
    assert server.engine.core.open == {}


def test_a_failure_within_a_stream_is_an_event(server: FakeServer) -> None:
    server.engine.script = says("Some text.", error=RequestError(500, "it broke."))
    assert events(server)[-1] == {"type": "error", "error": {"type": "api_error", "message": "it broke."}}


@pytest.mark.parametrize(
    "more, words",
    [
        ({"max_tokens": None}, "max_tokens must be given"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "system", "content": "x"}]}, "must be 'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": 5}]}, "a string or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use' is not supported"),
        ({"system": 5}, "system must be a string"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] must be a tool"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "`tools` must be set"),
        ({"temperature": "hot"}, "temperature must be"),
    ],
)
def test_what_makes_no_sense_is_refused_in_its_shape(server: FakeServer, more: dict[str, Any], words: str) -> None:
    status, body = send(server, **more)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in body["error"]["message"]


def test_a_key_is_asked_for(server: FakeServer) -> None:
    server.engine.script = says("Yes.")
    status, body = send(server, key="wrong")
    assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
    assert post(server, CHAT, PATH, Authorization="Bearer secret")[0] == 200
    assert ask(server, "POST", PATH, CHAT, {"Authorization": "Bearer wrong", "X-Api-Key": "secret"})[0] == 401


def test_models_are_told_in_the_form_of_who_asks(server: FakeServer) -> None:
    key, form = {"X-Api-Key": "secret"}, {"anthropic-version": "2023-06-01"}
    assert ask(server, "GET", "/v1/models", headers=key)[1]["object"] == "list"
    status, page, _ = ask(server, "GET", "/v1/models", headers=key | form)
    (model,) = page["data"]
    assert (status, page["has_more"], page["first_id"], page["last_id"]) == (200, False, "fake", "fake")
    assert (model["type"], model["id"], model["display_name"]) == ("model", "fake", "fake")
    assert model["created_at"][10] == "T" and model["created_at"].endswith("Z")
    assert ask(server, "GET", "/v1/models/fake", headers=key | form)[1] == model
    status, refused, _ = ask(server, "GET", "/v1/models/other", headers=key | form)
    assert (status, refused["type"], refused["error"]["type"]) == (404, "error", "not_found_error")
