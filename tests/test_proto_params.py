"""SamplingParams: defaults, both sides of each bound, wrong types, and fields that are refused rather than ignored."""

import math

import msgspec
import pytest

from quire.proto.codec import encode
from quire.proto.params import ParamError, RequestOutputKind, SamplingParams

DEFAULTS = {
    "n": 1, "best_of": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": [],
    "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0,
    "skip_special_tokens": True, "truncate_prompt_tokens": None, "output_kind": RequestOutputKind.CUMULATIVE,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logprobs": None, "detokenize": True,
}  # fmt: skip

GOOD = [
    ("n", 1), ("n", 16384), ("temperature", 0), ("temperature", 0.0), ("temperature", 2.0), ("top_p", 1e-6),
    ("top_p", 1), ("top_k", -1), ("top_k", 0), ("top_k", 1), ("min_p", 0), ("min_p", 1.0), ("seed", -5),
    ("seed", 2**64 - 1), ("stop", "x"), ("stop", ["a", "b"]), ("stop_token_ids", [0, 7]), ("max_tokens", 1),
    ("max_tokens", None), ("truncate_prompt_tokens", 1), ("best_of", 1), ("presence_penalty", 0.0),
]  # fmt: skip

BAD = [
    ("n", 0, "at least 1"), ("n", 16385, "at most"), ("n", 1.5, "integer"), ("n", True, "integer"),
    ("n", "2", "integer"), ("temperature", -0.1, "[0, 2]"), ("temperature", 2.1, "[0, 2]"),
    ("temperature", math.nan, "[0, 2]"), ("temperature", math.inf, "[0, 2]"), ("temperature", "hot", "number"),
    ("temperature", True, "number"), ("top_p", 0, "(0, 1]"), ("top_p", 1.5, "(0, 1]"), ("top_p", math.nan, "(0, 1]"),
    ("top_k", -2, "0 or -1"), ("top_k", 1.0, "integer"), ("top_k", 2**31, "at most"), ("min_p", -0.1, "[0, 1]"),
    ("min_p", 1.1, "[0, 1]"), ("seed", 2**64, "at most"), ("seed", 1.0, "integer"), ("stop", "", "empty"),
    ("stop", ["a", ""], "empty"), ("stop", [1], "list of strings"), ("stop", ["x"] * 65, "at most 64"),
    ("stop_token_ids", [-1], "token ids"), ("stop_token_ids", ["a"], "token ids"), ("stop_token_ids", 5, "token ids"),
    ("max_tokens", 0, "at least 1"), ("max_tokens", -1, "at least 1"), ("max_tokens", 1.0, "integer"),
    ("min_tokens", -1, "at least 0"), ("min_tokens", 17, "less than or equal to max_tokens"),
    ("truncate_prompt_tokens", 0, "at least 1"), ("ignore_eos", 1, "true or false"), ("best_of", 0, "at least"),
    ("presence_penalty", 2.5, "[-2, 2]"), ("repetition_penalty", 0, "(0, inf]"), ("skip_special_tokens", None, "true"),
]  # fmt: skip


def test_defaults_are_vllms():
    params = SamplingParams()
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_accepts(name, value):
    SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_refuses_naming_field_limit_and_value(name, value, said):
    with pytest.raises(ValueError, match=r".") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ParamError)
    assert caught.value.param == name
    assert name in str(caught.value)
    assert said in str(caught.value)


def test_greedy_resets_what_does_not_matter_and_needs_n_1():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.2)
    assert (params.greedy, params.top_p, params.top_k, params.min_p) == (True, 1.0, 0, 0.0)
    with pytest.raises(ParamError, match="n must be 1 when using greedy sampling"):
        SamplingParams(temperature=0, n=2)


def test_normal_forms():
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(temperature=0.001).temperature == 0.01


def test_survives_the_wire_and_is_checked_there_too():
    params = SamplingParams(n=3, temperature=0.7, stop=["a"], seed=2**64 - 1)
    assert msgspec.msgpack.decode(encode(params), type=SamplingParams) == params
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.msgpack.decode(encode({"top_p": 7.0}), type=SamplingParams)


def test_clone_shares_no_lists():
    params = SamplingParams(stop=["a"])
    copy = params.clone()
    copy.stop.append("b")
    assert params.stop == ["a"]
