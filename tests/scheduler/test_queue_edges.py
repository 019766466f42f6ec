"""The line of those who wait, its bounds and its rate, at the edge of each rule; and the outbox, in bytes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from adapter_rig import AdapterRig, adapter
from scheduler_rig import Rig

from quire.proto.codec import from_i8, from_i32, from_i64, i32, i64
from quire.proto.messages import Child, Finish, Logprobs, StepResult, TokenBatch
from quire.scheduler import queue
from quire.scheduler.accounts import Accounts
from quire.scheduler.queue import MAX_RETRY_S, MIN_RETRY_S, SPANS, DrainRate, WaitingQueue
from quire.scheduler.request import Sequence

# ---------------------------------------------------------------- how long it takes


def test_a_rate_is_of_the_last_places_alone() -> None:
    rate = DrainRate()
    rate.waiting(0.0)
    rate.freed(50.0)
    for number in range(1, SPANS):
        rate.freed(50.0 + 2 * number)
    now = 50.0 + 2 * (SPANS - 1)
    assert rate.seconds(1, now) == round((50 + 2 * (SPANS - 1)) / SPANS, 1)
    rate.freed(now + 2)  # the first is no more among them
    assert rate.seconds(1, now + 2) == 2.0


def test_a_rate_has_bounds_and_one_decimal() -> None:
    rate = DrainRate()
    assert rate.seconds(1, 99.0) == rate.seconds(0, 99.0) == MIN_RETRY_S == 1.0
    rate.waiting(0.0)
    rate.waiting(5.0)  # the wait began before
    assert rate.seconds(1, 7.26) == 7.3
    assert rate.seconds(1, 60.0) == rate.seconds(1, 61.0) == rate.seconds(9, 50.0) == MAX_RETRY_S == 60.0
    rate.idle()
    rate.freed(100.0)
    assert rate.seconds(1, 200.0) == 1.0


# ---------------------------------------------------------------- the line


def line(rig: Rig) -> list[tuple[int, int]]:
    return [(seq.uid, seq.index) for seq in rig.core.queue.in_turn(rig.core.running_by_account)]


def test_the_line_is_as_long_as_there_are_sequences_in_it() -> None:
    rig = Rig()
    assert len(rig.core.queue) == 0 and not rig.core.queue and line(rig) == []
    for key in "aab":
        rig.submit(8, key=key)
    assert len(rig.core.queue) == 3 and rig.core.queue
    (first, *_) = rig.core.queue
    assert rig.core.queue.remove(first) and not rig.core.queue.remove(first)
    assert len(rig.core.queue) == 2
    for seq in list(rig.core.queue):
        assert rig.core.queue.remove(seq)
    assert not rig.core.queue and line(rig) == []


def test_within_a_priority_the_key_that_runs_fewest_rows_is_next() -> None:
    rig = Rig(blocks=200, max_num_seqs=20, scheduling_policy="priority")
    wide = {"use_beam_search": True, "temperature": 0.0, "n": 3}
    for key, params in (("a", {}), ("b", wide), ("a", {}), ("c", {}), ("c", {}), ("b", {})):
        rig.submit(8, key=key, priority=2, **params)
    urgent = rig.submit(8, key="c", priority=1)
    assert [uid for uid, _ in line(rig)] == [urgent, 1, 2, 3, 4, 5, 6]
    rows = Counter(a=2, b=1)
    # With its urgent one, c has as many rows as b, whose search came first and takes it to four.
    assert [seq.uid for seq in rig.core.queue.in_turn(lambda: rows)] == [urgent, 2, 4, 1, 5, 3, 6]


def test_who_does_not_fit_is_passed_over_and_counts_for_nobody() -> None:
    rig = Rig(blocks=200, max_num_seqs=20)
    wide = {"use_beam_search": True, "temperature": 0.0, "n": 3}
    for key, params in (("a", {}), ("b", wide), ("a", {}), ("b", {}), ("c", wide)):
        rig.submit(8, key=key, **params)
    turns = rig.core.queue.in_turn(rig.core.running_by_account, lambda seq: seq.width == 1)
    assert [seq.uid for seq in turns] == [1, 4, 3]


def test_one_key_alone_is_first_come_first_served_and_preempted_ones_come_first() -> None:
    rig = Rig(max_num_seqs=2)
    for _ in range(4):
        rig.submit(8, key="k", max_tokens=9)
    rig.step()
    assert line(rig) == [(3, 0), (4, 0)]
    for seq in list(rig.replica.decoding):
        rig.core.preempt(seq)
    assert line(rig) == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_children_and_prompts_of_one_call_take_turns_with_those_who_wait() -> None:
    rig = Rig(max_num_seqs=1, max_num_batched_tokens=8)
    big = rig.submit(8, n=3, max_tokens=1, attempt=1, children=[Child(index, b"") for index in range(3)])
    first, second = rig.submit(8, max_tokens=1), rig.submit(8, max_tokens=1)
    together = [rig.submit(8, max_tokens=1, arrival=50.0) for _ in range(2)]
    order = []
    while rig.core.requests:
        plan = rig.step()
        assert plan is not None
        order += [(admit.uid, admit.index) for admit in plan.admits]
    assert order == [
        (big, 0), (first, 0), (second, 0), (together[0], 0), (big, 1), (together[1], 0), (big, 2),
    ]  # fmt: skip


def test_who_resumes_has_run_and_waits_for_no_turn() -> None:
    rig = Rig(max_num_seqs=1, max_num_batched_tokens=8)
    children = [Child(0, i32([5])), Child(1, i32([6])), Child(2, i32([7]))]
    big = rig.submit(4, n=3, attempt=1, children=children)
    later = rig.submit(4)
    assert line(rig) == [(big, 0), (big, 1), (big, 2), (later, 0)]
    rig.step()
    assert line(rig) == [(big, 1), (big, 2), (later, 0)]
    rig.run()


def test_of_two_children_the_second_comes_after_all_who_wait() -> None:
    rig = Rig(max_num_seqs=1, max_num_batched_tokens=8)
    big = rig.submit(8, n=2, max_tokens=1)
    first = rig.submit(8, max_tokens=1)
    order = []
    while rig.core.requests:
        plan = rig.step()
        assert plan is not None
        order += [(admit.uid, admit.index) for admit in plan.admits]
    assert order == [(big, 0), (first, 0), (big, 1)]


def test_children_take_turns_with_those_of_their_priority_alone() -> None:
    rig = Rig(max_num_seqs=1, max_num_batched_tokens=8, scheduling_policy="priority")
    big = rig.submit(8, n=3, attempt=1, children=[Child(index, b"") for index in range(3)])
    less = rig.submit(8, priority=1)
    rig.step()
    assert line(rig) == [(big, 1), (big, 2), (less, 0)]


def test_prompts_of_one_call_stand_before_those_who_come_later() -> None:
    rig = Rig()
    together = [(rig.submit(8, arrival=50.0), 0) for _ in range(2)]
    later = (rig.submit(8, arrival=60.0), 0)
    assert line(rig) == [*together, later]


@pytest.mark.parametrize("computed", [8, 16])
def test_who_was_preempted_waits_for_no_turn_though_others_of_its_call_do(computed: int) -> None:
    rig = Rig(max_num_seqs=1, max_num_batched_tokens=8)
    together = [(rig.submit(16, arrival=50.0), 0) for _ in range(2)]
    later = (rig.submit(8, arrival=60.0), 0)
    for _ in range(computed // 8):
        rig.step()
    assert line(rig) == [later, together[1]]
    (runs,) = rig.core.requests[together[0][0]].live
    rig.core.preempt(runs)
    assert line(rig) == [together[0], later, together[1]]


def test_rows_with_an_adapter_count_for_their_key_once_they_run() -> None:
    chosen = adapter("A")
    rig = AdapterRig(max_num_seqs=8)
    rig.ask(chosen, 8, max_tokens=1)
    rig.run()
    for key in "aabb":
        rig.ask(chosen, 8, key=key)
    plan = rig.plan()
    assert plan is not None and [admit.uid for admit in plan.admits] == [2, 4, 3, 5]


def test_lanes_are_merged_in_whatever_order_they_were_begun() -> None:
    rig = AdapterRig(scheduling_policy="priority")
    for name, priority in (("A", 1), ("B", 3), ("C", 2), ("D", 0), ("E", 4)):
        rig.ask(adapter(name), priority=priority)
    assert line(rig) == [(4, 0), (1, 0), (3, 0), (2, 0), (5, 0)]


def test_a_lane_whose_adapter_turns_out_to_be_absent_is_left_at_once() -> None:
    chosen = adapter("A")
    rig = AdapterRig()
    for each in (chosen, None, chosen, None):
        rig.ask(each)
    absent: set[bytes] = set()
    turns = rig.core.queue.in_turn(rig.core.running_by_account, absent=absent)
    assert [next(turns).uid for _ in range(2)] == [1, 2]
    absent.add(chosen.digest)  # its next stands at the head already
    assert [seq.uid for seq in turns] == [4]
    assert [seq.uid for seq in rig.core.queue.in_turn(rig.core.running_by_account, absent=absent)] == [2, 4]


def test_lanes_that_are_absent_change_nothing_in_the_order_of_the_others() -> None:
    for seed in range(20):
        rig, rng = AdapterRig(), random.Random(seed)
        arrivals = {rig.ask(adapter(f"n{number}"), arrival=rng.random()): number for number in range(40)}
        order = [seq.uid for seq in rig.core.queue.in_turn(rig.core.running_by_account)]
        gone = {number for number in range(40) if rng.random() < 0.7}
        absent = {adapter(f"n{number}").digest for number in gone}
        left = [seq.uid for seq in rig.core.queue.in_turn(rig.core.running_by_account, absent=absent)]
        assert left == [uid for uid in order if arrivals[uid] not in gone]


class Asked(set[bytes]):
    """Counts how often it was asked."""

    count = 0

    def __contains__(self, digest: object) -> bool:
        self.count += 1
        return super().__contains__(digest)


def test_many_lanes_that_are_absent_leave_the_line_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, taken, pop = AdapterRig(max_num_queued_reqs=500), [], queue.heappop
    names = [adapter(f"n{number}") for number in range(300)]
    for each in names:
        rig.ask(each)
    monkeypatch.setattr(queue, "heappop", lambda heap: taken.append(1) or pop(heap))
    absent = Asked(each.digest for each in names[:150])
    turns = rig.core.queue.in_turn(rig.core.running_by_account, absent=absent)
    assert next(turns).uid == 151
    absent.update(each.digest for each in names[151:-1])
    assert [seq.uid for seq in turns] == [300]
    assert len(taken) < 40 and absent.count < 900
    absent = Asked()
    turns = rig.core.queue.in_turn(rig.core.running_by_account, absent=absent)
    for at, seq in enumerate(turns):
        assert seq.uid == 2 * at + 1
        absent.add(names[2 * at + 1].digest)
    assert absent.count < 2000  # nor is the line gone through for each of them


# ---------------------------------------------------------------- bounds


def test_the_bounds_count_those_who_have_never_run() -> None:
    rig = Rig(max_num_seqs=2)
    queue = rig.core.queue
    one, two = rig.submit(8, max_tokens=9), rig.submit(12, n=2, max_tokens=9)
    assert (queue.fresh_requests, queue.fresh_tokens) == (2, 20)
    rig.step()
    assert (queue.fresh_requests, queue.fresh_tokens) == (0, 0)
    rig.core.preempt(rig.replica.decoding[0])
    assert (queue.fresh_requests, queue.fresh_tokens) == (0, 0)
    rig.submit(5)
    rig.core.abort(3, 0)
    assert (queue.fresh_requests, queue.fresh_tokens) == (0, 0)
    rig.run()
    assert {one, two} == {uid for uid, _ in rig.ends}


def test_a_queue_measures_only_while_somebody_waits_for_a_row() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit(8, max_tokens=3)
    rig.submit(8, max_tokens=3)
    rig.step()
    rig.step()
    rig.now = 10.0
    assert rig.core.queue.time_to_drain(10.0) == 10.0  # the second waits since 0, and nobody has ended
    rig.step()
    rig.step()
    assert rig.core.queue.time_to_drain(99.0) == 10.0  # one place in 10 s, and nobody waits any more
    rig.run()
    for _ in range(3):
        rig.submit(8)
    assert rig.core.queue.time_to_drain(99.0) == 30.0


@pytest.mark.parametrize(
    ("limit", "waiting", "length", "full"),
    [(10, [], 99, False), (10, [9], 1, False), (10, [9], 2, True), (None, [9], 99, False), (0, [], 1, False)],
)
def test_when_a_line_is_full_of_tokens(limit: int | None, waiting: list[int], length: int, full: bool) -> None:
    rig = Rig()
    queue = WaitingQueue(9, limit)
    for tokens in waiting:
        rig.submit(tokens)
        queue.enter(rig.core.requests[rig.last_uid])
    assert (queue.full(length) is not None) == full


def test_accounts_without_a_limit_count_nothing() -> None:
    rig, accounts = Rig(), Accounts(None)
    rig.submit(8, key="k")
    accounts.enter(rig.core.requests[1], 0.0)
    assert accounts.full("k", 0.0) is None
    accounts.leave(rig.core.requests[1], 0.0)


# ---------------------------------------------------------------- the outbox


def batches(rig: Rig) -> list[tuple[str, TokenBatch]]:
    return [(owner, m) for owner, m in rig.core.outbox.take() if isinstance(m, TokenBatch)]


def commit(rig: Rig, tokens: list[int], **fields: Any) -> None:
    plan = rig.core.plan(rig.replica)
    assert plan is not None
    rig.core.commit(rig.replica, StepResult(plan.lease, plan.step, i32(tokens), **fields))


def test_a_batch_of_prompts_and_decodes_ends_and_logprobs() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=2, logprobs=0)
    rig.submit(8, max_tokens=2, attempt=3)
    record = Logprobs(i32([11]), i32([0]), i32([1]))
    commit(rig, [11, 12], logprob_slots=i32([0]), logprobs=[record])
    rig.core.outbox.take()
    rig.submit(8, n=2, max_tokens=9, stop_token_ids=[34])
    commit(rig, [21, 22, 33, 34], logprob_slots=i32([0]), logprobs=[record])
    told = batches(rig)
    started, batch = told[0][1], told[-1][1]
    assert (from_i64(started.started_uids), from_i32(started.started_cached)) == ([3], [0])
    assert from_i64(batch.uids) == [1, 2, 3, 3] and from_i32(batch.indexes) == [0, 0, 0, 1]
    assert from_i32(batch.attempts) == [0, 3, 0, 0] and from_i32(batch.offsets) == [1, 1, 0, 0]
    assert from_i32(batch.tokens) == [21, 22, 33, 34] and from_i32(batch.counts) == [1, 1, 1, 1]
    assert from_i8(batch.finishes) == [Finish.LENGTH, Finish.LENGTH, Finish.NONE, Finish.STOP]
    assert from_i32(batch.stop_ids) == [-1, -1, -1, 34]
    assert from_i32(batch.logprob_rows) == [0] and batch.logprobs == [record]


def test_an_end_without_a_token_is_a_line_of_its_own() -> None:
    rig = Rig()
    uid = rig.submit(8, n=2, max_tokens=2, attempt=1, children=[Child(0, i32([1, 2])), Child(1, i32([1]))])
    ((owner, batch),) = batches(rig)
    assert (owner, batch.uids, from_i32(batch.indexes)) == ("detok", i64([uid]), [0])
    assert (from_i32(batch.offsets), batch.tokens, from_i32(batch.counts)) == ([2], b"", [0])
    assert from_i8(batch.finishes) == [Finish.LENGTH] and from_i32(batch.stop_ids) == [-1]
    assert batch.started_uids == batch.started_cached == batch.logprob_rows == b"" and batch.logprobs == []


def test_who_was_ended_by_its_last_token_is_known_until_the_batch_goes_out() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=9, stop_token_ids=[12])
    rig.submit(8, max_tokens=1)
    commit(rig, [12, 5])
    assert rig.core.outbox.stopped() == [(1, 0)]
    rig.core.outbox.take()
    assert rig.core.outbox.stopped() == []


def test_token_0_may_end_somebody_as_any_other() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=9, stop_token_ids=[0])
    commit(rig, [0])
    batch = batches(rig)[-1][1]
    assert (from_i8(batch.finishes), from_i32(batch.stop_ids)) == ([Finish.STOP], [0])
    rig.submit(8, max_tokens=9, attempt=1, stop_token_ids=[0], children=[Child(0, i32([0]))])
    assert rig.core.outbox.stopped() == []  # it had ended before: no token of this batch did that
    batch = batches(rig)[-1][1]
    assert (from_i8(batch.finishes), from_i32(batch.stop_ids), batch.tokens) == ([Finish.STOP], [0], b"")


def test_a_message_of_its_own_closes_the_batch_before_it() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=9)
    commit(rig, [12])
    rig.core.outbox.put("detok", "a message")
    rig.core.outbox.put("other", "another")
    kinds = [(owner, m if isinstance(m, str) else from_i32(m.tokens)) for owner, m in rig.core.outbox.take()]
    assert kinds == [("detok", []), ("detok", [12]), ("detok", "a message"), ("other", "another")]
    assert rig.core.outbox.take() == []


def test_a_sequence_is_where_its_state_says() -> None:
    rig = Rig()
    rig.submit(8, n=2, max_tokens=9)
    (parent,) = rig.core.queue
    assert isinstance(parent, Sequence) and (parent.computed, parent.scheduled, parent.blocks) == (0, 0, [])
    commit(rig, [5, 6])
    first, second = rig.replica.decoding
    assert (first.computed, first.total, first.output_len, first.outputs.tolist()) == (8, 9, 1, [5])
    assert (second.row, second.blocks) == (1, first.blocks)
    assert first.seed() != second.seed()
