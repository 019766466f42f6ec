"""Numbers and booleans as strings, and fields that nobody knows."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from quire.frontend import leniency
from quire.frontend.bounds import MAX_FIELDS
from quire.frontend.dialects.anthropic import MessagesRequest
from quire.frontend.dialects.ollama_schema import OllamaChatRequest
from quire.frontend.dialects.tgi import TgiRequest
from quire.frontend.errors import ApiError
from quire.frontend.leniency import MAX_WARNINGS, Bodies
from quire.frontend.pooling_schema import EmbeddingRequest
from quire.frontend.responses.request import ResponsesRequest
from quire.frontend.schema import ChatRequest, CompletionRequest, parse
from quire.frontend.shapes import MOST_OBJECTS, MOST_UNKNOWN, shape_of, unknown_within
from quire.frontend.texts import TokenizeRequest


def read(fields: dict[str, Any], kind: Any = CompletionRequest, rules: Bodies | None = None) -> Any:
    given = {"messages": [{"role": "user", "content": "hi"}]} if kind is ChatRequest else {"prompt": "hi"}
    return parse(json.dumps({**given, **fields}).encode(), kind, rules or Bodies(lenient=True))


@pytest.mark.parametrize(
    ("field", "given", "wanted"),
    [
        ("max_tokens", "5", 5), ("max_tokens", " 5 ", 5), ("max_tokens", "5.0", 5), ("max_tokens", "+5", 5),
        ("n", "2", 2), ("top_k", "-1", -1), ("seed", "-7", -7), ("priority", "3", 3), ("temperature", "0.5", 0.5),
        ("temperature", ".5", 0.5), ("temperature", "1", 1.0), ("top_p", "9e-1", 0.9), ("logprobs", "3", 3),
        ("logprobs", "true", True), ("prompt_logprobs", "false", False), ("echo", "False", False),
        ("ignore_eos", "on", True), ("ignore_eos", 1, True), ("ignore_eos", 0, False), ("stream", "no", False),
        ("truncate_prompt_tokens", "-1", -1),
    ],
)  # fmt: skip
def test_strings_are_read_as_what_they_say(field: str, given: Any, wanted: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        found = getattr(read({field: given, "detokenize": True}), field)
    assert (found, type(found)) == (wanted, type(wanted))
    (warned,) = caplog.messages
    assert warned.startswith(f"{field} came as {given!r}") and "--no-lenient-types" in warned
    with pytest.raises(ApiError) as caught:
        read({field: given}, rules=Bodies())
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("max_tokens", ""), ("max_tokens", "5.5"), ("max_tokens", "five"), ("max_tokens", "true"), ("max_tokens", True),
        ("max_tokens", "0x5"), ("max_tokens", "9" * 40), ("temperature", "nan"), ("temperature", "inf"), ("top_p", "½"),
        ("temperature", "1" * 2_000_000 + "x"), ("temperature", "1e999"),
        ("temperature", True), ("echo", "maybe"), ("echo", 2), ("echo", ""), ("user", 5), ("model", 1), ("stream", []),
    ],
)  # fmt: skip
def test_what_says_no_number_is_refused_by_name(field: str, given: Any, caplog: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read({field: given, "n": "1"})
    assert (caught.value.status, caught.value.param) == (400, field)


def test_ranges_are_checked_as_for_numbers_and_inner_fields_are_read_too() -> None:
    with pytest.raises(ApiError, match="max_tokens must be at least 1"):
        read({"max_tokens": "0"}).sampling({})
    chat = read({"stream": "true", "stream_options": {"include_usage": "true"}, "logprobs": "true", "top_logprobs": "2",
                 "tools": None}, ChatRequest)  # fmt: skip
    assert chat.stream is True and chat.stream_options.include_usage is True and chat.likeliest() == 2
    assert parse(b'{"input": "a", "dimensions": "8"}', EmbeddingRequest, Bodies(lenient=True)).dimensions == 8


def test_a_field_is_warned_of_once_a_minute(caplog: Any) -> None:
    now = [0.0]
    rules = Bodies(lenient=True, clock=lambda: now[0])

    def warned(*fields: str) -> list[str]:
        caplog.clear()
        for field in fields:
            read({field: "1"}, rules=rules)
        return [message.split()[0] for message in caplog.messages]

    with caplog.at_level(logging.WARNING):
        assert warned("n", "n", "seed", "n") == ["n", "seed"]
        now[0] = 59.9
        assert warned("n", "max_tokens") == ["max_tokens"]
        now[0] = 60.0
        assert warned("n", "n") == ["n"]


def test_an_unknown_field_is_warned_of_with_the_nearest_name(caplog: Any) -> None:
    rules = Bodies(clock=lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        assert read({"max_token": 5, "frobnicate": {}}, rules=rules).max_tokens is None
        read({"max_token": 5}, rules=rules)
    near, far = sorted(caplog.messages, reverse=True)[:2]
    assert len(caplog.messages) == 2
    assert "'max_token'" in near and "did you mean max_tokens?" in near
    assert "'frobnicate'" in far and "mean max" not in far


def test_names_of_clients_neither_fill_the_log_nor_forge_lines_of_it(caplog: Any) -> None:
    rules = Bodies(clock=lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        read({"a\nb\x1b[31m": 1}, rules=rules)
        assert caplog.messages[0].isprintable()
        for n in range(3 * MAX_WARNINGS):
            read({f"{n}" + "x" * 1000: 1}, rules=rules)
    assert len(caplog.messages) == MAX_WARNINGS == len(rules._warned)
    assert max(map(len, caplog.messages)) < 300


def test_many_unknown_names_are_compared_for_what_is_written_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(leniency.difflib, "get_close_matches", lambda name, *rest: compared.append(name) or [])
    rules = Bodies(clock=lambda: 0.0)
    for _ in range(2):
        rules.check_names({f"temperatur{n:04}": 1 for n in range(1000)}, frozenset(("temperature",)))
    assert compared == [f"temperatur{n:04}" for n in range(MAX_WARNINGS)]


def test_unknown_fields_are_refused_where_that_is_asked_for() -> None:
    rules = Bodies(reject_unknown=True)
    with pytest.raises(ApiError, match=r"no field 'max_token'; did you mean max_tokens\?") as caught:
        read({"max_token": 5}, rules=rules)
    assert (caught.value.status, caught.value.param) == (400, "max_token")
    read({"metadata": {}, "store": True, "watermarking": False, "max_completion_tokens": 5}, ChatRequest, rules)
    with pytest.raises(ApiError, match="no field 'inputs'; did you mean input"):
        parse(b'{"input": "a", "inputs": "b"}', EmbeddingRequest, rules)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (r'{"prompt": "a", "stop": "a\ud800"}', "stop"), (r'{"prompt": "a", "stop": ["x", "\udc00y"]}', "stop"),
        (r'{"prompt": "\ud800\ud800"}', "prompt"), (r'{"prompt": "a", "vllm_xargs": {"\ud800": 1}}', "vllm_xargs"),
        (r'{"prompt": "a", "\ud800": 1}', None),
    ],
)  # fmt: skip
def test_half_a_character_is_told_as_such(body: str, param: str | None) -> None:
    with pytest.raises(ApiError, match="holds a lone surrogate") as caught:
        parse(body.encode(), CompletionRequest)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert parse(rb'{"prompt": "a", "stop": "\ud83d\ude00"}', CompletionRequest).stop == "\U0001f600"
    with pytest.raises(ApiError, match="not valid JSON"):
        parse(rb'{"prompt": "\ud83d\ude00', CompletionRequest)


BODIES: dict[str, Any] = {
    "chat": (ChatRequest, {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                     {"role": "assistant", "tool_calls": [{"id": "1", "type": "function",
                                                           "function": {"name": "f", "arguments": "{}"}}]}],
        "stream": True, "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"anything": 1}}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"anything": 1}}},
        "logit_bias": {"5": 1}, "chat_template_kwargs": {"anything": 1}, "metadata": {"anything": "1"},
    }),
    "ollama": (OllamaChatRequest, {
        "messages": [{"role": "user", "content": "a", "images": []}], "options": {"temperature": 1, "num_gpu": 3},
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }),
    "anthropic": (MessagesRequest, {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"x": 1}}]}],
        "tools": [{"name": "f", "input_schema": {"anything": 1}}], "tool_choice": {"type": "auto"},
    }),
    "responses": (ResponsesRequest, {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "metadata": {"anything": "1"},
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
        "tools": [{"type": "function", "name": "f"}],
    }),
    "tgi": (TgiRequest, {"inputs": "a", "parameters": {"seed": 1, "grammar": {"type": "regex", "value": "a"}}}),
    "pooling": (EmbeddingRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "tokenize": (TokenizeRequest, {"messages": [{"role": "user", "content": "a"}]}),
}  # fmt: skip
INNER = [
    ("chat", ("stream_options",), "include_usag", "include_usage"), ("chat", ("messages", 0), "contnt", "content"),
    ("chat", ("messages", 0, "content", 0), "txt", "text"), ("chat", ("tools", 0), "functon", "function"),
    ("chat", ("tools", 0, "function"), "parametres", "parameters"),
    ("chat", ("messages", 1, "tool_calls", 0, "function"), "argument", "arguments"),
    ("chat", ("response_format", "json_schema"), "shema", "schema"),
    ("ollama", ("options",), "tempurature", "temperature"),
    ("ollama", ("messages", 0), "contnt", "content"), ("anthropic", ("messages", 0, "content", 0), "txt", "text"),
    ("anthropic", ("tools", 0), "input_shema", "input_schema"), ("anthropic", ("tool_choice",), "typ", "type"),
    ("responses", ("input", 0, "content", 0), "txt", "text"), ("responses", ("text",), "fromat", "format"),
    ("responses", ("reasoning",), "efort", "effort"), ("tgi", ("parameters",), "max_new_token", "max_new_tokens"),
    ("tgi", ("parameters", "grammar"), "valu", "value"), ("pooling", ("messages", 0), "contnt", "content"),
    ("tokenize", ("messages", 0), "contnt", "content"),
]  # fmt: skip


def test_what_a_client_adds_to_an_answer_may_be_sent_back() -> None:
    """The message of openai's ``chat.completions.parse()`` holds what was read of it."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}}
    said = {"role": "assistant", "content": "{}", "parsed": {"a": 1}, "tool_calls": [call]}
    parse(json.dumps({"messages": [said]}).encode(), ChatRequest, Bodies(reject_unknown=True))
    part = {"type": "output_text", "text": "{}", "parsed": {"a": 1}}
    body = {"input": [{"role": "assistant", "content": [part]}]}
    parse(json.dumps(body).encode(), BODIES["responses"][0], Bodies(reject_unknown=True))


@pytest.mark.parametrize(("which", "way", "name", "meant"), INNER)
def test_unknown_fields_are_told_at_every_level(
    which: str, way: tuple[Any, ...], name: str, meant: str, caplog: Any
) -> None:
    kind, body = BODIES[which]
    parse(json.dumps(body).encode(), kind, Bodies(reject_unknown=True))
    assert not caplog.messages
    wrong = json.loads(json.dumps(body))
    at = wrong
    for step in way:
        at = at[step]
    at[name] = None
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in way).removeprefix(".")
    with pytest.raises(ApiError) as caught:
        parse(json.dumps(wrong).encode(), kind, Bodies(reject_unknown=True))
    assert f"there is no field '{path}.{name}'; did you mean {meant}?" in str(caught.value)
    assert (caught.value.status, caught.value.param) == (400, way[0])
    parse(json.dumps(wrong).encode(), kind, Bodies())
    (warned,) = caplog.messages
    assert name in warned and f"did you mean {meant}?" in warned


def test_what_is_looked_at_within_a_body_is_bounded() -> None:
    odd = {str(n): 1 for n in range(MAX_FIELDS)}
    assert len(unknown_within({"messages": [odd, odd]}, shape_of(ChatRequest))) == MOST_UNKNOWN
    long = {"messages": [{"role": "user"}] * MOST_OBJECTS + [odd]}
    assert unknown_within(long, shape_of(ChatRequest)) == []
    assert unknown_within({"messages": [[[odd]], "text", None, 5], "tools": odd}, shape_of(ChatRequest))
