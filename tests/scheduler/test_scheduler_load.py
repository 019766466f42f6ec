"""Overload: who is refused, who is next, and how long those refused are told to wait. All by a fake clock."""

from __future__ import annotations

import random
import statistics

import pytest
from scheduler_rig import Rig

from quire.proto.messages import Child, Failed, Finish
from quire.scheduler.books import UNPLACED_S
from quire.scheduler.fake.fake_model import expected_tokens
from quire.scheduler.queue import DrainRate


def failures(rig: Rig) -> list[Failed]:
    rig.receive()
    found, rig.other = [m for m in rig.other if isinstance(m, Failed)], []
    return found


def running(rig: Rig) -> list[int]:
    return sorted(seq.uid for replica in rig.core.replicas.values() for seq in replica.sequences())


# ---------------------------------------------------------------- keys


def test_a_key_may_have_so_many_requests_open_and_no_more() -> None:
    rig = Rig(max_requests_per_key=2)
    secret = "sk-very-secret"
    for _ in range(3):
        rig.submit(5, key=secret)
    rig.submit(5, key="another")
    rig.submit(5)
    rig.submit(5)
    rig.submit(5)  # nobody's requests are not counted
    (failed,) = failures(rig)
    assert (failed.uid, failed.status) == (3, 429)
    assert "limit is 2 for each key" in failed.message and secret not in failed.message
    assert failed.retry_after is not None and failed.retry_after >= 1.0
    rig.submit(5, uid=3, attempt=1, key=secret)  # a resubmission is never refused for load
    assert failures(rig) == []
    rig.run()
    rig.submit(5, key=secret)
    assert failures(rig) == []
    rig.run()


def test_a_keys_retry_is_the_time_its_requests_take() -> None:
    rig = Rig(max_requests_per_key=1)
    for _ in range(3):
        rig.submit(5, key="k", max_tokens=2)
        rig.now += 8.0
        rig.run()
    rig.submit(5, key="k")
    rig.submit(5, key="k")
    assert failures(rig)[0].retry_after == 1.0  # it had none open in between: nothing is remembered
    rig.now += 7.0
    rig.submit(5, key="k")
    assert failures(rig)[0].retry_after == 7.0


def test_a_keys_rate_is_measured_only_while_it_has_as_many_open_as_it_may() -> None:
    rig = Rig(max_requests_per_key=2)
    first, second = rig.submit(5, key="k"), rig.submit(5, key="k")
    rig.now = 10.0
    rig.core.abort(first, 0)  # one place became free in 10 s, and there is one
    rig.now = 20.0
    rig.submit(5, key="k")
    rig.now = 24.0
    rig.submit(5, key="k")
    assert failures(rig)[0].retry_after == 14.0  # another is overdue by 4 s
    rig.submit(5, key="k", attempt=1)  # never refused for load: now there are three
    rig.core.abort(second, 0)  # and still as many as it may have
    rig.now = 26.0
    rig.submit(5, key="k")
    assert failures(rig)[0].retry_after == 8.0  # two in 14 s, and 2 s since


def test_a_key_that_has_nothing_open_is_forgotten() -> None:
    rig = Rig(max_requests_per_key=2)
    for key in ("a", "b", "b"):
        rig.submit(5, key=key)
    rig.core.abort(2, 0)
    assert sorted(rig.core.accounts._accounts) == ["a", "b"]
    rig.run()
    assert not rig.core.accounts._accounts


def test_keys_that_wait_share_what_runs() -> None:
    rig = Rig(max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(8):
        rig.submit(4, key="greedy", max_tokens=3 + number)
    rig.step()
    assert running(rig) == [1, 2, 3, 4]
    late = [rig.submit(4, key="modest", max_tokens=6), rig.submit(4, max_tokens=6)]
    started: list[int] = []
    while rig.core.requests:
        before = set(running(rig))
        rig.step()
        started += [uid for uid in running(rig) if uid not in before]
    assert started[:2] == late  # before those that came earlier, whose key runs more
    rig.run()


def test_shares_are_taken_in_turn_within_a_priority() -> None:
    rig = Rig(max_num_seqs=6, max_num_batched_tokens=64, scheduling_policy="priority")
    for key in "aaaabbc":
        rig.submit(4, key=key, max_tokens=3, priority=1)
    urgent = [rig.submit(4, key="a", max_tokens=3, priority=0) for _ in range(2)]
    assert [seq.uid for seq in rig.core.queue.in_turn(rig.core.running_by_account)] == [*urgent, 5, 7, 6, 1, 2, 3, 4]
    rig.run()


def test_children_that_begin_together_count_for_their_key_at_once() -> None:
    rig = Rig(max_num_seqs=6, max_num_batched_tokens=64)
    rig.submit(4, key="many", max_tokens=3, n=4)
    rig.submit(4, key="many", max_tokens=3)
    few = [rig.submit(4, key="few", max_tokens=3) for _ in range(2)]
    rig.step()
    assert sorted(running(rig)) == [1, 1, 1, 1, *few]
    rig.run()


@pytest.mark.parametrize("keys", ["", "aab"])
def test_who_leaves_the_line_while_it_is_looked_through_confuses_nobody(keys: str) -> None:
    rig = Rig(max_num_queued_reqs=500)
    rng = random.Random(1)
    uids = [rig.submit(4, key=rng.choice(keys or [""])) for _ in range(200)]
    seen = []
    for seq in rig.core.queue.in_turn(rig.core.running_by_account):
        seen.append(seq.uid)
        if rng.random() < 0.5:
            rig.core.drop(seq.request)
    assert sorted(seen) == uids
    assert keys or seen == uids
    rig.core.check_integrity()


def test_without_keys_it_is_first_come_first_served() -> None:
    rig = Rig(max_num_seqs=2)
    uids = [rig.submit(4) for _ in range(5)]
    assert [seq.uid for seq in rig.core.queue.in_turn(lambda: pytest.fail("asked for"))] == uids
    rig.run()


# ---------------------------------------------------------------- one request of many children


@pytest.mark.parametrize("key", ["", "sk-1"])
@pytest.mark.parametrize("how", ["children", "prompts"])
def test_a_request_does_not_wait_for_all_children_of_another(how: str, key: str) -> None:
    rig = Rig(max_num_seqs=8, max_num_batched_tokens=64, max_num_queued_reqs=500)
    if how == "prompts":  # of one call, whose client gives them one arrival
        big = [rig.submit(4, arrival=1.0, max_tokens=4, key=key) for _ in range(300)]
    else:
        big = [rig.submit(4, max_tokens=4, key=key, n=300)]
    for _ in range(3):
        rig.step()
    assert len(running(rig)) == 8
    for _ in range(3):
        late = [rig.submit(4, max_tokens=4, key=key, arrival=1000.0) for _ in range(5)]
        for _ in range(8):  # two rounds of four tokens each
            rig.step()
        assert [uid for uid in rig.started if uid in late] == late
    rig.run(2000)
    children = [(uid, 0) for uid in big] if how == "prompts" else [(big[0], i) for i in range(300)]
    assert all(rig.ends[child][0] is Finish.LENGTH for child in children)


def test_a_request_of_many_children_goes_on_however_many_come_after_it() -> None:
    rig = Rig(max_num_seqs=4, max_num_batched_tokens=64, max_num_queued_reqs=500)
    big = rig.submit(4, n=20, max_tokens=3)
    rig.step()
    began = {seq.index for seq in rig.replica.sequences()}
    for _ in range(300):  # there are always others in line
        while len(rig.core.queue) < 10:
            rig.submit(4, max_tokens=3)
        rig.step()
        began |= {seq.index for seq in rig.replica.sequences() if seq.uid == big}
        if len(began) == 20:
            break
    assert len(began) == 20 and rig.core.queue
    rig.run(2000)


def test_two_requests_of_many_children_share_what_runs() -> None:
    rig = Rig(max_num_seqs=8, max_num_batched_tokens=64)
    first, second = (rig.submit(4, n=40, max_tokens=6 + number) for number in range(2))
    shares = []
    for _ in range(52):
        rig.plan()
        rows = running(rig)
        shares.append((rows.count(first), rows.count(second)))
        rig.work()
    assert rig.core.queue
    assert shares[0] == (8, 0) and all(abs(a - b) <= 2 for a, b in shares[20:])
    rig.run(500)


@pytest.mark.parametrize("seed", range(6))
def test_everybody_in_line_has_one_turn_whoever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(blocks=40, max_num_seqs=6, max_num_queued_reqs=500, scheduling_policy="priority")
    keys, priorities = rng.choice([[""], ["a", "b", ""]]), rng.choice([[0], [0, 1]])
    arrivals = [float(rng.randint(1, 60)) for _ in range(60)]
    for arrival in arrivals:
        rig.submit(
            rng.randint(1, 20), arrival=arrival, key=rng.choice(keys), priority=rng.choice(priorities),
            n=rng.choice([1, 1, 1, 3, 12]), max_tokens=rng.randint(1, 12),
        )  # fmt: skip
        if rng.random() < 0.7:
            rig.step()
        if rng.random() < 0.1 and rig.core.requests:
            rig.core.drop(rng.choice(list(rig.core.requests.values())))
        turns = list(rig.core.queue.in_turn(rig.core.running_by_account))
        assert sorted(seq.key for seq in turns) == sorted(seq.key for seq in rig.core.queue)
        assert [seq.key[0] for seq in turns] == sorted(seq.key[0] for seq in turns)
    rig.run(3000)


def test_children_that_begin_together_are_few_where_others_wait() -> None:
    rig = Rig(blocks=256, max_num_seqs=16, max_num_batched_tokens=64)
    alone = rig.submit(30, n=12, max_tokens=3)
    rig.step()
    assert running(rig) == [alone] * 12
    rig.run()
    big = rig.submit(60, n=12, max_tokens=3)  # its prompt is most of a step, so that the next one waits a step
    other = rig.submit(30, n=12, max_tokens=3)
    rig.step()
    assert running(rig) == [big] * 8 + [other]
    rig.step()
    assert sorted(running(rig)) == [big] * 8 + [other] * 8
    rig.run()
    assert all((uid, index) in rig.ends for uid in (big, other) for index in range(12))


def test_a_preempted_child_comes_back_before_those_who_came_after_it() -> None:
    rig = Rig(blocks=10, max_num_seqs=4)
    big = rig.submit(12, n=3, max_tokens=40)
    rig.step()
    assert running(rig) == [big] * 3
    later = [rig.submit(12, max_tokens=4) for _ in range(3)]
    rig.step_until_preempted()
    line = [seq.uid for seq in rig.core.queue.in_turn(rig.core.running_by_account)]
    assert line in ([big, *later], [big, *later[1:]])  # the first of them may have had the fourth row
    rig.run()


def test_priorities_keep_their_order_through_preemption() -> None:
    rig = Rig(blocks=8, max_num_seqs=4, scheduling_policy="priority")
    low = [rig.submit(12, max_tokens=20, priority=5) for _ in range(2)]
    high = [rig.submit(12, max_tokens=20, priority=1) for _ in range(2)]
    order: list[int] = []
    while rig.core.requests:
        rig.step()
        for seq in rig.core.queue.in_turn(rig.core.running_by_account):
            assert all(seq.key >= other.key for other in rig.replica.sequences() if other.request.priority == 1)
        order += [uid for uid in (*low, *high) if (uid, 0) in rig.ends and uid not in order]
    assert rig.core.preemptions
    assert set(order[:2]) == set(high)
    for uid in (*low, *high):
        assert rig.tokens[uid, 0] == expected_tokens(rig.prompt(12, uid), uid, 20, rig.vocab)


# ---------------------------------------------------------------- time


def test_a_request_waits_so_long_for_its_first_step_and_no_longer() -> None:
    rig = Rig(max_num_seqs=1, queue_timeout=10.0)
    first = rig.submit(5, max_tokens=20)
    rig.step()
    waiting = rig.submit(5)
    again = rig.submit(5, attempt=1, children=[Child(0, b"")])
    rig.now = 9.9
    rig.core.expire()
    assert failures(rig) == []
    rig.now = 10.1
    rig.core.expire()
    (failed,) = failures(rig)
    assert (failed.uid, failed.status) == (waiting, 503)
    assert "10 s" in failed.message and failed.retry_after is not None and failed.retry_after >= 1.0
    rig.now = 100.0
    rig.core.expire()  # one that has begun, or was sent again, is never refused for load
    rig.run()
    assert (first, 0) in rig.ends and (again, 0) in rig.ends
    assert failures(rig) == []


def test_nothing_measured_is_as_long_again() -> None:
    rate = DrainRate()
    assert rate.seconds(1, 5.0) == 1.0
    rate.waiting(10.0)
    assert rate.seconds(1, 18.0) == 8.0
    rate.freed(20.0)
    assert rate.seconds(1, 20.0) == 10.0
    rate.freed(22.0)
    assert rate.seconds(1, 22.0) == 6.0
    assert rate.seconds(3, 22.0) == 18.0
    assert rate.seconds(1, 34.0) == 12.0  # a place is overdue
    rate.idle()
    rate.freed(500.0)  # while nobody waits it says nothing of the rate
    assert rate.seconds(1, 999.0) == 6.0
    assert rate.seconds(100, 999.0) == 60.0


def test_who_needs_the_places_of_several_is_told_to_wait_for_several() -> None:
    """Where tokens are bounded, a long prompt must wait until as many have gone as its tokens take."""
    rig = Rig(max_num_seqs=1, max_num_queued_tokens=100)
    rig.submit(5, max_tokens=50)
    rig.step()
    for _ in range(3):
        rig.submit(30)
    rig.step()  # from now on somebody waits for a row
    told = []
    rig.now = 6.0
    for length in (11, 40, 41, 70, 71, 100, 240):
        rig.submit(length)
        (failed,) = failures(rig)
        told.append(failed.retry_after)
    assert told == [6.0, 6.0, 12.0, 12.0, 18.0, 18.0, 18.0]
    rig.submit(10)
    assert failures(rig) == []  # just as many as there may be
    rig.run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("bound", ["requests", "tokens"])
def test_retry_after_is_right_at_twice_the_load(seed: int, bound: str) -> None:
    """Requests of random lengths at twice what four rows can do: what those refused are told, against the time until
    one like them would have found a place."""
    rng = random.Random(seed)
    flags = {"max_num_queued_reqs": 6} if bound == "requests" else {"max_num_queued_tokens": 300}
    rig = Rig(blocks=256, max_num_seqs=4, max_num_batched_tokens=256, **flags)
    step_s, mean_tokens = 0.4, 40
    arrivals_s = mean_tokens * step_s / 4 / 2
    due, told, pending = 0.0, [], []
    while rig.now < 1200:
        rig.step()
        rig.now += step_s
        while due < rig.now:
            due += rng.expovariate(1 / arrivals_s)
            length = rng.randint(20, 60)
            rig.submit(length, max_tokens=rng.randint(1, 2 * mean_tokens))
            for failed in failures(rig):
                assert failed.retry_after is not None
                pending.append((failed.retry_after, rig.now, length))
        free = [p for p in pending if not rig.core.queue.full(p[2])]
        told += [(retry, max(1.0, rig.now - at)) for retry, at, _ in free]
        pending = [p for p in pending if p not in free]
    told = told[10:]
    assert len(told) > 40
    given, real = statistics.fmean(t for t, _ in told), statistics.fmean(r for _, r in told)
    assert 0.5 <= given / real <= 2.0, (given, real)
    assert all(1.0 <= retry <= 60.0 for retry, _ in told)


# ---------------------------------------------------------------- workers of different sizes


def beams(rig: Rig) -> int:
    """A search that needs 10 blocks."""
    return rig.submit(8, max_tokens=18, use_beam_search=True, temperature=0.0, n=2, best_of=3)


@pytest.mark.slow
def test_what_a_small_replica_cannot_hold_goes_to_a_large_one_past_everyone() -> None:
    rig = Rig(blocks=[6, 64])
    large = [beams(rig) for _ in range(34)]  # more than one plan looks at
    small = [rig.submit(5) for _ in range(3)]
    rig.step(0)
    assert running(rig) == small[:1]  # the others have more room in the large one, when it is their turn
    rig.run(3000)
    assert all((uid, 0) in rig.ends for uid in (*large, *small))


def test_when_the_large_one_leaves_they_wait_for_another_and_then_are_told() -> None:
    rig = Rig(blocks=[6, 64])
    uid = beams(rig)
    rig.step(1)
    rig.core.end_lease(rig.core.replicas[1], blame=False)
    rig.plans[1].clear()
    rig.core.expire()
    rig.now += UNPLACED_S - 1
    rig.core.expire()
    assert failures(rig) == []
    rig.core.expect_replica(1)  # one that is on its way may hold it: the wait begins again
    rig.core.expire()
    rig.now += UNPLACED_S
    rig.core.give_up_replica(1)
    rig.core.expire()
    assert failures(rig) == []
    rig.now += UNPLACED_S
    rig.core.expire()
    (failed,) = failures(rig)
    assert (failed.uid, failed.status) == (uid, 503)
    assert "the largest has 6 KV blocks" in failed.message
    rig.core.check_integrity()
    beams(rig)
    assert failures(rig)[0].status == 400  # new ones at once


def test_a_worker_that_joins_takes_from_the_line_at_once() -> None:
    rig = Rig(max_num_seqs=2)
    uids = [rig.submit(5, max_tokens=12) for _ in range(6)]
    rig.step()
    assert running(rig) == uids[:2]
    rig.add(1, 64)
    rig.step(1)
    assert running(rig) == uids[:4]
    rig.core.replicas[1].drain()
    for seq in rig.core.replicas[1].sequences():
        rig.core.requeue(seq)
    rig.add(2, 64)
    rig.step(2)
    assert running(rig) == uids[:4]  # those that had to leave go before those that came later
    rig.run()
    for uid in uids:
        assert rig.ends[uid, 0][0] is Finish.LENGTH
        assert rig.tokens[uid, 0] == expected_tokens(rig.prompt(5, uid), uid, 12, rig.vocab)


# ---------------------------------------------------------------- poison


@pytest.mark.parametrize("seed", range(12))
def test_a_request_that_kills_workers_ends_at_its_third_and_harms_nobody(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(blocks=[64] * rng.choice([1, 2, 3]), max_num_seqs=8)
    good = [rig.submit(rng.randint(1, 40), n=rng.choice([1, 1, 2]), max_tokens=20) for _ in range(7)]
    at = rng.choice([-1, 0, 1, 5])  # it kills when it is admitted, with its prompt, or with a later token
    poison = rig.submit(rng.randint(1, 40), max_tokens=20)
    good += [rig.submit(5, max_tokens=20) for _ in range(3)]
    kills = 0
    for _ in range(3000):
        if not rig.core.requests:
            break
        number = rng.choice(list(rig.core.replicas))
        while rig.plan(number) is not None:
            pass
        if not rig.plans[number]:
            continue
        victims = [seq for seq in rig.core.replicas[number].in_flight[0].sequences() if seq.uid == poison]
        admitted = [admit for admit in rig.plans[number][0].admits if admit.uid == poison]
        if any(len(seq.outputs) >= at for seq in victims) or (at < 0 and admitted):
            kills += 1
            rig.core.end_lease(rig.core.replicas[number])
            rig.core.check_integrity()
            rig.add(number, 64)
        else:
            rig.work(number)
    assert not rig.core.requests
    assert kills == 3
    (failed,) = failures(rig)
    assert (failed.uid, failed.status) == (poison, 500)
    assert f"request {poison}" in failed.message and "3 times" in failed.message
    assert (poison, 0) not in rig.ends
    assert all((uid, 0) in rig.ends for uid in good)


def test_what_others_have_computed_is_no_progress_of_a_request_that_kills_workers() -> None:
    rig = Rig(max_num_seqs=1, block_size=8, max_num_batched_tokens=64)
    prompt = rig.prompt(40, 1)
    poison = rig.submit(prompt)
    for cached in (0, 16, 32):
        if cached:  # another of the same beginning comes first
            rig.submit(prompt[: cached + 1], arrival=0.0, max_tokens=1)
            rig.step()
        rig.plan()
        (seq,) = rig.replica.sequences()
        assert (seq.uid, seq.computed, seq.quarantined) == (poison, cached, cached == 32)
        rig.core.end_lease(rig.replica)
        rig.add(0, 64)
    failed = rig.failed()
    assert (failed.uid, failed.status) == (poison, 500)


def test_one_that_got_past_its_losses_and_is_preempted_begins_with_none() -> None:
    rig = Rig(max_num_seqs=1, block_size=8, max_num_batched_tokens=64)
    rig.submit(20, max_tokens=20)
    for _ in range(2):
        rig.plan()
        rig.core.end_lease(rig.replica)
        rig.add(0, 64)
    for _ in range(4):
        rig.step()
    (seq,) = rig.replica.sequences()
    rig.core.preempt(seq)
    rig.plan()
    assert seq.computed > 0
    assert not seq.quarantined
    rig.core.end_lease(rig.replica)
    rig.add(0, 64)
    rig.run()
