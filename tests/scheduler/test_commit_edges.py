"""What a result must be, and what a step's tokens do: the last that is right, and the first that is not."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_rig import VOCAB, Rig

from quire.proto.codec import BadFrame, from_i32, i32
from quire.proto.hashing import root_of
from quire.proto.messages import (
    Failed,
    Finish,
    Logprobs,
    Pooled,
    PromptChunk,
    PromptLogprobs,
    SlotFailed,
    SlotPooled,
    StepPlan,
    StepResult,
    Submit,
    TokenBatch,
)
from quire.proto.pooling import PoolingParams
from quire.proto.work import Pool
from quire.scheduler.logprobs import count_logprobs, first_logprobs, skip_logprobs
from quire.scheduler.replica import Replica
from quire.scheduler.step import Step

RECORD = Logprobs(i32([11]), i32([0]), i32([1]))


def planned(rig: Rig) -> StepPlan:
    plan = rig.core.plan(rig.replica)
    assert plan is not None
    return plan


def commit(rig: Rig, plan: StepPlan, tokens: list[int], **fields: Any) -> None:
    rig.core.commit(rig.replica, StepResult(plan.lease, plan.step, i32(tokens), **fields))
    rig.core.check_integrity()


def told(rig: Rig, kind: type) -> list[Any]:
    return [message for _, message in rig.core.outbox.take() if isinstance(message, kind)]


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("token", [0, VOCAB - 1])
def test_the_first_and_the_last_token_of_the_vocabulary(token: int) -> None:
    rig = Rig()
    rig.submit(8)
    commit(rig, planned(rig), [token])
    assert [from_i32(batch.tokens) for batch in told(rig, TokenBatch) if batch.tokens] == [[token]]


@pytest.mark.parametrize(
    ("step", "tokens", "counts"),
    [(0, [1, 2], b""), (2, [1, 2], b""), (1, [1], b""), (1, [1, 2, 3], b""), (1, [1, VOCAB], b""), (1, [-1, 1], b""),
     (1, [1, 2], i32([1])), (1, [1, 2], i32([1, 2])), (1, [1, 2], i32([1, 1, 1])), (1, [1, 2], i32([0, 0]))],
)  # fmt: skip
def test_a_result_that_is_not_the_steps(step: int, tokens: list[int], counts: bytes) -> None:
    rig = Rig()
    rig.submit(8)
    rig.submit(8)
    plan = planned(rig)
    with pytest.raises(BadFrame):
        rig.core.commit(rig.replica, StepResult(plan.lease, step, i32(tokens), counts))
    assert rig.core.steps == 0 and len(rig.replica.in_flight) == 1
    rig.core.commit(rig.replica, StepResult(plan.lease, 1, i32([1, 2]), i32([1, 1])))
    with pytest.raises(BadFrame, match="where none was expected"):
        rig.core.commit(rig.replica, StepResult(plan.lease, 1, i32([1, 2])))


@pytest.mark.parametrize(("slot", "sound"), [(-1, False), (0, True), (1, True), (2, False)])
def test_a_failed_slot_is_one_of_the_steps(slot: int, sound: bool) -> None:
    rig = Rig()
    uids = [rig.submit(8), rig.submit(8)]
    plan, failed = planned(rig), [SlotFailed(slot, 500, "why")]
    tokens = [1, 2] if not sound else [VOCAB if at == slot else 5 for at in range(2)]  # its token means nothing
    if not sound:
        with pytest.raises(BadFrame, match=f"slot {slot} of 2 failed"):
            commit(rig, plan, tokens, failed=failed)
        return
    commit(rig, plan, tokens, failed=failed)
    assert [message.uid for message in told(rig, Failed)] == [uids[slot]]
    assert set(rig.core.requests) == {uids[1 - slot]}


@pytest.mark.parametrize(("status", "kept"), [(399, 400), (400, 400), (401, 401), (598, 598), (599, 599), (600, 599)])
def test_the_status_of_a_failed_slot(status: int, kept: int) -> None:
    rig = Rig()
    rig.submit(8)
    commit(rig, planned(rig), [1], failed=[SlotFailed(0, status, "why", "param")])
    (failed,) = told(rig, Failed)
    assert (failed.status, failed.message, failed.param) == (kept, "why", "param")


def test_a_request_that_is_corrupted_is_counted_once() -> None:
    rig = Rig()
    for _ in range(3):
        rig.submit(8)
    rig.submit(4, n=2)
    plan = planned(rig)
    slots = [SlotFailed(slot, 500, "NaN", corrupted=slot != 1) for slot in range(5)]
    commit(rig, plan, [0] * 5, failed=slots)
    work = rig.core.stats().work
    assert len(told(rig, Failed)) == 4 and work is not None and work.corrupted == 3


# ---------------------------------------------------------------- logprobs


@pytest.mark.parametrize(
    ("slots", "sound"),
    [([0], True), ([1], True), ([0, 1], True), ([1, 0], False), ([0, 0], False), ([2], False), ([-1], False)],
)
def test_slots_of_logprobs_rise(slots: list[int], sound: bool) -> None:
    rig = Rig()
    uids = [rig.submit(8, logprobs=0), rig.submit(8, logprobs=0)]
    plan, fields = planned(rig), {"logprob_slots": i32(slots), "logprobs": [RECORD] * len(slots)}
    if not sound:
        with pytest.raises(BadFrame):
            commit(rig, plan, [1, 2], **fields)
        return
    commit(rig, plan, [1, 2], **fields)
    batch = told(rig, TokenBatch)[-1]
    assert from_i32(batch.logprob_rows) == slots and uids == [1, 2]


@pytest.mark.parametrize(("slots", "records"), [([0], 0), ([], 1), ([0], 2), ([0, 1], 1)])
def test_as_many_slots_as_logprobs(slots: list[int], records: int) -> None:
    rig = Rig()
    rig.submit(8, logprobs=0)
    rig.submit(8, logprobs=0)
    with pytest.raises(BadFrame):
        commit(rig, planned(rig), [1, 2], logprob_slots=i32(slots), logprobs=[RECORD] * records)


@pytest.mark.parametrize(
    ("record", "tokens"),
    [
        (Logprobs(i32([1]), i32([0]), i32([1])), 1), (Logprobs(i32([1, 2, 3, 4]), i32([0] * 4), i32([1, 1])), 2),
        (Logprobs(i32([1, 2, 3]), i32([0] * 3), i32([1])), 1), (Logprobs(b"", b"", b""), None),
        (Logprobs(b"", b"", i32([1])), None), (Logprobs(i32([1]), i32([0]), b""), None),
        (Logprobs(i32([1]), i32([0]), b"12345"), None), (Logprobs(i32([1]), i32([0, 0]), i32([1])), None),
        (Logprobs(i32([1, 2, 3]), i32([0] * 3), i32([1, 1])), None), (Logprobs(b"12", b"12", i32([1])), None),
        (Logprobs(i32([1]), i32([0]), i32([1]), texts=["a"]), None),
        (Logprobs(i32([1]), i32([0]), i32([1]), raw={0: b"a"}), None),
    ],
)  # fmt: skip
def test_what_a_record_must_be(record: Logprobs, tokens: int | None) -> None:
    if tokens is None:
        with pytest.raises(BadFrame):
            count_logprobs(record)
    else:
        assert count_logprobs(record) == tokens


def test_a_record_without_its_first_tokens() -> None:
    record = Logprobs(i32(range(6)), i32(range(10, 16)), i32([7, 8, 9]))
    assert skip_logprobs(record, 0) is record
    assert skip_logprobs(record, 1) == Logprobs(i32(range(2, 6)), i32(range(12, 16)), i32([8, 9]))
    assert skip_logprobs(record, 3) == Logprobs(b"", b"", b"")


def test_the_first_tokens_of_a_record() -> None:
    record = Logprobs(i32(range(6)), i32(range(10, 16)), i32([7, 8, 9]))
    assert first_logprobs(record, 3) is record
    assert first_logprobs(record, 2) == Logprobs(i32(range(4)), i32(range(10, 14)), i32([7, 8]))
    assert first_logprobs(record, 1) == Logprobs(i32([0, 1]), i32([10, 11]), i32([7]))


def test_logprobs_of_one_who_has_left_go_to_nobody() -> None:
    rig = Rig()
    gone, stays = rig.submit(8, logprobs=0), rig.submit(8, logprobs=0)
    plan = planned(rig)
    rig.core.abort(gone, 0)
    commit(rig, plan, [1, 2], logprob_slots=i32([0, 1]), logprobs=[RECORD, RECORD])
    batch = told(rig, TokenBatch)[-1]
    assert (from_i32(batch.logprob_rows), batch.logprobs, batch.tokens) == ([0], [RECORD], i32([2])) and stays == 2


# ---------------------------------------------------------------- logprobs of prompts


def piece(at: int, first: int, count: int) -> PromptChunk:
    return PromptChunk(at, first, Logprobs(i32(range(count)), i32([0] * count), i32([1] * count)))


@pytest.mark.parametrize(
    ("pieces", "sound"),
    [
        ([(0, 1, 7)], True), ([(0, 1, 3), (0, 4, 4)], True), ([(0, 1, 3)], True), ([], True),
        ([(0, 1, 8)], False), ([(0, 2, 2)], False), ([(0, 1, 3), (0, 3, 3)], False), ([(0, 1, 3), (0, 4, 5)], False),
        ([(1, 1, 7)], False), ([(0, 0, 7)], False), ([(1, 0, 1)], False), ([(1, 1, 1)], False),
    ],
)  # fmt: skip
def test_pieces_of_prompt_logprobs_join(pieces: list[tuple[int, int, int]], sound: bool) -> None:
    rig = Rig()
    uid = rig.submit(8, prompt_logprobs=0)
    plan, prompts = planned(rig), [piece(*one) for one in pieces]
    if not sound:
        with pytest.raises(BadFrame):
            commit(rig, plan, [1], prompts=prompts)
        return
    commit(rig, plan, [1], prompts=prompts)
    messages = [message for _, message in rig.core.outbox.take()]
    sent = [message for message in messages if isinstance(message, PromptLogprobs)]
    assert [(message.uid, message.start, len(message.logprobs.ranks) // 4) for message in sent] == [
        (uid, first, count) for _, first, count in pieces
    ]
    whole = sum(count for _, _, count in pieces) == 7
    failed = [message for message in messages if isinstance(message, Failed)]
    assert [(message.uid, message.status) for message in failed] == ([] if whole else [(uid, 500)])


def test_prompt_logprobs_are_of_those_who_asked_and_are_there() -> None:
    rig = Rig()
    gone, stays = rig.submit(8, prompt_logprobs=0), rig.submit(8)
    plan = planned(rig)
    with pytest.raises(BadFrame):
        commit(rig, plan, [1, 2], prompts=[piece(1, 1, 7)])
    rig.core.abort(gone, 0)
    commit(rig, plan, [1, 2], prompts=[piece(0, 1, 7)])
    assert told(rig, PromptLogprobs) == [] and set(rig.core.requests) == {stays}
    plan = planned(rig)
    with pytest.raises(BadFrame, match="logprobs of prompt tokens 1 to 8"):
        commit(rig, plan, [3], prompts=[piece(0, 1, 7)])


# ---------------------------------------------------------------- pooling


@pytest.mark.parametrize(
    ("slots", "rows", "size", "sound"),
    [
        ([0], 0, 8, True), ([0], 0, 4, True), ([0], 8, 32, True), ([0], 8, 64, True), ([0], 0, 0, False),
        ([0], 0, 6, False), ([0], 8, 36, False), ([0], 7, 56, False), ([0], 1, 8, False), ([0], 8, 0, False),
        ([], 0, 8, False), ([1], 0, 8, False), ([0, 0], 0, 8, False), ([0, 1], 0, 8, False),
    ],
)  # fmt: skip
def test_what_is_pooled_of_a_prompt(slots: list[int], rows: int, size: int, sound: bool) -> None:
    rig = Rig(blocks=[])
    config = rig.core.config
    lease = rig.add(0, 64).lease
    del rig.core.replicas[0]
    rig.core.add_replica(Replica(0, lease, "w0", config.max_num_seqs, 64, 8, 256, VOCAB, pools=True))
    work = Pool(PoolingParams(pooling="ALL"))
    rig.core.submit("detok", Submit(5, 2, i32(range(8)), b"", work, 1.0, root=root_of("")))
    plan, pooled = planned(rig), [SlotPooled(slot, rows, bytes(size)) for slot in slots]
    if not sound:
        with pytest.raises(BadFrame):
            commit(rig, plan, [0], pooled=pooled)
        return
    commit(rig, plan, [0], pooled=pooled)
    assert told(rig, Pooled) == [Pooled(5, 2, rows, bytes(size))]
    assert not rig.core.requests and rig.replica.pool.used == 0 and rig.core.stats().generation_tokens == 0


def test_a_worker_that_generates_pools_nothing() -> None:
    rig = Rig()
    rig.submit(8)
    plan = planned(rig)
    with pytest.raises(BadFrame):
        commit(rig, plan, [1], pooled=[SlotPooled(0, 0, bytes(8))])
    commit(rig, plan, [1])


# ---------------------------------------------------------------- ends


def test_a_stop_id_of_another_ends_nobody_and_ones_own_only_after_min_tokens() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=9, stop_token_ids=[7], min_tokens=2)
    rig.submit(8, max_tokens=9, stop_token_ids=[9])
    rig.submit(8, max_tokens=3, eos=(7,), stop_token_ids=[7])
    commit(rig, planned(rig), [7, 7, 5])
    assert [len(request.live) for request in rig.core.requests.values()] == [1, 1, 1]
    commit(rig, planned(rig), [7, 5, 5])
    rig.receive()
    assert rig.ends == {(1, 0): (Finish.STOP, 7)}
    commit(rig, planned(rig), [9, 7])
    rig.receive()
    assert rig.ends == {(1, 0): (Finish.STOP, 7), (2, 0): (Finish.STOP, 9), (3, 0): (Finish.STOP, -1)}
    assert rig.tokens == {(1, 0): [7, 7], (2, 0): [7, 5, 9], (3, 0): [5, 5, 7]}


@pytest.mark.parametrize(("token", "end"), [(7, (Finish.STOP, 7)), (5, (Finish.LENGTH, -1))])
def test_the_last_token_that_may_come_ends_a_sequence_once(token: int, end: tuple[Finish, int]) -> None:
    rig = Rig()
    uid = rig.submit(8, max_tokens=1, stop_token_ids=[7])
    commit(rig, planned(rig), [token])
    rig.receive()
    assert rig.ends == {(uid, 0): end} and rig.tokens == {(uid, 0): [token]} and not rig.core.requests


def test_tokens_drawn_for_one_who_left_meanwhile_go_to_nobody() -> None:
    rig = Rig()
    first, second = rig.submit(8, max_tokens=9), rig.submit(8, max_tokens=9)
    commit(rig, planned(rig), [1, 2])
    plan, after = planned(rig), planned(rig)
    rig.core.abort(first, 0)
    later = rig.submit(8, max_tokens=9)
    assert rig.core.plan(rig.replica) is None
    commit(rig, plan, [3, 4])
    last = planned(rig)  # the newcomer has the row of the one who left
    assert [admit.row for admit in last.admits] == [0]
    commit(rig, after, [5, 6])
    commit(rig, last, [7, 8])
    rig.receive()
    assert rig.tokens == {(first, 0): [1], (second, 0): [2, 4, 6, 7], (later, 0): [8]}


def test_what_a_step_has_in_flight() -> None:
    rig = Rig()
    first, second = rig.submit(8, max_tokens=9), rig.submit(40, max_tokens=9)
    planned(rig)
    step: Step = rig.replica.in_flight[0]
    assert [seq.uid for seq in step.sequences()] == [first, second]
    assert step.samples() == 1 and [slot.seq.uid for slot in step.slots()] == [first]
    drawn = step.drawn_for(0)
    assert drawn is not None and drawn.uid == first and not step.of_beams()
    rig.core.abort(first, 0)
    assert step.drawn_for(0) is None and [seq.uid for seq in step.sequences()] == [second]
    assert [chunk.end for chunk in step.chunks] == [8, 24]


def test_decodes_of_a_step_that_have_left_are_named_no_more() -> None:
    rig = Rig()
    uids = [rig.submit(8, max_tokens=9) for _ in range(3)]
    commit(rig, planned(rig), [1, 2, 3])
    planned(rig)
    step: Step = rig.replica.in_flight[0]
    rig.core.abort(uids[1], 0)
    assert [seq.uid for seq in step.sequences()] == [uids[0], uids[2]]
    found = [step.drawn_for(number) for number in range(3)]
    assert [seq.uid if seq is not None else None for seq in found] == [uids[0], None, uids[2]]
    assert [slot.generation for slot in step.slots()][1] == -1


def test_who_ran_when_a_worker_was_lost_is_told_once() -> None:
    rig = Rig()
    uid = rig.submit(40, max_tokens=9)
    planned(rig), planned(rig)
    assert [seq.uid for seq in rig.replica.abandon_steps()] == [uid]
    assert not rig.replica.in_flight and rig.replica.waited(99.0) == 0.0
