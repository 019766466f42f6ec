"""A worker whose step takes long keeps nobody waiting whom another could take; whoever waited is not remembered."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig

from quire.proto.config import EngineArgs
from quire.proto.messages import PROTOCOL, Bye, Configure, Hello, Lease, Loaded, Ready
from quire.scheduler.core import Scheduler
from quire.scheduler.replica import STALL_S
from quire.scheduler.worker_registry import MAX_BLOCKS, WorkerRegistry


def uids(rig: Rig, number: int) -> list[int]:
    return sorted(seq.uid for seq in rig.core.replicas[number].sequences())


def two_with_one_hung(steps: int) -> Rig:
    """Requests 1 and 2 run on a replica each, and replica 1 has so many steps that do not end."""
    rig = Rig([64, 64])
    for number in (0, 1):
        rig.submit(8, max_tokens=100)
        rig.plan(number)
    assert (uids(rig, 0), uids(rig, 1)) == ([1], [2])
    for _ in range(steps - 1):
        rig.plan(1)
    return rig


def test_nobody_waits_for_a_worker_that_hangs_while_another_has_room() -> None:
    rig = two_with_one_hung(2)
    new = [rig.submit(8, max_tokens=4) for _ in range(3)]
    rig.work(0)
    rig.plan(0)
    rig.work(0)
    waiting = [uid for uid in new if uid not in uids(rig, 0)]
    assert waiting  # by load replica 1 is the place for some of them, and it may yet take them
    rig.now += STALL_S + 0.1
    rig.plan(0)
    assert uids(rig, 0) == [1, *new] and uids(rig, 1) == [2]


def test_a_worker_that_hangs_takes_nobody_whom_another_could() -> None:
    rig = two_with_one_hung(1)  # so it could be sent another plan
    rig.now += STALL_S + 0.1
    rig.work(0)
    new = [rig.submit(8, max_tokens=4) for _ in range(3)]
    rig.plan(1)
    assert uids(rig, 1) == [2]
    rig.plan(0)
    assert uids(rig, 0) == [1, *new]


def test_where_all_take_long_load_decides_as_ever() -> None:
    rig = two_with_one_hung(1)
    rig.now += STALL_S + 0.1  # both have a step that takes long
    new = [rig.submit(8, max_tokens=4) for _ in range(2)]
    rig.plan(1)
    rig.plan(0)
    assert sorted(uids(rig, 0) + uids(rig, 1)) == [1, 2, *new]


def test_a_worker_that_went_on_is_a_place_like_another() -> None:
    rig = two_with_one_hung(2)
    rig.now += STALL_S + 0.1
    rig.work(1)
    assert not rig.core.replicas[1].stalled(rig.now)  # the next one began when this one ended
    rig.submit(8)
    rig.plan(1)
    assert uids(rig, 1) == [2, 3]


def test_only_those_who_wait_are_remembered_for_their_deadline() -> None:
    rig = Rig(max_num_seqs=1, queue_timeout=86400.0)
    rig.submit(8, max_tokens=2)
    waits = rig.submit(8)
    for _ in range(3):
        rig.core.abort(rig.submit(8), 0)
    assert len(rig.core._deadlines) == 2
    rig.step()
    assert list(rig.core._deadlines) == [waits]
    rig.now = 86401.0
    rig.core.expire()
    assert rig.failed().uid == waits and not rig.core._deadlines


@pytest.mark.parametrize(("claimed", "used"), [(64, 64), (60_000_000, MAX_BLOCKS), (2**31, None)])
def test_a_worker_with_room_for_more_blocks_than_are_of_use(claimed: int, used: int | None) -> None:
    """A tiny model on a large device; and no number that a message could not carry."""
    core = Scheduler(EngineArgs(), lambda: 0.0)
    registry = WorkerRegistry(core, 1, lambda: None)
    registry.on_worker("w", Hello("gpu_worker", "w", PROTOCOL, 1))
    registry.to_workers.clear()
    registry.on_worker("w", Loaded(Lease(1, 0, 1), claimed, 128, 1000))
    ((_, answer),) = registry.to_workers
    if used is None:
        assert isinstance(answer, Bye) and not registry.workers
        return
    assert isinstance(answer, Configure) and answer.num_blocks == used
    registry.on_worker("w", Ready(answer.lease))
    assert core.replicas[0].pool.num_blocks == used
