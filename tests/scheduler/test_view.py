"""What people who look inside are shown, and that nothing is kept for them while nobody does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scheduler_house import House

from quire.proto.codec import encode, i32
from quire.proto.hashing import hash_blocks
from quire.proto.messages import GetView, Heartbeat, Lease, Running, StepResult, Submit, View
from quire.proto.messages.view import CACHED, CELLS, FREE, SHARED, USED
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.view import runs
from quire.scheduler.watch import KEPT_S, NEWEST, Watch

SIZE = 8


@pytest.fixture
def house() -> House:
    found = House()
    found.hello("d1")
    found.hello("f1", "frontend")
    return found


def view(house: House, since: int = 0) -> View:
    house.members.on_front("f1", GetView(7, since))
    (found,) = house.told("f1", View)
    assert found.token == 7
    return found


def submit(house: House, uid: int, prompt: list[int], max_tokens: int = 20) -> None:
    ids = i32(prompt)
    work = Generate(SamplingParams(max_tokens=max_tokens), 1)
    house.members.on_front("d1", Submit(uid, 1, ids, b"".join(hash_blocks(ids, SIZE)), work, float(uid)))


def step(house: House, lease: Lease) -> None:
    """The result of the oldest step; the clock moves on by 10 ms."""
    house.registry.plans()
    oldest = house.core.replicas[lease.replica].in_flight[0]
    house.now += 0.01
    tokens = i32([5] * oldest.samples())
    house.registry.on_worker("w1", StepResult(lease, oldest.number, tokens))


def cells(row: Running) -> set[int]:
    pairs = np.frombuffer(row.cells, "<i4").reshape(-1, 2).tolist()
    return {cell for first, count in pairs for cell in range(first, first + count)}


def test_a_view_has_the_queue_the_rows_and_the_workers() -> None:
    house = House(max_num_seqs=1)
    house.hello("d1")
    house.hello("f1", "frontend")
    lease = house.worker("w1")
    house.registry.on_worker("w1", Heartbeat(memory=3 << 30))
    submit(house, 1, list(range(20)))
    submit(house, 2, list(range(9)))
    house.registry.plans()
    found = view(house)
    (row,), (waiting,), (worker,) = found.running, found.waiting, found.workers
    assert (row.uid, row.replica, row.phase, row.prompt, row.total) == (1, lease.replica, "decode", 20, 20)
    assert (waiting.uid, waiting.prompt, waiting.arrival) == (2, 9, 2.0)
    assert (worker.info.worker, worker.phase, worker.resident) == ("w1", "ready", 3 << 30)
    assert (found.stats.running, found.stats.waiting) == (1, 1)


def test_a_shared_prefix_is_shared_in_the_map_and_stays_cached(house: House) -> None:
    lease = house.worker("w1")
    prompt = list(range(2 * SIZE + 3))
    submit(house, 1, prompt)
    step(house, lease)
    submit(house, 2, prompt)
    house.registry.plans()
    house.now += 1
    found = view(house)
    (blocks,) = found.maps
    first, second = (cells(row) for row in found.running)
    assert first & second == {cell for cell, state in enumerate(blocks.cells) if state == SHARED}
    assert len(first & second) == 2 and (blocks.shared, blocks.used) == (2, 4)
    assert {blocks.cells[cell] for cell in first ^ second} == {USED}
    for uid in (1, 2):
        house.core.drop(house.core.requests[uid])
    house.now += 1
    (blocks,) = view(house).maps
    assert (blocks.used, blocks.cached) == (0, 2) and sorted(blocks.cells)[-3:] == [FREE, CACHED, CACHED]


def test_steps_are_kept_only_while_somebody_asks(house: House) -> None:
    lease = house.worker("w1")
    submit(house, 1, list(range(10)))
    step(house, lease)
    assert house.core.watch is None
    assert view(house).steps == []
    step(house, lease)
    (entry,) = view(house).steps
    assert (entry.kind, entry.prefill, entry.decodes, entry.replica) == ("step", 0, 1, lease.replica)
    assert entry.seconds > 0 and view(house, since=entry.number).steps == []
    submit(house, 2, list(range(100, 110)))
    step(house, lease)  # planned before
    step(house, lease)
    assert [(each.prefill, each.decodes) for each in view(house, since=entry.number).steps] == [(0, 1), (10, 1)]
    house.registry.gone("w1", "is gone")
    house.worker("w2")
    loss, join = view(house).steps[-2:]
    assert (loss.kind, loss.requeued, join.kind) == ("loss", 2, "join")
    assert len(view(house, since=10**9).steps) == 5  # of a scheduler before this one
    house.later(KEPT_S + 1)
    assert house.core.watch is None and house.members.views._view is None


def test_a_view_is_made_once_for_all_who_ask(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = house.members.views._make
    monkeypatch.setattr(house.members.views, "_make", lambda *given: made.append(1) or make(*given))
    house.worker("w1")
    view(house)
    view(house)
    assert len(made) == 1
    house.now += 0.5
    view(house)
    assert len(made) == 2


def test_large_pools_are_folded_and_answers_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(max_num_seqs=256, max_num_batched_tokens=8192)
    house.hello("d1")
    house.hello("f1", "frontend")
    lease = house.worker("w1", blocks=10 * CELLS + 1)
    for uid in range(300):
        submit(house, uid, list(range(uid, uid + 40)))
    step(house, lease)
    for _ in range(NEWEST + 20):
        view(house)
        house.core.watch.event("join", 0, house.now)
    house.now += 1
    found = view(house)
    (blocks,) = found.maps
    assert (blocks.fold, len(blocks.cells)) == (11, -(-(10 * CELLS + 1) // 11)) and blocks.used > 256
    assert blocks.cells.count(USED) + blocks.cells.count(SHARED) >= blocks.used // 11
    assert len(found.steps) == NEWEST and len(encode(found)) < 128 * 1024


def test_what_seldom_happens_is_told_however_many_steps_follow() -> None:
    watch = Watch(0, 0, 0)
    nothing: Any = SimpleNamespace(decodes=[], verifications=[], searches=[], chunks=[])
    watch.event("loss", 0, 0.0)
    for at in range(2 * NEWEST):
        watch.step(0, nothing, 0.0, 0.1, preemptions=int(at > 5), recomputed=0)
    found = watch.since(0)
    assert [each.number for each in found] == [1, 8, *range(2 * NEWEST + 1 - (NEWEST - 3), 2 * NEWEST + 2)]
    assert [each.number for each in watch.since(2 * NEWEST)] == [2 * NEWEST + 1]


def test_runs_and_states() -> None:
    assert np.frombuffer(runs(np.array([1, 2, 3, 7, 9, 10], np.int32)), "<i4").tolist() == [1, 3, 7, 1, 9, 2]
    assert runs(np.array([], np.int32)) == b""
    pool = BlockPool(4)
    kept, held, twice = pool.allocate_many(3)
    pool.register(kept, b"x" * 16)
    pool.release(kept)
    pool.share(twice)
    states = pool.states()
    assert [states[block] for block in (kept, held, twice)] == [CACHED, USED, SHARED] and states.sum() == 6
