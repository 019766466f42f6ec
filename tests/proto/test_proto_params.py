"""SamplingParams against the table of its fields, and what the class does beyond checking them."""

import msgspec
import numpy as np
import params_table
import pytest

from quire.proto import params as params_module
from quire.proto.codec import encode
from quire.proto.params import ParamError, RequestOutputKind, SamplingParams
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
    assert SamplingParams(temperature=0.9e-5).greedy


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


BIG, VOCABULARY = 2**31 - 1, 2**18
AT_THE_LIMIT = [
    ("max_tokens", BIG, {}), ("min_tokens", BIG, {"max_tokens": None}), ("logprobs", -1, {}), ("logprobs", BIG, {}),
    ("prompt_logprobs", -1, {}), ("prompt_logprobs", BIG, {}), ("truncate_prompt_tokens", BIG, {}),
    ("stop_token_ids", [BIG], {}), ("allowed_token_ids", [BIG], {}), ("logit_bias", {BIG: 1.0}, {}),
    ("bad_words", ["x"] * 1024, {}), ("logits_processors", ["a:b"] * 64, {}),
    ("allowed_token_ids", list(range(VOCABULARY)), {}), ("logit_bias", dict.fromkeys(range(VOCABULARY), 1.0), {}),
    ("temperature", 0.01, {}), ("temperature", 1e-6, {}), ("seed", 2**64 - 1, {}), ("min_tokens", 16, {}),
    ("n", 1, {"temperature": 0}),
]  # fmt: skip
BEYOND = [
    ("max_tokens", 2**31, {}, "at most 2147483647"), ("min_tokens", 2**31, {"max_tokens": None}, "at most 2147483647"),
    ("logprobs", -2, {}, "at least -1, got -2. (-1 is the whole vocabulary)"), ("logprobs", 2**31, {}, "at most"),
    ("prompt_logprobs", -2, {}, "(-1 is the whole vocabulary)"), ("prompt_logprobs", 2**31, {}, "at most"),
    ("truncate_prompt_tokens", 0, {}, "at least 1, got 0. (-1 keeps what the model's context holds)"),
    ("truncate_prompt_tokens", 2**31, {}, "at most"), ("truncate_prompt_tokens", -1.0, {}, "an integer"),
    ("logit_bias", dict.fromkeys(range(VOCABULARY + 1), 1), {}, "at most 262144 token ids, got 262145."),
    ("logit_bias", {True: 1}, {}, "no token id"), ("logit_bias", {1.0: 1}, {}, "no token id"),
    ("logit_bias", {"²": 1}, {}, "no token id"), ("best_of", 2.0, {"n": 2}, "an integer"),
    ("logits_processors", 5, {}, "a list of names, got 5."),
    ("n", 16385, {}, "n must be at most 16384, got 16385."), ("n", 0, {}, "n must be at least 1, got 0."),
]  # fmt: skip


def short(value):
    return f"{value!r:.30}"


@pytest.mark.parametrize(("name", "value", "others"), AT_THE_LIMIT, ids=short)
def test_what_is_at_the_limit_is_taken_as_it_is(name, value, others):
    assert getattr(SamplingParams(**{name: value}, **others), name) == value


@pytest.mark.parametrize(("name", "value", "others", "said"), BEYOND, ids=short)
def test_what_is_beyond_the_limit_is_refused_by_the_field_s_name(name, value, others, said):
    with pytest.raises(ParamError) as caught:
        SamplingParams(**{name: value}, **others)
    assert said in str(caught.value) and caught.value.param == name


def test_a_beam_search_is_told_which_field_does_not_fit():
    with pytest.raises(ParamError) as caught:
        SamplingParams(use_beam_search=True, best_of=2, temperature=0.5)
    assert caught.value.param == "temperature"


def test_ids_are_taken_once_each_in_the_order_given():
    params = SamplingParams(stop_token_ids=[7, 5, 7, 6], allowed_token_ids=[9, 1, 9])
    assert (params.stop_token_ids, params.allowed_token_ids) == ([7, 5, 6], [9, 1])


def test_an_empty_bias_is_none():
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_no_processors_are_none():
    assert SamplingParams(logits_processors=[]).logits_processors is None


def test_a_bias_within_the_range_is_kept():
    assert SamplingParams(logit_bias={1: -100, 2: 100, 3: 0.5}).logit_bias == {1: -100.0, 2: 100.0, 3: 0.5}


def test_false_asks_for_no_logprobs():
    params = SamplingParams(logprobs=False, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (None, 1)


def test_a_low_temperature_is_raised_with_one_warning(caplog):
    params_module._warn_once.cache_clear()
    for _ in range(2):
        assert SamplingParams(temperature=0.00999).temperature == 0.01
    assert [record.getMessage() for record in caplog.records] == [
        "a temperature below 0.01 overflows the logits; 0.01 is used instead"
    ]


def test_a_greedy_request_keeps_its_temperature_and_warns_nobody(caplog):
    params_module._warn_once.cache_clear()
    assert SamplingParams(temperature=0.9e-5).temperature == 0.9e-5 and not caplog.records


def test_the_lowest_temperature_that_is_kept_warns_nobody(caplog):
    params_module._warn_once.cache_clear()
    assert SamplingParams(temperature=0.01).temperature == 0.01 and not caplog.records


def test_what_is_drawn_keeps_its_cuts():
    params = SamplingParams(top_p=0.5, top_k=5, min_p=0.2)
    assert (params.top_p, params.top_k, params.min_p) == (0.5, 5, 0.2)


def test_a_subclass_of_str_is_taken_as_the_string_it_is():
    class Loud(str):
        def __str__(self):
            return "!"

    taken = SamplingParams(stop=Loud("x"))
    assert taken.stop == ["x"] and type(taken.stop[0]) is str


def test_a_clone_is_equal_and_shares_structured_outputs():
    params = SamplingParams(stop=["a"], structured_outputs=StructuredOutputsParams(regex="a"), seed=4)
    assert params.clone() == params


def test_one_beam_search_is_as_wide_as_best_of():
    assert SamplingParams(use_beam_search=True, n=2, best_of=5, temperature=0).width == 5


def test_the_kind_of_output_may_be_given_as_a_number():
    assert SamplingParams(output_kind=1).output_kind is RequestOutputKind.DELTA


def test_the_lowest_temperature_that_is_not_greedy():
    assert SamplingParams(temperature=1e-5).temperature == 0.01
    assert SamplingParams(temperature=9e-6).greedy


@pytest.mark.parametrize(
    ("names", "said"),
    [(["a:b", len], "holds a Python callable"), (["a:b", 5], "a list of names"), (["a:b", ""], "of names")],
)
def test_every_name_of_a_logits_processor_is_looked_at(names, said):
    with pytest.raises(ParamError, match=said):
        SamplingParams(logits_processors=names)


def test_a_temperature_may_be_as_high_as_you_like_and_is_never_greedy():
    assert SamplingParams(temperature=1e300).temperature == params_module.MAX_TEMPERATURE == 1e6
    assert SamplingParams(temperature=999999.0).temperature == 999999.0


def test_a_search_with_one_beam_is_greedy_sampling():
    given = {"use_beam_search": True, "early_stopping": True, "length_penalty": 2.0, "temperature": 0}
    one, two = (SamplingParams(n=n, **given) for n in (1, 2))
    assert (one.use_beam_search, one.early_stopping, one.length_penalty) == (False, False, 1.0)
    assert (two.use_beam_search, two.early_stopping, two.length_penalty) == (True, True, 2.0)
