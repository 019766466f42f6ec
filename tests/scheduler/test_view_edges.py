"""What a view has of many sequences, workers and blocks, and how often it is made. Its sizes are those that
docs/look-inside.md promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scheduler_house import House

from quire.proto.codec import i32
from quire.proto.messages import Assign, GetView, Lease, Loaded, StepPlan, Submit, View
from quire.proto.messages.view import CELLS, FREE, USED
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler import view as views
from quire.scheduler.fake.page_store import PageStore

KEEP_S = 0.2


def opened(**flags: Any) -> House:
    house = House(**flags)
    house.hello("d1")
    house.hello("f1", "frontend")
    return house


def look(house: House) -> View:
    house.members.on_front("f1", GetView(7, 0))
    (found,) = house.told("f1", View)
    return found


def submit(house: House, *uids: int, prompt: int = 3, **params: Any) -> None:
    for uid in uids:
        ids = i32(list(range(uid, uid + prompt)))
        work = Generate(SamplingParams(**{"max_tokens": 20, **params}), 1)
        house.members.on_front("d1", Submit(uid, 1, ids, b"", work, float(uid)))


def run(house: House, lease: Lease, store: PageStore, steps: int) -> None:
    """So many steps of ``w1``, with what its model gives."""
    for _ in range(steps):
        (plan,) = house.plans("w1")
        assert isinstance(plan, StepPlan)
        house.now += 0.001
        house.core.commit(house.core.replicas[lease.replica], store.run(plan))


def cells(held: bytes) -> set[int]:
    pairs = np.frombuffer(held, "<i4").reshape(-1, 2).tolist()
    return {cell for first, count in pairs for cell in range(first, first + count)}


def fill(house: House, workers: int) -> None:
    """So many workers come one after the other, each with sequences for all its rows."""
    rows = house.core.config.max_num_seqs
    for number in range(workers):
        house.worker(f"w{number}", blocks=4 * rows)
        submit(house, *range(number * rows, (number + 1) * rows))
        house.registry.plans()


# ---------------------------------------------------------------- how many


def test_of_one_worker_128_rows_and_64_in_line_are_told() -> None:
    house = opened(max_num_seqs=140, max_num_batched_tokens=8192)
    house.worker("w1", blocks=400)
    submit(house, *range(300, 100, -1))
    house.plans("w1")
    found = look(house)
    assert (found.stats.running, found.stats.waiting) == (140, 60) and len(found.waiting) == 60
    assert [row.uid for row in found.running] == list(range(101, 229))  # those that came first
    submit(house, *range(400, 410))
    house.now += KEEP_S
    assert [seq.uid for seq in look(house).waiting] == [*range(241, 301), *range(400, 404)]


def test_many_workers_share_the_rows_and_some_have_maps() -> None:
    house = opened(max_num_seqs=2)
    fill(house, 66)
    found = look(house)
    assert found.stats.running == 132
    assert [row.replica for row in found.running] == list(range(66))  # one of each
    assert [worker.info.replica for worker in found.workers] == list(range(64))
    assert [blocks.replica for blocks in found.maps] == list(range(16))


def test_two_workers_have_half_of_the_rows_each() -> None:
    house = opened(max_num_seqs=70, max_num_batched_tokens=8192)
    fill(house, 2)
    assert [row.replica for row in look(house).running] == [0] * 64 + [1] * 64


def test_where_many_hold_blocks_the_first_are_found_on_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    house = opened()
    lease = house.worker("w1")
    submit(house, 1, 2, 3, 4, 5, prompt=4)
    house.plans("w1")
    assert house.core.replicas[lease.replica].pool.used == 5
    monkeypatch.setattr(views, "CELL_BYTES", 3 * 8)  # room for three of them
    assert [len(row.cells) for row in look(house).running] == [8, 8, 8, 0, 0]


# ---------------------------------------------------------------- how often


def test_a_view_is_made_anew_after_a_while() -> None:
    house = opened()
    house.worker("w1")
    assert look(house).stats.waiting == 0
    submit(house, 1)
    house.now += 0.9 * KEEP_S
    assert look(house).stats.waiting == 0
    house.now = 100.0 + KEEP_S
    assert look(house).stats.waiting == 1


def test_a_large_pool_is_mapped_seldom_and_for_who_comes_back_at_once() -> None:
    house = opened()
    house.worker("w1", blocks=90_000)  # 0.9 s, of 100,000 blocks a second
    house.plans("w1")

    def used() -> tuple[int, int]:
        found = look(house)
        return found.maps[0].used, found.stats.blocks_used

    assert used() == (0, 0)
    submit(house, 1)
    house.plans("w1")
    house.now = 100.0 + 0.5
    assert used() == (0, 1)  # the rest of it is of now
    house.now = 100.0 + 0.9
    assert used() == (1, 1)
    house.core.drop(house.core.requests[1])
    house.now += 0.5
    assert used() == (1, 0)
    house.members.views.forget()
    assert used() == (0, 0)


# ---------------------------------------------------------------- workers, and their maps


def test_of_a_worker_that_loads_nothing_is_known_yet() -> None:
    house = opened()
    sizes = {"loading": None, "said": 4096, "silent": 0, "wrong": -5}
    for name, size in sizes.items():
        house.hello(name, "gpu_worker")
        (assign,) = house.sent(name, Assign)
        if size is not None:
            house.registry.on_worker(name, Loaded(assign.lease, 64, 128, 1000, block_bytes=size))
    found = {worker.info.worker: worker.block_bytes for worker in look(house).workers}
    assert found == {"loading": 0, "said": 4096, "silent": 0, "wrong": 0}


@pytest.mark.parametrize(("blocks", "fold"), [(CELLS, 1), (CELLS + 1, 2), (2 * CELLS, 2), (2 * CELLS + 1, 3)])
def test_a_cell_stands_for_as_few_neighbours_as_fit(blocks: int, fold: int) -> None:
    house = opened()
    house.worker("w1", blocks=blocks)
    submit(house, 1, prompt=20)
    house.plans("w1")
    found = look(house)
    ((row,), (blocks_of,)) = found.running, found.maps
    assert (blocks_of.blocks, blocks_of.fold, len(blocks_of.cells)) == (blocks, fold, -(-blocks // fold))
    used = {cell for cell, state in enumerate(blocks_of.cells) if state == USED}
    assert cells(row.cells) == used and blocks_of.used == 3
    assert used == {block // fold for block in house.core.requests[1].live[0].blocks}


def test_a_beam_search_holds_the_blocks_of_all_its_beams() -> None:
    house = opened()
    lease = house.worker("w1")
    store = PageStore(8, 64, 8, 1000)
    submit(house, 1, prompt=12, n=3, use_beam_search=True, temperature=0.0)
    run(house, lease, store, 8)
    house.plans("w1")
    found = look(house)
    ((row,), (blocks,)) = found.running, found.maps
    assert row.phase == "beam" and blocks.used > 4
    assert cells(row.cells) == {cell for cell, state in enumerate(blocks.cells) if state != FREE}
