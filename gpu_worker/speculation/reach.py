"""How far the keys and values of a drafting model reach in each row, and in which blocks they are whole.

They lie in pages of their own under the block tables of the target, so a block that the prefix cache hands to another
sequence brings the drafting model's keys and values with it, where there were any: a drafting model may be behind the
target, which draws without it. So each block remembers whether it was filled since its content last changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Ints = np.ndarray | list[int]

TOGETHER = 64
"""Steps whose new blocks are marked together, at most."""


class Reach:
    """Of ``max_rows`` rows with blocks of ``block_size`` tokens, of which there are ``num_blocks``.

    ``computed`` [max_rows] int64: so many leading positions of each row have keys and values.
    """

    def __init__(self, max_rows: int, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.computed = np.zeros(max_rows, np.int64)
        self._fresh = np.zeros(max_rows, bool)  # rows that have not run since they were admitted
        self._waits = False  # some row is so
        self._filled = np.zeros(num_blocks, bool)
        self._given: list[np.ndarray] = []  # blocks that hold nothing, as far as it is not in ``_filled`` yet

    def admit(self, rows: list[int]) -> None:
        """``rows`` begin anew: what they have is known when they first run."""
        self.computed[rows] = 0
        self._fresh[rows] = self._waits = True

    def drop(self, rows: list[int]) -> None:
        """``rows`` are nobody's."""
        if self._waits:
            self._fresh[rows] = False

    def fork(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Rows ``dst`` become what rows ``src`` are."""
        for array in (self.computed, self._fresh):
            array[list(dst)] = array[list(src)]

    def written(self, blocks: Sequence[int]) -> None:
        """The target's pages of ``blocks`` came from elsewhere."""
        self._filled[list(blocks)] = False

    def given(self, rows: np.ndarray, blocks: np.ndarray) -> None:
        """The tables of ``rows`` have ``blocks`` that were not in them, int64 [N] each. Those of a row that has run
        before hold nothing yet."""
        # While many rows decode nobody asks, so that those of many steps are marked together.
        self._given.append(blocks[~self._fresh[rows]] if self._waits else blocks)
        if len(self._given) == TOGETHER:
            self._settle()

    def _settle(self) -> None:
        if self._given:
            self._filled[np.concatenate(self._given)] = False
            self._given.clear()

    def ran(self, rows: Ints, starts: Ints, tables: np.ndarray, blocks: np.ndarray) -> None:
        """The target runs ``rows`` from positions ``starts`` on. A row's first run is behind the prefix that it found
        in the cache: of that it has what is whole in its blocks; the others hold nothing yet.

        Args:
            rows, starts: [R].
            tables: int32 [max_rows, max_blocks], the block tables.
            blocks: int64 [max_rows], how many leading entries of each table are set.
        """
        if not self._waits:
            return
        begun = np.flatnonzero(self._fresh[rows])
        if len(begun):
            self._settle()
            first = np.asarray(rows)[begun]
            self._fresh[first] = False
            self._begin(first, np.asarray(starts)[begun] // self.block_size, tables, blocks[first])
        self._waits = bool(self._fresh.any())

    def _begin(self, rows: np.ndarray, found: np.ndarray, tables: np.ndarray, counts: np.ndarray) -> None:
        """Of their ``counts`` blocks ``rows`` have found so many in the cache."""
        slots = np.arange(counts.max())
        table, cached = tables[rows, : len(slots)], slots < found[:, None]
        self.computed[rows] = self.block_size * np.logical_and.accumulate(cached & self._filled[table], 1).sum(1)
        self._filled[table[~cached & (slots < counts[:, None])]] = False

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
