"""What only the model can tell of a request, at each limit, and what is said beyond it."""

import pytest

from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.checks import (
    MAX_BAD_CHARACTERS,
    MAX_STOP_CHARACTERS,
    check_ids,
    check_params,
    check_prompt,
    check_text,
    tokens_kept,
)
from quire.proto.params import ParamError, SamplingParams
from quire.proto.structured import StructuredOutputsParams

MODEL = ModelConfig("", {}, 64, 100)  # a vocabulary of 100, a context of 64


def params_of(**fields):
    return SamplingParams(**{"max_tokens": None, **fields})


@pytest.mark.parametrize(
    ("fields", "max_logprobs"),
    [
        ({}, 0), ({"max_tokens": 64}, 20), ({"truncate_prompt_tokens": 64}, 20), ({"stop_token_ids": [99]}, 20),
        ({"allowed_token_ids": [3, 99]}, 20), ({"logit_bias": {99: 1.0}}, 20), ({"logprobs": 20}, 20),
        ({"prompt_logprobs": 20}, 20), ({"logprobs": 0}, 0), ({"logprobs": -1}, -1), ({"logprobs": 100}, -1),
        ({"prompt_logprobs": -1}, 100), ({"truncate_prompt_tokens": -1}, 20),
    ],
)  # fmt: skip
def test_what_the_model_can_do_at_the_limit(fields, max_logprobs):
    check_params(params_of(**fields), MODEL, 64, max_logprobs)


@pytest.mark.parametrize(
    ("fields", "max_logprobs", "said"),
    [
        ({"max_tokens": 65}, 20,
         "max_tokens=65 cannot be greater than max_model_len=64. Please request fewer output tokens."),
        ({"truncate_prompt_tokens": 65}, 20,
         "truncate_prompt_tokens=65 cannot be greater than max_model_len=64. Please select a smaller truncation size."),
        ({"stop_token_ids": [3, 100]}, 20,
         "stop_token_ids contains the token id 100, which is out of vocabulary (0 to 99)."),
        ({"allowed_token_ids": [100, 3]}, 20,
         "allowed_token_ids contains the token id 100, which is out of vocabulary (0 to 99)."),
        ({"logit_bias": {100: 1.0}}, 20,
         "logit_bias contains the token id 100, which is out of vocabulary (0 to 99)."),
        ({"logprobs": 21}, 20,
         "Requested sample logprobs of 21, which is greater than max allowed: 20 (--max-logprobs)"),
        ({"prompt_logprobs": 21}, 20,
         "Requested prompt logprobs of 21, which is greater than max allowed: 20 (--max-logprobs)"),
        ({"logprobs": -1}, 99,
         "Requested sample logprobs of 100, which is greater than max allowed: 99 (--max-logprobs)"),
        ({"logprobs": 101}, -1,
         "Requested sample logprobs of 101, which is greater than max allowed: 100 (--max-logprobs)"),
        ({"logprobs": 0}, -2, "Requested sample logprobs of 0, which is greater than max allowed: -2 (--max-logprobs)"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_do(fields, max_logprobs, said):
    with pytest.raises(ParamError) as caught:
        check_params(params_of(**fields), MODEL, 64, max_logprobs)
    assert (caught.value.param, str(caught.value)) == (next(iter(fields)), said)


@pytest.mark.parametrize(("name", "most"), [("stop", MAX_STOP_CHARACTERS), ("bad_words", MAX_BAD_CHARACTERS)])
def test_text_is_counted_over_all_strings(name, most):
    half = "x" * (most // 2)
    check_text(params_of(**{name: [half, half]}), True)
    with pytest.raises(ParamError) as caught:
        check_text(params_of(**{name: [half, half + "y"]}), True)
    said = f"{name} has more than {most} characters in all."
    assert (caught.value.param, str(caught.value)) == (name, said)


def test_without_a_tokenizer_there_is_no_text_to_look_for():
    check_text(params_of(), False)
    for fields, said in (
        ({"stop": ["x"]}, "stop requires a tokenizer so it can't be used with 'skip_tokenizer_init'."),
        ({"bad_words": ["x"]}, "bad_words requires a tokenizer so it can't be used with 'skip_tokenizer_init'."),
        ({"structured_outputs": StructuredOutputsParams(regex="a")},
         "Structured outputs requires a tokenizer so it can't be used with 'skip_tokenizer_init'"),
    ):  # fmt: skip
        check_text(params_of(**fields), True)
        with pytest.raises(ParamError) as caught:
            check_text(params_of(**fields), False)
        assert (caught.value.param, str(caught.value)) == (next(iter(fields)), said)


@pytest.mark.parametrize(
    ("keep", "least", "kept"),
    [(None, 0, None), (1, 0, 1), (5, 60, 5), (-1, 0, 63), (-1, 1, 63), (-1, 2, 62), (-1, 63, 1), (-1, 64, 1),
     (-1, 99, 1)],
)  # fmt: skip
def test_truncation_leaves_room_for_the_least_output(keep, least, kept):
    assert tokens_kept(params_of(truncate_prompt_tokens=keep, min_tokens=least), 64) == kept


@pytest.mark.parametrize("ids", [[0], [99], [0, 99] * 20])
def test_ids_of_the_vocabulary_are_taken(ids):
    check_ids(ids, MODEL)
    check_prompt(ids, MODEL, 64)


@pytest.mark.parametrize(
    ("ids", "said"),
    [([], "prompt must not be empty: it has no tokens."), ([-1, 5], "Token id -1 is out of vocabulary (0 to 99)."),
     ([0, 100], "Token id 100 is out of vocabulary"), ([5, 100], "Token id 100 is out of vocabulary (0 to 99)."),
     ([100, -1], "Token id -1 is out of vocabulary")],
)  # fmt: skip
def test_ids_out_of_the_vocabulary_are_refused(ids, said):
    for check in (lambda: check_ids(ids, MODEL), lambda: check_prompt(ids, MODEL, 64)):
        with pytest.raises(ParamError) as caught:
            check()
        assert caught.value.param == "prompt" and str(caught.value).startswith(said)


def test_a_prompt_leaves_room_for_one_token():
    check_prompt([1] * 63, MODEL, 64)
    start = "This model's maximum context length is 64 tokens. However, your prompt contains {} input tokens, which "
    end = " output tokens. Please reduce the length of the input prompt."
    for count, room in ((64, "leaves no room for"), (65, "exceeds this limit even without any")):
        with pytest.raises(ParamError) as caught:
            check_prompt([1] * count, MODEL, 64)
        assert (caught.value.param, str(caught.value)) == ("input_tokens", start.format(count) + room + end)
