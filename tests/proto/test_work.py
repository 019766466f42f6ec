"""What a request is to do: with an adapter, for a child, and how much text stands in it."""

from __future__ import annotations

from typing import Any

import pytest

from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.thinking import Thinking
from quire.proto.work import (
    BACKGROUND,
    AdaptedGenerate,
    AdaptedPool,
    Adapter,
    Generate,
    Infill,
    Pool,
    Text,
    ThinkingGenerate,
    adapter_of,
    bytes_of,
    child_seed,
    with_adapter,
)

A = Adapter("a", "/a", b"0123456789abcdef")
GENERATE = Generate(SamplingParams(), 7, [1], b"1234", [[5]])
POOL = Pool(PoolingParams(), "pair", 3)


def test_work_without_an_adapter_is_as_it_was() -> None:
    assert with_adapter(GENERATE, None) is GENERATE and with_adapter(POOL, None, -1) is POOL
    assert adapter_of(GENERATE) is adapter_of(POOL) is None


@pytest.mark.parametrize(("work", "kind"), [(GENERATE, AdaptedGenerate), (POOL, AdaptedPool)])
def test_work_with_an_adapter_or_its_slot_is_the_same_work(work: Any, kind: type) -> None:
    asked = with_adapter(work, A)
    assert type(asked) is kind and adapter_of(asked) == A and asked.slot == -1
    sent = with_adapter(asked, None, 0)
    assert type(sent) is kind and (sent.adapter, sent.slot) == (None, 0)
    for made in (asked, sent):
        assert all(getattr(made, name) == getattr(work, name) for name in work.__struct_fields__)
    bare = kind(work.params, 1) if kind is AdaptedGenerate else kind(work.params)
    assert (bare.adapter, bare.slot) == (None, -1)


def test_thoughts_stay_held_to_their_budget() -> None:
    thinking = Thinking(5, [9], ["<think>"], ["</think>"], False)
    work = ThinkingGenerate(SamplingParams(), 7, thinking=thinking)
    made = with_adapter(work, A, 2)
    assert type(made) is ThinkingGenerate and (made.thinking, made.adapter, made.slot) == (thinking, A, 2)


@pytest.mark.parametrize(
    ("work", "size"),
    [
        (GENERATE, 0), (POOL, 4), (Pool(PoolingParams()), 0), (Text(), 0),
        (Text(parts=["abc", 5, "d", 6]), 3 + 8 + 1 + 8),
        (Text(infill=Infill("pre", "suffix!")), 3 + 7),
        (Text(["x"], Infill("pre", "s", [("n", "text"), ("m.c", "")], "ab")), 1 + 6 + 8),
    ],
)  # fmt: skip
def test_how_much_text_stands_beside_the_prompt(work: Any, size: int) -> None:
    assert bytes_of(work) == size


def test_text_to_tokens_is_plain_text_with_no_pieces_unless_that_is_asked_for() -> None:
    assert not Text().plain and not Text().pieces


def test_children_draw_by_seeds_of_64_bits() -> None:
    assert [child_seed(2**64 - 1, index) for index in range(3)] == [2**64 - 1, 0, 1]


def test_what_is_to_wait_for_all_else_has_the_lowest_priority_of_32_bits() -> None:
    assert BACKGROUND == 2147483647
