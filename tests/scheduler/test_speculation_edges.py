"""Drafts at the edge of each rule: what a result may hold, what is counted, and where a verification ends."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from drafting_rig import Drafting, K, verifies

from quire.proto.codec import BadFrame, from_i32, i32
from quire.proto.hashing import hash_blocks, root_of
from quire.proto.messages import Failed, SlotFailed, SpeculativePlan, SpeculativeResult, StepPlan, StepResult
from quire.scheduler.draft_room import DraftRoom
from quire.scheduler.fake.fake_model import expected_tokens
from quire.scheduler.tally import Speculation


def test_what_came_of_drafts_is_counted_by_place() -> None:
    counts = Speculation()
    assert (counts.drafts, counts.draft_tokens, counts.accepted) == (0, 0, [])
    counts.expect(2), counts.expect(4), counts.expect(3)
    counts.count([3, 0, 2, 2], [2, 1, 3, 1])  # tokens drafted, and those that the verification gave
    counts.count([1], [5])  # more than were drafted cannot have been right
    assert (counts.drafts, counts.draft_tokens, counts.accepted) == (4, 8, [3, 1, 0, 0])


def verifying(rows: int = 1, **params: Any) -> tuple[Drafting, SpeculativePlan]:
    """A rig whose rows have drawn one token each, and a plan that verifies drafts of all."""
    rig = Drafting()
    for _ in range(rows):
        rig.submit(9, **{"max_tokens": 40, **params})
    rig.step()
    plan = rig.core.plan(rig.replica)
    assert verifies(plan) and from_i32(plan.draft_rows) == list(range(rows))
    return rig, plan


def answer(
    rig: Drafting, plan: SpeculativePlan, counts: list[int], drafted: list[int] | None = None, **more: Any
) -> None:
    tokens = more.pop("tokens", [5] * sum(counts))
    given = drafted if drafted is not None else [max(0, count - 1) for count in counts]
    result = SpeculativeResult(plan.lease, plan.step, i32(tokens), i32(counts), drafted=i32(given), **more)
    rig.core.commit(rig.replica, result)
    rig.core.check_integrity()
    rig.receive()


@pytest.mark.parametrize(
    ("counts", "drafted", "sound"),
    [
        ([1, 1 + K], [0, K], True), ([1 + K, 1], [K, K], True), ([2 + K, 1], None, False), ([1, 0], None, False),
        ([1, 1], [-1, 0], False), ([1, 1], [0, K + 1], False), ([1, 1], [0], False), ([1, 1], [0, 0, 0], False),
        ([1], None, False), ([1, 1, 1], None, False),
    ],
)  # fmt: skip
def test_what_a_verification_may_give(counts: list[int], drafted: list[int] | None, sound: bool) -> None:
    rig, plan = verifying(2)
    if not sound:
        with pytest.raises(BadFrame):
            answer(rig, plan, counts, drafted)
        assert rig.core.speculation.drafts == 0
        return
    answer(rig, plan, counts, drafted)
    assert [len(rig.tokens[uid, 0]) for uid in (1, 2)] == [1 + count for count in counts]
    assert rig.core.stats().draft_tokens == sum(drafted or [])


@pytest.mark.parametrize("counts", [[1, 0], [1 + K, 2 + K], [1, 2 + K]])
def test_the_slot_that_is_wrong_is_named(counts: list[int]) -> None:
    rig, plan = verifying(2)
    with pytest.raises(BadFrame, match=f"slot 1 of step 2 draws {counts[1]} tokens, not 1 to {1 + K}"):
        answer(rig, plan, counts)


def test_a_verification_is_answered_by_its_own_kind_of_result() -> None:
    rig, plan = verifying()
    with pytest.raises(BadFrame, match="1 tokens and 1 counts for the 1 slots"):
        rig.core.commit(rig.replica, StepResult(plan.lease, plan.step, i32([5]), i32([1])))
    with pytest.raises(BadFrame, match="1 tokens and 1 counts"):
        answer(rig, plan, [2], tokens=[5])
    with pytest.raises(BadFrame, match="vocabulary"):
        answer(rig, plan, [3], tokens=[5, 5, rig.vocab])


@pytest.mark.parametrize("left", [1, 2, K])
def test_a_verification_gives_no_more_than_its_row_may_grow(left: int) -> None:
    rig, plan = verifying(max_tokens=1 + left)
    assert from_i32(plan.counts) == [left]
    with pytest.raises(BadFrame, match=f"draws {left + 1} tokens, not 1 to {left}"):
        answer(rig, plan, [left + 1])
    answer(rig, plan, [left])
    assert len(rig.tokens[1, 0]) == 1 + left and not rig.core.requests


def test_of_two_in_flight_the_second_begins_where_the_first_came_to() -> None:
    rig, first = verifying(max_tokens=2 + K)  # one was drawn: K + 1 are left
    second = rig.core.plan(rig.replica)
    assert second is None  # all that it may grow is asked for
    rig, first = verifying(max_tokens=4 + K)
    second = rig.core.plan(rig.replica)
    assert verifies(second)
    answer(rig, first, [2])
    assert len(rig.tokens[1, 0]) == 3
    with pytest.raises(BadFrame, match=f"not 1 to {1 + K}"):
        answer(rig, second, [2 + K])
    answer(rig, second, [1 + K])
    assert len(rig.tokens[1, 0]) == 4 + K and not rig.core.requests


@pytest.mark.parametrize(("left", "most"), [(4 + K, K), (40, 1 + K)])
def test_the_second_gives_what_is_left_or_as_much_as_any(left: int, most: int) -> None:
    rig, first = verifying(max_tokens=left)
    second = rig.core.plan(rig.replica)
    assert verifies(second)
    answer(rig, first, [3])
    with pytest.raises(BadFrame, match=f"slot 0 of step 3 draws {most + 1} tokens, not 1 to {most}"):
        answer(rig, second, [most + 1], [K])
    answer(rig, second, [most])
    assert len(rig.tokens[1, 0]) == 4 + most


def test_what_is_verified_for_one_that_was_preempted_counts_for_nobody() -> None:
    rig, plan = verifying(2)
    (seq,) = rig.core.requests[1].live
    rig.core.preempt(seq)
    with pytest.raises(BadFrame):
        answer(rig, plan, [2 + K, 1])
    answer(rig, plan, [3, 2])
    assert [len(rig.tokens[uid, 0]) for uid in (1, 2)] == [1, 3]
    assert seq.total == 10 and rig.core.stats().accepted == [2, 1, 0, 0]  # the worker drafted them all the same


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_that_failed_gives_one_token_that_means_nothing(slot: int) -> None:
    rig, plan = verifying(2)
    failed = {"failed": [SlotFailed(slot, 500, "why")]}
    counts = [2, 2]
    with pytest.raises(BadFrame, match=f"slot {slot} of step 2 draws 2 tokens, not 1 to 1"):
        answer(rig, plan, counts, **failed)
    counts[slot] = 1
    tokens = [7, 7, 7]
    tokens[2 * slot] = rig.vocab  # slots have 1 and 2 tokens, or 2 and 1
    answer(rig, plan, counts, tokens=tokens, **failed)
    assert [m.uid for m in rig.other if isinstance(m, Failed)] == [slot + 1]
    assert rig.tokens[2 - slot, 0][1:] == [7, 7]
    rig, plan = verifying()
    for wrong in (-1, 1):
        with pytest.raises(BadFrame, match=f"slot {wrong} of 1 failed"):
            answer(rig, plan, [1], failed=[SlotFailed(wrong, 500, "why")])


def test_what_comes_behind_the_token_that_ends_a_sequence_is_no_output() -> None:
    rig, plan = verifying(stop_token_ids=[7], min_tokens=3)
    answer(rig, plan, [5], tokens=[7, 8, 7, 9, 7])  # the first is too early
    assert rig.tokens[1, 0][1:] == [7, 8, 7] or len(rig.tokens[1, 0]) == 3
    assert not rig.core.requests and rig.core.stats().generation_tokens == len(rig.tokens[1, 0])


def test_a_sequence_grows_by_what_it_was_given_and_its_full_blocks_are_found() -> None:
    rig, plan = verifying()
    (seq,) = rig.core.requests[1].live
    first = rig.tokens[1, 0][0]
    assert (seq.loose, seq.scheduled, seq.computed, seq.total) == (1, 9 + 1 + K, 9, 10)
    second = rig.core.plan(rig.replica)
    assert verifies(second) and (seq.loose, seq.scheduled) == (2, 9 + 2 * (1 + K))
    answer(rig, plan, [2], tokens=[20, 21])
    assert (seq.loose, seq.scheduled, seq.computed, seq.total) == (1, 11 + 1 + K, 11, 12)
    answer(rig, second, [5], tokens=[22, 23, 24, 25, 26])
    assert (seq.loose, seq.scheduled, seq.computed, seq.total) == (0, 16, 16, 17)
    assert list(seq.outputs) == [first, *range(20, 27)]
    assert len(rig.replica.pool.find(seq.hash_blocks(2, 8), 9)) == 2


def test_a_row_goes_over_from_decodes_to_verifications_and_back() -> None:
    rig = Drafting(draft_rows=1, blocks=100)
    uid, other = rig.submit(9, max_tokens=90), rig.submit(9, max_tokens=90)
    (seq,) = rig.core.requests[uid].live
    plans = [rig.step() for _ in range(6)]
    rig.core.abort(other, 0)
    plans += [rig.step() for _ in range(3)]
    assert list(seq.outputs) == rig.tokens[uid, 0]
    rig.submit(9, max_tokens=90)
    plans += [rig.step() for _ in range(20)]
    kinds = [verifies(plan) for plan in plans]
    assert sorted({*pairwise(kinds)}) == [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    assert list(seq.outputs) == rig.tokens[uid, 0]
    hashes = hash_blocks(i32([*rig.prompt(9, uid), *seq.outputs]), 8, root_of(""))
    assert len(rig.replica.pool.find(hashes, 99)) == seq.computed // 8


@pytest.mark.parametrize("counts", [[2], [1, 1], [3, 2], [1, 4, 1]])
def test_a_block_that_verifications_began_and_decodes_filled_is_found(counts: list[int]) -> None:
    rig, plan = verifying()
    (seq,) = rig.core.requests[1].live
    token = 20
    for last, count in zip([False] * (len(counts) - 1) + [True], counts, strict=True):
        answer(rig, plan, [count], tokens=[*range(token, token + count)])
        token += count
        if not last:
            plan = rig.core.plan(rig.replica)
            assert verifies(plan)
    assert seq.loose == 0 and seq.computed < 16
    rig.replica.drafts = 0  # from here on it decodes
    while seq.computed < 16:
        plan = rig.core.plan(rig.replica)
        assert type(plan) is StepPlan
        rig.core.commit(rig.replica, StepResult(plan.lease, plan.step, i32([token])))
        rig.core.check_integrity()
        token += 1
    hashes = hash_blocks(i32([*rig.prompt(9, 1), *seq.outputs]), 8, root_of(""))
    assert len(rig.replica.pool.find(hashes, 9)) == 2


def test_one_that_was_preempted_with_drafts_in_flight_begins_anew() -> None:
    rig, _ = verifying()
    (seq,) = rig.core.requests[1].live
    rig.core.preempt(seq)
    assert seq.loose == 0
    rig.core.end_lease(rig.replica, blame=False)
    rig.add(0, 64)
    rig.run()
    assert len(rig.tokens[1, 0]) == 40


def test_beams_that_lack_a_block_get_one_that_drafts_alone_hold() -> None:
    rig = Drafting(blocks=9, max_model_len=60, drafts=20, max_num_batched_tokens=256, vocab=30)
    uid = rig.submit(11, max_tokens=29)
    for _ in range(3):
        rig.plan()
    while rig.plans[0]:
        rig.work()
    rig.submit(8, max_tokens=11, n=2, use_beam_search=True, temperature=0.0)
    rig.run()
    assert rig.core.preemptions == 0
    assert rig.tokens[uid, 0] == expected_tokens(rig.prompt(11, uid), uid, 29, 30)


def test_who_has_ended_holds_no_blocks_of_drafts() -> None:
    rig = Drafting()
    rig.submit(9, max_tokens=40)
    rig.run()
    assert not rig.replica.draft_room._holders


def lent(computed: int, scheduled: int, loose: int, blocks: int) -> DraftRoom:
    """The room of drafts where one that is so far holds so many blocks."""
    replica = Drafting().replica
    seq: Any = SimpleNamespace(key=(1,), row=0, computed=computed, scheduled=scheduled, loose=loose)
    replica.columns.enter(0, computed, scheduled, 100, replica.pool.allocate_many(blocks))
    replica.draft_room.lend(seq)
    return replica.draft_room


@pytest.mark.parametrize(
    ("computed", "scheduled", "loose", "left"),
    [(8, 8, 0, 2), (7, 7, 0, 1), (9, 9, 0, 2), (25, 25, 0, 4), (8, 30, 1, 4)],
)
def test_blocks_past_the_next_token_are_taken_back(computed: int, scheduled: int, loose: int, left: int) -> None:
    room = lent(computed, scheduled, loose, 4)
    assert not room.tight
    assert room.take_back() is (left < 4) and room._columns.num_blocks.item(0) == left
    assert bool(room._holders) == bool(loose)
    room.begin_plan()
    assert room.tight
    room.begin_plan()
    assert not room.tight


@pytest.mark.parametrize(("computed", "loose", "comes"), [(6, 1, True), (7, 1, False), (6, 0, False)])
def test_results_under_way_may_free_what_the_least_that_they_give_does_not_need(
    computed: int, loose: int, comes: bool
) -> None:
    assert lent(computed, 16, loose, 2).coming() is comes


def test_a_room_of_drafts_begins_with_nobody_in_need() -> None:
    room = Drafting().replica.draft_room
    room.begin_plan()
    assert not room.tight and not room.coming()
