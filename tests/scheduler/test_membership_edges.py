"""Who is there, and for how long, at the edge of each rule."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from scheduler_house import House

from quire.proto.codec import i32, i64
from quire.proto.messages import (
    PROTOCOL,
    Abort,
    Assign,
    BeamTokens,
    Bye,
    Compiled,
    Configure,
    Drain,
    Failed,
    GetStats,
    Heartbeat,
    Hello,
    Lease,
    Loaded,
    Logprobs,
    Manage,
    Managed,
    Peers,
    PromptLogprobs,
    Ready,
    Reconcile,
    Stats,
    StepFailed,
    StepResult,
    Stopped,
    Submit,
    TokenBatch,
    Unknown,
)
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler.blame import SLOTS, START, Blame
from quire.scheduler.inputs import Inputs
from quire.scheduler.membership import LOST_FRONT_S, STOOD_STILL_S
from quire.scheduler.worker import INT32_MAX
from quire.scheduler.worker_phase import Phase
from quire.scheduler.worker_registry import (
    LOADED_LIMIT_S,
    LOADING_LIMIT_S,
    MAX_BLOCKS,
    STOPPED_S,
    count,
)


@pytest.fixture
def house() -> House:
    return House()


# ---------------------------------------------------------------- the front side


def test_a_hello_makes_a_peer_and_tells_the_others_unless_it_is_an_operators(house: House) -> None:
    house.hello("d1")
    assert len(house.told("d1", Peers)) == 1
    house.hello("o1", "operator")
    assert house.told("d1", Peers) == [] and "o1" in house.members.front
    house.members.front_gone("o1")
    assert house.told("d1", Peers) == []
    house.hello("f1", "frontend")
    (peers,) = house.told("d1", Peers)
    assert [(p.kind, p.incarnation, p.endpoint) for p in peers.peers] == [
        ("detokenizer", "d1", "ipc:///x/d1"), ("frontend", "f1", "ipc:///x/f1"), ("gpu_worker", "", ""),
    ]  # fmt: skip


def test_a_stranger_may_say_what_is_of_no_use_and_nothing_else(house: House) -> None:
    for message in (Abort(7, 3), Stopped(7, 3, 0, 1), GetStats(1), Heartbeat(), Bye()):
        house.members.on_front("old", message)
    assert house.core.bad_messages == 0 and house.core.outbox.take() == []
    house.members.on_front("old", Reconcile(i64([7, 8]), i32([1, 2])))
    assert house.told("old", Unknown) == [Unknown(i64([7, 8]), i32([1, 2]))]
    house.submit("old", 2**63, attempt=1)
    assert house.core.bad_messages == 1 and house.core.outbox.take() == []
    house.submit("old", 5, attempt=2**31)
    assert house.core.bad_messages == 2 and house.core.outbox.take() == []


def test_what_a_connection_loses_ends_the_requests_whose_it_was(house: House) -> None:
    house.hello("d1")
    house.hello("d2")
    for uid, owner in ((1, "d1"), (2, "d1"), (3, "d1"), (4, "d2"), (5, "d1")):
        house.submit(owner, uid)
    lost: list[Any] = [
        TokenBatch(i64([1, 4, 99]), i32([1, 1, 1]), i32([0] * 3), i32([0] * 3), i32([1] * 3), i32([5] * 3), bytes(3),
                   i32([-1] * 3)),
        PromptLogprobs(2, 1, 1, Logprobs(b"", b"", b"")),
        BeamTokens(3, 1, 1, b"", b""),
        Failed(5, 1, 500, "of no consequence"),
    ]  # fmt: skip
    for message in lost:
        house.members.undelivered("d1", message)
    assert set(house.core.requests) == {4, 5}  # the fourth is another's
    assert house.core.lost_owners == {"d1"} and house.members.front["d1"].lost_at == house.now


def test_a_connection_is_lost_once(house: House) -> None:
    house.hello("d1")
    house.hello("f1", "frontend")
    house.core.outbox.take()
    house.members.front_gone("d1")
    assert len(house.told("f1", Peers)) == 1
    house.now += 3.0
    house.members.front_gone("d1")
    house.members.front_gone("nobody")
    assert house.told("f1", Peers) == []
    house.later(1.9)
    assert "d1" in house.members.front
    house.later(0.1)
    assert "d1" in house.members.front  # looked at once a second
    house.later(1.0)
    assert "d1" not in house.members.front


@pytest.mark.parametrize(("after", "there"), [(LOST_FRONT_S - 0.01, True), (LOST_FRONT_S, False)])
def test_a_lost_detokenizer_is_waited_for_so_long(house: House, after: float, there: bool) -> None:
    house.hello("d1")
    house.submit("d1", 1)
    house.members.front_gone("d1")
    house.later(after)
    assert ("d1" in house.members.front) == there == (1 in house.core.requests)


def test_heartbeats_say_how_many_frames_were_bad(house: House) -> None:
    house.hello("d1")
    house.hello("f1", "frontend")
    house.worker("w1")
    Inputs(house.members).bad_frames(3)
    house.core.count_bad()
    house.later(0.0)
    assert house.told("d1", Heartbeat) == [Heartbeat(bad_frames=4)]
    house.members.on_front("f1", Heartbeat(bad_frames=10))
    house.registry.on_worker("w1", Heartbeat(bad_frames=200))
    house.members.on_front("d1", GetStats(6))
    (stats,) = house.told("d1", Stats)
    assert (stats.token, stats.bad_frames) == (6, 214)
    assert house.members.timeout() == 1.0
    house.now += 0.4
    assert house.members.timeout() == pytest.approx(0.6)
    house.now += 9.0
    assert house.members.timeout() == 0.0


@pytest.mark.parametrize(
    ("claimed", "kept"), [(-1, 0), (0, 0), (5, 5), (INT32_MAX, INT32_MAX), (INT32_MAX + 1, INT32_MAX)]
)
def test_a_count_that_a_peer_claims_fits_a_message(claimed: int, kept: int) -> None:
    assert count(claimed) == kept


def test_a_request_that_ended_three_schedulers_is_given_up(house: House, tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    for _ in range(3):
        Blame(lock).begin(7)
    house.members.blame = blame = Blame(lock)
    house.hello("d1")
    assert house.told("d1", Peers)[-1].blamed == 7
    for uid in (7, 8):
        house.submit("d1", uid, attempt=4)
    (failed,) = house.told("d1", Failed)
    assert (failed.uid, failed.attempt, failed.status) == (7, 4, 500)
    assert failed.message == "The scheduler died 3 times while taking in this request (7); it is given up."
    assert set(house.core.requests) == {8} and Blame(lock).last is None
    house.submit("d1", 2**63)
    assert house.told("d1", Failed)[0].status == 400 and blame.losses(8).count == 0
    os.close(lock)


@pytest.mark.parametrize("uid", [0, 2**63 - 1, -(2**63)])
def test_every_request_is_written_down_while_it_is_taken_in(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    house.members.blame = Blame(lock)
    house.hello("d1")

    def dies(*args: object) -> None:
        raise SystemExit

    monkeypatch.setattr(house.core, "submit", dies)
    with pytest.raises(SystemExit):
        house.submit("d1", uid)
    assert Blame(lock).last == uid
    os.close(lock)


def test_the_last_that_ended_a_scheduler_are_remembered_in_order(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    os.write(lock, b"epoch")
    for uid in range(100, 100 + SLOTS):
        Blame(lock).begin(uid)
    Blame(lock).begin(101)  # again: it is the last now
    Blame(lock).begin(-5)
    blame = Blame(lock)
    assert blame.last == -5 and blame.losses(-5).count == 1
    blame = Blame(lock)  # what was written when that was found
    assert blame.last is None and blame.losses(-5).count == 1
    assert [blame.losses(uid).count for uid in (100, 101, 102)] == [0, 2, 1]
    assert os.pread(lock, 5, 0) == b"epoch" and START >= 8
    os.close(lock)


def test_without_a_lock_file_or_room_in_it_nothing_outlives_the_process(tmp_path: Path) -> None:
    Blame().begin(7)
    assert Blame().last is None
    (tmp_path / "lock").touch()
    lock = os.open(tmp_path / "lock", os.O_RDONLY)  # cannot be written
    blame = Blame(lock)
    blame.begin(7)
    assert Blame(lock).last is None and blame.losses(7).count == 0
    os.close(lock)


# ---------------------------------------------------------------- from Hello to Ready


def test_what_a_worker_is_assigned_and_what_its_replica_is(house: House) -> None:
    hello = Hello("gpu_worker", "w1", PROTOCOL, 77, endpoint="", device="cpu, 2 threads")
    house.registry.on_worker("w1", hello)
    (assign,) = house.sent("w1", Assign)
    assert (assign.lease, assign.block_size, assign.max_num_seqs, assign.max_num_batched_tokens) == (
        Lease(42, 0, 1), 8, 8, 32,
    )  # fmt: skip
    assert house.core.loading == {0} and not house.registry.ready
    house.now += 7.0
    house.registry.on_worker("w1", Loaded(assign.lease, 50, 120, 900, pools=True, whole=True))
    assert house.sent("w1", Configure) == [Configure(assign.lease, 50)]
    house.now += 9.0
    house.registry.on_worker("w1", Ready(assign.lease))
    assert house.core.loading == set() and house.registry.ready
    replica = house.core.replicas[0]
    assert (replica.number, replica.lease, replica.peer, replica.num_rows) == (0, assign.lease, "w1", 8)
    assert (replica.pool.num_blocks, replica.block_size, replica.max_model_len) == (50, 8, 120)
    assert (replica.vocab_size, replica.device, replica.pools, replica.whole) == (900, "cpu, 2 threads", True, True)
    worker = house.registry.workers["w1"]
    assert worker.since == worker.heartbeat_at == house.now


@pytest.mark.parametrize(
    ("sizes", "sound"),
    [
        ((1, 1, 1), True), ((0, 1, 1), False), ((1, 0, 1), False), ((1, 1, 0), False),
        ((INT32_MAX, INT32_MAX, INT32_MAX), True), ((1, INT32_MAX + 1, 1), False), ((1, 1, INT32_MAX + 1), False),
    ],
)  # fmt: skip
def test_sizes_that_a_worker_may_have(house: House, sizes: tuple[int, int, int], sound: bool) -> None:
    house.hello("w1", "gpu_worker")
    (assign,) = house.sent("w1", Assign)
    house.registry.on_worker("w1", Loaded(assign.lease, *sizes))
    assert ("w1" in house.registry.workers) == sound == (house.core.bad_messages == 0)
    if sound:
        assert house.sent("w1", Configure) == [Configure(assign.lease, min(sizes[0], MAX_BLOCKS))]


def test_a_worker_that_says_hello_again_begins_again(house: House) -> None:
    house.hello("d1")
    first = house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    second = house.worker("w1")
    assert (first.replica, second.replica) == (0, 0) and second.counter == first.counter + 1
    assert house.registry.lost["w1"] == "said Hello again"
    assert [seq.losses.count for seq in house.core.queue] == [1]


@pytest.mark.parametrize(("loaded", "limit"), [(False, LOADING_LIMIT_S), (True, LOADED_LIMIT_S)])
@pytest.mark.parametrize("configures", [False, True])
def test_loading_and_configuring_may_take_so_long_each(
    house: House, loaded: bool, limit: float, configures: bool
) -> None:
    house.registry.on_worker("w1", Hello("gpu_worker", "w1", PROTOCOL, 1, loaded=loaded))
    (assign,) = house.sent("w1", Assign)
    if configures:
        house.later(limit)
        house.registry.on_worker("w1", Loaded(assign.lease, 50, 120, 900))
    house.later(limit)
    assert "w1" in house.registry.workers
    house.later(1.0)
    assert "w1" not in house.registry.workers and not house.core.loading
    (bye,) = house.sent("w1", Bye)
    state = "configuring" if configures else "loading"
    assert bye.reason.endswith(f"it was {state} for {limit:g} s") and not bye.again


# ---------------------------------------------------------------- ready


def test_what_a_worker_says_of_another_lease_is_dropped(house: House) -> None:
    lease = house.worker("w1")
    stale = Lease(lease.epoch, lease.replica, lease.counter + 1)
    for message in (Loaded(stale, 0, 0, 0), Ready(stale), StepResult(stale, 1, b""), StepFailed(stale, 1, "boom"),
                    Compiled(stale)):  # fmt: skip
        house.registry.on_worker("w1", message)
    assert house.registry.workers["w1"].phase is Phase.READY and house.registry.compilations == 0
    assert house.core.bad_messages == 0


def test_a_worker_without_a_lease_is_told_so_when_it_beats(house: House) -> None:
    for message in (Bye(), Drain("enough"), Ready(Lease(1, 2, 3))):
        house.registry.on_worker("w9", message)
    assert house.registry.to_workers == []
    house.registry.on_worker("w9", Heartbeat())
    assert house.sent("w9", Bye) == [Bye("it has no lease here", again=True)]


@pytest.mark.parametrize(("said", "why"), [("", "left (no reason given)"), ("bored", "left (bored)")])
def test_how_a_worker_left_is_remembered(house: House, said: str, why: str) -> None:
    house.worker("w1")
    house.registry.on_worker("w1", Bye(said))
    assert house.registry.lost == {"w1": why}


def test_a_step_that_failed_is_why_the_worker_is_gone(house: House) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    house.registry.on_worker("w1", StepFailed(lease, 1, "boom"))
    assert house.registry.lost == {"w1": "failed in step 1: boom"} and house.sent("w1", Bye) == []
    assert [seq.losses.count for seq in house.core.queue] == [1]


@pytest.mark.parametrize(("worker_timeout", "silent"), [(0.5, 2.0), (2.0, 2.0), (7.0, 7.0)])
def test_a_worker_is_silent_after_its_limit_and_not_before(worker_timeout: float, silent: float) -> None:
    house = House(worker_timeout=worker_timeout)
    house.worker("w1")
    house.later(silent)
    assert "w1" in house.registry.workers
    house.later(1.0)
    assert "w1" not in house.registry.workers
    (bye,) = house.sent("w1", Bye)
    assert bye.again and bye.reason == f"the scheduler ended this worker's lease: it was silent for {silent:g} s"
    assert house.registry.lost == {"w1": f"loses its lease: it was silent for {silent:g} s"}


def test_a_result_is_a_sign_of_life_too(house: House) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    plans = house.plans("w1")
    silent = house.core.config.worker_timeout
    house.later(silent - 1)
    house.registry.on_worker("w1", StepResult(lease, plans[0].step, i32([5])))
    house.later(silent - 1)
    assert "w1" in house.registry.workers


@pytest.mark.parametrize(("after", "counts"), [(STOPPED_S, False), (STOPPED_S + 0.1, True)])
def test_a_connection_that_breaks_soon_after_a_standstill_says_nothing(
    house: House, after: float, counts: bool
) -> None:
    house.hello("d1")
    house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    house.members.notice()
    house.now += 100.0
    house.members.notice()
    house.now += after
    house.registry.gone("w1", "is gone: its connection broke")
    assert [seq.losses.count for seq in house.core.queue] == [int(counts)]


@pytest.mark.parametrize(("pause", "forgiven"), [(STOOD_STILL_S - 0.1, False), (STOOD_STILL_S + 0.1, True)])
def test_only_a_standstill_is_forgiven(pause: float, forgiven: bool) -> None:
    house = House(worker_timeout=2.0)
    house.hello("d1")
    house.worker("w1")
    house.members.front_gone("d1")
    house.members.notice()
    house.now += pause
    house.members.notice()
    house.later(1.0)
    assert ("w1" in house.registry.workers) == forgiven
    house.now += LOST_FRONT_S - pause - 1.0
    house.members.tick()
    assert ("d1" in house.members.front) == forgiven


# ---------------------------------------------------------------- leaving


def test_the_shorter_patience_counts(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    house.submit("d1", 1, max_tokens=90)
    house.plans("w1")
    house.registry.drain("w1", "first", 10.0)
    house.registry.drain("w1", "second", 60.0)
    worker = house.registry.workers["w1"]
    assert (worker.leave_by, worker.reason, worker.drained) == (house.now + 10.0, "first", 1)
    house.registry.drain("w1", "third", 3.0)
    assert worker.leave_by == house.now + 3.0
    house.later(2.9)
    assert worker.phase is Phase.DRAINING
    house.now += 0.1
    house.registry.on_worker("w1", Heartbeat())
    house.later(1.0)
    assert worker.phase is Phase.LEAVING and house.sent("w1", Drain) == [Drain("first")]
    house.later(1.0)
    assert house.sent("w1", Drain) == []
    house.registry.drain("nobody", "?", 1.0)


def test_a_worker_asks_to_leave_with_the_patience_of_the_flag(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    house.registry.on_worker("w1", Drain(""))
    worker = house.registry.workers["w1"]
    assert worker.reason == "it asked to leave" and worker.leave_by == house.now + house.core.config.drain_timeout
    assert not house.registry.ready and house.core.replicas


# ---------------------------------------------------------------- operators


def manage(house: House, action: str, worker: str = "", timeout: float = -1.0) -> Managed:
    house.members.on_front("o1", Manage(7, action, worker, timeout))
    (answer,) = house.told("o1", Managed)
    return answer


@pytest.mark.parametrize(
    ("timeout", "patience"), [(0.0, 0.0), (5.0, 5.0), (-1.0, None), (math.inf, None), (math.nan, None)]
)
def test_an_operators_patience(house: House, timeout: float, patience: float | None) -> None:
    house.hello("d1")
    house.hello("o1", "operator")
    house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    assert manage(house, "force-drain", "0", timeout).error == ""
    expected = house.core.config.drain_timeout if patience is None else patience
    assert house.registry.workers["w1"].leave_by == house.now + expected
    assert house.registry.workers["w1"].reason == "an operator's drain"


@pytest.mark.parametrize(("name", "found"), [
    ("0", "gpu_worker-abcd1"), ("gpu_worker-abcd1", "gpu_worker-abcd1"), ("abcd1", "gpu_worker-abcd1"),
    ("efgh", "gpu_worker-efgh2"), ("efg", None), ("abcd", None), ("gpu_worker-e", "gpu_worker-efgh2"),
    ("2", None), ("", None), ("gpu_worker-", None),
])  # fmt: skip
def test_how_a_worker_may_be_named(house: House, name: str, found: str | None) -> None:
    house.hello("o1", "operator")
    for worker in ("gpu_worker-abcd1", "gpu_worker-efgh2", "gpu_worker-abcd3"):
        house.hello(worker, "gpu_worker")
    house.registry.on_worker("gpu_worker-abcd3", Bye())
    house.hello("gpu_worker-abcd4", "gpu_worker")  # the third again, by number
    answer = manage(house, "remove", name if name != "2" else "3")
    gone = [worker.worker for worker in answer.workers if worker.state == "draining"]
    assert gone == ([found] if found else [])
    if found is None:
        assert "name one of: 0 (abcd1), 1 (efgh2), 2 (abcd4)." in answer.error


def test_an_operator_is_told_where_there_are_no_workers(house: House) -> None:
    house.hello("o1", "operator")
    assert manage(house, "drain", "0").error == "no worker '0' is here: there are no workers."
    assert manage(house, "explode").error == "unknown action 'explode'; it must be list, drain or remove."


def test_what_an_operator_is_told_of_each_worker(house: House) -> None:
    house.hello("o1", "operator")
    house.hello("d1")
    house.registry.on_worker("w1", Hello("gpu_worker", "w1", PROTOCOL, 2**40, device="gpu"))
    (assign,) = house.sent("w1", Assign)
    house.hello("w2", "gpu_worker")
    house.registry.on_worker("w1", Loaded(assign.lease, 50, 120, 900))
    house.registry.on_worker("w1", Ready(assign.lease))
    house.submit("d1", 1)
    house.registry.plans()
    first, second = manage(house, "list").workers
    assert (first.worker, first.replica, first.state, first.device, first.pid) == ("w1", 0, "ready", "gpu", INT32_MAX)
    assert (first.running, first.blocks, first.blocks_used, first.last_step) == (1, 50, 1, 2)
    assert (second.state, second.running, second.blocks, second.blocks_used) == ("loading", 0, 0, 0)
    assert second.last_step == 0


def test_aborts_and_stops_reach_the_request(house: House) -> None:
    house.hello("d1")
    for uid in (1, 2, 3):
        params = SamplingParams(max_tokens=5, n=2)
        house.members.on_front("d1", Submit(uid, 1, i32([1, 2, 3]), b"", Generate(params, 1), float(uid)))
    house.members.on_front("d1", Abort(1, 0))
    house.members.on_front("d1", Abort(2, 1))
    house.members.on_front("d1", Stopped(3, 1, 1, 0))
    assert {uid: len(request.live) for uid, request in house.core.requests.items()} == {1: 2, 3: 1}
    house.members.on_front("d1", Bye())
    assert house.core.lost_owners == {"d1"}


def test_operators_are_neither_announced_nor_told_who_is_there(house: House) -> None:
    house.hello("o1", "operator")
    house.hello("f1", "frontend")
    told = house.core.outbox.take()
    assert [(peer, type(message)) for peer, message in told] == [("f1", Peers)]
    assert [peer.incarnation for peer in told[0][1].peers] == ["f1", ""]
    house.hello("d1")
    (told,) = house.told("d1", Peers)
    assert [peer.incarnation for peer in told.peers] == ["f1", "d1", ""]


def test_the_first_heartbeat_counts_no_bad_frame(house: House) -> None:
    house.hello("f1", "frontend")
    house.members.tick()
    assert house.told("f1", Heartbeat) == [Heartbeat()]


def test_a_uid_that_no_column_holds_is_refused_on_either_side(house: House) -> None:
    house.hello("d1")
    for uid in (2**63, -(2**63) - 1):
        house.submit("d1", uid)
        (failed,) = house.told("d1", Failed)
        assert (failed.uid, failed.status) == (uid, 400)
