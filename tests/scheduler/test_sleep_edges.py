"""What the scheduler remembers of a sleep, and what a worker says of its tiers, at the edge of each rule."""

from __future__ import annotations

import pytest
from scheduler_house import House

from quire.proto.messages import Loaded, Moved, Ready, Rested, Sleep, Tiers
from quire.scheduler.offload import MOST_SLOTS
from quire.scheduler.slumber import Slumber
from quire.scheduler.tiers import Sizes
from quire.scheduler.worker import INT32_MAX
from quire.scheduler.worker_phase import Phase

BOTH = ("weights", "kv_cache")


def test_a_sleep_is_news_where_it_is_deeper() -> None:
    slumber = Slumber()
    assert (slumber.rest, slumber.level, slumber.falling, slumber.told) == (None, 0, 0, False)
    assert slumber.sleep(1) and (slumber.rest, slumber.tags, slumber.told) == (1, BOTH, True)
    assert not slumber.sleep(1) and slumber.sleep(2) and not slumber.sleep(1)
    assert slumber.rest == slumber.level == 2


def test_what_was_put_away_comes_back_in_parts() -> None:
    slumber = Slumber()
    slumber.sleep(2)
    assert slumber.wake(["weights"]) and (slumber.tags, slumber.rest, slumber.level) == (("kv_cache",), 0, 2)
    assert not slumber.wake(["weights"])
    assert slumber.sleep(1) and (slumber.tags, slumber.rest) == (BOTH, 2)
    assert slumber.wake([]) and (slumber.tags, slumber.rest, slumber.level) == ((), None, 0)
    assert not slumber.wake([]) and slumber.sleep(1) and slumber.rest == 1
    assert slumber.wake(["kv_cache"]) and slumber.rest == 1
    assert slumber.wake(["weights"]) and slumber.rest is None


def test_a_sleep_that_begins_when_all_has_ended_keeps_the_deepest_level() -> None:
    slumber = Slumber()
    slumber.fall(2), slumber.fall(1)
    assert slumber.falling == 2 and slumber.told and slumber.rest is None
    slumber.wake([])
    assert slumber.falling == 0
    slumber.fall(1)
    slumber.sleep(1)
    assert slumber.falling == 0


@pytest.mark.parametrize(("asleep", "tags", "level"), [(0, ("kv_cache",), 1), (1, BOTH, 1), (2, BOTH, 2)])
def test_a_sleep_that_a_worker_tells_of_is_news_once(asleep: int, tags: tuple[str, ...], level: int) -> None:
    slumber = Slumber()
    assert slumber.adopt(asleep) and (slumber.tags, slumber.level, slumber.told) == (tags, level, False)
    assert not slumber.adopt(2) and slumber.level == level
    told = Slumber()
    told.wake([])
    assert not told.adopt(asleep) and told.rest is None


@pytest.mark.parametrize(("level", "sound"), [(0, False), (1, True), (2, True), (3, False)])
def test_the_levels_of_a_sleep(level: int, sound: bool) -> None:
    refused = Slumber().refusal(Sleep(1, "sleep", level=level))
    assert refused == ("" if sound else f"level must be 1 or 2, got {level}.")
    assert Slumber().refusal(Sleep(1, "ask", level=level, mode="?", tags=["weights"])) == ""


def test_who_waits_is_answered_once() -> None:
    slumber = Slumber()
    for peer, token in (("f", 1), ("g", 1), ("f", 1)):
        slumber.wait(peer, token)
    assert slumber.waits("f", 1) and not slumber.waits("f", 2) and slumber.awaited
    assert slumber.take_waiting() == [("f", 1), ("g", 1)] and not slumber.awaited and slumber.take_waiting() == []


def test_nobody_begins_while_what_runs_ends_before_a_sleep() -> None:
    house = House()
    house.hello("f", "frontend"), house.hello("d")
    house.worker("w")
    house.submit("d", 1, max_tokens=9)
    house.plans("w")
    house.members.on_front("f", Sleep(1, "sleep", mode="wait"))
    house.submit("d", 2)
    assert house.core.paused and not house.plans("w") and len(house.core.queue) == 1
    house.members.on_front("f", Sleep(2, "wake_up"))
    assert not house.core.paused and house.registry.slumber.falling == 0


def test_one_that_leaves_while_it_lies_down_may_say_that_it_rests() -> None:
    house = House()
    house.hello("f", "frontend")
    house.members.on_front("f", Sleep(1, "sleep"))
    house.hello("w", "gpu_worker")
    worker = house.registry.workers["w"]
    house.registry.drain("w", "asked", 30.0)
    house.registry.on_worker("w", Rested(worker.lease))
    assert worker.phase is Phase.RECALLED and not worker.rested and not house.core.bad_messages


# ---------------------------------------------------------------- tiers that a worker has


@pytest.mark.parametrize(
    ("slots", "block_bytes", "kept"),
    [(7, 64, (7, 64)), (-1, -1, (0, 0)), (MOST_SLOTS + 1, 2**40, (MOST_SLOTS, INT32_MAX))],
)
def test_what_a_worker_has_outside_of_its_device(
    slots: int, block_bytes: int, kept: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House()
    house.hello("w1", "gpu_worker")
    lease = house.registry.workers["w1"].lease
    house.registry.on_worker("w1", Moved(lease, 9))  # before it is ready there is nothing to say
    house.registry.on_worker("w1", Tiers(lease, slots, True, block_bytes))
    house.registry.on_worker("w1", Loaded(lease, 64, 128, 1000))
    seen: list[Sizes] = []
    monkeypatch.setattr("quire.scheduler.offload.Tier", lambda sizes, *_: seen.append(sizes))
    house.registry.on_worker("w1", Ready(lease))
    assert seen == [Sizes(kept[0], True, kept[1], 8)] and house.core.tiers is not None
    house.registry.on_worker("w1", Moved(lease, 9))  # this one has none after all
    assert "w1" in house.registry.workers


def test_without_a_prefix_cache_nothing_is_kept_anywhere() -> None:
    house = House(enable_prefix_caching=False)
    house.hello("w1", "gpu_worker")
    lease = house.registry.workers["w1"].lease
    house.registry.on_worker("w1", Tiers(lease, 5, False, 64))
    house.registry.on_worker("w1", Loaded(lease, 64, 128, 1000))
    house.registry.on_worker("w1", Ready(lease))
    assert house.core.replicas[0].tier is None and house.core.tiers is None
    house.registry.on_worker("w1", Moved(lease, 9))
    assert "w1" in house.registry.workers


def test_a_worker_that_moved_what_nobody_asked_for_is_expelled() -> None:
    house = House()
    house.hello("w1", "gpu_worker")
    lease = house.registry.workers["w1"].lease
    house.registry.on_worker("w1", Tiers(lease, 5, False, 64))
    house.registry.on_worker("w1", Loaded(lease, 64, 128, 1000))
    house.registry.on_worker("w1", Ready(lease))
    house.registry.on_worker("w1", Moved(lease, 0))
    assert "w1" in house.registry.workers
    house.registry.on_worker("w1", Moved(lease, 9))
    assert house.registry.lost == {"w1": "loses its lease: Moved of number 9, which was not asked for"}
