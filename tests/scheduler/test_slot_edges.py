"""A replica's slots for adapters: what holds at the edge of each rule."""

from __future__ import annotations

import pytest
from adapter_rig import adapter

from quire.proto.codec import BadFrame
from quire.proto.messages import AdapterReady, DropAdapter, Lease, LoadAdapter
from quire.scheduler.adapter_slots import FAILED_S, RETRY_S, AdapterSlots
from quire.scheduler.block_pool import PoolError

A, B, C, D = (adapter(name) for name in "ABCD")
LEASE = Lease(1, 0, 7)


def ask(slots: AdapterSlots, *wanted, now: float = 0.0, first=None) -> list[bool]:
    """One plan, with these next in line: whether each may begin."""
    slots.begin_turn(first)
    may = [slots.admits(each) for each in wanted]
    slots.end_turn(now)
    return may


def load(slots: AdapterSlots, now: float = 0.0, error: str = "") -> None:
    """The worker has done the first of what it was told."""
    adapter = slots.loading[0]
    (slot,) = [slot for slot in slots.slots if slot.adapter == adapter]
    assert slots.loaded(AdapterReady(LEASE, slots.slots.index(slot), slot.generation, error), now) == adapter
    if error:
        slots.note_failed(adapter, now)


def full(*adapters, count: int = 0) -> AdapterSlots:
    """Slots with these ready, one more used than the other: the first was used first."""
    slots = AdapterSlots(LEASE, count or len(adapters))
    ask(slots, *adapters)
    for each in adapters:
        load(slots)
        slots.take(each)
    slots.take_orders()
    return slots


def test_an_adapter_on_its_way_and_ready() -> None:
    slots = AdapterSlots(LEASE, 2)
    assert ask(slots, A, A, B) == [False] * 3
    assert slots.loading == [A, B] and slots.holds(A) and not (slots.has(A) or slots.takes(A))
    assert slots.could_take(A, 0.0) and slots.may_have(A, 0.0) and not slots.holds(C)
    assert slots.take_orders() == [
        LoadAdapter(LEASE, 0, "A", A.path, 1, A.digest), LoadAdapter(LEASE, 1, "B", B.path, 2, B.digest)
    ]  # fmt: skip
    assert slots.take_orders() == []
    load(slots)
    assert slots.has(A) and slots.takes(A) and not slots.has(B) and slots.loading == [B]
    assert slots.could_take(C, 0.0)  # nobody uses A
    assert slots.take(A) == 0 and not slots.could_take(C, 0.0) and slots.could_take(A, 0.0)
    with pytest.raises(PoolError, match="'B', which is not ready in slot 1"):
        slots.take(B)
    slots.check_integrity([0])


def test_of_slots_that_nobody_uses_the_one_used_longest_ago_is_given_away() -> None:
    slots = full(A, B, C)
    for number in range(3):
        slots.leave(number)
    slots.take(A)
    slots.leave(0)
    assert ask(slots, D) == [False]
    assert slots.loading == [D] and not slots.holds(B) and slots.has(A) and slots.has(C)
    slots = full(A, B)
    slots.leave(0), slots.leave(1)
    assert ask(slots, A, C) == [True, False]  # A's slot will be used
    assert not slots.holds(B) and slots.has(A)


def test_only_as_many_are_granted_as_there_are_slots() -> None:
    slots = AdapterSlots(LEASE, 2)
    ask(slots, B, C, first=A)  # a wish goes first
    assert slots.loading == [A, B]
    slots = full(A, B)
    assert ask(slots, A, B, C) == [True, True, False]
    assert ask(slots, A, C, B) == [True, False, False]  # B is not granted: C is, which comes before it


def test_so_many_slots_are_closed_as_are_lacking_those_used_longest_ago_first() -> None:
    slots = full(A, B, C)
    ask(slots, D)
    assert [slots.takes(each) for each in (A, B, C)] == [False, True, True]
    assert not slots.could_take(A, 0.0) and slots.has(A)
    slots.begin_turn()
    slots.end_turn(0.0)  # nobody looked at the line: it stays closed
    assert not slots.takes(A)
    ask(slots, D, adapter("E"))
    assert [slots.takes(each) for each in (A, B, C)] == [False, False, True]
    ask(slots, B, D)  # of two that are closed one is enough, and B is asked for
    assert [slots.takes(each) for each in (A, B, C)] == [False, True, True]
    ask(slots, C)
    assert [slots.takes(each) for each in (A, B, C)] == [True, True, True]


def test_a_closed_slot_is_given_away_once_it_is_empty_even_to_whom_it_was_granted() -> None:
    slots = full(A, B)
    ask(slots, C)
    slots.leave(1)
    assert ask(slots, A, C) == [False, False]  # B's slot is free for C, and A's is open again
    assert slots.loading == [C] and ask(slots, A) == [True]
    slots = full(A, B)
    ask(slots, C, D)
    slots.leave(0)
    assert ask(slots, C, A) == [False, False]
    assert slots.loading == [C] and not slots.holds(A)  # it was closed, and comes back behind C


def test_a_failed_load_is_not_tried_again_here_for_a_while() -> None:
    slots = AdapterSlots(LEASE, 1)
    ask(slots, A)
    load(slots, 5.0, "no such folder")
    assert not slots.holds(A) and not slots.loading and slots.could_take(B, 5.0)
    assert [slots.could_take(A, 5.0 + after) for after in (RETRY_S - 0.1, RETRY_S)] == [False, True]
    assert [slots.may_have(A, 5.0 + after) for after in (FAILED_S - 0.1, FAILED_S)] == [False, True]
    ask(slots, A, now=5.0 + RETRY_S - 0.1)
    assert not slots.loading
    ask(slots, A, now=5.0 + RETRY_S)
    assert slots.loading == [A]
    load(slots, 20.0)
    ask(slots, B, now=20.0)
    assert not slots.holds(A) and slots.may_have(A, 20.0)  # it did load in the end
    slots.note_failed(A, 50.0), slots.note_failed(B, 40.0 + FAILED_S)
    assert list(slots._failed) == [A.digest, B.digest]
    slots.note_failed(B, 50.0 + FAILED_S)  # the first is forgotten by now
    assert list(slots._failed) == [B.digest]
    slots.forget_failed(B), slots.forget_failed(B)
    assert slots.may_have(B, 50.0 + FAILED_S)


def test_a_load_hangs_from_when_the_worker_came_to_it() -> None:
    slots = AdapterSlots(LEASE, 3)
    assert slots.look(1e9) is None and not slots.stuck
    ask(slots, A, now=100.0)
    ask(slots, B, now=150.0)
    assert slots.look(100.0) is None and not slots.stuck
    assert slots.look(100.1) == A and slots.stuck
    assert not slots.could_take(A, 400.0) and not slots.could_take(C, 400.0) and not slots.may_have(C, 400.0)
    ask(slots, C, now=400.0)
    assert slots.loading == [A, B]
    load(slots, 420.0)
    assert not slots.stuck and slots.look(420.0) is None and slots.look(420.1) == B
    assert slots.could_take(A, 430.0) and slots.may_have(A, 430.0)


def test_one_that_moves_has_its_adapter_loaded_where_nothing_else_is_on_its_way() -> None:
    slots = full(A, count=4)
    slots.note_failed(D, 0.0)
    slots.want(A, 0.0), slots.want(D, RETRY_S - 0.1)
    assert not slots.loading
    slots.want(B, 0.0), slots.want(C, 0.0)
    assert slots.loading == [B]
    load(slots)
    slots.want(D, RETRY_S)
    assert slots.loading == [D]


def test_one_that_is_on_its_way_keeps_its_slot() -> None:
    slots = AdapterSlots(LEASE, 1)
    ask(slots, A)
    ask(slots, B)
    assert slots.loading == [A]
    slots = full(A, count=2)
    ask(slots, B)
    ask(slots, C)  # A's slot is closed for it, though B's is used by nobody yet
    assert slots.loading == [B] and not slots.takes(A)
    load(slots)
    assert slots.takes(B)


def test_a_slot_is_not_closed_whose_adapter_was_granted() -> None:
    slots = full(A, B)
    ask(slots, A, C)
    assert slots.takes(A) and not slots.takes(B)
    slots.begin_turn()
    assert [slots.may_admit(each) for each in (A, B)] == [True, True]
    slots.admits(A), slots.admits(B)
    assert [slots.may_admit(each) for each in (A, B, C)] == [True, True, False]


def test_a_turn_says_whether_a_slot_was_opened() -> None:
    slots = AdapterSlots(LEASE, 2)
    slots.begin_turn()
    assert slots.end_turn(0.0) is False
    slots.admits(A)
    assert slots.end_turn(0.0) is False  # none was closed
    slots = full(A, B)
    ask(slots, C)
    slots.begin_turn()
    slots.admits(B)
    assert slots.end_turn(0.0) is True


def test_a_slot_that_nobody_needs_is_emptied_when_the_last_has_left_it() -> None:
    slots = full(A, B, C)
    slots.take(A)
    slots.drop(D), slots.drop(A)
    assert slots.take_orders() == [DropAdapter(LEASE, -1, D.digest)]
    slots.leave(0)
    assert slots.has(A) and not slots.take_orders()
    slots.leave(0)
    assert not slots.holds(A) and slots.take_orders() == [DropAdapter(LEASE, 0, A.digest)]
    slots.drop(D)
    slots.leave(2)
    assert slots.has(C)  # it was not the last slot's that was dropped
    slots.take_orders()
    slots.drop(C)
    assert slots.take_orders() == [DropAdapter(LEASE, 2, C.digest)]
    slots.drop(B), slots.take(B), slots.leave(1), slots.leave(1)
    assert slots.has(B)  # somebody asked for it again


def test_an_emptied_slot_is_open() -> None:
    slots = full(A, B)
    ask(slots, C)
    slots.leave(0)
    slots.drop(A)  # it was closed
    slots.begin_turn()
    slots.admits(B)
    assert slots.end_turn(0.0) is False


def test_an_answer_counts_once_and_for_a_slot_that_is_there() -> None:
    slots = AdapterSlots(LEASE, 1)
    ask(slots, A)
    failed = AdapterReady(LEASE, 0, 1, "no such folder")
    slots.loaded(failed, 0.0)
    for message in (failed, AdapterReady(LEASE, 1, 1), AdapterReady(LEASE, -1, 1)):
        with pytest.raises(BadFrame, match="is not being loaded"):
            slots.loaded(message, 0.0)
