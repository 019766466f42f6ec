"""How far the keys and values of a drafting model reach in each row, and in which blocks they are whole.

They lie in pages of their own under the block tables of the target, so a block that the prefix cache hands to another
sequence brings the drafting model's keys and values with it, where there were any: a drafting model may be behind the
target, which draws without it. So each block remembers whether it was filled since its content last changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TOGETHER = 64
"""Steps whose new blocks are looked at together, at most."""


class Reach:
    """Of ``max_rows`` rows with blocks of ``block_size`` tokens, of which there are ``num_blocks``.

    ``computed`` [max_rows] int64: so many leading positions of each row have keys and values.
    """

    def __init__(self, max_rows: int, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.computed = np.zeros(max_rows, np.int64)
        self._seen = np.zeros(max_rows, np.int64)  # leading blocks of each table that were looked at
        self._fresh = np.ones(max_rows, bool)  # rows that have not run since they were admitted
        self._filled = np.zeros(num_blocks, bool)
        self._given: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # see ``given``: not yet looked at

    def admit(self, row: int) -> None:
        """``row`` begins anew: what it has is known when it first runs."""
        self._settle()
        self.computed[row] = self._seen[row] = 0
        self._fresh[row] = True

    def fork(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Rows ``dst`` become what rows ``src`` are."""
        self._settle()
        for array in (self.computed, self._seen, self._fresh):
            array[list(dst)] = array[list(src)]

    def copy_blocks(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Blocks ``dst`` have become copies of blocks ``src``."""
        self._settle()
        self._filled[dst] = self._filled[src]

    def written(self, blocks: Sequence[int]) -> None:
        """The target's pages of ``blocks`` came from elsewhere."""
        self._settle()
        self._filled[list(blocks)] = False

    def reset(self) -> None:
        """Nothing is known of any row or block."""
        self._given.clear()
        self.computed[:] = self._seen[:] = 0
        self._fresh[:] = True
        self._filled[:] = False

    def ran(self, rows: np.ndarray, starts: np.ndarray, tables: np.ndarray, blocks: np.ndarray) -> None:
        """The target runs ``rows`` from positions ``starts`` on: blocks that are new to their rows hold nothing yet,
        but for those that came with a cached prefix.

        Args:
            rows, starts: int64 [R].
            tables: int32 [max_rows, max_blocks], the block tables.
            blocks: int64 [max_rows], how many leading entries of each table are set.
        """
        self._settle()
        changed = blocks[rows] > self._seen[rows]
        if np.count_nonzero(changed):
            for row, start in zip(rows[changed].tolist(), starts[changed].tolist(), strict=True):
                self.grown(row, start, tables, blocks.item(row))

    def given(self, rows: np.ndarray, slots: np.ndarray, blocks: np.ndarray) -> None:
        """``ran`` of rows that ran before, whose tables have new ``blocks`` at ``slots``; int64 [N] each."""
        # While many rows decode nobody asks, so that those of many steps are looked at together.
        self._given.append((rows, slots, blocks))
        if len(self._given) == TOGETHER:
            self._settle()

    def _settle(self) -> None:
        if self._given:
            rows, slots, blocks = (np.concatenate(column) for column in zip(*self._given, strict=True))
            self._given.clear()
            new = (slots >= self._seen[rows]) & ~self._fresh[rows]
            self._filled[blocks[new]] = False
            np.maximum.at(self._seen, rows[new], slots[new] + 1)

    def grown(self, row: int, start: int, tables: np.ndarray, count: int) -> None:
        """``ran`` of one row, which has ``count`` blocks."""
        self._settle()
        first = self._seen.item(row)
        if count <= first:
            return
        if self._fresh.item(row):
            first, self._fresh[row] = start // self.block_size, False
            whole = self._filled[tables[row, :first]]
            leading = first if whole.all() else int(whole.argmin())
            self.computed[row] = leading * self.block_size
        self._filled[tables[row, first:count]] = False
        self._seen[row] = count

    def advance(self, row: int, end: int, tables: np.ndarray) -> None:
        """``reached`` of one row."""
        self._settle()
        before, whole = self.computed.item(row) // self.block_size, end // self.block_size
        self.computed[row] = end
        if whole > before:
            self._filled[tables[row, before:whole]] = True

    def reached(self, rows: np.ndarray, ends: np.ndarray, tables: np.ndarray) -> None:
        """``rows`` have keys and values of all tokens before ``ends``, which are known tokens; int64 [R] each."""
        self._settle()
        before = self.computed[rows] // self.block_size
        self.computed[rows] = ends
        whole = ends // self.block_size
        for at in np.flatnonzero(whole > before).tolist():
            self._filled[tables[rows[at], before[at] : whole[at]]] = True
