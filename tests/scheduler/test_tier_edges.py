"""What a worker keeps outside of its device: which block gives way, what is counted, and when a load is held."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig

from quire.proto.codec import BadFrame, from_i8, from_i32, i32
from quire.proto.messages import Lease, Move, Moved, TierStats
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.request import Sequence, State
from quire.scheduler.tiers import MEASURED_AGAIN, SURE, WAITS, Sizes, Tier, TieredPool

LEASE, SIZE = Lease(1, 0, 7), 8


class Kept:
    """A tier, and the pool of its replica."""

    def __init__(self, slots: int = 4, disk: bool = False, blocks: int = 20):
        self.now = 0.0
        self.tier = Tier(Sizes(slots, disk, 64, SIZE), TierStats(), lambda: self.now)
        self.pool = TieredPool(blocks, True, self.tier)
        self.held: list[list[int]] = []  # blocks of those who run

    @property
    def counts(self) -> TierStats:
        return self.tier.counts

    def store(self, *names: bytes) -> Move:
        """These were in the device's cache, and are kept now."""
        for block, name in enumerate(names):
            self.tier.offer(block, name)
        (move,) = self.tier.take(LEASE)
        self.moved(number=move.number, written=b"".join(names) if self.tier.sizes.disk else b"")
        return move

    def moved(self, **values: object) -> None:
        self.tier.moved(self.pool, Moved(LEASE, **values))
        assert not self.tier.check_integrity()
        self.pool.check_integrity([*self.tier.tables(), *self.held])

    def begin(self, seq: Sequence, *names: bytes, cached: tuple[int, ...] | list[int] = ()) -> Move:
        self.tier.begin(LEASE, self.pool, seq, list(cached), list(names))
        return self.tier.take(LEASE)[-1]


def name(number: int) -> bytes:
    return bytes([number]) * 16


NAMES = [name(number) for number in range(8)]


def waiting(count: int = 1) -> list[Sequence]:
    rig = Rig()
    for _ in range(count):
        rig.submit(40)
    return list(rig.core.queue)


# ---------------------------------------------------------------- stores


def test_a_block_goes_to_the_tiers_that_lack_it() -> None:
    kept = Kept(slots=2, disk=True)
    move = kept.store(*NAMES[:2])
    assert move == Move(LEASE, 1, i32([0, 1]), i32([0, 1]), bytes([1, 1]), NAMES[0] + NAMES[1])
    assert (kept.counts.host_store_bytes, kept.counts.disk_store_bytes) == (128, 128)
    kept.moved(lost=NAMES[0])
    kept.tier.offer(5, NAMES[0]), kept.tier.offer(6, NAMES[0])  # the second time it is on its way
    (move,) = kept.tier.take(LEASE)
    assert (from_i32(move.store_blocks), from_i32(move.store_slots), from_i8(move.store_files)) == ([5], [-1], [1])
    assert kept.counts.disk_evictions == 1 and kept.counts.host_store_bytes == 128
    kept.moved(number=move.number, lost=NAMES[0] + NAMES[7])  # it could not be written
    assert kept.counts.disk_evictions == 1 and kept.counts.disk_store_bytes == 128
    kept.moved(written=NAMES[6])  # a file of before: nobody wrote it for us
    assert kept.counts.disk_store_bytes == 128 and kept.tier.find(kept.pool, NAMES[5:], 1, 2) == 1


def test_without_host_memory_and_disk_nothing_is_asked() -> None:
    kept = Kept(slots=0)
    kept.tier.offer(0, NAMES[0])
    assert kept.tier.take(LEASE) == []
    kept = Kept(slots=1)
    kept.tier.offer(0, NAMES[0]), kept.tier.offer(1, NAMES[0]), kept.tier.offer(2, NAMES[1])
    (move,) = kept.tier.take(LEASE)  # one place, which is being written
    assert (from_i32(move.store_blocks), from_i8(move.store_files)) == ([0], [0])
    assert kept.counts.host_evictions == 0


def test_the_place_of_a_block_that_is_being_read_is_not_given_away() -> None:
    kept, (seq, other) = Kept(slots=2), waiting(2)
    kept.store(*NAMES[:2])
    first = kept.begin(seq, NAMES[0])
    second = kept.begin(other, NAMES[0])
    assert kept.store(NAMES[2]).store_slots == i32([1])
    kept.moved(number=first.number)
    kept.tier._touch(NAMES[2])
    assert kept.store(NAMES[3]).store_slots == i32([1])  # somebody still reads the other
    kept.moved(number=second.number)
    assert kept.store(NAMES[4]).store_slots == i32([0]) and kept.counts.host_evictions == 3


def test_a_pool_offers_what_is_handed_out_and_what_is_let_go() -> None:
    kept = Kept(slots=4, blocks=3)
    blocks = kept.pool.allocate_many(3)
    kept.pool.register_many(blocks[:2], NAMES[:2])
    kept.pool.share(blocks[0])
    kept.pool.release_table(blocks)
    (move,) = kept.tier.take(LEASE)
    assert move.store_hashes == NAMES[1]  # one is held still, one has no name
    kept.held = [blocks[:1]]
    kept.moved(number=move.number)
    kept.pool.release_table(kept.held.pop())
    (move,) = kept.tier.take(LEASE)
    assert move.store_hashes == NAMES[0]
    kept.moved(number=move.number)
    for known in NAMES[:2]:
        kept.tier.free_slots.append(kept.tier.host.pop(known))
    kept.held = [kept.pool.allocate_many(2)]
    (move,) = kept.tier.take(LEASE)
    assert move.store_hashes == NAMES[1]  # of those that are overwritten now
    kept.moved(number=move.number)
    kept.pool.allocate_many(1)
    assert [move.store_hashes for move in kept.tier.take(LEASE)] == [NAMES[0]]


# ---------------------------------------------------------------- loads


def test_what_a_load_is_and_what_it_leaves() -> None:
    kept, (seq,) = Kept(slots=3, disk=True), waiting()
    kept.store(*NAMES[:2])
    kept.moved(written=NAMES[2])
    cached = kept.pool.allocate_many(1)
    kept.pool.register_many(cached, [NAMES[7]])
    kept.pool.release_table(cached)
    kept.tier.take(LEASE)
    move = kept.begin(seq, *NAMES[:3], cached=cached)
    blocks = from_i32(move.load_blocks)
    assert (from_i32(move.load_slots), move.load_hashes) == ([0, 1, -1], b"".join(NAMES[:3]))
    assert len({*cached, *blocks}) == 4 and kept.tier.tables() == [cached + blocks] and kept.pool.used == 4
    load = kept.tier.of(seq)
    assert load is not None and load.coming and load.wanted and kept.tier.coming(seq)
    assert kept.tier.on_their_way == {*NAMES[:3]}
    kept.tier.settle(kept.pool)
    assert not kept.tier.make_room(kept.pool) and kept.pool.used == 4 and kept.pool.find(NAMES, 9) == []
    kept.moved(number=move.number)
    counts = kept.counts
    assert (counts.queries, counts.host_hits, counts.disk_hits, counts.failed_loads) == (24, 16, 8, 0)
    assert (counts.host_load_bytes, counts.disk_load_bytes) == (128, 64)
    assert kept.pool.find(NAMES[:3], 9) == blocks and not kept.tier.coming(seq) and kept.pool.used == 4
    assert not kept.tier.on_their_way
    kept.tier.settle(kept.pool)
    assert kept.tier.of(seq) is load and not kept.tier.make_room(kept.pool, seq)
    kept.tier.started(kept.pool, 5)
    assert counts.queries == 29 and kept.tier.of(seq) is load
    seq.finish()
    kept.tier.started(kept.pool, 1)
    assert kept.tier.of(seq) is None and kept.tier.tables() == [] and kept.pool.used == 0


def test_room_is_made_by_giving_up_what_is_there_for_others() -> None:
    kept, (first, second, third) = Kept(slots=4), waiting(3)
    kept.store(*NAMES[:3])
    moves = [kept.begin(seq, NAMES[at]) for at, seq in enumerate((first, second, third))]
    for move in moves[:2]:
        kept.moved(number=move.number)
    assert kept.tier.make_room(kept.pool, second)
    assert kept.tier.of(first) is None and kept.tier.of(second) and kept.tier.of(third) and kept.pool.used == 2
    assert kept.tier.make_room(kept.pool) and kept.tier.of(second) is None and kept.pool.used == 1
    assert not kept.tier.make_room(kept.pool)


def test_a_second_load_of_one_sequence_takes_the_place_of_the_first() -> None:
    kept, (seq,) = Kept(slots=4), waiting()
    kept.store(*NAMES[:3])
    kept.moved(number=kept.begin(seq, NAMES[0]).number)
    cached = kept.pool.find(NAMES, 1)
    kept.moved(number=kept.begin(seq, *NAMES[1:3], cached=cached).number)
    (table,) = kept.tier.tables()
    assert table == kept.pool.find(NAMES, 3) and kept.pool.used == 3


def test_a_load_for_one_who_was_preempted_since_is_nobodys() -> None:
    kept, (seq,) = Kept(), waiting()
    kept.store(NAMES[0])
    move = kept.begin(seq, NAMES[0])
    seq.generation += 1
    assert kept.tier.of(seq) is None
    kept.moved(number=move.number)
    assert kept.tier.tables() == [] and kept.pool.used == 0 and kept.pool.find(NAMES, 1)
    assert seq.state is State.WAITING


def test_of_a_load_that_failed_the_places_are_forgotten_and_the_blocks_behind_it_free() -> None:
    kept, (seq, other) = Kept(slots=3, disk=True), waiting(2)
    kept.store(*NAMES[:3])
    kept.moved(written=NAMES[3])
    move, beside = kept.begin(seq, *NAMES[:4]), kept.begin(other, NAMES[0])
    kept.moved(number=move.number, failed=i32([1, 3]))
    assert (kept.counts.failed_loads, kept.counts.host_hits, kept.counts.disk_hits) == (2, 16, 0)
    assert NAMES[1] not in kept.tier.host and NAMES[3] not in kept.tier.disk and NAMES[2] in kept.tier.host
    load = kept.tier.of(seq)
    assert load is not None and load.blocks == from_i32(move.load_blocks)[:1]
    assert kept.pool.find(NAMES, 9) == load.blocks and kept.pool.find(NAMES[2:3], 1) == from_i32(move.load_blocks)[2:3]
    again = kept.begin(seq, NAMES[0])
    kept.moved(number=beside.number, failed=i32([0]))  # somebody else reads it again
    assert NAMES[0] in kept.tier.host
    kept.moved(number=again.number, failed=i32([0]))
    assert NAMES[0] not in kept.tier.host and sorted(kept.tier.free_slots) == [0, 1]


@pytest.mark.parametrize("failed", [[-1], [1], [0, 1]])
def test_only_places_of_the_load_may_have_failed(failed: list[int]) -> None:
    kept, (seq,) = Kept(), waiting()
    kept.store(NAMES[0])
    move = kept.begin(seq, NAMES[0])
    with pytest.raises(BadFrame, match="which it does not have"):
        kept.moved(number=move.number, failed=i32(failed))


# ---------------------------------------------------------------- what is worth a load


def test_what_is_kept_and_not_in_the_pool_one_after_another() -> None:
    kept = Kept(disk=True)
    kept.store(*NAMES[:2])
    kept.moved(written=NAMES[2] + NAMES[3] + NAMES[5])
    assert [kept.tier.find(kept.pool, NAMES, first, 8) for first in range(6)] == [4, 3, 2, 1, 0, 1]
    assert kept.tier.find(kept.pool, NAMES, 0, 3) == 3 and kept.tier.find(kept.pool, NAMES, 3, 3) == 0
    kept.pool.register_many(kept.pool.allocate_many(1), [NAMES[2]])
    assert kept.tier.find(kept.pool, NAMES, 0, 8) == 2


def test_nothing_kept_is_found_once_all_is_forgotten() -> None:
    kept = Kept(disk=True)
    kept.store(*NAMES[:2])
    kept.moved(written=NAMES[2])
    assert kept.tier.find(kept.pool, NAMES, 0, 8) == 3
    kept.pool.forget_cached()
    assert kept.tier.find(kept.pool, NAMES, 0, 8) == 0 and len(kept.tier.free_slots) == 4
    assert not kept.tier.check_integrity()
    kept.store(NAMES[0])
    assert kept.tier.find(kept.pool, NAMES, 0, 8) == 1


def test_what_was_measured_holds_until_it_is_measured_again() -> None:
    kept = Kept()
    kept.moved(load_s=0.5, disk_s=0.25, token_s=0.125)
    kept.moved()
    assert (kept.tier.load_s, kept.tier.disk_s, kept.tier.token_s) == (0.5, 0.25, 0.125)
    kept.moved(load_s=1.0), kept.moved(disk_s=2.0), kept.moved(token_s=3.0)
    assert (kept.tier.load_s, kept.tier.disk_s, kept.tier.token_s) == (1.0, 2.0, 3.0)
    again = [kept.tier.measure_again() for _ in range(2 * MEASURED_AGAIN)]
    assert [at for at, due in enumerate(again, 1) if due] == [MEASURED_AGAIN, 2 * MEASURED_AGAIN]


def waited(kept: Kept, seq: Sequence, seconds: float, *names: bytes, **told: object) -> None:
    """A load of these comes after so long."""
    move = kept.begin(seq, *names)
    kept.now += seconds
    kept.moved(number=move.number, **told)
    kept.tier.make_room(kept.pool)


def test_what_any_load_takes_beside_its_blocks_counts_once_it_is_sure() -> None:
    """The shortest of the last ones; a token is computed in 0.25 s, so a block in 2 s."""
    kept, (seq,) = Kept(disk=True), waiting()
    kept.store(*NAMES[:2])
    kept.moved(written=NAMES[2], load_s=0.5, disk_s=1.0, token_s=0.25)
    for _ in range(SURE - 1):
        waited(kept, seq, 9.0, *NAMES[:3])
    waited(kept, seq, 0.0, *NAMES[:3], failed=i32([2]))  # of one that failed nothing is known
    kept.moved(written=NAMES[2])
    assert kept.tier.worth(NAMES[:1], SIZE) == 1 and list(kept.tier._waits) == [7.0] * (SURE - 1)
    waited(kept, seq, 3.5, *NAMES[:3])  # 2 s of it for the blocks: two from memory and one from disk
    assert [kept.tier.worth(NAMES[:count], SIZE) for count in (1, 2, 3)] == [1, 2, 3]
    waited(kept, seq, 2.0, *NAMES[:3])
    for _ in range(WAITS):
        waited(kept, seq, 4.0, *NAMES[:3])
    assert [kept.tier.worth(NAMES[:count], SIZE) for count in (1, 2, 3)] == [0, 2, 3]
    waited(kept, seq, 0.25, NAMES[0])  # sooner than was measured: nothing beside
    assert list(kept.tier._waits)[-1] == 0.0
    kept.moved(written=NAMES[3])
    waited(kept, seq, 5.0, *NAMES[2:4])  # both from disk
    assert list(kept.tier._waits)[-1] == 3.0


def test_what_a_load_writes_over_is_stored_before() -> None:
    kept, (seq,) = Kept(), waiting()
    kept.store(NAMES[0])
    kept.tier.offer(0, NAMES[5])
    kept.tier.begin(LEASE, kept.pool, seq, [], NAMES[:1])
    store, load = kept.tier.take(LEASE)
    assert (store.number, store.store_hashes) == (2, NAMES[5]) and (load.number, load.load_hashes) == (3, NAMES[0])


def test_what_is_loaded_keeps_its_place_while_room_is_made_for_it() -> None:
    kept = Kept(slots=2, blocks=4)
    kept.store(*NAMES[:2])
    blocks = kept.pool.allocate_many(4)
    kept.pool.register_many(blocks, NAMES[2:6])
    BlockPool.release_table(kept.pool, blocks)  # long ago: host memory has given their places to others since
    (seq,) = waiting()
    move = kept.begin(seq, *NAMES[:2])
    assert from_i32(move.load_slots) == [0, 1] and not kept.tier.disk
    kept.moved(number=move.number)
