"""Columns at the edges of their types, long and short; hashes of blocks; seeds of children."""

import struct

import msgspec
import pytest

from quire.proto import codec, hashing
from quire.proto import messages as m
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate, Pool, child_seed

KINDS = {
    "i8": (codec.i8, codec.from_i8, "b", -(2**7), 2**7 - 1),
    "i32": (codec.i32, codec.from_i32, "i", -(2**31), 2**31 - 1),
    "i64": (codec.i64, codec.from_i64, "q", -(2**63), 2**63 - 1),
    "u64": (codec.u64, codec.from_u64, "Q", 0, 2**64 - 1),
}


@pytest.mark.parametrize("count", [0, 1, codec.FEW, codec.FEW + 1, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_a_column_is_little_endian_and_comes_back(kind, count):
    pack, unpack, code, low, high = KINDS[kind]
    values = [(low, high, 0, 1)[place % 4] for place in range(count)]
    assert pack(values) == pack(iter(values)) == pack(tuple(values)) == struct.pack(f"<{count}{code}", *values)
    assert unpack(pack(values)) == values


@pytest.mark.parametrize("count", [1, codec.FEW + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_does_not_fit_is_an_overflow(kind, count):
    pack, _, _, low, high = KINDS[kind]
    for bad in (low - 1, high + 1):
        with pytest.raises(OverflowError):
            pack([0] * (count - 1) + [bad])


@pytest.mark.parametrize("count", [1, codec.FEW + 1])
@pytest.mark.parametrize("pack", [codec.i32, codec.i64])
def test_what_is_no_number_is_a_type_error(pack, count):
    with pytest.raises(TypeError):
        pack([0] * (count - 1) + ["x"])


@pytest.mark.parametrize("pack", [codec.i32, codec.i64])
def test_only_a_long_list_is_packed_in_the_way_that_long_lists_are_quick(monkeypatch, pack):
    seen = []
    monkeypatch.setattr(codec, "_pack", lambda code, values: seen.append(len(values)) or b"")
    for values in ([0] * codec.FEW, (0,) * 100, [0] * (codec.FEW + 1)):
        pack(values)
    assert seen == [codec.FEW + 1]


def test_floats_have_single_precision():
    assert codec.f32([0.5, -1.25]) == struct.pack("<2f", 0.5, -1.25)
    assert codec.from_f32(codec.f32([0.1])) == [struct.unpack("<f", struct.pack("<f", 0.1))[0]]


def test_unsigned_integers_of_32_bits():
    assert codec.from_u32(struct.pack("<2I", 0, 2**32 - 1)) == [0, 2**32 - 1]


@pytest.mark.parametrize(
    ("unpack", "size"), [(codec.from_i32, 4), (codec.from_u32, 4), (codec.from_f32, 4), (codec.from_i64, 8),
                         (codec.from_u64, 8)]
)  # fmt: skip
def test_a_torn_column_says_how_long_it_is(unpack, size):
    with pytest.raises(codec.BadFrame) as caught:
        unpack(bytes(size + 1))
    assert str(caught.value) == f"a column of {size + 1} bytes is not a whole number of {size}-byte items"


def test_both_ends_of_a_link_hold_a_frame_to_256_mib():
    assert codec.MAX_FRAME == 268_435_456  # another number is another protocol


def test_a_bad_frame_says_why_in_few_words():
    with pytest.raises(codec.BadFrame) as caught:
        codec.Decoder(m.ToDetokenizer)(codec.encode(["x" * 5000]))
    assert 0 < len(str(caught.value)) <= 200
    assert isinstance(caught.value.__cause__, msgspec.MsgspecError)


# ---------------------------------------------------------------- hashes of blocks


@pytest.mark.parametrize(("ids", "blocks"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)])
def test_full_blocks_alone_are_hashed(ids, blocks):
    assert len(hashing.hash_blocks(codec.i32(range(ids)), 4)) == blocks


def test_each_block_s_parent_is_the_one_before_and_the_first_one_s_is_the_root():
    ids = codec.i32(range(12))
    hashes, parent = [], hashing.ROOT
    for block in (ids[:16], ids[16:32], ids[32:]):
        hashes.append(parent := hashing.hash_block(parent, block))
    assert hashing.hash_blocks(ids, 4) == hashes
    assert hashing.hash_blocks(ids[16:], 4, hashes[0]) == hashes[1:]


def test_a_hash_is_of_16_bytes_and_of_both_its_parts():
    first = hashing.hash_block(b"p" * 16, b"t" * 16)
    assert len(first) == len(hashing.ROOT) == hashing.HASH_SIZE == 16
    assert len({first, hashing.hash_block(b"q" * 16, b"t" * 16), hashing.hash_block(b"p" * 16, b"u" * 16)}) == 3


def test_the_root_is_nothing_without_a_salt_and_a_hash_with_one():
    assert hashing.root_of("") == bytes(16)
    assert len(hashing.root_of("a")) == 16 and len({hashing.root_of(salt) for salt in ("", "a", "b", "ä")}) == 4


def test_a_salt_s_root_is_no_block_s_hash():
    """Else a prompt of that text could be made to share what is salted."""
    assert hashing.root_of("a" * 32) != hashing.hash_block(b"a" * 16, b"a" * 16)


def test_what_is_made_is_noted():
    made = []
    noted = hashing.noting(made)
    hashes = [noted(hashing.ROOT, b"abcd"), noted(b"p" * 16, b"efgh")]
    assert hashes == made == [hashing.hash_block(hashing.ROOT, b"abcd"), hashing.hash_block(b"p" * 16, b"efgh")]


# ---------------------------------------------------------------- work


def test_what_is_to_be_done_is_told_apart_by_its_first_item():
    generate, pool = Generate(SamplingParams(), 7), Pool(PoolingParams())
    assert [msgspec.msgpack.decode(codec.encode(work))[0] for work in (generate, pool)] == [0, 1]


def test_what_the_detokenizer_adds_is_not_there_before():
    generate, pool = Generate(SamplingParams(), 7), Pool(PoolingParams())
    assert (generate.eos, generate.suppressed_ids, generate.bad_words) == ([], b"", [])
    assert (pool.pair, pool.token_type_start) == (None, -1)


@pytest.mark.parametrize(
    ("seed", "index", "drawn"), [(5, 0, 5), (5, 3, 8), (2**64 - 1, 0, 2**64 - 1), (2**64 - 1, 1, 0), (-1, 0, 2**64 - 1)]
)
def test_a_child_s_seed_is_its_request_s_and_its_index_in_64_bits(seed, index, drawn):
    assert child_seed(seed, index) == drawn
