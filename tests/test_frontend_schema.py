"""What a request may hold, before anything is queued."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.frontend.errors import MAX_MESSAGE, ApiError, error_body
from quire.frontend.schema import MAX_PROMPTS, ChatRequest, CompletionRequest, parse
from quire.proto.params import SamplingParams

LEN = 2048


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), ChatRequest)


def refused(body: bytes | dict[str, Any], kind: type[Any] = CompletionRequest) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        request = parse(raw, kind)
        request.prompts() if kind is CompletionRequest else request.conversation()
        request.sampling({}, LEN)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"), ("max_tokens", 5.0), ("max_tokens", True), ("max_tokens", -1), ("max_tokens", 0),
        ("max_tokens", 10**30), ("max_tokens", []), ("n", 0), ("n", 10**6), ("n", True), ("n", "1"),
        ("temperature", -1), ("temperature", "hot"), ("temperature", 2.5), ("temperature", True),
        ("top_p", 0), ("top_p", 1.5), ("top_k", -5), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1),
        ("seed", 1.5), ("seed", 2**70), ("seed", "x"), ("stop", [1]), ("stop", ""), ("stop", {"a": 1}),
        ("stop", ["a"] * 65), ("stop_token_ids", ["a"]), ("stop_token_ids", [True]), ("stop_token_ids", [-1]),
        ("ignore_eos", 1), ("ignore_eos", "true"), ("skip_special_tokens", "no"), ("stream", "yes"), ("echo", 1),
        ("include_stop_str_in_output", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 0),
        ("priority", 1.5), ("priority", 2**40), ("add_special_tokens", "a"), ("model", 5), ("user", 5),
        ("stream_options", {"include_usage": True}), ("stream_options", 5), ("best_of", 0),
        # known, not honoured yet
        ("logprobs", 1), ("logprobs", 0), ("logprobs", 100), ("prompt_logprobs", 1), ("suffix", "x"), ("best_of", 5),
        ("frequency_penalty", 0.5), ("presence_penalty", -1), ("presence_penalty", True), ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}), ("use_beam_search", True), ("min_tokens", 3), ("bad_words", ["x"]),
        ("allowed_token_ids", [1]), ("response_format", {"type": "json_object"}), ("guided_json", {}),
        ("structured_outputs", {"regex": "a"}), ("length_penalty", 2), ("detokenize", False), ("cache_salt", "x"),
        ("prompt_embeds", "x"), ("return_token_ids", True), ("spaces_between_special_tokens", False),
    ],
)  # fmt: skip
def test_bad_value_names_its_field(field: str, value: Any) -> None:
    error = refused({"prompt": "hi", field: value})
    assert error.param == field
    assert field in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize("field", ["tools", "functions", "chat_template", "reasoning_effort", "documents", "audio"])
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
    assert request.sampling({}, LEN) == SamplingParams(max_tokens=16)
    chat(logprobs=False, top_logprobs=0, tools=[], tool_choice="none", parallel_tool_calls=True, logit_bias=None)
    chat(tools=None, tool_choice="auto", store=False, metadata={}, modalities=["text"], function_call="none")


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


def test_text_parts_are_joined_and_the_rest_of_a_message_is_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "x"}, {"role": "assistant", "content": None}]
    assert chat(messages=messages).conversation() == [
        {"role": "user", "content": "a\nb", "name": "x"},
        {"role": "assistant", "content": None},
    ]


def test_max_tokens_of_chat() -> None:
    assert chat().sampling({}, LEN).max_tokens is None
    assert chat(max_tokens=5).sampling({}, LEN).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).sampling({}, LEN).max_tokens == 7
    error = refused({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}, ChatRequest)
    assert error.param == "max_completion_tokens"
    assert "max_completion_tokens" in error.message


def test_every_parameter_arrives() -> None:
    fields = {
        "n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 2**63, "stop": ["a", "b"],
        "stop_token_ids": [1, 2], "include_stop_str_in_output": True, "ignore_eos": True, "max_tokens": 9,
        "skip_special_tokens": False, "truncate_prompt_tokens": 11,
    }  # fmt: skip
    assert completion(**fields).sampling({}, LEN) == SamplingParams(**fields)


def test_the_models_defaults_give_way_to_the_request() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9}
    params = completion(top_p=0.5).sampling(defaults, LEN)
    assert (params.temperature, params.top_p) == (0.6, 0.5)


def test_truncate_to_what_leaves_room() -> None:
    assert completion(truncate_prompt_tokens=-1, max_tokens=48).sampling({}, LEN).truncate_prompt_tokens == 2000
    assert chat(truncate_prompt_tokens=-1).sampling({}, LEN).truncate_prompt_tokens == LEN - 1


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
