"""Hello to Bye, leases and timers, on a clock that the test moves."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from scheduler_house import House

from quire.proto.codec import BadFrame, Decoder, encode, f32, from_i32, i32, i64
from quire.proto.messages import (
    PROTOCOL,
    Abort,
    Assign,
    BeamStopped,
    BeamTokens,
    Bye,
    Child,
    Compiled,
    Configure,
    Drain,
    Failed,
    GetStats,
    GetView,
    Heartbeat,
    Hello,
    Lease,
    Loaded,
    Logprobs,
    Manage,
    Managed,
    Moved,
    Peer,
    Peers,
    PromptLogprobs,
    Ready,
    Reconcile,
    Rest,
    Rested,
    Stats,
    StepFailed,
    StepResult,
    Stopped,
    Submit,
    Tiers,
    TokenBatch,
    ToSchedulerFront,
    ToSchedulerWorkers,
    Unknown,
)
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler.awaited import FOLLOWS_S, GAP_S
from quire.scheduler.blame import Blame
from quire.scheduler.fake.fake_worker import FakeWorker
from quire.scheduler.membership import LOST_FRONT_S
from quire.scheduler.worker_phase import STARTING, TRANSITIONS, Event, Phase
from quire.scheduler.worker_registry import LOADING_LIMIT_S, MAX_LOST


@pytest.fixture
def house() -> House:
    return House()


def test_peers_are_told_on_every_change(house: House) -> None:
    house.hello("d1")
    (peers,) = house.told("d1", Peers)
    assert (peers.epoch, peers.block_size, peers.ready, peers.max_model_len) == (42, 8, False, 0)
    house.hello("f1", "frontend")
    assert [p.kind for p in house.told("d1", Peers)[-1].peers] == ["detokenizer", "frontend", "gpu_worker"]
    house.worker("w1")
    peers = house.told("f1", Peers)[-1]
    assert (peers.ready, peers.max_model_len, len(peers.peers)) == (True, 128, 3)
    house.registry.gone("w1", "died")
    peers = house.told("d1", Peers)[-1]
    assert (peers.ready, peers.max_model_len, len(peers.peers)) == (False, 128, 3)
    assert peers.peers[-1] == Peer("gpu_worker", "", "")  # another is on its way
    house.members.front_gone("f1")
    assert len(house.told("d1", Peers)[-1].peers) == 2


def test_another_protocol_gets_bye(house: House) -> None:
    house.hello("d1", protocol=PROTOCOL + 1)
    house.hello("w1", "gpu_worker", protocol=0)
    assert "protocol" in house.told("d1", Bye)[0].reason
    assert "protocol 0" in house.sent("w1", Bye)[0].reason
    assert not house.members.front
    assert not house.registry.workers


@pytest.mark.parametrize("hello", [Hello("nobody", "x", PROTOCOL, 1), Hello("detokenizer", "other", PROTOCOL, 1)])
def test_a_hello_that_lies_is_counted(house: House, hello: Hello) -> None:
    house.members.on_front("x", hello)
    house.registry.on_worker("x", hello)
    assert house.core.bad_messages == 2
    assert not house.members.front


def test_results_of_another_lease_are_dropped(house: House) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    first, second = house.plans("w1")
    stale = Lease(41, lease.replica, lease.counter)
    house.registry.on_worker("w1", StepResult(stale, 1, i32([5])))
    house.registry.on_worker("w9", StepResult(lease, 1, i32([5])))
    assert house.core.steps == 0
    house.registry.on_worker("w1", StepResult(lease, first.step, i32([5])))
    house.registry.on_worker("w1", StepResult(lease, second.step, i32([5])))
    assert house.core.steps == 2
    assert house.core.bad_messages == 0


@pytest.mark.parametrize("tokens", [b"", b"123", i32([-5]), i32([1, 2])])
def test_a_malformed_result_ends_the_lease(house: House, tokens: bytes) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    house.registry.on_worker("w1", StepResult(lease, 1, tokens))
    assert house.sent("w1", Bye)
    assert not house.core.replicas
    assert house.core.bad_messages == 1
    assert len(house.core.queue) == 1
    house.core.check_integrity()
    house.worker("w2")
    assert house.plans("w2")


def test_a_failed_step_ends_the_lease_and_the_worker_comes_back(house: House) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    house.registry.on_worker("w1", StepFailed(lease, 1, "boom"))
    assert not house.core.replicas
    again = house.worker("w1b")
    assert again.counter > lease.counter
    (plan, _) = house.plans("w1b")
    assert (plan.lease, plan.step) == (again, 1)


@pytest.mark.parametrize("bad", [Ready, StepResult, lambda lease: Loaded(lease, 0, 128, 1000)])
def test_a_worker_out_of_turn_is_expelled(house: House, bad: Any) -> None:
    house.hello("w1", "gpu_worker")
    (assign,) = house.sent("w1", Assign)
    house.registry.on_worker("w1", bad(assign.lease, 1, b"") if bad is StepResult else bad(assign.lease))
    assert house.sent("w1", Bye)
    assert not house.registry.workers
    assert not house.core.loading


def test_workers_take_the_lowest_free_number(house: House) -> None:
    assert [house.worker(f"w{i}").replica for i in range(3)] == [0, 1, 2]
    house.registry.on_worker("w1", Bye())
    assert house.worker("w7").replica == 1


def test_a_lost_detokenizers_requests_wait_five_seconds(house: House) -> None:
    house.hello("d1")
    house.hello("d2")
    house.worker("w1")
    for uid in (1, 2):
        house.submit("d1", uid)
    house.members.front_gone("d1")
    house.later(LOST_FRONT_S - 0.5)
    assert set(house.core.requests) == {1, 2}
    house.submit("d2", 2, attempt=2)
    house.later(1.5)
    assert set(house.core.requests) == {2}
    assert house.core.requests[2].owner == "d2"
    assert "d1" not in house.members.front


def test_a_detokenizer_that_comes_back_in_time_keeps_its_requests(house: House) -> None:
    house.hello("d1")
    house.submit("d1", 1)
    house.members.front_gone("d1")
    house.later(2.0)
    house.hello("d1")
    house.later(60.0)
    assert set(house.core.requests) == {1}


def test_requests_whose_tokens_were_lost_end_at_once(house: House) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    plan = house.plans("w1")[0]
    house.submit("d1", 2)
    house.core.outbox.take()
    house.registry.on_worker("w1", StepResult(lease, plan.step, i32([5])))
    (batch,) = house.told("d1", TokenBatch)
    house.members.undelivered("d1", batch)
    assert set(house.core.requests) == {2}


def test_strangers_are_told_that_nothing_is_here(house: House) -> None:
    house.submit("old", 7, attempt=3)
    house.members.on_front("old", Abort(7, 3))
    house.members.on_front("old", Heartbeat())
    house.members.on_front("old", Stopped(7, 3, 0, 1))
    (gone,) = house.told("old", Unknown)
    assert (gone.uids, gone.attempts) == (i64([7]), i32([3]))
    assert house.core.bad_messages == 0
    house.members.on_front("old", Manage(1, "list"))
    assert house.told("old", Managed) == [Managed(1, [], "The scheduler was started meanwhile; ask again.")]
    assert house.core.bad_messages == 0
    house.members.on_front("old", Ready(Lease(1, 0, 1)))  # nobody of the front socket says this
    assert house.core.bad_messages == 1


def test_everyone_is_beaten_to_every_second(house: House) -> None:
    house.hello("d1")
    house.hello("w1", "gpu_worker")
    house.later(0.0)
    house.later(0.4)
    house.later(0.4)
    assert (len(house.told("d1", Heartbeat)), len(house.sent("w1", Heartbeat))) == (1, 1)
    assert 0 < house.members.timeout() <= 0.3
    house.later(0.3)
    assert (len(house.told("d1", Heartbeat)), len(house.sent("w1", Heartbeat))) == (1, 1)


def test_a_silent_worker_and_a_hung_step_are_found() -> None:
    house = House(worker_timeout=20.0, step_timeout=60.0)
    house.hello("d1")
    house.worker("silent")
    house.later(19.9)
    assert "silent" in house.registry.workers
    house.later(1.0)
    assert not house.registry.workers
    (bye,) = house.sent("silent", Bye)
    assert bye.again and "20 s" in bye.reason
    assert house.core.bad_messages == 0
    lease = house.worker("hung")
    house.submit("d1", 1)
    first, _ = house.plans("hung")
    for turn in range(11):
        if turn == 5:  # the second step's time begins when the first has ended
            house.registry.on_worker("hung", StepResult(lease, first.step, i32([5])))
        assert "hung" in house.registry.workers
        house.registry.on_worker("hung", Heartbeat(0))
        house.later(10.0)
    house.registry.on_worker("hung", Heartbeat(0))
    house.later(1.0)
    (bye,) = house.sent("hung", Bye)
    assert not bye.again and "step 2 did not end in 60 s" in bye.reason
    assert len(house.core.queue) == 1


def test_a_worker_that_loads_for_long_is_not_silent(house: House) -> None:
    house.hello("w1", "gpu_worker")
    house.later(LOADING_LIMIT_S - 1)
    assert "w1" in house.registry.workers
    house.later(2.0)
    assert "w1" not in house.registry.workers
    assert not house.core.loading


def test_an_expelled_worker_that_wakes_is_told_to_come_again(house: House) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    first, _ = house.plans("w1")
    house.later(60.0)
    house.sent("w1", Bye)
    house.registry.on_worker("w1", StepResult(lease, first.step, i32([5])))
    house.registry.on_worker("w1", Heartbeat(1))
    assert house.core.steps == 0
    assert [bye.again for bye in house.sent("w1", Bye)] == [True]
    assert house.worker("w1again").counter > lease.counter
    assert house.plans("w1again")


def test_when_the_scheduler_itself_stood_still_nobody_is_held_to_that(house: House) -> None:
    house.hello("d1")
    house.hello("d2")
    house.worker("w1")
    house.worker("leaver")
    house.submit("d1", 1)
    house.submit("d1", 2)
    house.plans("w1")
    house.members.front_gone("d2")
    house.registry.drain("leaver", "test", 10.0)
    house.members.notice()
    house.later(1.0)
    house.members.notice()
    house.now += 400.0
    house.members.notice()
    house.later(0.1)
    assert set(house.registry.workers) == {"w1", "leaver"}
    assert "d2" in house.members.front
    assert len(house.core.replicas[1].sequences()) == 1
    house.registry.gone("w1", "broke off while nobody looked")
    assert [seq.losses.count for seq in house.core.queue] == [0]
    house.later(15.0)
    house.later(1.0)
    assert "leaver" not in house.registry.workers


def test_drain_lets_requests_finish_and_takes_nothing_new(house: House) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1, max_tokens=2)
    first, second = house.plans("w1")
    house.told("d1", Peers)
    house.registry.on_worker("w1", Drain("scaling down"))
    assert not house.told("d1", Peers)[-1].ready
    house.submit("d1", 2)
    assert house.sent("w1", Drain) == []
    house.registry.on_worker("w1", StepResult(lease, first.step, i32([5])))
    house.registry.on_worker("w1", StepResult(lease, second.step, i32([5])))
    assert house.sent("w1", Drain) == [Drain("scaling down")]
    assert house.plans("w1") == []
    house.registry.on_worker("w1", Bye("drained"))
    assert not house.core.replicas
    assert [seq.losses.count for seq in house.core.queue] == [0]
    house.worker("w2")
    assert house.plans("w2")


def test_a_drain_does_not_wait_for_requests_whose_detokenizer_is_gone(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    house.registry.drain("w1", "shutting down", 30.0)
    house.later(1.0)
    assert house.sent("w1", Drain) == []
    house.members.on_front("d1", Bye())
    house.later(1.0)
    assert house.sent("w1", Drain)
    house.hello("d1")
    assert not house.core.lost_owners
    house.worker("w2")
    assert house.plans("w2")


def test_drain_ends_when_its_time_is_up(house: House) -> None:
    house.hello("d1")
    worker = FakeWorker(64, 128, 1000)
    lease = house.worker("w1")
    house.submit("d1", 1)
    plans = house.plans("w1")
    house.registry.drain("w1", "going home", 10.0)
    house.later(9.0)
    house.registry.on_worker("w1", Heartbeat(0))
    assert house.sent("w1", Drain) == []
    house.later(1.5)
    (drain,) = house.sent("w1", Drain)
    house.core.check_integrity()
    assert house.plans("w1") == []
    house.worker("w2")
    assert house.plans("w2")
    for plan in plans:  # what was in flight ends there, for nobody
        house.registry.on_worker("w1", StepResult(lease, plan.step, i32([5])))
    assert house.core.bad_messages == 0 and "w1" in house.registry.workers
    (bye,) = worker.handle(drain)
    house.registry.on_worker("w1", bye)
    assert list(house.core.replicas) == [1]
    assert house.core.requests[1].live[0].losses.count == 0
    house.core.check_integrity()


def reach(house: House, phase: Phase) -> Lease:
    """Bring ``w1`` into ``phase``; where it has a replica, a request runs there and two steps are in flight."""
    house.hello("d1")
    if phase is Phase.RESTING:
        house.registry.slumber.sleep(1)
    house.hello("w1", "gpu_worker")
    (assign,) = house.sent("w1", Rest if phase is Phase.RESTING else Assign)
    if phase is Phase.RESTING:
        return assign.lease
    if phase not in (Phase.LOADING, Phase.RECALLED):
        house.registry.on_worker("w1", Loaded(assign.lease, 64, 128, 1000))
    if phase not in (Phase.LOADING, Phase.RECALLED, Phase.CONFIGURING):
        house.registry.on_worker("w1", Ready(assign.lease))
        house.submit("d1", 1)
        assert len(house.plans("w1")) == 2
    if phase in (Phase.RECALLED, Phase.DRAINING, Phase.LEAVING):
        house.registry.drain("w1", "test", 0.0 if phase is Phase.LEAVING else 30.0)
    assert house.registry.workers["w1"].phase is phase
    return assign.lease


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", Event)
def test_a_worker_goes_where_the_table_says_and_is_expelled_for_the_rest(
    house: House, phase: Phase, event: Event
) -> None:
    lease = reach(house, phase)
    house.sent("w1", Bye)
    if event is Event.EMPTY:  # nothing that a worker says
        house.members.on_front("d1", Abort(1, 1))
        house.later(1.0)
        assert house.registry.workers["w1"].phase is TRANSITIONS[phase].get(event, phase)
        return
    messages = {
        Event.LOADED: Loaded(lease, 64, 128, 1000),
        Event.READY: Ready(lease),
        Event.RESTED: Rested(lease),
        Event.RESULT: StepResult(lease, 1, i32([5])),
        Event.DRAIN: Drain("enough"),
    }
    house.registry.on_worker("w1", messages[event])
    after, worker = TRANSITIONS[phase].get(event), house.registry.workers.get("w1")
    assert (worker.phase if worker is not None else None) is after
    assert [bye.again for bye in house.sent("w1", Bye)] == ([False] if after is None else [])
    assert house.core.bad_messages == (after is None)
    assert bool(house.core.loading) == (after in STARTING)
    assert bool(house.core.replicas) == (worker is not None and worker.replica is not None)
    house.core.check_integrity()


@pytest.mark.parametrize("phase", ["loading", "configuring"])
def test_a_worker_may_leave_before_it_is_ready(house: House, phase: str) -> None:
    house.hello("w1", "gpu_worker")
    (assign,) = house.sent("w1", Assign)
    if phase == "configuring":
        house.registry.on_worker("w1", Loaded(assign.lease, 64, 128, 1000))
        assert house.sent("w1", Configure)
    house.registry.drain("w1", "no need", 30.0)
    assert house.sent("w1", Drain)
    house.registry.on_worker(
        "w1", Ready(assign.lease) if phase == "configuring" else Loaded(assign.lease, 64, 128, 1000)
    )
    assert house.sent("w1", object) == [] and "w1" in house.registry.workers
    house.registry.on_worker("w1", Bye("drained"))
    assert (house.core.loading, house.core.replicas, house.registry.workers) == (set(), {}, {})


def test_a_bye_without_a_drain_may_be_a_requests_fault(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    house.registry.on_worker("w1", Bye("sys.exit was called"))
    assert [seq.losses.count for seq in house.core.queue] == [1]


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.LEAVING, Phase.RECALLED])
def test_a_worker_that_was_to_leave_reads_as_draining_and_its_bye_is_nobodys_fault(house: House, phase: Phase) -> None:
    reach(house, phase)
    house.hello("o1", "operator")
    assert [worker.state for worker in manage(house, "list").workers] == ["draining"]
    house.registry.on_worker("w1", Bye("drained"))
    assert house.registry.lost == {} and manage(house, "list").workers == []
    assert [seq.losses.count for seq in house.core.queue] == ([] if phase is Phase.RECALLED else [0])


def manage(house: House, action: str, worker: str = "", timeout: float = -1.0, peer: str = "o1") -> Managed:
    house.members.on_front(peer, Manage(7, action, worker, timeout))
    (answer,) = house.told(peer, Managed)
    assert answer.token == 7
    return answer


def test_operators_list_drain_and_remove(house: House) -> None:
    house.hello("d1")
    house.hello("o1", "operator")
    assert all(p.kind != "operator" for p in house.told("d1", Peers)[-1].peers)
    for name in ("gpu_worker-abc", "gpu_worker-abd", "gpu_worker-x"):
        house.worker(name)
    house.hello("gpu_worker-9fe0", "gpu_worker")
    house.submit("d1", 1)
    house.submit("d1", 2)
    house.registry.plans()
    answer = manage(house, "list")
    assert [(w.worker, w.replica, w.state, w.running, w.blocks) for w in answer.workers] == [
        ("gpu_worker-abc", 0, "ready", 1, 64), ("gpu_worker-abd", 1, "ready", 1, 64),
        ("gpu_worker-x", 2, "ready", 0, 64), ("gpu_worker-9fe0", 3, "loading", 0, 0),
    ]  # fmt: skip
    assert manage(house, "drain", "gpu_worker-a").error.startswith("2 workers begin with 'gpu_worker-a'")
    assert "no worker '9' is here; name one of: 0 (abc)" in manage(house, "drain", "9").error
    assert "no worker 'gpu' is here" in manage(house, "drain", "gpu").error
    assert "''" in manage(house, "remove", "").error
    assert "'explode'" in manage(house, "explode", "0").error
    answer = manage(house, "drain", "abc", timeout=5.0)
    assert (answer.error, answer.workers[0].state, answer.workers[1].state) == ("", "draining", "ready")
    assert house.sent("gpu_worker-abc", Drain) == []
    house.later(6.0)
    assert house.sent("gpu_worker-abc", Drain)
    manage(house, "remove", "1")
    assert house.sent("gpu_worker-abd", Drain)
    house.core.check_integrity()
    manage(house, "drain", "2", timeout=float("nan"))
    assert house.sent("gpu_worker-x", Drain)  # nothing runs there
    assert len(house.core.queue) == 2


def test_operators_hear_of_a_worker_that_was_lost_and_not_of_one_that_left(house: House) -> None:
    house.hello("o1", "operator")
    for name in ("gpu_worker-left", "gpu_worker-lost"):
        house.worker(name)
        manage(house, "drain", name)
    house.registry.on_worker("gpu_worker-left", Bye("drained"))
    house.registry.gone("gpu_worker-lost", "is gone: its connection broke")
    assert manage(house, "list", "gpu_worker-left").error == ""
    said = "gpu_worker-lost did not leave: it is gone: its connection broke. One started in its place serves"
    assert manage(house, "list", "gpu_worker-lost").error.startswith(said)
    assert manage(house, "list").error == ""
    for number in range(MAX_LOST):
        house.worker(f"gpu_worker-{number}")
        house.registry.gone(f"gpu_worker-{number}", "is gone")
    assert len(house.registry.lost) == MAX_LOST and manage(house, "list", "gpu_worker-lost").error == ""


def test_the_last_worker_that_can_run_what_is_open_goes_only_by_force(house: House) -> None:
    house.hello("d1")
    house.hello("o1", "operator")
    house.worker("gpu_worker-small", blocks=2)
    house.worker("gpu_worker-large")
    house.submit("d1", 1)
    refused = (
        "replica 1 is the last worker that could run 1 of the 1 open requests; start another first, or add --force"
    )
    for action in ("drain", "remove"):
        answer = manage(house, action, "1")
        assert answer.error.startswith(refused) and [worker.state for worker in answer.workers] == ["ready", "ready"]
    assert manage(house, "drain", "0").error == ""
    house.hello("gpu_worker-loading", "gpu_worker")
    assert manage(house, "drain", "1").error == ""  # what loads may run it
    assert manage(house, "drain", "1").error == ""  # and it leaves already
    assert manage(house, "drain", "loading").error.startswith("replica 2 is the last worker")
    assert manage(house, "force-remove", "loading").error == ""
    house.core.drop(house.core.requests[1])
    house.worker("gpu_worker-idle")
    assert manage(house, "drain", "idle").error == ""  # nobody asks for anything


def waits(house: House, seconds: float) -> list[Failed]:
    """What d1 is told in so many seconds, in which the others are heard."""
    told = []
    for _ in range(int(seconds)):
        house.later(1.0)
        told += house.told("d1", Failed)
    return told


def comes(house: House) -> bool:
    """Whether those of the front side were told last that a worker is on its way."""
    house.members.announce()
    return any(peer.kind == "gpu_worker" for peer in house.told("d1", Peers)[-1].peers)


def test_requests_fail_after_a_while_where_an_operator_has_sent_the_last_worker_away(house: House) -> None:
    house.hello("d1")
    house.hello("o1", "operator")
    house.worker("gpu_worker-only")
    house.submit("d1", 1)
    manage(house, "force-remove", "0")
    house.registry.on_worker("gpu_worker-only", Bye("drained"))
    assert not comes(house) and waits(house, GAP_S - 2) == []
    (failed,) = waits(house, 3)
    assert (failed.uid, failed.status) == (1, 503) and failed.message.startswith("No worker is ready, none was in")
    assert house.core.requests == {}


@pytest.mark.parametrize("how", ["dies", "is told to end", "dies after an operator's drain"])
def test_requests_wait_longer_where_another_worker_may_follow(house: House, how: str) -> None:
    house.hello("d1")
    house.hello("o1", "operator")
    house.worker("gpu_worker-only")
    house.submit("d1", 1)
    house.registry.plans()
    if how == "is told to end":
        house.registry.on_worker("gpu_worker-only", Drain("SIGTERM"))
        house.registry.on_worker("gpu_worker-only", Bye("drained"))
    else:
        if "operator" in how:
            manage(house, "force-drain", "0")
        house.registry.gone("gpu_worker-only", "is gone")
    assert comes(house) and waits(house, FOLLOWS_S - 2) == [] and comes(house)
    assert [failed.status for failed in waits(house, 3)] == [503]
    assert not comes(house)


def test_who_is_sent_away_does_not_take_the_place_of_one_that_was_lost(house: House) -> None:
    house.hello("d1")
    house.hello("o1", "operator")
    for name in ("gpu_worker-a", "gpu_worker-b"):
        house.worker(name)
    house.submit("d1", 1)
    house.registry.gone("gpu_worker-b", "is gone")
    assert waits(house, 1) == []
    manage(house, "force-drain", "gpu_worker-a")
    house.registry.on_worker("gpu_worker-a", Bye("drained"))
    assert comes(house) and waits(house, GAP_S + 10) == [] and comes(house)
    house.worker("gpu_worker-c")  # the successor of the one that was lost
    manage(house, "force-drain", "gpu_worker-c")
    house.registry.on_worker("gpu_worker-c", Bye("drained"))
    assert not comes(house)


def test_requests_wait_for_a_worker_that_loads_however_long_and_not_for_one_that_dies_again_and_again(
    house: House,
) -> None:
    house.hello("d1")
    house.submit("d1", 1)
    house.hello("gpu_worker-0", "gpu_worker")
    assert waits(house, FOLLOWS_S + 100) == [] and comes(house)
    house.registry.gone("gpu_worker-0", "is gone")
    assert waits(house, GAP_S - 2) == []
    house.hello("gpu_worker-1", "gpu_worker")
    house.registry.gone("gpu_worker-1", "is gone")
    assert waits(house, GAP_S - 2) == [] and [failed.uid for failed in waits(house, 3)] == [1]


def test_time_in_which_the_scheduler_stood_still_is_no_wait_for_a_worker(house: House) -> None:
    house.hello("d1")
    house.submit("d1", 1)
    house.now += 1000.0
    house.members.notice()
    assert waits(house, FOLLOWS_S - 3) == [] and len(waits(house, 4)) == 1


def test_only_operators_manage(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    house.members.on_front("d1", Manage(1, "remove", "0"))
    house.members.on_front("stranger", Manage(1, "remove", "0"))
    assert house.core.bad_messages == 1
    assert [answer.workers for answer in house.told("stranger", Managed)] == [[]]
    assert house.registry.ready


def test_stats_answer_the_one_who_asks(house: House) -> None:
    house.hello("f1", "frontend")
    house.members.wire_bad_frames = 3
    house.members.on_front("f1", GetStats(9))
    (stats,) = house.told("f1", Stats)
    assert (stats.token, stats.bad_frames, stats.compilations) == (9, 3, 0)


def test_compilations_while_serving_are_counted(house: House) -> None:
    """Of the worker's own lease, and after it has gone too."""
    house.hello("f1", "frontend")
    lease = house.worker("w1")
    for said in (lease, lease, Lease(lease.epoch, lease.replica, lease.counter + 1)):
        house.registry.on_worker("w1", Compiled(said))
    house.registry.gone("w1", "is gone")
    house.members.on_front("f1", GetStats(1))
    assert house.told("f1", Stats)[0].compilations == 2


def test_sound_messages_with_mad_values_break_nothing(house: House) -> None:
    """Everything that decodes is handled: refused, counted or ignored, and the books still balance."""
    rng = random.Random(5)
    front, workers = Decoder(ToSchedulerFront), Decoder(ToSchedulerWorkers)
    house.hello("d1")
    house.worker("w1")

    def number() -> int:
        return rng.choice([0, 1, 1, 2, 3, 7, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, rng.getrandbits(20)])

    def column() -> bytes:
        return rng.choice([b"", i32([1]), i32([1, 2, 3]), i64([1, 2]), i32([-1]), b"odd", i32([5] * 40)])

    def lease() -> Lease:
        worker = house.registry.workers.get("w1")
        return worker.lease if worker and rng.random() < 0.8 else Lease(number(), number(), number())

    def params() -> SamplingParams:
        return SamplingParams(n=rng.randint(1, 20), max_tokens=rng.choice([None, 1, 20, 2**31 - 1]))

    def answer() -> Any:
        worker = house.registry.workers.get("w1")
        if worker is None or worker.replica is None or not worker.replica.in_flight:
            return Submit(rng.randint(10, 30), 1, i32([1, 2, 3]), b"", Generate(SamplingParams(max_tokens=20), 1), 1.0)
        step = worker.replica.in_flight[0]
        return StepResult(worker.lease, step.number, i32([5] * step.samples()))

    makers = [
        *[answer] * 12,
        lambda: Submit(
            number(),
            number(),
            column(),
            rng.choice([b"", column()]),
            Generate(params(), number(), [number()]),
            rng.choice([1.0, float("nan"), -1e300]),
            rng.choice([[], [Child(number(), column())]]),
            priority=number(),
            losses=number(),
        ),
        lambda: Abort(number(), number()),
        lambda: Stopped(number(), number(), number(), number()),
        lambda: Reconcile(column(), column()),
        lambda: GetStats(number()),
        lambda: GetView(number(), number()),
        lambda: Hello(
            rng.choice(["detokenizer", "operator", "gpu_worker", ""]), "w1", rng.choice([1, number()]), number()
        ),
        lambda: Loaded(lease(), number(), number(), number()),
        lambda: Ready(lease()),
        lambda: Compiled(lease()),
        lambda: Tiers(lease(), rng.choice([-1, 0, 9]), True, 64),
        lambda: Moved(lease(), rng.choice([-1, 0, 1, 7]), rng.choice([b"", b"abc", column()]), rng.randbytes(16)),
        lambda: StepResult(lease(), rng.choice([number(), 1, 2, 3, 4, 5]), column(), column()),
        lambda: StepFailed(lease(), number(), "?"),
        lambda: Manage(
            number(), rng.choice(["list", "drain", "remove", "?"]), rng.choice(["0", "w1", ""]), float("nan")
        ),
        lambda: Drain("?"),
        lambda: Heartbeat(number(), number(), number()),
        Bye,
    ]
    for turn in range(4000):
        if turn % 40 == 0:
            house.hello("d1")
            house.registry.gone("w1", "makes room for the next")
            house.worker("w1")
        frame = encode(rng.choice(makers)())
        for decode, handle, peer in (
            (front, house.members.on_front, "d1"),
            (workers, house.registry.on_worker, "w1"),
        ):
            try:
                message = decode(frame)
            except BadFrame:
                continue
            handle(peer, message)
        house.later(0.05)
        house.registry.plans()
        for _, out in [*house.core.outbox.take(), *house.registry.to_workers]:
            encode(out)
        house.registry.to_workers.clear()
        house.core.check_integrity()
    assert house.core.bad_messages > 100
    assert house.core.steps > 0


def search(house: House, uid: int) -> None:
    """A beam search with stop strings that has asked its first question."""
    params = SamplingParams(n=2, use_beam_search=True, temperature=0.0, max_tokens=9, stop=["x"])
    house.members.on_front("d1", Submit(uid, 1, i32([1, 2, 3]), b"", Generate(params, 1), float(uid)))
    (plan,) = house.plans("w1")
    record = Logprobs(i32([7, 7, 8, 9, 10]), f32([-1, -1, -2, -3, -4]), i32([1]))
    house.registry.on_worker("w1", StepResult(plan.lease, plan.step, i32([7]), b"", i32([0]), [record]))


def test_a_beam_search_asks_and_is_answered(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    search(house, 5)
    (question,) = house.told("d1", BeamTokens)
    assert (question.uid, question.step, question.tokens) == (5, 1, i32([7, 8, 9, 10]))
    assert house.plans("w1") == []
    house.members.on_front("d1", BeamStopped(5, 1, 1, i32([1])))
    (plan,) = house.plans("w1")
    assert from_i32(plan.append_tokens) == [7, 9]
    house.members.on_front("d1", BeamStopped(5, 1, 1, i32([77])))  # nobody asked: not even looked at
    assert 5 in house.core.requests


def test_a_wrong_answer_is_counted_and_fails_the_search(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    search(house, 5)
    house.members.on_front("d1", BeamStopped(5, 1, 1, i32([9])))
    assert [message.status for message in house.told("d1", Failed)] == [500]
    assert house.core.bad_messages == 1
    assert not house.core.requests


def test_a_question_or_answer_lost_on_its_way_drops_the_search(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    search(house, 5)
    (question,) = house.told("d1", BeamTokens)
    house.submit("d1", 4)
    house.members.front_gone("d1")
    assert list(house.core.requests) == [4]
    house.hello("d1")
    house.members.on_front("d1", Reconcile(i64([4, 5]), i32([1, 1])))
    assert house.told("d1", Unknown) == [Unknown(i64([5]), i32([1]))]
    house.members.undelivered("d1", PromptLogprobs(4, 1, 1, Logprobs(b"", b"", b"")))
    house.hello("d1")
    search(house, 5)
    house.members.undelivered("d1", question)
    assert not house.core.requests


def test_a_request_that_ends_schedulers_while_it_is_taken_in_is_known_to_the_next(tmp_path):
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    for deaths in range(3):
        blame = Blame(lock)
        assert (blame.losses(7).count, blame.losses(8).count) == (deaths, 0)
        assert blame.last == (7 if deaths else None)
        blame.begin(8)
        blame.end()
        blame.begin(7)  # and the process is killed here
    assert Blame(lock).losses(7).count == 3
    last = Blame(lock)
    assert last.last is None and last.losses(7).count == 3  # the one before ended in peace
    os.close(lock)
