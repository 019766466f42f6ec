"""Workers that sleep: what the scheduler remembers, who waits, and who is told when."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_house import House

from quire.proto.codec import i32
from quire.proto.messages import (
    PROTOCOL,
    Assign,
    Configure,
    Drain,
    Failed,
    GetStats,
    Hello,
    Loaded,
    Peers,
    Ready,
    Rest,
    Rested,
    Sleep,
    Sleeping,
    Stats,
    StepResult,
    TokenBatch,
)
from quire.scheduler.worker_phase import Phase


class Bedroom(House):
    """A house with a frontend ``f`` and a detokenizer ``d``."""

    def __init__(self, **flags: Any) -> None:
        super().__init__(**flags)
        self.hello("f", "frontend")
        self.hello("d")
        self._tokens = 0

    def tell(self, action: str, **values: Any) -> None:
        self._tokens += 1
        self.members.on_front("f", Sleep(self._tokens, action, **values))

    def rested(self, *names: str) -> list[int]:
        """These do what they were told; the levels of it."""
        messages, self.registry.to_workers = self.registry.to_workers, []
        rests = [(peer, m) for peer, m in messages if isinstance(m, Rest) and peer in names]
        for peer, rest in rests:
            self.registry.on_worker(peer, Rested(rest.lease))
        return [rest.level for _, rest in rests]

    def woken(self, name: str) -> None:
        (assign,) = self.sent(name, Assign)
        self.registry.on_worker(name, Loaded(assign.lease, 64, 128, 1000))
        self.sent(name, Configure)
        self.registry.on_worker(name, Ready(assign.lease))

    def away(self) -> list[str] | None:
        """The answer that came, if one did."""
        answers = self.told("f", Sleeping)
        assert not any(answer.error for answer in answers)
        return answers[-1].tags if answers else None

    def state(self) -> str:
        """As /metrics is told it."""
        self.members.on_front("f", GetStats(1))
        (stats,) = self.told("f", Stats)
        assert stats.work is not None
        return stats.work.sleep_state


@pytest.fixture
def house() -> Bedroom:
    return Bedroom()


BOTH = ["weights", "kv_cache"]


def test_what_ran_waits_and_goes_on_when_the_workers_wake(house: Bedroom) -> None:
    lease = house.worker("w")
    house.submit("d", 1)
    _, second = house.plans("w")
    house.registry.on_worker("w", StepResult(lease, 1, i32([5])))
    house.tell("sleep")
    assert house.away() is None  # the worker has not said so yet
    assert house.rested("w") == [1]
    assert house.away() == BOTH
    house.registry.on_worker("w", StepResult(lease, second.step, i32([6])))  # of the lease before: it says nothing
    house.submit("d", 2)
    assert not house.plans("w") and len(house.core.queue) == 2 and not house.core.loading - {0}
    house.core.check_integrity()
    assert house.told("d", Peers)[-1:] == [] or house.registry.ready
    house.tell("wake_up")
    assert house.away() is None
    house.woken("w")
    assert house.away() == []
    (plan, _) = house.plans("w")
    assert [(admit.uid, len(admit.ids) // 4) for admit in plan.admits] == [(1, 4), (2, 3)]


def test_a_worker_that_comes_while_all_sleep_sleeps_too(house: Bedroom) -> None:
    house.worker("w")
    house.tell("sleep", level=2)
    house.rested("w")
    house.away()
    house.registry.gone("w", "died")
    house.hello("v", "gpu_worker")
    assert house.registry.workers["v"].phase is Phase.RESTING
    house.tell("sleep")  # again: it is answered when the new one has done it, at the level there is
    assert house.away() is None
    assert house.rested("v") == [2]
    assert house.away() == BOTH


def test_a_level_goes_deeper_and_never_back(house: Bedroom) -> None:
    house.worker("w")
    house.tell("sleep")
    assert house.rested("w") == [1] and house.state() == "weights_offloaded"
    house.tell("sleep", level=2)
    assert house.rested("w") == [2] and house.state() == "discard_all"
    house.tell("sleep", level=1)
    assert house.rested("w") == []
    assert house.away() == BOTH


def test_weights_may_be_woken_before_the_cache(house: Bedroom) -> None:
    house.worker("w")
    house.tell("sleep")
    house.rested("w")
    house.tell("wake_up", tags=["weights"])
    assert house.rested("w") == [0]
    assert house.away() == ["kv_cache"] and house.state() == ""
    house.tell("wake_up", tags=["kv_cache"])
    house.woken("w")
    assert house.away() == [] and house.state() == "awake"
    house.tell("wake_up")
    assert house.away() == []  # nothing is away: it is answered at once


def test_with_wait_what_runs_ends_first_and_nothing_new_begins(house: Bedroom) -> None:
    lease = house.worker("w")
    house.submit("d", 1, max_tokens=2)
    house.plans("w")
    house.tell("sleep", mode="wait")
    house.submit("d", 2)
    house.registry.on_worker("w", StepResult(lease, 1, i32([5])))
    assert house.away() is None and not house.rested("w")
    house.registry.on_worker("w", StepResult(lease, 2, i32([6])))
    assert not house.plans("w") and 1 not in house.core.requests
    house.registry.plans()
    assert house.registry.slumber.tags
    house.rested("w")
    assert house.registry.workers["w"].phase is Phase.RESTING
    house.tell("wake_up")
    house.woken("w")
    (plan, _) = house.plans("w")
    assert [admit.uid for admit in plan.admits] == [2]


def test_with_abort_what_is_open_fails_and_what_comes_later_waits(house: Bedroom) -> None:
    house.worker("w")
    house.submit("d", 1)
    house.plans("w")
    house.tell("sleep", mode="abort")
    (failed,) = house.told("d", Failed)
    assert (failed.uid, failed.status) == (1, 503)
    house.submit("d", 2)
    house.tell("sleep", mode="abort")  # sent again: it sleeps already
    assert not house.told("d", Failed) and len(house.core.queue) == 1


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"action": "snore"}, "unknown action"),
        ({"action": "sleep", "level": 3}, "level must be 1 or 2, got 3"),
        ({"action": "sleep", "mode": "now"}, "mode must be one of keep, wait, abort, got 'now'"),
        ({"action": "wake_up", "tags": ["gpu"]}, "tags must be of weights, kv_cache, got 'gpu'"),
    ],
)
def test_what_is_wrong_changes_nothing(house: Bedroom, values: dict[str, Any], text: str) -> None:
    house.worker("w")
    house.tell(**values)
    (answer,) = house.told("f", Sleeping)
    assert text in answer.error and not house.registry.slumber.tags


def test_a_scheduler_in_a_dead_ones_place_learns_that_all_sleep(house: Bedroom) -> None:
    house.worker("new")
    house.submit("d", 1)
    house.plans("new")
    house.registry.on_worker("old", Hello("gpu_worker", "old", PROTOCOL, 1, loaded=True, asleep=2))
    assert sorted(house.rested("new", "old")) == [2, 2]
    house.tell("ask")
    assert house.away() == BOTH
    house.tell("wake_up")
    # From here on this scheduler knows better than a worker that has not heard of it.
    house.registry.on_worker("late", Hello("gpu_worker", "late", PROTOCOL, 1, loaded=True, asleep=2))
    assert not house.registry.slumber.tags and house.sent("late", Assign)


def test_one_that_drains_while_all_fall_asleep_is_let_go(house: Bedroom) -> None:
    house.worker("w")
    house.submit("d", 1)
    house.plans("w")
    house.registry.on_worker("w", Drain("asked"))
    house.tell("sleep")
    assert house.sent("w", Drain) and len(house.core.queue) == 1
    assert house.away() == BOTH
    house.core.check_integrity()


def test_one_that_rests_may_leave_and_one_that_is_silent_is_taken_for_dead(house: Bedroom) -> None:
    for name in ("a", "b"):
        house.worker(name)
    house.tell("sleep")
    house.rested("a", "b")
    house.registry.drain("a", "an operator's drain", 30.0)
    assert house.registry.workers["a"].phase is Phase.RECALLED and house.sent("a", Drain)
    house.later(house.core.config.worker_timeout + 1)
    assert "b" not in house.registry.workers
    assert not house.told("d", TokenBatch)


def test_who_waits_and_asks_again_changes_nothing(house: Bedroom) -> None:
    """Sleep and wake_up of two administrators: told again at every change, each would undo the other for ever."""
    house.worker("w")
    house.tell("sleep")
    house.tell("wake_up")
    before = house.registry.workers["w"].lease
    house.members.on_front("f", Sleep(1, "sleep"))
    house.members.on_front("f", Sleep(2, "wake_up"))
    assert house.registry.workers["w"].lease == before and house.away() is None
    house.woken("w")
    assert [answer.token for answer in house.told("f", Sleeping)] == [1, 2]


def test_the_prefix_cache_is_reset_when_nobody_holds_blocks(house: Bedroom) -> None:
    lease = house.worker("w")
    house.submit("d", 1, max_tokens=1)
    house.plans("w")
    house.tell("reset_prefix_cache")
    (refused,) = house.told("f", Sleeping)
    assert "while 1 blocks are in use" in refused.error
    house.registry.on_worker("w", StepResult(lease, 1, i32([5])))
    house.tell("reset_prefix_cache")
    (done,) = house.told("f", Sleeping)
    assert (done.error, done.tags, house.core.stats().blocks_used) == ("", [], 0)
