"""What crosses the wire at the edges of what may: vectors, records of logprobs, and what cannot be sent."""

import numpy
import pytest
from open_requests import PROMPT, pooling

from quire.client.logprobs import by_row, unpack
from quire.client.results import Pooled, RequestError
from quire.client.sendable import bad_field, pack_ids, priority_of, size_of, unsendable
from quire.proto import messages as m
from quire.proto.codec import BadFrame, f32, from_i32, i32
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate, Pool

# ---------------------------------------------------------------- pooling


@pytest.mark.parametrize(
    ("rows", "data"), [(2, [1, 2]), (-1, [1]), (0, []), (3, []), (3, [1, 2]), (4, [1, 2, 3, 4]), (-3, [1, 2, 3])]
)
def test_vectors_that_are_not_what_they_say_are_refused(rows, data):
    request = pooling()
    with pytest.raises(ValueError):
        request.take(rows, f32(data))
    assert request.pooled is None


def test_vectors_before_the_prompt_is_known_are_refused():
    with pytest.raises(ValueError, match="0 rows of 4 bytes answer request 1"):
        pooling(accepted=False).take(0, f32([1]))


def test_torn_vectors_are_refused():
    with pytest.raises(ValueError):
        pooling().take(0, b"abc")


@pytest.mark.parametrize(("rows", "shape"), [(0, (6,)), (3, (3, 2))])
def test_vectors_have_a_row_for_the_prompt_or_one_for_each_token(rows, shape):
    request = pooling()
    request.start(150.0, 2)
    request.take(rows, f32(range(6)))
    pooled = request.pooled
    assert (pooled.data.shape, pooled.data.dtype) == (shape, numpy.float32)
    assert (pooled.data.ravel().tolist(), pooled.prompt_ids, pooled.num_cached_tokens) == (list(range(6)), PROMPT, 2)


def test_nothing_is_cached_of_vectors_where_nobody_says_so():
    assert Pooled([1], numpy.zeros(1, numpy.float32)).num_cached_tokens == 0


def test_a_pooled_request_makes_no_progress():
    assert pooling().reached == 0


# ---------------------------------------------------------------- records of logprobs


def test_a_record_of_several_tokens_has_equal_shares():
    record = m.Logprobs(i32([1, 2, 3, 4]), f32([-1, -2, -3, -4]), i32([5, 6]), list("abcd"), {0: b"x", 3: b"y"})
    first, second = unpack(record)
    assert (first.ids, first.values, first.rank, first.texts, first.raw) == ([1, 2], [-1, -2], 5, ["a", "b"], {0: b"x"})
    assert (second.ids, second.rank, second.texts, second.raw) == ([3, 4], 6, ["c", "d"], {1: b"y"})


@pytest.mark.parametrize(
    "record",
    [
        m.Logprobs(i32([1, 2, 3]), f32([-1] * 3), i32([1, 1])), m.Logprobs(i32([1]), f32([-1] * 2), i32([1])),
        m.Logprobs(i32([1]), f32([-1]), i32([1]), ["a", "b"]), m.Logprobs(i32([1]), f32([-1]), i32([1]), [], {1: b"x"}),
        m.Logprobs(i32([1]), f32([-1]), i32([1]), [], {-1: b"x"}), m.Logprobs(i32([1]), f32([-1]), b""),
        m.Logprobs(b"", b"", i32([1])), m.Logprobs(i32([1]) + b"x", f32([-1]) + b"x", i32([1])),
        m.Logprobs(i32([1]), f32([-1]), i32([1]) + b"x"),
    ],
)  # fmt: skip
def test_a_record_that_does_not_fit_is_a_bad_frame(record):
    with pytest.raises(BadFrame, match="logprobs of"):
        unpack(record)


def test_records_are_found_by_their_rows():
    first, second = m.Logprobs(i32([1]), f32([-1]), i32([1])), m.Logprobs(i32([2, 3]), f32([-1] * 2), i32([1] * 2))
    columns = [b""] * 4, i32([1, 1, 2]), b"", [], b"", [], b""
    batch = m.TextBatch(*columns[0], *columns[1:], logprob_rows=i32([0, 2]), logprobs=[first, second])
    assert by_row(batch, [1, 1, 2]) == {0: first, 2: second}


def test_an_error_reads_as_its_message():
    assert str(RequestError(400, "no")) == "no"


def test_a_record_must_be_of_as_many_tokens_as_its_row():
    record = m.Logprobs(i32([1, 2]), f32([-1, -2]), i32([1, 1]))
    assert len(unpack(record, 2)) == 2
    with pytest.raises(BadFrame, match="logprobs of 1 tokens have 8 bytes of ids, 8 of values, 8 of ranks and 0 texts"):
        unpack(record, 1)


# ---------------------------------------------------------------- what can be sent


@pytest.mark.parametrize("value", [0, 5, -(2**31), 2**31 - 1, numpy.int64(7)])
def test_a_priority_is_an_integer_of_32_bits(value):
    assert priority_of(value) == int(value) and type(priority_of(value)) is int


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (2**31, ValueError, "priority must be a 32-bit integer, got 2147483648."),
        (-(2**31) - 1, ValueError, "priority must be a 32-bit integer, got -2147483649."),
        (1.0, TypeError, "priority must be an integer, got 1.0."), (None, TypeError, "priority must be an integer"),
        (True, TypeError, "priority must be an integer, got True."), ("1", TypeError, "priority must be an integer"),
    ],
)  # fmt: skip
def test_what_is_no_priority(value, error, said):
    with pytest.raises(error) as caught:
        priority_of(value)
    assert said in str(caught.value)


def test_ids_are_packed_as_int32():
    assert from_i32(pack_ids([0, 2**31 - 1])) == [0, 2**31 - 1]


@pytest.mark.parametrize("bad", [2**31, "x", None, 1.5])
def test_ids_that_do_not_fit_are_refused(bad):
    with pytest.raises(RequestError, match="token ids must be integers of at most 31 bits") as caught:
        pack_ids([1, bad])
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def tokenize(**fields):
    return m.Tokenize(0, 0, fields.pop("work", Generate(SamplingParams(), 1)), 0.0, **fields)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 512), ({"prompt": "abc"}, 515), ({"ids": i32([1, 2])}, 520), ({"cache_salt": "ab"}, 514),
        ({"messages": [{"role": "user", "content": "hello"}]}, 512 + 4 + 5),
        ({"messages": [{"role": "user"}, {"content": ["x", "y"], "other": {}}]}, 512 + 4 + 2 + 64),
        ({"template": {"a": "b"}}, 512 + 5), ({"work": Pool(PoolingParams(), "pair")}, 516),
        ({"work": Pool(PoolingParams())}, 512),
    ],
)  # fmt: skip
def test_the_size_of_a_request(fields, size):
    assert size_of(tokenize(**fields)) == size


def test_what_can_be_sent_has_no_bad_field():
    assert bad_field(tokenize(prompt="hi")) is None and unsendable("x", str) is None


@pytest.mark.parametrize(
    ("fields", "name", "why"),
    [
        ({"prompt": "\ud800"}, "prompt", "it holds a lone surrogate, which is no text"),
        ({"prompt": 5}, "prompt", "Expected `str | null`, got `int`"),
        ({"template": {"tools": "\ud800"}}, "tools", "it holds a lone surrogate, which is no text"),
        ({"template": {"fine": 1, "odd": object()}}, "odd", "Encoding objects of type object is unsupported"),
        ({"work": Pool(PoolingParams(), "\ud800")}, "pair", "it holds a lone surrogate, which is no text"),
        ({"priority": 10**30}, "priority", "can't serialize ints < -2**63 or > 2**64 - 1"),
    ],
)  # fmt: skip
def test_the_field_that_cannot_be_sent_is_named_and_why(fields, name, why):
    assert bad_field(tokenize(**fields)) == (name, why)


def test_fields_that_do_not_go_together_are_named_by_what_they_are_of():
    params = SamplingParams()
    params.n, params.temperature = 2, 0.0
    bad = bad_field(tokenize(work=Generate(params, 1)))
    assert bad == ("SamplingParams", "n must be 1 when using greedy sampling (temperature 0), got n=2")


def test_what_is_nested_too_deep_cannot_be_sent():
    deep = []
    for _ in range(100000):
        deep = [deep]
    assert unsendable(deep, list)
