"""What a request may hold, before anything is queued."""

from __future__ import annotations

import json
from typing import Any

import params_table
import pytest

from quire.client.results import RequestError
from quire.frontend.errors import MAX_MESSAGE, ApiError, error_body
from quire.frontend.schema import MAX_PROMPTS, ChatRequest, CompletionRequest, parse
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), ChatRequest)


def refused(body: bytes | dict[str, Any], kind: type[Any] = CompletionRequest) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        request = parse(raw, kind)
        request.prompts() if kind is CompletionRequest else request.conversation()
        request.sampling({})
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"), ("max_tokens", 5.5), ("max_tokens", True), ("max_tokens", -1), ("max_tokens", 0),
        ("max_tokens", 10**30), ("max_tokens", []), ("n", 0), ("n", 10**6), ("n", True), ("n", "1"),
        ("temperature", -1), ("temperature", "hot"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.5), ("top_k", -5), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1),
        ("seed", 1.5), ("seed", 2**70), ("seed", "x"), ("stop", [1]), ("stop", ""), ("stop", {"a": 1}),
        ("stop", ["a"] * 65), ("stop_token_ids", ["a"]), ("stop_token_ids", [True]), ("stop_token_ids", [-1]),
        ("ignore_eos", 1), ("ignore_eos", "true"), ("skip_special_tokens", "no"), ("stream", "yes"), ("echo", 1),
        ("include_stop_str_in_output", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 0),
        ("priority", 1.5), ("priority", 2**40), ("add_special_tokens", "a"), ("model", 5), ("user", 5),
        ("stream_options", {"include_usage": True}), ("stream_options", 5), ("best_of", 0),
        ("min_tokens", -1), ("return_token_ids", 1), ("return_tokens_as_token_ids", "x"),
        ("guided_decoding_backend", 5), ("guided_whitespace_pattern", 5), ("detokenize", 0),
        ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", ["x"]),
        # known, not honoured yet
        ("suffix", 5), ("repetition_detection", {}),
    ],
)  # fmt: skip
def test_bad_value_names_its_field(field: str, value: Any) -> None:
    error = refused({"prompt": "hi", field: value})
    assert error.param == field
    assert field in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize("field", [
    "functions", "chat_template", "documents", "audio",
    "prompt_token_ids", "return_prompt_text", "watermarking", "packed_top_logprobs",
])  # fmt: skip
def test_chat_features_to_come_are_refused_by_name(field: str) -> None:
    error = refused({"messages": [{"role": "user", "content": "x"}], field: [{"type": "function"}]}, ChatRequest)
    assert error.param == field
    assert "not supported yet" in error.message


def test_numbers_too_large_for_json_name_their_field() -> None:
    assert refused(b'{"prompt": "a", "temperature": 1e999}').param == "temperature"
    assert refused(b'{"prompt": "a", "surprise": 1e999}').param == "surprise"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"5", b'{"prompt": "a"', b'{"prompt": "a"} x', b'{"prompt": NaN}',
     b'{"temperature": NaN, "prompt": "a"}', b'{"temperature": Infinity, "prompt": "a"}', b'{"prompt": "\xff"}',
     b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"[" * 100_000],
)  # fmt: skip
def test_broken_json(body: bytes) -> None:
    refused(body)


def test_neutral_values_of_openai_clients_are_accepted() -> None:
    request = completion(
        frequency_penalty=0, presence_penalty=0.0, repetition_penalty=1.0, logprobs=None, logit_bias={}, best_of=1,
        suffix=None, response_format={"type": "text"}, min_tokens=0, bad_words=[], use_beam_search=False,
        stream_options=None, user="me", model=None, n=None, stop=None, seed=None, temperature=None, max_tokens=None,
    )  # fmt: skip
    assert request.sampling({}) == SamplingParams(max_tokens=16)
    chat(logprobs=False, top_logprobs=0, tool_choice="none", parallel_tool_calls=True, logit_bias=None)
    chat(tools=None, store=False, metadata={}, modalities=["text"], function_call="none")


def test_whole_numbers_of_clients_whose_numbers_are_all_floats() -> None:
    plain = {"max_tokens": 5, "n": 2, "seed": 7, "top_k": 3, "min_tokens": 0, "logprobs": 1, "priority": -2}
    floats = completion(**{name: float(value) for name, value in plain.items()})
    assert (floats, floats.priority, type(floats.max_tokens)) == (completion(**plain), -2, int)
    chat(top_logprobs=2.0, logprobs=True, temperature=1.0, max_completion_tokens=1e2, metadata=1.0)
    for field, value in (("max_tokens", 1.5), ("n", -0.0), ("stream", 1.0), ("stop", 2.0), ("user", 1.0), ("n", 1e300)):
        assert refused({"prompt": "x", "seed": 1.0, field: value}).param == field


def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    assert parse(b'\xef\xbb\xbf{"prompt": "a"}', CompletionRequest).prompt == "a"


def test_unknown_fields_are_ignored() -> None:
    assert completion(frobnicate=[1, {"a": None}]).prompts() == ["hi"]


def test_prompt_forms() -> None:
    assert completion(prompt=["a", "b"]).prompts() == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts() == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts() == [[1], [2, 3]]


@pytest.mark.parametrize(
    "prompt",
    ["", None, [], [""], ["a", ""], [[]], [[1], []], ["a", 1], [1, "a"], [[1], "a"], ["a", [1]], [1, True], [True],
     [1.5], [-1], [2**31], [[1, -1]], [[[1]]], 5, {"a": 1}, [None], ["x"] * (MAX_PROMPTS + 1), False],
)  # fmt: skip
def test_bad_prompts(prompt: Any) -> None:
    assert refused({"prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", {"role": "user"}, ["hi"], [5], [{}], [{"content": "x"}], [{"role": 5, "content": "x"}],
     [{"role": "", "content": "x"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
     [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"text": "x"}]}]],
)  # fmt: skip
def test_bad_messages(messages: Any) -> None:
    assert refused({"messages": messages}, ChatRequest).param == "messages"


def test_parts_become_parts_of_text_and_the_rest_of_a_message_is_kept() -> None:
    parts = ["a", {"type": "text", "text": "b", "lang": "en"}, {"type": "input_text", "text": "c"}]
    messages = [{"role": "user", "content": parts, "name": "x"}, {"role": "assistant", "content": None}]
    told = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "lang": "en"}, {"type": "text", "text": "c"}]
    assert chat(messages=messages).conversation() == [
        {"role": "user", "content": told, "name": "x"},
        {"role": "assistant", "content": None},
    ]


def test_max_tokens_of_chat() -> None:
    assert chat().sampling({}).max_tokens is None
    assert chat(max_tokens=5).sampling({}).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).sampling({}).max_tokens == 7
    error = refused({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}, ChatRequest)
    assert error.param == "max_completion_tokens"
    assert "max_completion_tokens" in error.message


def test_every_parameter_arrives() -> None:
    fields = {
        "n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 2**63, "stop": ["a", "b"],
        "stop_token_ids": [1, 2], "include_stop_str_in_output": True, "ignore_eos": True, "max_tokens": 9,
        "skip_special_tokens": False, "truncate_prompt_tokens": -1, "best_of": 5, "presence_penalty": -1,
        "frequency_penalty": 0.5, "repetition_penalty": 1.5, "bad_words": ["x"], "min_tokens": 2, "logprobs": 4,
        "prompt_logprobs": 0, "spaces_between_special_tokens": False, "logits_processors": ["a.b:c"],
        "logit_bias": {"5": -2.5}, "allowed_token_ids": [5, 6], "skip_reading_prefix_cache": True,
    }  # fmt: skip
    assert completion(**fields).sampling({}) == SamplingParams(**fields)


def test_the_models_defaults_give_way_to_the_request() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9}
    params = completion(top_p=0.5).sampling(defaults)
    assert (params.temperature, params.top_p) == (0.6, 0.5)


# ---------------------------------------------------------------- the table of sampling fields


def in_json(cell: tuple[Any, ...]) -> bool:
    """Whether HTTP can say it; null means that a field is not given."""
    value = params_table.given(*cell[:2])[cell[0]]
    try:
        return params_table.ROWS[cell[0]].http and value is not None and bool(json.dumps(value))
    except TypeError:
        return False


def body_of(kind: type[Any], fields: dict[str, Any]) -> bytes:
    own = {"prompt": "hi"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({**own, "max_tokens": 16, **fields}).encode()


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize(("name", "value"), [cell for cell in params_table.cells("good") if in_json(cell)])
def test_the_table_is_accepted(kind: type[Any], name: str, value: Any) -> None:
    fields = params_table.given(name, value)
    params = parse(body_of(kind, fields), kind).sampling({})
    if fields.get("max_tokens", 16) is not None:
        assert params == SamplingParams(**{"max_tokens": 16, **fields})


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize(("name", "value", "said"), [cell for cell in params_table.cells("bad") if in_json(cell)])
def test_the_table_is_refused(kind: type[Any], name: str, value: Any, said: str) -> None:
    fields = params_table.given(name, value)
    body = body_of(kind, fields)
    error = refused(body, kind)
    if b"NaN" in body or b"Infinity" in body:
        assert "not valid JSON" in error.message
        return
    assert error.param in fields
    assert error.param in error.message
    if error.param == name != "use_beam_search":
        assert said in error.message


def test_a_number_too_large_names_each_field() -> None:
    for name in ("logit_bias", "presence_penalty", "early_stopping", "guided_json", "response_format"):
        assert refused(b'{"prompt": "a", "%s": 1e400}' % name.encode()).param == name


ODD = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**30, 0.5, -1e300, "", "x", "\u0000", "never", [], {}, [None],
    ["x"], [1], [True], [[1]], {"type": "text"}, {"type": "json_schema", "json_schema": {}}, {"1": 1}, {"1": None},
    {"x": {}}, {"regex": "a"}, {"json": {}, "regex": ""}, [{"role": "user", "content": ""}],
]  # fmt: skip


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_whatever_a_field_holds_it_is_taken_or_refused(kind: type[Any]) -> None:
    """Nothing else is ever raised: a request must not become a fault of ours."""
    others: list[dict[str, Any]] = [
        {},
        {"stream": True},
        {"use_beam_search": True, "n": 2},
        {"echo": True},
        {"guided_json": {}},
        {"guided_json": False},
    ]
    for name in kind.__struct_fields__:
        for value in ODD:
            for other in others:
                try:
                    request = parse(body_of(kind, {**other, name: value}), kind)
                    request.sampling({"temperature": 0.5, "max_tokens": 9})
                    request.extras()
                    request.own_words(RequestError(400, "x", name))
                except ApiError as error:
                    assert error.status == 400
                    assert error.param is not None


# ---------------------------------------------------------------- logprobs


def test_logprobs_of_completions() -> None:
    for given, k in [(None, None), (False, None), (0, 0), (True, 1), (5, 5), (-1, -1)]:
        params = completion(logprobs=given).sampling({})
        assert (params.logprobs, params.prompt_logprobs) == (k, None)
    assert completion().extras() is completion(logprobs=False, echo=True, return_token_ids=False).extras() is None
    params = completion(logprobs=2, echo=True).sampling({})
    assert (params.logprobs, params.prompt_logprobs) == (2, 2)
    params = completion(logprobs=2, echo=True, prompt_logprobs=5, stream=False).sampling({})
    assert (params.logprobs, params.prompt_logprobs) == (2, 5)
    assert completion(logprobs=2, echo=True, prompt_logprobs=-1).sampling({}).prompt_logprobs == -1
    for bad in (-2, "1", 1.5, [1]):
        assert refused({"prompt": "x", "logprobs": bad}).param == "logprobs"
    assert refused({"prompt": "x", "logprobs": -5, "echo": True}).param == "logprobs"


def test_logprobs_of_chats() -> None:
    for fields, k in [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0),
                      ({"logprobs": True, "top_logprobs": 3}, 3), ({"logprobs": True, "top_logprobs": -1}, -1),
                      ({"logprobs": False, "top_logprobs": 0}, None)]:  # fmt: skip
        assert chat(**fields).sampling({}).logprobs == k
    said = "when using `top_logprobs`, `logprobs` must be set to true."
    for fields, param, message in [
        ({"top_logprobs": 3}, "top_logprobs", said),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs", said),
        ({"top_logprobs": -2, "logprobs": True}, "top_logprobs", "top_logprobs must be at least -1"),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs", "top_logprobs must be an integer"),
        ({"logprobs": 3}, "logprobs", "logprobs must be true or false, got an integer"),
        ({"prompt_logprobs": "3"}, "prompt_logprobs", "prompt_logprobs must be an integer"),
    ]:
        error = refused({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)
        assert error.param == param
        assert message in error.message


# ---------------------------------------------------------------- forms


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": {}}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": {"type": "array"}}}, {"json": {"type": "array"}}),
        ({"response_format": NAMED}, {"json": SCHEMA}),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a", "disable_fallback": False}}, {"regex": "a"}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
        ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "outlines"}, {"json": json.dumps(SCHEMA)}),
        ({"guided_regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"guided_choice": ["x"]}, {"choice": ["x"]}),
        ({"guided_grammar": 'root ::= "a"', "response_format": {"type": "text"}}, {"grammar": 'root ::= "a"'}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_json_object": False, "guided_json": None}, None),
    ],
)
@pytest.mark.parametrize("make", [completion, chat])
def test_forms(make: Any, fields: dict[str, Any], form: dict[str, Any] | None) -> None:
    assert make(**fields).sampling({}).structured_outputs == (None if form is None else StructuredOutputsParams(**form))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", "json"), ("response_format", {}), ("response_format", {"type": "yaml"}),
        ("response_format", {"type": 5}), ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": SCHEMA}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": "x"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": "yes"}}),
        ("structured_outputs", "x"), ("structured_outputs", {"structural_tag": 5}),
        ("structured_outputs", {"regex": "a", "backend": "x"}),
        ("guided_json", 5), ("guided_json", []), ("guided_regex", 5), ("guided_regex", ""), ("guided_regex", True),
        ("guided_choice", "abc"), ("guided_choice", []), ("guided_choice", [1]), ("guided_grammar", {"a": 1}),
        ("guided_json_object", 1), ("guided_regex", "a" * (2**18 + 1)), ("guided_whitespace_pattern", " ?"),
    ],
)  # fmt: skip
def test_bad_forms_name_the_field_that_holds_them(field: str, value: Any) -> None:
    for kind in (CompletionRequest, ChatRequest):
        error = refused(body_of(kind, {field: value}), kind)
        assert error.param == field
        assert error.message.startswith(field)


@pytest.mark.parametrize("fields", [f for f, _ in params_table.STRUCTURED.bad if "regex" not in f or f["regex"] != "a"])
def test_bad_structured_outputs(fields: dict[str, Any]) -> None:
    error = refused({"prompt": "x", "structured_outputs": fields})
    assert error.param == "structured_outputs"
    assert "structured_outputs" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA, "guided_regex": "a"}, {"guided_choice": ["a"], "response_format": NAMED},
        {"structured_outputs": {"regex": "a"}, "guided_json": {}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    ],
)  # fmt: skip
def test_one_form_at_a_time(fields: dict[str, Any]) -> None:
    error = refused({"prompt": "x", **fields})
    assert error.param in fields
    assert all(name in error.message for name in fields)


def test_errors_from_further_in_name_the_requests_own_fields() -> None:
    def told(request: Any, param: str, message: str = "") -> tuple[str | None, str]:
        error = request.own_words(RequestError(400, message or f"{param} is wrong.", param, 3))
        assert (error.status, error.retry_after) == (400, 3)
        return error.param, error.message

    said = "structured_outputs.json is no schema."
    assert told(completion(guided_json={}), "structured_outputs", said) == ("guided_json", "guided_json is no schema.")
    assert told(chat(response_format=NAMED), "structured_outputs")[0] == "response_format"
    assert told(chat(response_format=NAMED), "json")[0] == "response_format"  # a schema that cannot be sent
    assert told(completion(structured_outputs={"regex": "a"}), "structured_outputs")[0] == "structured_outputs"
    assert told(chat(), "logprobs") == ("top_logprobs", "top_logprobs is wrong.")
    assert told(chat(), "logprobs", "30 logprobs (--max-logprobs)")[1] == "30 top_logprobs (--max-logprobs)"
    assert told(completion(), "logprobs")[0] == "logprobs"
    assert told(completion(echo=True, logprobs=1), "prompt_logprobs")[0] == "logprobs"
    assert told(completion(prompt_logprobs=1), "prompt_logprobs")[0] == "prompt_logprobs"
    assert told(chat(max_tokens=5), "max_tokens")[0] == "max_tokens"
    assert told(chat(max_completion_tokens=5), "max_tokens") == (
        "max_completion_tokens", "max_completion_tokens is wrong.",
    )  # fmt: skip
    assert told(chat(max_completion_tokens=5), "min_tokens", "min_tokens over max_tokens=5") == (
        "min_tokens", "min_tokens over max_completion_tokens=5",
    )  # fmt: skip
    assert told(completion(use_beam_search=True, n=99), "best_of")[0] == "n"
    assert told(completion(), "prompt", "prompt is wrong.") == ("prompt", "prompt is wrong.")


# ---------------------------------------------------------------- several sequences, and what cannot be streamed


def test_beam_search() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    params = completion(use_beam_search=True, n=4, length_penalty=0.5, early_stopping="never").sampling(defaults)
    assert (params.n, params.width, params.temperature, params.top_p, params.top_k, params.min_p) == (4, 4, 0, 1, 0, 0)
    assert (params.length_penalty, params.early_stopping, params.repetition_penalty) == (0.5, "never", 1.1)
    for width in ({}, {"n": 1}, {"best_of": 1}):  # one beam takes the likeliest token each time
        greedy = completion(use_beam_search=True, length_penalty=0.5, **width).sampling(defaults)
        assert greedy == completion(temperature=0, repetition_penalty=1.1, **width).sampling({})
    params = chat(use_beam_search=True, n=2, best_of=6, temperature=0).sampling({})
    assert (params.n, params.width) == (2, 6)
    for fields, param in [
        ({"n": 65}, "n"), ({"best_of": 65}, "best_of"),
        ({"n": 2, "temperature": 0.5}, "temperature"), ({"n": 2, "top_p": 0.5}, "top_p"), ({"n": 0}, "n"),
    ]:  # fmt: skip
        error = refused({"prompt": "x", "use_beam_search": True, **fields})
        assert error.param == param
        assert param in error.message
    error = refused({"prompt": "x", "use_beam_search": True, "n": 2, "stream": True})
    assert "Streaming is not currently supported with beam search" in error.message
    assert error.param == "use_beam_search"


def test_best_of_and_streams() -> None:
    assert completion(best_of=2, n=2, stream=True).sampling({}).width == 2
    assert refused({"prompt": "x", "best_of": 3, "n": 2, "stream": True}).param == "best_of"
    assert refused({"prompt": "x", "best_of": 2, "stream": True}).param == "best_of"
    for value in (0, 1, True, -1):
        error = refused({"prompt": "x", "prompt_logprobs": value, "stream": True})
        assert error.message == "`prompt_logprobs` are not available when `stream=True`."
    assert completion(prompt_logprobs=False, stream=True).extras() is None
    assert completion(echo=True, logprobs=1, stream=True).sampling({}).prompt_logprobs == 1


# ---------------------------------------------------------------- max_tokens


def test_the_prompt_alone() -> None:
    request = completion(echo=True, max_tokens=0, logprobs=1)
    assert request.prompt_only
    assert request.sampling({}).max_tokens == 1
    assert not completion(echo=True, max_tokens=1).prompt_only
    assert refused({"prompt": "x", "max_tokens": 0}).param == "max_tokens"
    assert refused(body_of(ChatRequest, {"max_tokens": 0, "echo": True}), ChatRequest).param == "max_tokens"


def test_the_models_own_limit_and_the_operators() -> None:
    assert chat().sampling({"max_tokens": 100}).max_tokens == 100
    assert chat(max_tokens=200).sampling({"max_tokens": 100}).max_tokens == 200
    assert chat(max_completion_tokens=200).sampling({"max_tokens": 100}, 150).max_tokens == 150
    assert chat(max_tokens=50).sampling({"max_tokens": 100}, 100).max_tokens == 50
    assert chat().sampling({}, 100).max_tokens == 100
    assert completion(max_tokens=200).sampling({"max_tokens": 8}).max_tokens == 200
    assert completion().sampling({}, 5).max_tokens == 5
    assert completion().sampling({"max_tokens": 100}).max_tokens == 16
    assert completion().sampling({"max_tokens": 8}).max_tokens == 8
    assert completion(min_tokens=20).sampling({}).max_tokens == 20


def test_template_options() -> None:
    assert chat().template() == {"add_generation_prompt": True, "continue_final_message": False}
    assert not chat(continue_final_message=True).template()["add_generation_prompt"]
    assert chat(chat_template_kwargs={"enable_thinking": False}).template()["chat_template_kwargs"] == {
        "enable_thinking": False
    }


def test_long_messages_are_cut() -> None:
    body = json.loads(error_body(ApiError(400, "x" * 10**6, "prompt")))
    assert len(body["error"]["message"]) <= MAX_MESSAGE + 3
    assert body["error"]["code"] == 400


def test_vllm_xargs_are_extra_args() -> None:
    assert completion(vllm_xargs={"a": 1, "b": ["x"]}).sampling({}).extra_args == {"a": 1, "b": ["x"]}
    assert completion(vllm_xargs={}).sampling({}).extra_args is None
    assert refused({"prompt": "x", "vllm_xargs": [1]}).param == "vllm_xargs"


def test_named_ids_need_logprobs() -> None:
    error = refused({"messages": [{"role": "user", "content": "x"}], "logprob_token_ids": [4]}, ChatRequest)
    assert error.param == "logprob_token_ids" and "logprobs" in error.message
