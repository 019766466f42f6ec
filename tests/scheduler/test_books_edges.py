"""What the books do at the edge of a rule: who is forgotten, what is counted, when time is up."""

from __future__ import annotations

import logging

import pytest
from scheduler_rig import Rig

from quire.proto.codec import i32
from quire.proto.messages import Child, Failed, Finish, Lease, SlotFailed, StepResult, Stopped, TokenBatch
from quire.scheduler.books import UNPLACED_S
from quire.scheduler.fake.fake_model import expected_tokens
from quire.scheduler.replica import Replica


def failures(rig: Rig) -> list[Failed]:
    rig.receive()
    found, rig.other = [m for m in rig.other if isinstance(m, Failed)], []
    return found


def test_bad_messages_are_counted_and_logged_while_they_are_few(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    with caplog.at_level(logging.WARNING):
        for number in range(2001):
            rig.core.bad("w1", f"nonsense {number}")
    assert rig.core.bad_messages == 2001
    logged = [record.args[1] for record in caplog.records if isinstance(record.args, tuple)]
    assert logged == [*range(1, 21), 1000, 2000]


# ---------------------------------------------------------------- owners


def search(rig: Rig, **params: object) -> int:
    return rig.submit(8, n=2, use_beam_search=True, temperature=0.0, **params)


def test_a_search_is_dropped_with_the_connection_only_while_an_answer_is_awaited() -> None:
    rig = Rig()
    quiet, asks, plain = search(rig), search(rig, stop=["x"]), rig.submit(8)
    rig.core.owner_lost("detok")
    assert set(rig.core.requests) == {quiet, asks, plain}
    rig.step()
    rig.core.owner_lost("another")
    assert set(rig.core.requests) == {quiet, asks, plain}
    rig.core.owner_lost("detok")  # with the question of one of them
    assert set(rig.core.requests) == {quiet, plain}
    rig.run()


def test_a_search_is_dropped_too_where_the_detokenizer_is_back_before_its_loss_was_seen() -> None:
    rig = Rig()
    quiet, asks = search(rig), search(rig, stop=["x"])
    rig.step()
    rig.core.owner_returned("detok")
    assert set(rig.core.requests) == {quiet} and asks not in rig.core.requests
    rig.run()


def test_nothing_is_left_of_an_owner_that_did_not_come_back() -> None:
    rig = Rig()
    rig.submit(8)
    rig.step()
    number = rig.core.outbox.number("detok")
    assert rig.core.outbox.number("detok") == number
    rig.core.owner_lost("detok")
    assert rig.core.lost_owners == {"detok"}
    rig.core.forget_owner("detok")
    assert not rig.core.lost_owners and not rig.core.requests and rig.replica.pool.used == 0
    assert not rig.core.outbox._sinks and not rig.core.outbox._numbered
    assert rig.core.outbox.number("detok") > number  # one that comes later is another
    rig.core.forget_owner("nobody")
    rig.core.owner_lost("detok")
    rig.core.owner_returned("detok")
    assert not rig.core.lost_owners


# ---------------------------------------------------------------- counts


def test_what_is_counted_when_a_request_begins() -> None:
    rig = Rig()
    prompt = rig.prompt(20, 1)
    first = rig.submit(prompt, n=2)
    rig.step()
    stats = rig.core.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (20, 0, 20)
    rig.run()
    again = rig.submit(prompt, n=2)
    rig.step()
    stats = rig.core.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (40, 16, 40)
    assert rig.started == {first: 0, again: 16}
    for seq in list(rig.replica.decoding):
        rig.core.preempt(seq)
    rig.step()
    stats = rig.core.stats()  # one that was preempted asked for its prefix before
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens, stats.preemptions) == (40, 16, 40, 2)
    rig.run()
    assert rig.core.stats().generation_tokens == 16


def test_work_that_is_counted() -> None:
    rig = Rig(enable_prefix_caching=False)
    rig.submit(20, max_tokens=3)
    rig.submit(20, n=2, max_tokens=3)
    work = rig.core.stats().work
    assert work is not None and (work.block_size, work.prefix_caching, work.deferred) == (8, False, 1)  # one sibling
    assert not any(work.steps) and not any(work.requests)
    rig.step()  # 32 tokens, the budget
    rig.core.preempt(rig.replica.decoding[0])
    rig.core.pause(True)
    stats = rig.core.stats()
    assert stats.work is not None and stats.work.deferred == stats.waiting > 0
    rig.core.pause(False)
    assert stats.work.step_tokens == 32 and stats.work.steps[3] == 1 == sum(stats.work.steps)
    rig.run()
    work = rig.core.stats().work
    assert work is not None and work.requests[:3] == [1, 1, 0] and sum(work.requests) == 2
    assert work.request_preemptions == 1 and not rig.core.tally._open
    assert sum(work.steps) == rig.core.steps and work.step_tokens > 32


def test_stats_of_several_replicas() -> None:
    rig = Rig(blocks=[10, 20], device="cpu")
    for _ in range(3):
        rig.submit(8, max_tokens=9)
    for number in (0, 1):
        rig.step(number)
        rig.plan(number)
    rig.core.replicas[1].drain()
    stats = rig.core.stats(7, 5, 3)
    assert (stats.token, stats.bad_frames, stats.compilations, stats.blocks) == (7, 5, 3, 30)
    assert (stats.running, stats.waiting, stats.steps, stats.blocks_used) == (2, 1, 2, 4)
    told = [(r.replica, r.state, r.device, r.running, r.blocks, r.blocks_used, r.last_step) for r in stats.replicas]
    counts = [len(rig.core.replicas[number].sequences()) for number in (0, 1)]
    assert told == [
        (0, "ready", "cpu", counts[0], 10, rig.core.replicas[0].pool.used, 2),
        (1, "draining", "cpu", counts[1], 20, rig.core.replicas[1].pool.used, 2),
    ]
    assert rig.core.running_by_account() == {"": 2}
    stats = rig.core.stats()
    assert (stats.token, stats.bad_frames, stats.compilations) == (0, 0, 0)


def test_what_a_preempted_sequence_computes_again_is_counted() -> None:
    rig = Rig(enable_prefix_caching=False)
    uid = rig.submit(20, max_tokens=30)
    for _ in range(6):
        rig.step()
    (seq,) = rig.core.requests[uid].live
    assert seq.total == 26 and rig.core.stats().recomputed_tokens == 0
    rig.core.preempt(seq)
    rig.plan()
    assert rig.core.stats().recomputed_tokens == 25  # the last token was not computed before
    cached = Rig()
    uid = cached.submit(20, max_tokens=30)
    for _ in range(6):
        cached.step()
    cached.core.preempt(*cached.core.requests[uid].live)
    cached.plan()
    assert cached.core.stats().recomputed_tokens == 1  # three blocks are found


# ---------------------------------------------------------------- time


def test_a_deadline_is_for_the_first_step_of_what_was_not_sent_before() -> None:
    rig = Rig(max_num_seqs=1, queue_timeout=10.0)
    runs = rig.submit(8, max_tokens=30)
    rig.step()
    early, again = rig.submit(8), rig.submit(8, attempt=1)
    rig.now = 4.0
    late = rig.submit(8)
    rig.now = 9.99
    rig.core.expire()
    assert failures(rig) == []
    rig.now = 10.0
    rig.core.expire()
    (failed,) = failures(rig)
    assert (failed.uid, failed.status) == (early, 503)
    assert failed.message == ("The request waited for 10 s, the limit, for its first step. Please try again later.")
    rig.now = 14.0
    rig.core.expire()
    assert [failed.uid for failed in failures(rig)] == [late]
    rig.now = 900.0
    rig.core.expire()
    assert set(rig.core.requests) == {runs, again}
    rig.run()


def large(rig: Rig) -> int:
    """Its prompt alone fits the smaller replica, its output does not."""
    return rig.submit(20, max_tokens=60)


def test_who_only_a_larger_worker_could_hold_waits_a_minute_for_one() -> None:
    rig = Rig(blocks=[4, 16, 3])
    uid, small = large(rig), rig.submit(8)
    rig.core.end_lease(rig.core.replicas[1], blame=False)
    rig.now = 100.0
    rig.core.expire()
    rig.now += UNPLACED_S - 0.01
    rig.core.expire()
    assert failures(rig) == []
    rig.now += 0.01
    rig.core.expire()
    (failed,) = failures(rig)
    assert (failed.uid, failed.status, failed.retry_after) == (uid, 503, UNPLACED_S)
    assert "the largest has 4 KV blocks of 8 tokens, and no larger one came within 60 s" in failed.message
    assert set(rig.core.requests) == {small}


@pytest.mark.parametrize("comes", ["loading", "ready"])
def test_the_minute_begins_again_where_somebody_may_hold_it(comes: str) -> None:
    rig = Rig(blocks=[4, 16])
    uid = large(rig)
    rig.core.end_lease(rig.core.replicas[1], blame=False)
    rig.core.expire()
    rig.now = UNPLACED_S - 1
    if comes == "loading":
        rig.core.expect_replica(2)
        rig.core.expire()
        rig.core.give_up_replica(2)
    else:
        rig.add(2, 16)
        rig.core.expire()
        rig.core.end_lease(rig.core.replicas[2], blame=False)
    rig.core.expire()
    rig.now += UNPLACED_S - 1
    rig.core.expire()
    assert failures(rig) == [] and set(rig.core.requests) == {uid}
    rig.now += 1
    rig.core.expire()
    assert [failed.uid for failed in failures(rig)] == [uid]


def test_one_that_waited_for_a_worker_which_never_came_has_a_minute_too() -> None:
    rig = Rig(blocks=[4])
    rig.core.expect_replica(1)
    uid = large(rig)
    rig.core.give_up_replica(1)
    rig.core.expire()
    assert failures(rig) == []
    rig.now += UNPLACED_S
    rig.core.expire()
    assert [failed.uid for failed in failures(rig)] == [uid]


def test_without_any_worker_everybody_waits() -> None:
    rig = Rig(blocks=[])
    uid = rig.submit(8)
    rig.core.give_up_replica(0)
    for _ in range(3):
        rig.core.expire()
        rig.now += UNPLACED_S
    assert failures(rig) == [] and set(rig.core.requests) == {uid}


# ---------------------------------------------------------------- ends and losses


def test_a_failed_request_is_told_all_there_is_to_know() -> None:
    rig = Rig()
    uid = rig.submit(8, attempt=3, max_tokens=9)
    plan = rig.plan()
    assert plan is not None
    failed = [SlotFailed(0, 422, "no such adapter", "model")]
    rig.core.commit(rig.replica, StepResult(plan.lease, plan.step, i32([0]), failed=failed))
    assert failures(rig) == [Failed(uid, 3, 422, "no such adapter", "model")]
    assert rig.replica.pool.used == 0 and not rig.core.queue


def test_a_drained_worker_is_no_loss_and_a_lost_one_is() -> None:
    rig = Rig()
    uid = rig.submit(8, max_tokens=9)
    for blame, count in ((False, 0), (True, 1), (True, 2)):
        rig.plan()
        rig.core.end_lease(rig.replica, blame=blame)
        assert [seq.losses.count for seq in rig.core.queue] == [count]
        assert rig.core.quarantine_waits == (count == 2)
        rig.add(0, 64)
    rig.run()
    rig.core.expire()
    assert not rig.core.quarantine_waits
    assert rig.tokens[uid, 0] == expected_tokens(rig.prompt(8, uid), uid, 9, rig.vocab)


def test_ends_are_told_with_the_last_token_and_once() -> None:
    rig = Rig()
    rig.submit(8, n=2, max_tokens=2)
    batches = []
    while rig.core.requests:
        rig.plan()
        plan = rig.plans[0].popleft()
        rig.core.commit(rig.replica, rig.stores[0].run(plan))
        batches += [m for _, m in rig.core.outbox.take() if isinstance(m, TokenBatch) and m.counts]
    assert [(batch.counts, batch.finishes, batch.stop_ids) for batch in batches] == [
        (i32([1, 1]), bytes(2), i32([-1, -1])),
        (i32([1, 1]), bytes([Finish.LENGTH.value] * 2), i32([-1, -1])),
    ]


def test_one_that_is_stopped_while_it_waits_leaves_the_line() -> None:
    rig = Rig()
    uid = rig.submit(8, max_tokens=9)
    rig.step()
    rig.core.preempt(*rig.core.requests[uid].live)
    assert len(rig.core.queue) == 1
    rig.core.stopped(Stopped(uid, 0, 0, 0))
    assert not rig.core.queue and not rig.core.requests
    rig.core.check_integrity()


def test_what_had_ended_before_the_last_attempt_was_lost_ends_as_it_did() -> None:
    rig = Rig()
    uid = rig.submit(8, attempt=1, n=3, max_tokens=3, eos=(7,), children=[
        Child(0, i32([5, 6, 7])), Child(1, i32([5, 6, 4])), Child(2, i32([7])),
    ])  # fmt: skip
    rig.receive()
    assert rig.ends == {(uid, 0): (Finish.STOP, -1), (uid, 1): (Finish.LENGTH, -1), (uid, 2): (Finish.STOP, -1)}
    assert not rig.core.requests


def test_one_that_had_grown_to_the_models_length_ends_with_no_stop_id() -> None:
    rig = Rig(max_model_len=10)
    uid = rig.submit(8, attempt=1, max_tokens=5, min_tokens=5, children=[Child(0, i32([5, 6]))])
    rig.receive()
    assert rig.ends == {(uid, 0): (Finish.LENGTH, -1)}


# ---------------------------------------------------------------- replicas


def test_of_the_worker_that_drafts_most_each_place_is_counted() -> None:
    rig = Rig()
    for number, drafts in ((1, 3), (2, 2)):
        lease = Lease(1, number, 9)
        rig.core.add_replica(Replica(number, lease, f"w{number}", 8, 64, 8, 256, 1000, drafts=drafts))
    assert rig.core.stats().accepted == [0, 0, 0]


def test_a_prefix_cache_is_forgotten_once_no_block_is_held() -> None:
    rig = Rig()
    prompt = rig.prompt(33, 1)
    rig.submit(prompt, max_tokens=2)
    rig.plan()
    assert "while 5 blocks are in use" in rig.core.reset_prefix_cache()
    rig.run()
    assert rig.core.reset_prefix_cache() == ""
    again = rig.submit(prompt, max_tokens=2)
    rig.run()
    assert rig.started[again] == 0
