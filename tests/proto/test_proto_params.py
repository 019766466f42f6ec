"""SamplingParams against the table of its fields, and what the class does beyond checking them."""

import msgspec
import numpy as np
import params_table
import pytest

from quire.proto.codec import encode
from quire.proto.params import ParamError, SamplingParams
from quire.proto.structured import GuidedDecodingParams, StructuredOutputsParams


def test_the_table_has_every_field_with_vllms_default():
    params = SamplingParams()
    assert {name: getattr(params, name) for name in params.__struct_fields__} == {
        name: row.default for name, row in params_table.ROWS.items()
    }


@pytest.mark.parametrize(("name", "value"), params_table.cells("good"))
def test_accepts_and_survives_the_wire(name, value):
    params = SamplingParams(**params_table.given(name, value))
    assert msgspec.msgpack.decode(encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(("name", "value", "said"), params_table.cells("bad"))
def test_refuses_naming_the_field_and_the_limit(name, value, said):
    with pytest.raises(ParamError) as caught:
        SamplingParams(**params_table.given(name, value))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.param in str(caught.value) or caught.value.param == "structured_outputs"


@pytest.mark.parametrize("fields", params_table.STRUCTURED.good)
def test_structured_outputs_accepts(fields):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    assert msgspec.msgpack.decode(encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(("fields", "said"), params_table.STRUCTURED.bad)
def test_structured_outputs_refuses(fields, said):
    with pytest.raises(ValueError, match="structured_outputs") as caught:
        StructuredOutputsParams(**fields)
    assert said in str(caught.value)


def test_greedy_resets_what_does_not_matter():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.2)
    assert (params.greedy, params.top_p, params.top_k, params.min_p) == (True, 1.0, 0, 0.0)
    assert SamplingParams(temperature=0.9e-5).greedy and not SamplingParams(temperature=1e-5).greedy


def test_normal_forms():
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert SamplingParams(logprobs=True).logprobs == 1
    assert SamplingParams(n=3, best_of=3).best_of is None
    assert SamplingParams(logit_bias={"3": 500, 4: -101}).logit_bias == {3: 100.0, 4: -100.0}
    older = GuidedDecodingParams(regex="a", backend="outlines", disable_fallback=True)
    for params in (SamplingParams(guided_decoding=older), SamplingParams(structured_outputs=older)):
        assert (params.structured_outputs, params.guided_decoding) == (StructuredOutputsParams(regex="a"), None)


def test_lists_of_other_kinds_are_taken_as_lists():
    taken = SamplingParams(
        stop=("a", "b"), stop_token_ids={5}, bad_words=("x",), allowed_token_ids=range(3),
        structured_outputs=StructuredOutputsParams(choice=("yes", "no")),
    )  # fmt: skip
    own = SamplingParams(
        stop=["a", "b"], stop_token_ids=[5], bad_words=["x"], allowed_token_ids=[0, 1, 2],
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
    )  # fmt: skip
    assert taken == own == msgspec.msgpack.decode(encode(taken), type=SamplingParams)
    for bad in ({"stop": (1,)}, {"stop_token_ids": ("a",)}, {"bad_words": {5}}, {"allowed_token_ids": ()}):
        with pytest.raises(ParamError, match=next(iter(bad))):
            SamplingParams(**bad)


def test_from_optional_takes_none_for_any_default():
    names = SamplingParams.__struct_fields__
    assert SamplingParams.from_optional(**dict.fromkeys(names)) == SamplingParams(max_tokens=None)
    assert SamplingParams.from_optional() == SamplingParams()
    assert SamplingParams.from_optional(n=None, temperature=0.5, stop="x") == SamplingParams(temperature=0.5, stop="x")


def test_numbers_of_numpy_are_taken_as_pythons():
    taken = SamplingParams(
        temperature=np.linspace(0, 1, 5)[2], top_p=np.float32(0.5), max_tokens=np.int64(3), seed=np.uint64(2**64 - 1),
        n=np.int32(2), stop=np.str_("x"), logprobs=np.int8(1),
    )  # fmt: skip
    own = SamplingParams(temperature=0.5, top_p=0.5, max_tokens=3, seed=2**64 - 1, n=2, stop="x", logprobs=1)
    assert taken == own == msgspec.msgpack.decode(encode(taken), type=SamplingParams)
    for bad, said in (({"n": np.int64(0)}, "at least 1"), ({"top_p": np.float64("nan")}, "top_p must be in"),
                      ({"n": np.float64(1.5)}, "an integer"), ({"ignore_eos": np.int64(1)}, "true or false"),
                      ({"temperature": np.array([0.5])}, "a number")):  # fmt: skip
        with pytest.raises(ParamError, match=said):
            SamplingParams(**bad)


def test_the_width_is_what_is_run():
    assert SamplingParams().width == 1
    assert SamplingParams(n=2, best_of=5).width == 5
    assert SamplingParams(use_beam_search=True, n=4, temperature=0).width == 4


def test_checked_on_the_wire_too():
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.msgpack.decode(encode({"top_p": 7.0}), type=SamplingParams)


def test_clone_shares_no_lists():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    copy = params.clone()
    copy.stop.append("b")
    copy.logit_bias[5] = 1.0
    assert params.stop == ["a"] and params.logit_bias == {1: 2.0}
