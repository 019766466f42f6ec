"""Blocks of one replica that are kept outside of its device's cache, in its worker's host memory and on its disk.

The worker keeps bytes; which block is where, which place is given to another, and what is loaded for whom is decided
here. A block is offered to the tiers when nobody holds it any more, and again where it is about to be overwritten and
is not there yet. What somebody in line begins with is loaded into blocks that are held here until its first step, and
registered in the prefix cache when it is there: so to all others a loaded block is a cached one.

Everything here dies with the lease. A room above the sequences and below the replicas.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..proto.codec import BadFrame, from_i32, i8, i32
from ..proto.hashing import HASH_SIZE
from ..proto.messages import Lease, Move, Moved, TierStats
from .block_pool import BlockPool
from .request import Sequence, State

MAX_LOADS = 16
"""Sequences whose blocks are on their way at once, so that the worker's queue is short."""

MEASURED_AGAIN = 8
"""Of so many loads that would take longer than to compute, one is made: it may have been slow for a while only."""
WAITS, SURE = 16, 3
"""Loads of which the shortest says how long any load takes beside its blocks, and how many say nothing yet."""


class Sizes(NamedTuple):
    """What a worker said in Tiers."""

    slots: int
    disk: bool
    block_bytes: int
    block_size: int  # tokens


class Load:
    """Blocks on their way for a sequence in line: ``blocks`` are all that it holds of the pool for it, those that were
    cached before included; of the last ``len(hashes)`` the contents come."""

    __slots__ = ("asked_at", "blocks", "coming", "generation", "hashes", "seq", "slots")

    def __init__(self, seq: Sequence, blocks: list[int], hashes: list[bytes], slots: list[int], now: float):
        self.seq, self.generation = seq, seq.generation
        self.blocks, self.hashes, self.slots = blocks, hashes, slots
        self.coming, self.asked_at = True, now

    @property
    def wanted(self) -> bool:
        """Its sequence still waits."""
        return self.seq.state is State.WAITING and self.seq.generation == self.generation


class Tier:
    """What a replica's worker keeps. ``take`` hands over what is to be moved."""

    def __init__(self, sizes: Sizes, counts: TierStats, clock: Callable[[], float]):
        self.sizes, self.counts, self._clock = sizes, counts, clock
        self.host: dict[bytes, int] = {}  # hash -> slot, the one that was used longest ago first
        self.disk: set[bytes] = set()
        self.free_slots = array("i", range(sizes.slots - 1, -1, -1))
        self.pinned: dict[int, int] = {}  # slot -> loads that read it
        self.loads: dict[int, Load] = {}  # on their way, by the number of their Move
        self.held: dict[tuple, Load] = {}  # by the key of their sequence: on their way, or there
        self.on_their_way: set[bytes] = set()  # hashes; whoever begins with the same blocks waits for these
        self._filling: dict[bytes, int] = {}  # hash -> slot that is being written
        self._writing: set[bytes] = set()  # on their way to disk
        self._stores: dict[int, list[bytes]] = {}  # asked for, by number
        self._offered: list[tuple[int, int, bool, bytes]] = []  # block, slot, whether to disk, hash
        self._moves: list[Move] = []
        self._number = self._refused = 0
        self.load_s = self.disk_s = self.token_s = 0.0
        self._waits: deque[float] = deque(maxlen=WAITS)  # what loads took beside their blocks

    # -- stores

    def offer(self, block: int, block_hash: bytes) -> None:
        """``block`` holds this and may be overwritten by any later plan: keep it where it is not kept yet."""
        to_disk = self.sizes.disk and block_hash not in self.disk and block_hash not in self._writing
        slot = -1
        if block_hash in self.host:
            self._touch(block_hash)
        elif self.sizes.slots and block_hash not in self._filling:
            slot = self._place()
        if slot < 0 and not to_disk:
            return
        if slot >= 0:
            self._filling[block_hash] = slot
            self.counts.host_store_bytes += self.sizes.block_bytes
        if to_disk:
            self._writing.add(block_hash)
        self._offered.append((block, slot, to_disk, block_hash))

    def _touch(self, block_hash: bytes) -> None:
        """It was used now."""
        self.host[block_hash] = self.host.pop(block_hash)

    def _place(self) -> int:
        """A slot for one more block: a free one, or that of the block that was used longest ago; -1: all are in use."""
        if self.free_slots:
            return self.free_slots.pop()
        for block_hash, slot in self.host.items():
            if slot not in self.pinned:
                del self.host[block_hash]
                self.counts.host_evictions += 1
                return slot
        return -1

    # -- loads

    def find(self, pool: BlockPool, hashes: list[bytes], first: int, limit: int) -> int:
        """How many of ``hashes`` from ``first`` on, before ``limit``, are kept here and not in ``pool``, one after
        another."""
        at, host, disk = first, self.host, self.disk
        while at < limit and ((wanted := hashes[at]) in host or wanted in disk) and not pool.holds(wanted):
            at += 1
        return at - first

    def worth(self, hashes: list[bytes], block_size: int) -> int:
        """How many of these blocks, from the first on, are loaded sooner than computed, by what was measured: seconds
        for each block and token by the worker, and here how long a load takes at least beside that."""
        if not self.token_s:
            return len(hashes)
        spent, best, found = min(self._waits) if len(self._waits) >= SURE else 0.0, 0.0, 0
        for count, block_hash in enumerate(hashes, 1):
            spent += (self.load_s if block_hash in self.host else self.disk_s) - self.token_s * block_size
            if spent <= best:
                best, found = spent, count
        return found

    def measure_again(self) -> bool:
        """Loads are not worth it, by what was measured: of some of them it is measured again all the same."""
        self._refused += 1
        return self._refused % MEASURED_AGAIN == 0

    def begin(self, lease: Lease, pool: BlockPool, seq: Sequence, cached: list[int], hashes: list[bytes]) -> None:
        """Load ``hashes``, which follow the ``cached`` blocks of ``seq``, into blocks of their own."""
        slots = [self.host.get(block_hash, -1) for block_hash in hashes]
        for block_hash, slot in zip(hashes, slots, strict=True):
            if slot >= 0:  # and stays there, whatever the blocks that are taken next have to be kept
                self._touch(block_hash)
                self.pinned[slot] = self.pinned.get(slot, 0) + 1
        for block in cached:
            pool.share(block)
        before = self.held.get(seq.key)
        if before is not None and not before.coming:
            self._let_go(pool, before)
        blocks = pool.allocate_many(len(hashes))  # what these held is offered before
        self._pack_stores(lease)
        self._number += 1
        load = self.loads[self._number] = self.held[seq.key] = Load(seq, cached + blocks, hashes, slots, self._clock())
        self.on_their_way.update(hashes)
        self._moves.append(
            Move(lease, self._number, load_blocks=i32(blocks), load_slots=i32(load.slots), load_hashes=b"".join(hashes))
        )

    def of(self, seq: Sequence) -> Load | None:
        """The load for ``seq``, on its way or there."""
        load = self.held.get(seq.key)
        return load if load is not None and load.wanted and load.seq is seq else None

    def coming(self, seq: Sequence) -> bool:
        """Blocks for ``seq`` are on their way."""
        load = self.of(seq)
        return load is not None and load.coming

    def started(self, pool: BlockPool, tokens: int) -> None:
        """A sequence has left the line and computes so many of its tokens: what was held for it it holds itself."""
        self.counts.queries += tokens
        self.settle(pool)

    def settle(self, pool: BlockPool) -> None:
        """Give up what is held for those who wait no more."""
        for load in [load for load in self.held.values() if not load.coming and not load.wanted]:
            self._let_go(pool, load)

    def make_room(self, pool: BlockPool, but: Sequence | None = None) -> bool:
        """Somebody needs blocks: give up those that are held for others in line, who may still find them. False where
        there are none."""
        idle = [load for load in self.held.values() if not load.coming and load.seq is not but]
        for load in idle:
            self._let_go(pool, load)
        return bool(idle)

    def _let_go(self, pool: BlockPool, load: Load) -> None:
        if self.held.get(load.seq.key) is load:
            del self.held[load.seq.key]
        pool.release_table(load.blocks)

    def tables(self) -> list[list[int]]:
        """The blocks that are held here."""
        held = {id(load): load for load in [*self.held.values(), *self.loads.values()]}
        return [load.blocks for load in held.values()]

    # -- the worker's link

    def take(self, lease: Lease) -> list[Move]:
        """What is to be sent, before any plan that was made since."""
        if self._offered:
            self._pack_stores(lease)
        moves, self._moves = self._moves, []
        return moves

    def _pack_stores(self, lease: Lease) -> None:
        if not self._offered:
            return
        blocks, slots, files, hashes = zip(*self._offered, strict=True)
        self._offered = []
        self._number += 1
        self._stores[self._number] = [h for h, slot in zip(hashes, slots, strict=True) if slot >= 0]
        self._moves.append(Move(lease, self._number, i32(blocks), i32(slots), i8(files), b"".join(hashes)))

    def moved(self, pool: BlockPool, message: Moved) -> None:
        """The worker says what it did. Raises BadFrame where nothing of the kind was asked for."""
        written, lost = _hashes(message.written), _hashes(message.lost)
        failed = from_i32(message.failed)
        load = self.loads.get(message.number)
        if message.number and load is None and message.number not in self._stores:
            raise BadFrame(f"Moved of number {message.number}, which was not asked for")
        if failed and (load is None or any(not 0 <= place < len(load.hashes) for place in failed)):
            raise BadFrame(f"loads {failed[:8]} of Move {message.number} failed, which it does not have")
        for block_hash in self._stores.pop(message.number, ()):
            self.host[block_hash] = self._filling.pop(block_hash)
        if load is not None:
            del self.loads[message.number]
            self._arrived(pool, load, set(failed))
        self.counts.disk_store_bytes += len(self._writing.intersection(written)) * self.sizes.block_bytes
        self._writing.difference_update(written, lost)
        self.disk.update(written)
        self.counts.disk_evictions += len(self.disk.intersection(lost))
        self.disk.difference_update(lost)
        self.load_s, self.disk_s = message.load_s or self.load_s, message.disk_s or self.disk_s
        self.token_s = message.token_s or self.token_s
        if load is not None and not failed:
            on_disk = load.slots.count(-1)
            took = (len(load.slots) - on_disk) * self.load_s + on_disk * self.disk_s
            self._waits.append(max(0.0, self._clock() - load.asked_at - took))

    def _arrived(self, pool: BlockPool, load: Load, failed: set[int]) -> None:
        """Its blocks may be found now, but for those that failed: these are computed."""
        load.coming = False
        self.on_their_way.difference_update(load.hashes)
        blocks, size = load.blocks[len(load.blocks) - len(load.hashes) :], self.sizes.block_bytes
        there = [place for place in range(len(blocks)) if place not in failed]
        for place, (block_hash, slot) in enumerate(zip(load.hashes, load.slots, strict=True)):
            if slot >= 0:
                self._unpin(slot)
            if place in failed:
                self._forget(block_hash, slot)
        tokens = self.sizes.block_size
        from_host = sum(load.slots[place] >= 0 for place in there)
        from_disk = len(there) - from_host
        counts = self.counts
        counts.failed_loads += len(failed)
        counts.queries += tokens * len(there)
        counts.host_hits, counts.disk_hits = (
            counts.host_hits + from_host * tokens,
            counts.disk_hits + from_disk * tokens,
        )
        counts.host_load_bytes += size * from_host
        counts.disk_load_bytes += size * from_disk
        pool.register_many([blocks[place] for place in there], [load.hashes[place] for place in there])
        if failed:  # nor are those behind the first of these found, so nobody can wait for room that they take
            kept = len(load.blocks) - len(load.hashes) + min(failed)
            pool.release_table(load.blocks[kept:])
            del load.blocks[kept:]
        if not load.wanted or self.held.get(load.seq.key) is not load:
            self._let_go(pool, load)

    def _unpin(self, slot: int) -> None:
        self.pinned[slot] -= 1
        if not self.pinned[slot]:
            del self.pinned[slot]

    def _forget(self, block_hash: bytes, slot: int) -> None:
        """It could not be loaded: nobody is to try again."""
        if slot < 0:
            self.disk.discard(block_hash)
        elif self.host.get(block_hash) == slot and slot not in self.pinned:
            del self.host[block_hash]
            self.free_slots.append(slot)

    def forget_cached(self) -> None:
        """What is kept is not found any more, until a worker that begins anew tells of its disk. What is being written
        or read stays."""
        for block_hash, slot in list(self.host.items()):
            if slot not in self.pinned:
                del self.host[block_hash]
                self.free_slots.append(slot)
        self.disk.clear()

    def check_integrity(self) -> str:
        """What does not add up, or ""."""
        slots = [*self.host.values(), *self._filling.values(), *self.free_slots]
        if sorted(slots) != list(range(self.sizes.slots)):
            return f"{len(slots)} places in host memory are accounted for, of {self.sizes.slots}"
        if not set(self.pinned) <= set(self.host.values()):
            return "a place in host memory is read, and holds nothing"
        return ""


def _hashes(column: bytes) -> list[bytes]:
    if len(column) % HASH_SIZE:
        raise BadFrame(f"{len(column)} bytes are no whole number of hashes")
    return [column[at : at + HASH_SIZE] for at in range(0, len(column), HASH_SIZE)]


class TieredPool(BlockPool):
    """A pool whose blocks are offered to ``tier``."""

    def __init__(self, num_blocks: int, caching: bool, tier: Tier):
        super().__init__(num_blocks, caching)
        self.tier = tier

    def allocate_many(self, count: int) -> list[int]:
        """As of any pool. What was not kept yet of these blocks is offered now."""
        block, hash_of = self.num_blocks, self._hash_of
        for _ in range(min(count, self.free_count)):
            block = self._next[block]
            if (block_hash := hash_of[block]) is not None:
                self.tier.offer(block, block_hash)
        return super().allocate_many(count)

    def forget_cached(self) -> None:
        """As of any pool, and so for what is kept elsewhere."""
        super().forget_cached()
        self.tier.forget_cached()

    def release_table(self, blocks: list[int]) -> None:  # type: ignore[override]
        """As of any pool. What nobody holds any more is offered."""
        super().release_table(blocks)
        for block in reversed(blocks):
            if not self.refs[block] and (block_hash := self._hash_of[block]) is not None:
                self.tier.offer(block, block_hash)
