"""Blocks of one replica's KV cache: reference counts, the prefix cache, and the order in which free blocks are reused.

A block is free (count 0, in the free list) or held by one or more sequences. A full block whose content is committed
is registered under its chained hash, and keeps the hash while it is free, until it is handed out again: that is the
whole prefix cache. The free list is a doubly linked list threaded through two int arrays, so that a cached block in
its middle is taken out in O(1).

Reuse order, first to last: blocks without a hash (nobody can want them), then hashed ones by time of release. A
sequence releases its tail first, so among equally old blocks the beginnings of prompts live longest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..proto.messages.view import CACHED, SHARED, USED


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold the keys and values of so many tokens."""
    return -(-tokens // block_size)


MANY = 64
"""Blocks up to which a loop is quicker than numpy."""


class PoolError(RuntimeError):
    """The pool's books would not balance: a block released twice, or handed out with none free. Always a bug."""


class BlockPool:
    """``num_blocks`` blocks, numbered from 0. ``caching=False`` turns the prefix cache off."""

    def __init__(self, num_blocks: int, caching: bool = True):
        self.num_blocks = num_blocks
        self.caching = caching
        self.free_count = num_blocks
        self.refs = array("i", bytes(4 * num_blocks))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Links of free blocks; entry num_blocks is the list's head and tail. A held block's links mean nothing.
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._prev = array("i", [num_blocks, *range(num_blocks)])

    @property
    def used(self) -> int:
        """Blocks held by at least one sequence."""
        return self.num_blocks - self.free_count

    def allocate(self) -> int:
        """One block, as by ``allocate_many``."""
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """So many blocks of one's own, their old content forgotten. PoolError when fewer are free: look at
        ``free_count``."""
        if count > self.free_count:
            raise PoolError(f"no free block: {count} are asked for and {self.free_count} left")
        following, hash_of, by_hash, refs = self._next, self._hash_of, self._by_hash, self.refs
        head = block = self.num_blocks
        blocks = []
        for _ in range(count):
            block = following[block]
            blocks.append(block)
            refs[block] = 1
            block_hash = hash_of[block]
            if block_hash is not None:
                del by_hash[block_hash]
                hash_of[block] = None
        after = following[head] = following[block]
        self._prev[after] = head
        self.free_count -= count
        return blocks

    def share(self, block: int) -> None:
        """Hold ``block`` once more; a free one (a cached prefix) leaves the free list."""
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Hold ``block`` once less; at 0 it becomes free and keeps its hash. PoolError where nobody holds it."""
        if self.refs[block] > 1:
            self.refs[block] -= 1
        else:
            self.release_table([block])

    def release_table(self, blocks: Sequence[int]) -> None:
        """Release a sequence's whole table, tail first."""
        hash_of, head = self._hash_of, self.num_blocks
        free = self._free_by_numpy(blocks) if len(blocks) > MANY else self._free(blocks)
        hashes = list(map(hash_of.__getitem__, free))
        plain = hashes.count(None)
        if None in hashes[plain:]:  # not just the tail
            free.sort(key=lambda block: hash_of[block] is not None)
        self._link(free[:plain][::-1], head, self._next[head])  # the last released is the first to be reused
        self._link(free[plain:], self._prev[head], head)

    def find(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """The blocks that hold the longest cached prefix of ``hashes``, ``limit`` at most. Holds nothing yet."""
        blocks: list[int] = []
        by_hash = self._by_hash
        for i in range(min(limit, len(hashes))):
            block = by_hash.get(hashes[i])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block of this content is here."""
        return block_hash in self._by_hash

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these (distinct) blocks are free now, and so cost a free block when shared."""
        refs = self.refs
        return [refs[block] for block in blocks].count(0)

    def register(self, block: int, block_hash: bytes) -> None:
        """Let others find this block, as by ``register_many``."""
        self.register_many([block], [block_hash])

    def register_many(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Let others find these held, full and committed blocks. The first block of a content stays its only one."""
        if not self.caching:
            return
        by_hash, hash_of = self._by_hash, self._hash_of
        for block, block_hash in zip(blocks, hashes, strict=True):
            if by_hash.setdefault(block_hash, block) == block:
                hash_of[block] = block_hash

    def forget_cached(self) -> None:
        """Nothing is found by its hash from now on. Blocks that are held stay."""
        self._by_hash.clear()
        self._hash_of = [None] * self.num_blocks

    def states(self) -> NDArray[np.uint8]:
        """Of each block the state that people are shown: ``proto/messages/view.py`` has them."""
        found, refs = np.zeros(self.num_blocks, np.uint8), _view(self.refs)
        found[np.fromiter(self._by_hash.values(), np.intp, len(self._by_hash))] = CACHED
        found[refs == 1] = USED
        found[refs > 1] = SHARED
        return found

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the books with the block tables of all sequences. PoolError says what is wrong."""
        held = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise PoolError(f"a table holds a block twice: {list(table)}")
            for block in table:
                held[block] += 1
        if held != self.refs.tolist():
            wrong = [(b, self.refs[b], held[b]) for b in range(self.num_blocks) if held[b] != self.refs[b]]
            raise PoolError(f"(block, references counted, tables that hold it): {wrong[:8]}")
        self._check_free_list(held)
        for block, block_hash in enumerate(self._hash_of):
            if block_hash is not None and self._by_hash.get(block_hash) != block:
                raise PoolError(f"block {block} has a hash that leads elsewhere")
        if sum(h is not None for h in self._hash_of) != len(self._by_hash):
            raise PoolError("the hash table names blocks that do not carry its hash")

    def _check_free_list(self, held: list[int]) -> None:
        head = self.num_blocks
        seen, block = 0, self._next[head]
        while block != head and seen <= self.num_blocks:
            if held[block]:
                raise PoolError(f"block {block} is free and held at once")
            if self._prev[self._next[block]] != block:
                raise PoolError(f"the free list is torn at block {block}")
            seen, block = seen + 1, self._next[block]
        if not seen == self.free_count == held.count(0):
            raise PoolError(f"{seen} blocks in the free list, {self.free_count} counted, {held.count(0)} not held")

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.free_count -= 1

    def _free(self, blocks: Sequence[int]) -> list[int]:
        """Hold each once less, the last first. Returns those that nobody holds any more."""
        refs, free = self.refs, []
        for block in reversed(blocks):
            held = refs[block]
            if held == 1:
                refs[block] = 0
                free.append(block)
            elif held:
                refs[block] = held - 1
            else:
                raise PoolError(f"block {block} is released twice")
        return free

    def _free_by_numpy(self, blocks: Sequence[int]) -> list[int]:
        """The same, for many."""
        table, refs = np.array(blocks[::-1], np.int32), _view(self.refs)
        held = refs[table] - 1
        if (held < 0).any():
            raise PoolError(f"block {table[held < 0][0]} is released twice")
        refs[table] = held
        return table[held == 0].tolist()

    def _link(self, blocks: list[int], before: int, after: int) -> None:
        """Put ``blocks`` into the free list, between two that are neighbours there."""
        self.free_count += len(blocks)
        if len(blocks) > MANY:
            chain = np.array([before, *blocks, after], np.int32)
            _view(self._next)[chain[:-1]] = chain[1:]
            _view(self._prev)[chain[1:]] = chain[:-1]
            return
        following, previous = self._next, self._prev
        for block in blocks:
            following[before], previous[block] = block, before
            before = block
        following[before], previous[after] = after, before


def _view(column: array[int]) -> NDArray[np.int32]:
    return np.frombuffer(column, np.int32)
