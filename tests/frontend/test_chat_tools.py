"""Chats with tools and thoughts over HTTP, streamed and not, over an engine of scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from http_asks import error_of, post
from spoken import says

from quire.client.generation import OpenGeneration
from quire.frontend.fake import FakeServer
from quire.frontend.schema import ChatRequest
from quire.frontend.tool_choice import reading_of, tools_of
from quire.proto.grammars.structural_tags import placed
from quire.proto.messages import Finish
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams

PATH = "/v1/chat/completions"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
PARIS = '{"city": "Paris"}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + PARIS + "}\n</tool_call>"
LATE = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer(tool_parser="hermes", reasoning_parser="qwen3") as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.engine.requests.clear()
    return shared


def client(server: FakeServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)


def whole(server: FakeServer, **more: Any) -> Any:
    status, body = post(server, {**CHAT, **more}, PATH)
    assert status == 200, body
    return body["choices"][0]


def streamed(server: FakeServer, extra: Any = None, **more: Any) -> tuple[dict[str, Any], str | None, list[Any]]:
    """A choice's message put together from its chunks, its finish_reason, and the deltas."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reason, deltas = None, []
    for chunk in client(server).chat.completions.create(
        model="fake", stream=True, **{**CHAT, **more}, extra_body=extra
    ):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            delta = choice.delta.model_dump(exclude_unset=True)
            deltas.append(delta)
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for piece in delta.get("tool_calls") or ():
                if "id" in piece:
                    assert piece["index"] == len(message["tool_calls"])
                    message["tool_calls"].append([piece["function"]["name"], piece["function"]["arguments"]])
                else:
                    message["tool_calls"][piece["index"]][1] += piece["function"]["arguments"]
    return message, reason, deltas


def asked(server: FakeServer) -> Any:
    (request,) = server.engine.requests
    assert isinstance(request, OpenGeneration)
    return request


def test_thought_text_and_two_calls(server: FakeServer) -> None:
    server.engine.script = says(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{LATE}")
    choice = whole(server)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Let me see.", "Hm.", "Hm.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": PARIS}, {"name": "get_time", "arguments": "{}"},
    ]  # fmt: skip
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert all(call["type"] == "function" and "index" not in call for call in message["tool_calls"])
    params = asked(server).work.params
    assert params.skip_special_tokens is False
    told = json.loads(params.structured_outputs.structural_tag)["format"]
    assert (told["type"], told["triggers"], told["stop_after_first"]) == ("triggered_tags", ["<tool_call>"], False)
    assert asked(server).message.template["tools"] == TOOLS

    got, reason, deltas = streamed(server)
    assert (got["content"], got["reasoning"], reason) == ("Let me see.", "Hm.", "tool_calls")
    assert got["tool_calls"] == [["get_weather", PARIS], ["get_time", "{}"]]
    assert len([delta for delta in deltas if delta.get("tool_calls")]) > 3  # in pieces


@pytest.mark.parametrize("at", [9, 18, 22, -30], ids=["thought", "its end", "text", "call"])
def test_what_is_echoed_and_goes_on_is_read_with_the_rest(server: FakeServer, at: int) -> None:
    answer = f"<think>Hm.</think>Let me. {CALL}"
    server.engine.script = says(answer[at:])
    messages = [*CHAT["messages"], {"role": "assistant", "content": answer[:at]}]
    more = {"echo": True, "continue_final_message": True}
    got, reason, _ = streamed(server, more, messages=messages)
    assert (got["reasoning"], got["content"], got["tool_calls"]) == ("Hm.", "Let me.", [["get_weather", PARIS]])
    message = whole(server, messages=messages, **more)["message"]
    assert (message["reasoning"], message["content"], reason) == ("Hm.", "Let me.", "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": PARIS}
    reading = reading_of(tools_of(TOOLS), "auto", False, True, None, "hermes", "qwen3")
    assert reading is not None  # where the prompt, which ends with what was said, is known
    found = replace(reading, said=answer[:at]).reader(f"assistant\n{answer[:at]}").message(answer[at:])
    assert (found["reasoning"], found["content"], len(found["tool_calls"])) == ("Hm.", "Let me.", 1)


def test_the_tokens_of_thoughts_are_counted(server: FakeServer) -> None:
    server.engine.script = says("<think>" + 8 * "Hm. " + "</think>" + 8 * "So. ")
    status, body = post(server, CHAT, PATH)
    used = body["usage"]
    assert status == 200 and 0 < used["completion_tokens_details"]["reasoning_tokens"] < used["completion_tokens"]
    asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    last = json.loads(post(server, asked, PATH)[1].decode().split("data: ")[-2])["usage"]
    assert 0 < last["completion_tokens_details"]["reasoning_tokens"] < last["completion_tokens"]
    server.engine.script = says("So.")
    assert post(server, CHAT, PATH)[1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_what_is_not_wanted_is_left_out(server: FakeServer) -> None:
    server.engine.script = says(f"<think>Hm.</think>{CALL}{LATE}")
    choice = whole(server, include_reasoning=False, parallel_tool_calls=False, n=2, logprobs=True)
    assert "reasoning" not in choice["message"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["message"]["content"] is None and choice["logprobs"]["content"]
    got, reason, _ = streamed(server, {"include_reasoning": False}, parallel_tool_calls=False)
    assert (got, reason) == ({"content": "", "reasoning": "", "tool_calls": [["get_weather", PARIS]]}, "tool_calls")
    form = json.loads(server.engine.requests[-1].work.params.structured_outputs.structural_tag)  # type: ignore[union-attr]
    assert form["format"]["stop_after_first"] is True


def test_an_answer_without_calls_and_one_cut_off(server: FakeServer) -> None:
    server.engine.script = says("Just text. ")
    choice = whole(server)
    assert (choice["message"], choice["finish_reason"]) == (
        {"role": "assistant", "content": "Just text. ", "refusal": None}, "stop",
    )  # fmt: skip
    server.engine.script = says(CALL[:55], Finish.LENGTH)
    choice = whole(server)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": CALL[49:55]}


def test_none_tells_the_model_of_no_tools(server: FakeServer) -> None:
    server.engine.script = says(CALL)
    assert whole(server, tool_choice="none")["message"]["content"] == CALL
    assert "tools" not in asked(server).message.template
    assert asked(server).work.params.structured_outputs is None


def test_required_and_named_are_demanded(server: FakeServer) -> None:
    server.engine.script = says(CALL)
    choice = whole(server, tool_choice="required")
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)
    form = json.loads(asked(server).work.params.structured_outputs.structural_tag)["format"]["content"]
    assert (form["type"], form["at_least_one"], len(form["tags"])) == ("tags_with_separator", True, 2)
    server.engine.requests.clear()
    whole(server, tool_choice={"type": "function", "function": {"name": "get_time"}})
    form = json.loads(asked(server).work.params.structured_outputs.structural_tag)["format"]["content"]
    assert [tag["begin"] for tag in form["tags"]] == ['<tool_call>\n{"name": "get_time", "arguments": ']
    assert form["stop_after_first"] is True


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_are_the_only_ones(server: FakeServer) -> None:
    server.engine.script = says(LATE)
    assert whole(server, tool_choice=allowed("required", "get_time"))["finish_reason"] == "tool_calls"
    assert [each["function"]["name"] for each in asked(server).message.template["tools"]] == ["get_time"]
    assert "get_weather" not in asked(server).work.params.structured_outputs.structural_tag
    server.engine.requests.clear()
    assert whole(server, tool_choice=allowed("auto", "get_time", "get_weather"))["finish_reason"] == "tool_calls"
    assert len(asked(server).message.template["tools"]) == 2


def test_a_model_whose_form_is_not_known_is_asked_for_a_list() -> None:
    with FakeServer(says('[{"name": "get_weather", "parameters": {"city": "Paris"}}]')) as server:
        choice = whole(server, tool_choice="required")
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": PARIS}
        assert streamed(server, tool_choice="required")[0]["tool_calls"] == [["get_weather", PARIS]]
        error = error_of(post(server, CHAT, PATH), 400)
        assert error["param"] == "tool_choice" and "--tool-call-parser" in error["message"]
        server.engine.script = says("<think>Hm.</think>Yes.")
        plain = whole(server, tools=None)
        assert plain["message"] == {"role": "assistant", "content": "<think>Hm.</think>Yes.", "refusal": None}


def test_effort_goes_to_the_template(server: FakeServer) -> None:
    server.engine.script = says("Yes.")
    whole(server, tools=None, reasoning_effort="none", chat_template_kwargs={"a": 1})
    assert asked(server).message.template["chat_template_kwargs"] == {
        "reasoning_effort": "none", "enable_thinking": False, "a": 1,
    }  # fmt: skip


def test_an_earlier_thought_is_shown_under_both_names(server: FakeServer) -> None:
    server.engine.script = says("Yes.")
    for name in ("reasoning", "reasoning_content"):
        whole(server, messages=[{"role": "assistant", "content": "a", name: "Hm."}, {"role": "user", "content": "b"}])
        told = server.engine.requests[-1].message.messages[0]
        assert (told["reasoning"], told["reasoning_content"]) == ("Hm.", "Hm.")


def test_a_form_of_the_requests_own_comes_after_the_thought(server: FakeServer) -> None:
    server.engine.script = says('<think>Hm.</think>{"a": 1}')
    message = whole(server, response_format={"type": "json_object"})["message"]
    assert (message["content"], message["reasoning"]) == ('{"a": 1}', "Hm.")
    form = json.loads(asked(server).work.params.structured_outputs.structural_tag)["format"]
    assert form["content"] == {"type": "json_schema", "json_schema": {"type": "object"}}
    server.engine.requests.clear()
    server.engine.script = says("<think>Hm.</think>")
    assert whole(server, tools=None, guided_grammar='start: "x"')["message"]["content"] == "<think>Hm.</think>"
    assert asked(server).work.params.structured_outputs.grammar  # which cannot be part of another


def test_schemas_of_any_depth_are_answered_or_refused(server: FakeServer) -> None:
    server.engine.script = says("Yes.")
    for depth in range(850, 1050, 20):
        deep = '{"items": ' * depth + "{}" + "}" * depth
        body = json.dumps({**CHAT, "tools": [{"function": {"name": "f", "parameters": "deep"}}]}).replace(
            '"deep"', deep
        )
        assert post(server, body.encode(), PATH)[0] in (200, 400)


@pytest.mark.parametrize(
    "more, param, words",
    [
        ({"tools": []}, "tools", "leave it out"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice", "`tools` must be set"),
        ({"tools": None, "tool_choice": {"function": {"name": "f"}}}, "tool_choice", "`tools` must be set"),
        ({"tool_choice": "any"}, "tool_choice", "Invalid value"),
        ({"reasoning_effort": "some"}, "reasoning_effort", "minimal"),
        ({"stream_interval": 0}, "stream_interval", "at least 1"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "must name a function"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "does not match"),
        ({"tool_choice": allowed("auto")}, "tool_choice", "must name some of the tools"),
        ({"tool_choice": allowed("auto", "get_time", "f")}, "tool_choice", "and no others"),
        ({"tool_choice": allowed("none", "get_time")}, "tool_choice", "mode must be auto or required"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "an object with mode and tools"),
        ({"tools": [5]}, "tools", "tools[0] must be an object"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "name must be"),
        ({"tools": [{"type": "function", "function": {"name": "a\nb"}}]}, "tools", "printable"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools", "JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools", "true or false"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "x" * 2**18}}}],
                "truncate_prompt_tokens": -1,
            },
            "tools",
            "limit",
        ),
        ({"parallel_tool_calls": 5}, "parallel_tool_calls", "true or false"),
    ],
)
def test_what_makes_no_sense_is_refused(server: FakeServer, more: dict[str, Any], param: str, words: str) -> None:
    error = error_of(post(server, {**CHAT, **more}, PATH), 400)
    assert error["param"] == param and words in error["message"]


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(("tail", "before"), [("<think>", "<tool_call>?\n</think>\n"), ("<think>\n\n</think>", "")])
def test_a_demanded_answer_begins_where_the_prompt_ends(parser: str, tail: str, before: str) -> None:
    """A thought that the prompt has opened is closed first, and after one that it has closed there is none."""
    reading = reading_of(tools_of(TOOLS), "required", False, True, None, "hermes", parser)
    assert reading is not None and reading.form is not None
    message = reading.reader(f"{tail}\n").message(before + CALL)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    assert message.get("reasoning", "") == before.removesuffix("\n</think>\n")
    given = json.loads(placed(reading.form.structural_tag or "", tail))
    assert given["begun"] == ("thought" if before else "answer")
    assert placed(reading.form.structural_tag or "", "assistant") == reading.form.structural_tag


@pytest.mark.parametrize("parser", ["openai", None])
def test_what_gpt_oss_is_demanded_is_read_in_its_channels(parser: str | None) -> None:
    """A call in its own words, or where a name cannot be told in them as a list in the last channel."""
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    said = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>"
    if parser is None:
        said = f'<|channel|>final<|message|>[{{"name": "get_weather", "parameters": {PARIS}}}]<|return|>'
    reading = reading_of(tools_of(TOOLS), "required", False, True, None, parser, "gpt-oss")
    assert reading is not None and reading.form is not None
    assert ("to=functions.get_weather" if parser else "final") in str(reading.form.structural_tag)
    message = reading.reader("<|start|>assistant").message(thought + said)
    assert (message["reasoning"], message["content"]) == ("Hm.", None)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [PARIS]
    own = reading_of({}, "none", False, True, StructuredOutputsParams(json_object=True), parser, "gpt-oss")
    assert own is not None and "<|channel|>final<|message|>" in str(own.form)
    assert own.reader(None).message(thought + "<|channel|>final<|message|>{}<|return|>")["content"] == "{}"
    odd = tools_of([{"type": "function", "function": {"name": "a b"}}])
    listed = reading_of(odd, "required", False, True, None, parser, "gpt-oss")
    assert listed is not None and listed.parser == "json_list"


@pytest.mark.parametrize("more", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"thinking": False}}])
def test_a_model_that_is_told_not_to_think_is_demanded_no_thought(more: Any) -> None:
    body = ChatRequest(messages=[{"role": "user", "content": "hi"}], tools=TOOLS, tool_choice="required", **more)
    reading = body.reading(SamplingParams(), "hermes", "deepseek_r1")
    assert reading is not None and reading.form is not None and "</think>" not in str(reading.form.structural_tag)
    assert reading.reader("<think></think>").message(CALL)["tool_calls"]


def test_a_server_may_tell_its_model_not_to_think() -> None:
    """Unless a request says otherwise."""
    usual = {"enable_thinking": False}
    for more, thinks in (
        ({}, False), ({"reasoning_effort": "low"}, True), ({"chat_template_kwargs": {"enable_thinking": True}}, True),
    ):  # fmt: skip
        body = ChatRequest(messages=[{"role": "user", "content": "hi"}], tools=TOOLS, tool_choice="required", **more)
        reading = body.reading(SamplingParams(), "hermes", "qwen3", usual)
        assert reading is not None and reading.form is not None
        assert ("</think>" in str(reading.form.structural_tag)) is thinks


@pytest.mark.parametrize("said", [CALL[:-15], CALL + LATE[:-15]], ids=["one", "the second"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_stop_string_within_a_call_is_no_end_of_calls(server: FakeServer, said: str, choice: str) -> None:
    """Nor is an end of the model's own: a client that is told of tool_calls runs them."""
    for stop in ("x", None):
        server.engine.script = says(said, Finish.STOP, stop)
        found = whole(server, stop=["x"], tool_choice=choice)
        assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
        assert found["message"]["tool_calls"]
        assert streamed(server, stop=["x"], tool_choice=choice)[1] == "stop"
    server.engine.script = says(CALL[:-13], Finish.STOP, "\n")  # all of the call is there
    assert whole(server, stop=["\n"], tool_choice=choice)["finish_reason"] == "tool_calls"
    assert streamed(server, stop=["\n"], tool_choice=choice)[1] == "tool_calls"


@pytest.mark.parametrize("parser", ["hermes", "openai", None])
def test_what_is_demanded_has_no_text_beside_it(parser: str | None) -> None:
    """Where the answer is cut off before a call has begun, its first marks are no text for the user."""
    list_ = f'[{{"name": "get_weather", "parameters": {PARIS}}}]'
    for said in (CALL if parser == "hermes" else list_)[:20:4], "<", "[":
        reading = reading_of(tools_of(TOOLS), "required", False, True, None, parser, None)
        assert reading is not None
        assert reading.reader(None).message(said) == {"content": ""}
        assert reading.reader(None).reason("length") == "length"
    reading = reading_of(tools_of(TOOLS), "auto", False, True, None, "hermes", None)
    assert reading is not None and reading.reader(None).message("<") == {"content": "<"}


def test_calls_have_no_content_however_they_came_about(server: FakeServer) -> None:
    """Null, as OpenAI answers, also where a call was demanded."""
    server.engine.script = says(LATE)
    for choice in ("auto", "required", {"type": "function", "function": {"name": "get_time"}}):
        assert whole(server, tool_choice=choice)["message"]["content"] is None
