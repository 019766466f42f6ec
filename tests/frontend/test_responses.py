"""OpenAI's Responses API over HTTP by its own client, streamed and not, over an engine of scripts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from responding import ask, client, held, until
from spoken import says

from quire.client.generation import OpenGeneration
from quire.client.request import OpenRequest
from quire.client.results import RequestError
from quire.detokenizer.template import ChatTemplate
from quire.frontend.fake import FakeServer
from quire.frontend.responses.store import Journal, Store, Stored
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
    assert template["chat_template_kwargs"] == {"reasoning_effort": "low", "enable_thinking": True}


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
        {"role": "assistant", "content": "Let me see.", "reasoning": "Hm.", "reasoning_content": "Hm.", "tool_calls": [
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
    server.engine.script = says("I see.")
    again = ask(server, input="go on", previous_response_id=done.id)
    assert again.status == "completed"
    messages = server.engine.requests[-1].message.messages
    assert messages is not None
    told = "{{ messages[1].tool_calls[0].function.arguments }}"
    assert ChatTemplate({"default": told}, {}).render(messages, None) == str({"_raw": '{"city": '})


@pytest.mark.parametrize("said", [TEXT[:-16], TEXT + '<tool_call>{"name": "get_weather", "arguments": {"ci'])
def test_a_stop_string_within_a_call_leaves_the_response_incomplete(server: FakeServer, said: str) -> None:
    """OpenAI has no reason for that."""
    server.engine.script = says(said, Finish.STOP, "ris")
    done = ask(server, tools=TOOLS, extra_body={"stop": ["ris"]})
    last = list(ask(server, tools=TOOLS, stream=True, extra_body={"stop": ["ris"]}))[-1]
    assert last.type == "response.incomplete"
    for each in (done, last.response):
        assert (each.status, each.incomplete_details, each.output[-1].status) == ("incomplete", None, "incomplete")
        assert each.output[1].status == "completed"


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
        ({"background": True, "store": False}, "background"), ({"conversation": "c"}, "conversation"),
        ({"max_tool_calls": -1}, "max_tool_calls"), ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"), ({"service_tier": "gold"}, "service_tier"),
        ({"include": ["all"]}, "include"), ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"), ({"metadata": {str(n): "b" for n in range(17)}}, "metadata"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"reasoning": {"effort": 5}}, "reasoning"), ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "x"}}}, "text"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(server: FakeServer, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, **more)
    assert refused.value.param == param


def test_every_field_has_its_effect_or_is_echoed(server: FakeServer) -> None:
    server.engine.script = says("Yes.")
    more = {"truncation": "auto", "max_tool_calls": 3, "top_logprobs": 2, "service_tier": "auto", "user": "me"}
    done = ask(server, metadata={"a": "b"}, prompt_cache_key="k", text={"verbosity": "low"}, **more,
               include=["message.output_text.logprobs", "reasoning.encrypted_content"],
               extra_body={"top_k": 5, "thinking_token_budget": 9})  # fmt: skip
    assert (done.metadata, done.truncation, done.max_tool_calls, done.service_tier) == (
        {"a": "b"},
        "auto",
        3,
        "default",
    )
    told = (done.top_logprobs, done.user, done.prompt_cache_key, done.background, done.service_tier)
    assert told == (2, "me", "k", False, "default")
    request = server.engine.requests[-1]
    assert isinstance(request, OpenGeneration)
    params = request.work.params
    assert (params.logprobs, params.top_k, params.thinking_token_budget) == (2, 5, 9)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_messages_tokens(server: FakeServer, stream: bool) -> None:
    """And tokens of thoughts are counted."""
    server.engine.script = says(TEXT, step=1)
    more: dict[str, Any] = {"tools": TOOLS, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    done = ask(server, **more, stream=stream)
    if stream:
        events = list(done)
        pieces = [event for event in events if event.type == "response.output_text.delta"]
        assert all(piece.logprobs for piece in pieces) and len(pieces) > 5
        done = events[-1].response
    (message,) = [item for item in done.output if item.type == "message"]
    assert len(message.content[0].logprobs) == len("Let me see.")
    assert len(message.content[0].logprobs[0].top_logprobs) == 1
    thoughts = done.usage.output_tokens_details.reasoning_tokens
    assert 0 < thoughts <= len("<think>Hm.</think>") < done.usage.output_tokens


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


def test_forms_are_parsed_and_streams_accumulate(server: FakeServer) -> None:
    server.engine.script = says('{"city": "Paris", "degrees": 18}')
    with client(server) as typed:
        parsed = typed.responses.parse(model="fake", input="hi", text_format=Weather).output_parsed
        assert parsed == Weather(city="Paris", degrees=18)
        with typed.responses.stream(model="fake", input="hi", text_format=Weather) as stream:
            assert [event.type for event in stream][-1] == "response.completed"
            assert stream.get_final_response().output_parsed == parsed


def test_a_conversation_is_kept_by_items(server: FakeServer) -> None:
    """An item that is referred to, those of a response that are sent back whole, and the list of what was asked."""
    server.engine.script = says(TEXT)
    first = ask(server, tools=TOOLS, input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [
        {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}])  # fmt: skip
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "18"}
    server.engine.script = says("Warm.")
    second = ask(server, input=[result], previous_response_id=first.id)
    sent = [{"role": "user", "content": "hi"}, *[item.model_dump() for item in first.output], result]
    referred = [{"type": "item_reference", "id": item.id} for item in first.output]
    third = ask(server, input=[sent[0], *referred, result], store=False)
    ask(server, input=sent, store=False)
    chained, referred, whole = (request.message.messages or [] for request in server.engine.requests[-3:])
    assert [message["role"] for message in chained] == ["system", "user", "assistant", "tool"]
    assert referred == whole and whole[1:] == chained[2:] and whole[1]["reasoning_content"] == "Hm."
    assert third.output_text == "Warm."
    items = client(server).responses.input_items
    listed = [item.type for item in items.list(second.id, order="asc", limit=4)]
    assert listed == ["message", "message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item.type for item in items.list(second.id, limit=1)] == listed[::-1]
    with pytest.raises(openai.BadRequestError):
        items.list(second.id, limit=0)


def test_what_is_referred_to_is_as_long_as_a_body_may_be(server: FakeServer) -> None:
    server.engine.script = says("Warm.")
    told = {"id": "msg_long", "role": "user", "content": "a" * 100_000}
    ask(server, input=[told])
    again = {"type": "item_reference", "id": "msg_long"}
    ask(server, input=[again] * 3, store=False)
    assert [each["content"] for each in server.engine.requests[-1].message.messages or []] == ["a" * 100_000] * 3
    with pytest.raises(openai.BadRequestError, match="more than 8388608 bytes; refer to fewer"):
        ask(server, input=[again] * 100, store=False)


def test_a_message_that_was_cut_off_is_gone_on_with(server: FakeServer) -> None:
    server.engine.script = says(" there.")
    said = {"type": "message", "role": "assistant", "status": "incomplete", "content": "Hello"}
    ask(server, input=[{"role": "user", "content": "hi"}, said])
    template = server.engine.requests[-1].message.template
    assert template is not None and template["continue_final_message"] and not template["add_generation_prompt"]


def test_a_custom_tool_is_called_with_a_text(server: FakeServer) -> None:
    server.engine.script = says('<tool_call>{"name": "run", "arguments": {"input": "ls \\"a\\""}}</tool_call>')
    tools: list[Any] = [{"type": "custom", "name": "run", "format": {
        "type": "grammar", "syntax": "regex", "definition": "ls.*"}}, *TOOLS]  # fmt: skip
    events = list(ask(server, tools=tools, stream=True))
    (call,) = events[-1].response.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "run", 'ls "a"')
    kinds = [event.type.removeprefix("response.") for event in events[2:-1]]
    assert kinds == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    form = server.engine.requests[-1].work.params.structured_outputs
    assert form is not None and "^(?:ls.*)$" in form.structural_tag
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "a"}
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "run"}]}
    ask(server, tools=tools, tool_choice=only, input=[output], previous_response_id=events[-1].response.id)
    message = server.engine.requests[-1].message
    assert [each["role"] for each in message.messages or []] == ["user", "assistant", "tool"]
    assert [tool["function"]["name"] for tool in (message.template or {})["tools"]] == ["run"]


@pytest.mark.parametrize("arguments", ['{"input": 1}', '{"inp', '{"input": "ls'])
def test_what_is_no_input_of_a_custom_tool_is_told_as_it_stands(server: FakeServer, arguments: str) -> None:
    server.engine.script = says(f'<tool_call>{{"name": "run", "arguments": {arguments}')
    tools: list[Any] = [{"type": "custom", "name": "run"}]
    (whole,) = ask(server, tools=tools).output
    (told,) = list(ask(server, tools=tools, stream=True))[-1].response.output
    assert whole.input == told.input == arguments


# ---------------------------------------------------------------- in the background


def test_a_response_in_the_background_is_polled_and_its_stream_resumed(server: FakeServer) -> None:
    go_on = threading.Event()
    server.engine.script = held(TEXT, go_on)
    begun = ask(server, tools=TOOLS, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    seen = until(server, begun.id, "in_progress")
    with client(server) as typed:
        stream = typed.responses.retrieve(begun.id, stream=True)
        some = [next(stream) for _ in range(4)]
        stream.close()
        assert [event.type for event in some[:3]] == ["response.created", "response.queued", "response.in_progress"]
        with pytest.raises(openai.BadRequestError):
            ask(server, previous_response_id=begun.id)
        go_on.set()
        rest = list(typed.responses.retrieve(begun.id, stream=True, starting_after=some[-1].sequence_number))
        assert [event.sequence_number for event in some + rest] == list(range(len(some) + len(rest)))
        done = until(server, begun.id, "completed")
        assert rest[-1].type == "response.completed" and rest[-1].response.output == done.output
        assert (seen.id, len(done.output), done.output_text) == (begun.id, 3, "Let me see.")
        with typed.responses.stream(response_id=begun.id, starting_after=5) as again:
            assert next(event.sequence_number for event in again) == 6
        with pytest.raises(openai.BadRequestError):
            typed.responses.retrieve(ask(server).id, stream=True)
        assert typed.responses.cancel(begun.id).status == "completed"
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            typed.responses.cancel(ask(server).id)


def test_a_client_that_leaves_does_not_end_what_runs_in_the_background(server: FakeServer) -> None:
    go_on = threading.Event()
    server.engine.script = held("One two three.", go_on)
    stream = ask(server, background=True, stream=True)
    id = next(stream).response.id
    stream.close()
    go_on.set()
    assert until(server, id, "completed").output_text == "One two three."


def test_a_response_in_the_background_is_cancelled(server: FakeServer) -> None:
    go_on = threading.Event()
    server.engine.script = held("One two three.", go_on)
    stream = ask(server, background=True, stream=True)
    id = next(stream).response.id
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    cancelled = client(server).responses.cancel(id)
    assert (cancelled.status, cancelled.output[0].status) == ("cancelled", "incomplete")
    assert [event.type for event in stream][-1] == "response.incomplete"
    assert until(server, id, "cancelled").output_text == "One two"
    assert client(server).responses.cancel(id).status == "cancelled"
    assert not server.engine.core.open
    go_on.set()


def test_a_failure_in_the_background_is_kept_and_a_refusal_is_told_at_once(server: FakeServer) -> None:
    server.engine.script = says("One", error=RequestError(500, "it broke."))
    failed = until(server, ask(server, background=True).id, "failed")
    assert (failed.error.message, failed.output_text) == ("it broke.", "One")
    server.engine.refuse = lambda request: RequestError(400, "it is too long.", "input_tokens")
    with pytest.raises(openai.BadRequestError, match="too long"):
        ask(server, background=True)
    with pytest.raises(openai.BadRequestError, match="too long"):
        ask(server, truncation="auto")
    server.engine.refuse = lambda request: None


def test_what_does_not_fit_is_left_out_from_the_oldest_on(server: FakeServer) -> None:
    def refuse(request: OpenRequest) -> RequestError | None:
        long = len(request.message.messages or []) > 3
        return RequestError(400, "it is too long.", "input_tokens") if long else None

    server.engine.script, server.engine.refuse = says("Yes."), refuse
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(6) for role in ("user", "assistant")]
    given = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "Now?"}]
    with pytest.raises(openai.BadRequestError):
        ask(server, input=given)
    ask(server, input=given, truncation="auto")
    server.engine.refuse = lambda request: None
    kept = [message["content"] for message in server.engine.requests[-1].message.messages or []]
    assert kept in (["Be brief.", "Now?"], ["Be brief.", "user 5", "assistant 5", "Now?"])


def test_the_tokens_of_an_input_are_counted(server: FakeServer) -> None:
    counted = client(server).responses.input_tokens.count(model="fake", input="hi there")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 2)
    assert not server.engine.core.open


def kept(id: str, size: int = 0, status: str = "completed") -> Stored:
    return Stored("me", {"id": id, "status": status, "output": []}, [{"id": id, "content": "x" * size}])


def test_what_is_kept_is_bounded() -> None:
    now = [0.0]
    store = Store(most=2, most_bytes=600, clock=lambda: now[0])
    for n in range(3):
        store.put(kept(str(n), 100))
    with pytest.raises(RequestError):
        store.get("0", "me")
    assert (
        store.get("2", "me").response["id"] == "2"
        and set(store.items({"2", "x"}, "me")) == {"2"}
        and not store.items({"2"}, "you")
    )
    store.put(kept("large", 1000))
    with pytest.raises(RequestError):
        store.get("large", "me")
    for id in ("a", "b"):
        store.begin(kept(id, status="queued"))
    with pytest.raises(RequestError) as full:
        store.begin(kept("c", status="queued"))
    assert full.value.status == 429
    stored = kept("b", status="queued")
    store.drop("b", "me")
    journal = store.begin(stored)
    for _ in range(3):
        journal.add(b"x" * 300)
    assert journal.size == stored.size == 600  # the others run, so its own oldest events go
    store.put(kept("b"))
    now[0] += 25 * 3600
    assert store.get("a", "me")  # what runs stays
    with pytest.raises(RequestError):
        store.get("b", "me")


def test_a_journal_forgets_its_oldest_events() -> None:
    async def read(after: int) -> bytes:
        return b"".join([data async for data in journal.after(after)])

    journal = Journal(most_bytes=4)
    for event in (b"0", b"1", b"2", b"3", b"45"):
        journal.add(event)
    journal.end()
    assert (
        asyncio.run(read(1)) == b"2345"
        and asyncio.run(read(2)) == b"345"
        and asyncio.run(read(3)) == b"45"
        and asyncio.run(read(9)) == b""
    )
    with pytest.raises(RequestError, match="starting_after=0"):
        asyncio.run(read(0))
