"""Workers that say what cannot be, load adapters, fall asleep and wake: what holds at the edge of each rule."""

from __future__ import annotations

from typing import Any

import pytest
from adapter_rig import adapter
from scheduler_house import House

from quire.proto.codec import i32
from quire.proto.messages import (
    PROTOCOL,
    AdapterReady,
    Assign,
    Bye,
    Failed,
    Hello,
    Lease,
    LoadAdapter,
    Loaded,
    Peers,
    Ready,
    Register,
    Registered,
    Rest,
    Rested,
    Sleep,
    Sleeping,
    StepResult,
    Submit,
    Tiers,
)
from quire.proto.params import SamplingParams
from quire.proto.work import Generate, with_adapter
from quire.scheduler import worker_registry
from quire.scheduler.adapters import LOAD_LIMIT_S
from quire.scheduler.worker import INT32_MAX, MAX_DRAFTS, MAX_SLOTS, Worker, impossible
from quire.scheduler.worker_phase import Event, Phase
from quire.scheduler.worker_registry import LOADING_LIMIT_S

LEASE = Lease(1, 0, 1)


@pytest.fixture
def house() -> House:
    house = House()
    house.hello("f", "frontend")
    house.hello("d")
    house.core.outbox.take()
    return house


def tell(house: House, token: int, action: str, **values: Any) -> None:
    house.members.on_front("f", Sleep(token, action, **values))


def rest(house: House, *names: str) -> None:
    """These give back their memory, as they were told."""
    for name in names:
        house.registry.on_worker(name, Rested(house.registry.workers[name].lease))


def wake(house: House, name: str) -> None:
    lease = house.registry.workers[name].lease
    house.registry.on_worker(name, Loaded(lease, 64, 128, 1000))
    house.registry.on_worker(name, Ready(lease))


# ---------------------------------------------------------------- what it says of itself


@pytest.mark.parametrize(
    ("values", "sound"),
    [
        ({"adapter_slots": MAX_SLOTS}, True), ({"adapter_slots": MAX_SLOTS + 1}, False), ({"adapter_slots": -1}, False),
        ({"drafts": MAX_DRAFTS, "draft_rows": INT32_MAX}, True), ({"drafts": MAX_DRAFTS + 1}, False),
        ({"drafts": -1}, False), ({"draft_rows": INT32_MAX + 1}, False), ({"draft_rows": -1}, False),
    ],
)  # fmt: skip
def test_what_no_worker_can_be(values: dict[str, int], sound: bool) -> None:
    why = impossible(Loaded(LEASE, 1, 1, 1, **values))
    assert bool(why) != sound and (sound or str(next(iter(values.values()))) in why)


@pytest.mark.parametrize(
    ("rest", "rested", "loaded", "phase", "there"),
    [
        (None, False, False, Phase.LOADING, False), (None, False, True, Phase.LOADING, True),
        (None, False, False, Phase.CONFIGURING, True), (0, True, False, None, True), (1, True, False, None, True),
        (1, False, True, None, True), (1, False, False, None, False), (2, True, True, None, False),
    ],
)  # fmt: skip
def test_where_the_weights_are(rest: int | None, rested: bool, loaded: bool, phase: Phase | None, there: bool) -> None:
    worker = Worker(Hello("gpu_worker", "w", PROTOCOL, 1, loaded=loaded), LEASE, 5.0, rest)
    if phase is Phase.CONFIGURING:
        assert worker.follow(Event.LOADED, 7.0) and worker.since == 7.0
    worker.rested = rested
    assert worker.has_weights is there and (worker.bad_frames, worker.drained, worker.running()) == (0, 0, 0)
    assert not worker.follow(Event.RESULT, 9.0)


def test_a_hello_is_its_senders_own(house: House) -> None:
    house.registry.on_worker("w", Hello("gpu_worker", "v", PROTOCOL, 1))
    assert not house.registry.workers and house.core.bad_messages == 1


def test_one_that_is_to_load_is_among_those_that_are_told_of(house: House) -> None:
    house.hello("w", "gpu_worker")
    (peers,) = house.told("d", Peers)
    assert [(peer.kind, peer.incarnation) for peer in peers.peers][-1] == ("gpu_worker", "w") and not peers.ready


@pytest.mark.parametrize(("pools", "block_bytes", "moves"), [(False, 1, True), (False, 0, False), (True, 1, False)])
def test_whose_blocks_may_move(house: House, pools: bool, block_bytes: int, moves: bool) -> None:
    house.hello("w", "gpu_worker")
    lease = house.registry.workers["w"].lease
    loaded = Loaded(lease, 64, 128, 1000, pools=pools, kv_format="kv", block_bytes=block_bytes)
    house.registry.on_worker("w", loaded)
    house.registry.on_worker("w", Ready(lease))
    assert house.core.replicas[0].kv_format == ("kv" if moves else "")


# ---------------------------------------------------------------- adapters


def test_one_that_is_not_ready_has_no_adapter_ready(house: House) -> None:
    house.hello("w", "gpu_worker")
    house.registry.on_worker("w", AdapterReady(house.registry.workers["w"].lease, 0, 1))
    assert house.registry.lost == {"w": "loses its lease: it said AdapterReady while loading"}


@pytest.mark.parametrize("blame", [True, False])
def test_a_wish_that_ends_three_workers_is_refused(house: House, blame: bool) -> None:
    house.members.on_front("f", Register(1, adapter("A")))
    for number in range(3):
        assert not house.told("f", Registered)
        house.worker(f"w{number}", slots=1)
        house.registry.plans()
        assert house.sent(f"w{number}", LoadAdapter)
        house.registry.gone(f"w{number}", "died", blame)
    assert [answer.status for answer in house.told("f", Registered)] == ([500] if blame else [])


def test_a_load_that_hangs_is_noticed_once_a_second(house: House) -> None:
    house.worker("w", slots=1)
    work = with_adapter(Generate(SamplingParams(max_tokens=5), 1), adapter("A"))
    house.members.on_front("d", Submit(1, 0, i32([1, 2, 3]), b"", work, 1.0))
    house.registry.plans()
    for after, told in ((LOAD_LIMIT_S, 0), (1.0, 1)):
        house.now += after
        house.registry.workers["w"].heartbeat_at = house.now
        house.registry.tick()
        assert [failed.status for failed in house.told("d", Failed)] == [503] * told


# ---------------------------------------------------------------- asleep


@pytest.mark.parametrize(("asleep", "rest"), [(-1, None), (0, 0), (1, 1), (2, 2), (3, 2)])
def test_a_worker_that_sleeps_already_says_how_deep(house: House, asleep: int, rest: int | None) -> None:
    house.registry.on_worker("w", Hello("gpu_worker", "w", PROTOCOL, 1, asleep=asleep))
    assert house.registry.slumber.rest == rest
    assert [message.level for message in house.sent("w", Rest)] == ([] if rest is None else [rest])


def test_what_ran_when_all_fell_asleep_is_no_loss_and_everybody_is_told(house: House) -> None:
    house.worker("w")
    house.submit("d", 1)
    house.plans("w")
    house.core.outbox.take()
    tell(house, 1, "sleep")
    assert [seq.losses.count for seq in house.core.queue] == [0] and house.told("d", Peers)
    house.registry.gone("w", "died")
    assert house.registry.ready  # requests are taken: somebody will wake the workers


def test_all_must_be_idle_before_they_fall_asleep(house: House) -> None:
    for name in ("a", "b"):
        house.worker(name)
    house.submit("d", 1)
    house.registry.plans()
    tell(house, 1, "sleep", mode="wait")
    house.registry.plans()
    assert not house.registry.slumber.tags and house.core.paused
    house.core.abort(1, 1)
    house.registry.plans()
    assert house.registry.slumber.tags and not house.core.paused


def test_who_asks_is_answered_at_once_and_waits_for_nothing(house: House) -> None:
    house.worker("w")
    tell(house, 1, "ask")
    assert house.told("f", Sleeping) == [Sleeping(1, [])] and not house.registry.slumber.awaited


def test_an_answer_waits_for_all_who_stay(house: House) -> None:
    for name in ("a", "b", "c"):
        house.worker(name)
    tell(house, 1, "sleep")
    rest(house, "a", "b")
    assert not house.told("f", Sleeping)
    house.registry.gone("c", "died")
    assert house.told("f", Sleeping) == [Sleeping(1, ["weights", "kv_cache"])]
    tell(house, 2, "wake_up")
    wake(house, "a")
    assert not house.told("f", Sleeping)
    wake(house, "b")
    assert house.told("f", Sleeping) == [Sleeping(2, [])]


def test_where_nobody_is_there_to_wake_the_first_that_comes_answers(house: House) -> None:
    tell(house, 1, "sleep")
    assert house.told("f", Sleeping) == [Sleeping(1, ["weights", "kv_cache"])]
    tell(house, 2, "wake_up")
    assert not house.told("f", Sleeping)
    house.worker("w")
    assert house.told("f", Sleeping) == [Sleeping(2, [])]


def test_one_that_rests_is_silent_after_its_limit_and_not_before(house: House) -> None:
    for name in ("stays", "leaves"):
        house.worker(name)
    tell(house, 1, "sleep")
    rest(house, "stays", "leaves")
    house.registry.drain("leaves", "asked", 1.0)
    silent = house.core.config.worker_timeout
    house.now += silent
    house.registry.tick()
    assert "stays" in house.registry.workers
    house.now += 0.1
    house.registry.tick()
    assert set(house.registry.workers) == {"leaves"}  # which has given its word that it goes
    (bye,) = house.sent("stays", Bye)
    assert bye.again


def test_one_that_is_to_rest_may_take_as_long_as_one_that_loads(house: House) -> None:
    house.worker("w")
    tell(house, 1, "sleep")
    house.now += 2 * house.core.config.worker_timeout
    house.registry.tick()
    assert "w" in house.registry.workers and not house.sent("w", Assign)


def test_one_that_rests_may_do_so_for_as_long_as_it_likes(house: House) -> None:
    house.worker("w")
    tell(house, 1, "sleep")
    rest(house, "w")
    house.now += LOADING_LIMIT_S + 1.0
    house.registry.workers["w"].heartbeat_at = house.now
    house.registry.tick()
    assert "w" in house.registry.workers and not house.sent("w", Bye)


def test_where_one_loads_who_asks_waits_for_nothing_either(house: House) -> None:
    house.hello("w", "gpu_worker")
    tell(house, 1, "ask")
    assert house.told("f", Sleeping) == [Sleeping(1, [])]


def test_where_nobody_is_left_to_end_what_runs_all_sleep_at_the_next_plan(house: House) -> None:
    house.worker("w")
    house.submit("d", 1)
    house.registry.plans()
    tell(house, 1, "sleep", mode="wait")
    house.registry.gone("w", "died")
    assert not house.told("f", Sleeping)
    house.registry.plans()
    assert house.told("f", Sleeping) == [Sleeping(1, ["weights", "kv_cache"])]


# ---------------------------------------------------------------- what is sent, and what a loss is


def test_all_that_was_in_flight_is_blamed_for_a_worker_that_died(house: House) -> None:
    house.worker("w")
    house.submit("d", 1)
    assert len(house.core.queue) == 1
    plan, *more = house.plans("w")
    house.registry.on_worker("w", StepResult(plan.lease, plan.step, i32([5])))
    assert len(house.core.replicas[0].in_flight) == len(more) == 1
    house.registry.gone("w", "died")
    assert [seq.losses.count for seq in house.core.queue] == [1]


@pytest.mark.parametrize("tiers", [True, False])
def test_what_is_to_be_stored_goes_before_each_plan(house: House, tiers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_registry, "moves", lambda core: [("w", "move")])
    house.hello("w", "gpu_worker")
    lease = house.registry.workers["w"].lease
    if tiers:
        house.registry.on_worker("w", Tiers(lease, 8, False, 100))
    house.registry.on_worker("w", Loaded(lease, 64, 128, 1000))
    house.registry.on_worker("w", Ready(lease))
    house.submit("d", 1)
    house.registry.to_workers = []
    house.registry.plans()
    kinds = ["move" if message == "move" else "plan" for _, message in house.registry.to_workers]
    assert kinds == (["move", "plan", "move", "plan", "move"] if tiers else ["plan", "plan"])
