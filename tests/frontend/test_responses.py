"""OpenAI's Responses API over HTTP by its own client, streamed and not, over an engine of scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from spoken import says

from quire.client.generation import OpenGeneration
from quire.client.results import RequestError
from quire.frontend.fake import FakeServer
from quire.frontend.responses import Store
from quire.proto.messages import Finish

TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": True}]
TEXT = '<think>Hm.</think>Let me see.<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer(tool_parser="hermes", reasoning_parser="qwen3", api_key="one two") as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.engine.requests.clear()
    return shared


def client(server: FakeServer, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def ask(server: FakeServer, **more: Any) -> Any:
    return client(server).responses.create(**{"model": "fake", "input": "hi there", **more})


def test_a_thought_a_text_and_a_call(server: FakeServer) -> None:
    server.engine.script = says(TEXT)
    done = ask(server, tools=TOOLS, instructions="Be brief.", reasoning={"effort": "low"})
    thought, message, call = done.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
    assert (message.type, done.output_text) == ("message", "Let me see.")
    assert (call.type, call.name, call.arguments, call.status) == (
        "function_call", "get_weather", '{"city": "Paris"}', "completed",
    )  # fmt: skip
    assert (done.status, done.instructions, done.usage.input_tokens) == ("completed", "Be brief.", 4)
    (request,) = server.engine.requests
    assert request.message.messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi there"},
    ]  # fmt: skip
    template = request.message.template
    assert template is not None
    assert template["tools"] == [
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    ]
    assert template["chat_template_kwargs"] == {"reasoning_effort": "low"}


def test_events_in_order(server: FakeServer) -> None:
    server.engine.script = says(TEXT)
    events = list(ask(server, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 1 and "".join(pieces) == '{"city": "Paris"}'
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message", "function_call"]


def test_one_goes_on_from_what_was_stored(server: FakeServer) -> None:
    server.engine.script = says(TEXT)
    first = ask(server, tools=TOOLS, instructions="Be brief.")
    server.engine.script = says("Sunny.")
    output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "18 degrees"}
    second = ask(server, input=[output], previous_response_id=first.id, stream=True)
    done = next(event.response for event in second if event.type == "response.completed")
    assert done.output_text == "Sunny."
    assert server.engine.requests[-1].message.messages == [
        {"role": "user", "content": "hi there"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [
            {"id": first.output[2].call_id, "type": "function", "function": {
                "name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": first.output[2].call_id, "content": "18 degrees"},
    ]  # fmt: skip
    assert client(server).responses.retrieve(done.id).output_text == "Sunny."
    with pytest.raises(openai.NotFoundError):
        client(server, "two").responses.retrieve(done.id)
    client(server).responses.delete(done.id)
    with pytest.raises(openai.NotFoundError):
        ask(server, previous_response_id=done.id)
    with pytest.raises(openai.NotFoundError):
        client(server).responses.retrieve(ask(server, store=False).id)


def test_what_was_cut_off_is_incomplete(server: FakeServer) -> None:
    server.engine.script = says(TEXT[:-21], Finish.LENGTH)
    done = ask(server, tools=TOOLS, max_output_tokens=50)
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (done.output[2].status, done.output[2].arguments) == ("incomplete", '{"city": ')


def test_a_form_and_a_failure(server: FakeServer) -> None:
    server.engine.script = says("{}", error=RequestError(500, "it broke."))
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    events = list(ask(server, text={"format": schema}, stream=True))
    assert (events[-1].type, events[-1].response.error.message) == ("response.failed", "it broke.")
    request = server.engine.requests[-1]
    assert isinstance(request, OpenGeneration) and request.work.params.structured_outputs is not None


@pytest.mark.parametrize(
    "more, param",
    [
        ({"input": ""}, "input"), ({"input": [{"type": "image"}]}, "input"), ({"input": [5]}, "input"),
        ({"input": [{"content": "x"}]}, "messages"), ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"background": True}, "background"), ({"reasoning": {"effort": 5}}, "reasoning"),
        ({"text": {"format": {"type": "x"}}}, "text"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(server: FakeServer, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, **more)
    assert refused.value.param == param


def test_what_is_kept_is_bounded() -> None:
    store = Store(most=2, most_bytes=500)
    for n in range(3):
        store.put("me", {"id": str(n)}, [{"content": "x" * 100}])
    with pytest.raises(RequestError):
        store.get("0", "me")
    assert store.get("2", "me").response == {"id": "2"}
    store.put("me", {"id": "large"}, [{"content": "x" * 1000}])
    with pytest.raises(RequestError):
        store.get("large", "me")
