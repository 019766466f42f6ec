"""A sequence's counters, a replica's rows and the lineup of those who decode, one rule at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scheduler_rig import VOCAB, Rig

from quire.proto.codec import from_i32, i32
from quire.proto.hashing import hash_blocks, root_of
from quire.proto.messages import Child, StepResult
from quire.proto.standstill import Standstill
from quire.scheduler.batch import Lineup
from quire.scheduler.block_pool import PoolError
from quire.scheduler.fake.fake_model import expected_tokens
from quire.scheduler.replica import Replica
from quire.scheduler.request import Sequence, State


def only(rig: Rig) -> Sequence:
    (request,) = rig.core.requests.values()
    (seq,) = request.live
    return seq


def draw(rig: Rig, *tokens: int) -> None:
    plan = rig.core.plan(rig.replica)
    assert plan is not None
    rig.core.commit(rig.replica, StepResult(plan.lease, plan.step, i32(tokens)))
    rig.core.check_integrity()


# ---------------------------------------------------------------- counters


def test_the_counters_of_a_prompt_and_of_its_decodes() -> None:
    rig = Rig()
    rig.submit(40, max_tokens=9)
    seq = only(rig)
    assert (seq.state, seq.total, seq.output_len, seq.computed, seq.scheduled, seq.row) == (
        State.WAITING,
        40,
        0,
        0,
        0,
        -1,
    )
    rig.core.plan(rig.replica)
    assert (seq.state, seq.computed, seq.scheduled, seq.prefilling, seq.row) == (State.RUNNING, 0, 32, True, 0)
    rig.core.plan(rig.replica)
    assert (seq.computed, seq.scheduled, seq.prefilling, seq.drew) == (0, 40, False, False)
    rig.plans[0].clear()
    for step, tokens in ((1, []), (2, [7])):
        rig.core.commit(rig.replica, StepResult(rig.replica.lease, step, i32(tokens)))
    assert (seq.computed, seq.scheduled, seq.total, seq.output_len, seq.drew) == (40, 40, 41, 1, True)
    assert (seq.horizon, seq.milestone, len(seq.blocks)) == (40, 48, 5)
    rig.core.plan(rig.replica)
    assert (seq.computed, seq.scheduled, seq.total, seq.horizon, len(seq.blocks)) == (40, 41, 41, 48, 6)
    rig.core.preempt(seq)
    assert (seq.state, seq.total, seq.outputs.tolist(), seq.generation, seq.row) == (State.WAITING, 41, [7], 1, -1)
    assert (seq.computed, seq.scheduled, seq.blocks, seq.replica, seq.drew) == (0, 0, [], -1, False)
    rig.core.abort(seq.uid, 0)
    assert (seq.state, seq.generation) == (State.FINISHED, 2)


def test_the_first_block_that_decodes_fill_is_found_under_its_root() -> None:
    rig = Rig()
    rig.submit(30, max_tokens=30)  # its row and what is left in it
    rig.run()
    rig.submit(4, max_tokens=30, cache_salt="salt")
    seq = only(rig)
    while seq.computed < 16:
        rig.step()
    ids = seq.request.prompt + seq.outputs.tobytes()
    assert rig.replica.pool.find(hash_blocks(ids[:64], 8, root_of("salt")), 2) == seq.blocks[:2]


@pytest.mark.parametrize(("length", "max_tokens", "blocks"), [(8, 1, 1), (8, 2, 2), (7, 2, 1), (8, 9, 2), (8, 10, 3)])
def test_the_most_blocks_of_a_sequence(length: int, max_tokens: int, blocks: int) -> None:
    rig = Rig()
    rig.submit(length, max_tokens=max_tokens)
    assert only(rig).most_blocks(8) == blocks and only(rig).spare_blocks(8) == 0


def test_a_resumed_sequence_has_what_it_was_given_and_losses_before_its_last_token() -> None:
    rig = Rig()
    rig.submit(8, attempt=1, losses=2, max_tokens=9, children=[Child(0, i32([5, 6, 7]))])
    seq = only(rig)
    assert (seq.total, seq.output_len, seq.losses.count, seq.losses.furthest) == (11, 3, 2, 10)
    assert seq.quarantined
    (admit,) = (rig.core.plan(rig.replica) or pytest.fail("no plan")).admits
    assert (from_i32(admit.ids)[8:], admit.prompt_len, admit.uid, admit.index, admit.row) == ([5, 6, 7], 8, 1, 0, 0)
    rig.core.commit(rig.replica, StepResult(rig.replica.lease, 1, i32([9])))
    assert not seq.quarantined and rig.replica.quarantined == []
    assert not seq.note_loss() and (seq.losses.count, seq.losses.furthest) == (1, 11)


def test_three_losses_at_one_point_are_its_own() -> None:
    rig = Rig()
    rig.submit(8)
    seq = only(rig)
    assert seq.losses.furthest == -1 and not seq.quarantined
    assert [seq.note_loss() for _ in range(3)] == [False, False, True]


# ---------------------------------------------------------------- blocks and hashes


@pytest.mark.parametrize(("prompt_len", "outputs"), [(20, 13), (16, 9), (3, 30), (24, 0)])
def test_hashes_of_blocks_of_prompt_and_outputs(prompt_len: int, outputs: int) -> None:
    rig = Rig()
    drawn = [900 - at for at in range(outputs)]
    given: Any = {"attempt": 1, "children": [Child(0, i32(drawn))]} if outputs else {}
    uid = rig.submit(prompt_len, max_tokens=60, cache_salt="s", **given)
    seq, ids = only(rig), i32([*rig.prompt(prompt_len, uid), *drawn])
    full = (prompt_len + outputs) // 8
    assert seq.hash_blocks(full, 8) == hash_blocks(ids, 8, root_of("s"))
    assert seq.hash_blocks(0, 8) == seq.hashes


def test_what_is_computed_is_found_by_the_next_block_by_block() -> None:
    rig = Rig(max_num_batched_tokens=8)
    prompt = rig.prompt(40, 1)
    rig.submit(prompt, max_tokens=9)
    hashes = hash_blocks(i32(prompt), 8, root_of(""))
    for full in range(1, 5):
        rig.step()
        assert len(rig.replica.pool.find(hashes, 9)) == full
    rig.run()
    more = [*prompt, *expected_tokens(prompt, 1, 9, VOCAB)]
    assert len(rig.replica.pool.find(hash_blocks(i32(more), 8, root_of("")), 9)) == 6


def test_outputs_are_taken_over_as_far_as_they_are_asked_for() -> None:
    rig = Rig()
    rig.submit(5, max_tokens=30)
    draw(rig, 100)
    seq = rig.replica.decoding[0]
    for token in range(101, 120):
        draw(rig, token)
    seq.keep_drawn(16)  # of its first 16 tokens 11 are outputs
    assert seq._outputs.tolist() == list(range(100, 111))
    seq.keep_drawn(9)
    assert seq._outputs.tolist() == list(range(100, 111))
    assert seq.outputs.tolist() == list(range(100, 120)) and seq.total == 25
    assert rig.core.requests[1].live == [seq]


# ---------------------------------------------------------------- rows


def test_rows_are_given_out_from_the_first_and_told_when_they_are_given_up() -> None:
    rig = Rig(max_num_seqs=4)
    uids = [rig.submit(8, max_tokens=9) for _ in range(3)]
    draw(rig, 1, 2, 3)
    assert [seq.row for seq in rig.replica.decoding] == [0, 1, 2] and rig.replica.running == 3
    rig.core.abort(uids[1], 0)
    assert rig.replica.free_rows == [3, 1] and rig.replica.drops == [1]
    plan = rig.core.plan(rig.replica)
    assert plan is not None and from_i32(plan.drops) == [1] and rig.replica.drops == []
    plan = rig.core.plan(rig.replica)
    assert plan is not None and plan.drops == b""
    assert rig.replica.last().uid == uids[2]


def test_a_row_is_released_once() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=9)
    draw(rig, 1)
    rig.submit(8, max_tokens=9)
    draw(rig, 2, 1)
    for seq in rig.replica.decoding[:]:
        rig.replica.release(seq)
        with pytest.raises(PoolError, match="is not where its state says"):
            rig.replica.release(seq)


def test_the_last_that_came_is_the_one_to_go_whether_it_decodes_or_not() -> None:
    rig = Rig(scheduling_policy="priority")
    rig.submit(8, max_tokens=9, priority=1)
    draw(rig, 1)
    rig.submit(60, max_tokens=9, priority=2)
    draw(rig, 2)
    assert rig.replica.last().uid == 2 and rig.replica.prefilling
    rig.core.abort(2, 0)
    rig.submit(60, max_tokens=9, priority=0)
    draw(rig, 3)
    assert [seq.uid for seq in rig.replica.prefilling] == [3] and rig.replica.last().uid == 1
    assert [seq.uid for seq in rig.replica.sequences()] == [1, 3]


def test_how_long_a_step_has_run() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=9)
    rig.now = 5.0
    assert rig.replica.waited(50.0) == 0.0
    rig.plan()
    rig.now = 7.0
    rig.plan()
    assert rig.replica.waited(12.0) == 7.0
    rig.now = 10.0
    rig.work()
    assert rig.replica.waited(12.0) == 2.0  # the second began when the first had ended
    rig.work()
    assert rig.replica.waited(12.0) == 0.0
    rig.now = 20.0
    rig.plan()
    assert rig.replica.waited(21.5) == 1.5
    assert [rig.replica.stalled(20.0 + seconds) for seconds in (2.0, 2.1)] == [False, True]


def test_a_standstill_of_the_scheduler_is_no_time_of_a_step() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=9)
    rig.plan()
    rig.now = 1.0
    rig.plan()
    rig.now = 3.0
    rig.work()
    standstill = Standstill(5.0, rig.now)
    assert standstill.notice(103.0)
    rig.replica.forgive(standstill)
    assert rig.replica.waited(104.0) == 1.0  # since the step before it was done


# ---------------------------------------------------------------- who decodes


def test_a_lineup_is_in_order_whoever_joins_and_leaves() -> None:
    rig = Rig(max_num_batched_tokens=64)
    for arrival in (5.0, 1.0, 3.0, 4.0, 2.0):
        rig.submit(8, max_tokens=9, arrival=arrival)
    draw(rig, *range(5))
    going = rig.replica.going
    by_key = sorted(rig.replica.decoding, key=lambda seq: seq.key)
    assert going.batch().seqs == by_key and going.batch() is going.batch()
    assert going.rows().tolist() == [seq.row for seq in by_key]
    lineup = Lineup(rig.replica.columns)
    for seq in (by_key[2], by_key[0], by_key[4], by_key[1], by_key[3]):
        lineup.discard(seq)  # it is not there yet
        lineup.add(seq)
    assert lineup.batch().seqs == by_key and lineup.rows().tolist() == [seq.row for seq in by_key]
    for at, left in ((4, by_key[:4]), (0, by_key[1:4]), (2, [by_key[1], by_key[3]])):
        before = lineup.batch()
        lineup.discard(by_key[at])
        lineup.discard(by_key[at])
        assert lineup.batch().seqs == left and lineup.rows().tolist() == [seq.row for seq in left]
        assert len(before) == len(left) + 1
    assert lineup.at(np.array([1])) == [by_key[3]]


def test_a_batch_names_its_rows_and_whose_they_are() -> None:
    rig = Rig()
    for _ in range(3):
        rig.submit(8, max_tokens=9, attempt=4)
    draw(rig, 1, 2, 3)
    batch = rig.replica.going.batch()
    assert (from_i32(batch.packed), from_i32(batch.numbers), len(batch)) == ([0, 1, 2], [0, 1, 2], 3)
    assert batch.before_output.tolist() == [7, 7, 7]
    (part,) = batch.parts
    assert part.places is None and from_i32(part.attempts) == [4, 4, 4] and from_i32(part.indexes) == [0, 0, 0]
    assert part.of(np.array([5, 6, 7], np.int32)) == i32([5, 6, 7])
    some = batch.only(np.array([True, False, True]))
    assert (from_i32(some.packed), [seq.uid for seq in some.seqs]) == ([0, 2], [1, 3])
    assert [batch.place(at) for at in range(3)] == [0, 1, 2]


def test_the_children_of_a_suspect_are_suspects_each_until_its_own_first_token() -> None:
    rig = Rig()
    rig.submit(8, attempt=1, losses=2, n=3, max_tokens=30)
    rig.submit(8, max_tokens=30)
    rig.plan()
    assert [seq.index for seq in rig.replica.quarantined] == [0, 1, 2]
    rig.work()
    suspects = len(rig.replica.quarantined)
    while suspects:
        plan = rig.step()
        assert plan is not None and len(from_i32(plan.rows)) == 1  # alone
        assert len(rig.replica.quarantined) == suspects - 1
        suspects -= 1
    while rig.core.requests[1].live[0].output_len < 20:
        rig.step()
    for seq in rig.replica.sequences():
        rig.core.preempt(seq)
    rig.run()
    for uid, index in ((1, 0), (1, 1), (1, 2), (2, 0)):
        assert rig.tokens[uid, index] == expected_tokens(rig.prompt(8, uid), uid + index, 30, VOCAB)


@pytest.mark.parametrize(("first", "cached"), [(0, 0), (1, 0), (16, 8), (17, 16), (39, 32), (40, 32)])
def test_of_a_prompt_whose_logprobs_are_asked_for_the_cache_gives_what_is_before_them(first: int, cached: int) -> None:
    rig = Rig(max_num_batched_tokens=64)
    prompt = rig.prompt(40, 1)
    rig.submit(prompt)
    rig.run()
    uid = rig.submit(prompt, prompt_logprobs=0, prompt_from=first)
    rig.run()
    assert rig.started[uid] == cached
    assert sum(len(piece.logprobs.ranks) // 4 for piece in rig.prompts.get(uid, [])) == 40 - max(first, 1)


def test_a_block_that_fills_behind_cached_ones_is_found() -> None:
    rig = Rig()
    prompt = rig.prompt(20, 1)
    rig.submit(prompt)
    rig.run()
    uid = rig.submit(prompt, max_tokens=9)
    rig.run()
    hashes = hash_blocks(i32([*prompt, *rig.tokens[uid, 0]]), 8, root_of(""))
    assert rig.started[uid] == 16 and len(rig.replica.pool.find(hashes, 9)) == 3


def test_a_worker_that_runs_prompts_whole_caches_none() -> None:
    lease = Rig().replica.lease
    caching = [Replica(0, lease, "w", 8, 9, 8, 64, VOCAB, whole=whole).pool.caching for whole in (False, True)]
    assert caching == [True, False]


def test_a_prompt_whose_logprobs_were_half_done_is_preempted_and_done_again() -> None:
    rig = Rig()
    uid = rig.submit(60, prompt_logprobs=0)
    rig.step()
    rig.core.preempt(*rig.core.requests[uid].live)
    rig.run()
    assert sum(len(piece.logprobs.ranks) // 4 for piece in rig.prompts[uid]) == 59
