"""What each step reads and changes of the sequences that run at one replica: a column for each thing, an entry a row.

The columns live as long as the replica, and they are the truth about a sequence for as long as it holds a row: a step
of 256 decodes is a handful of array operations on them, and ``Sequence`` reads and writes its own entries. What only
some sequences need in a step (a new block, a full block, an end) is found by comparing columns; everything else about
them stays in their objects.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..proto.codec import BadFrame

Rows = NDArray[np.intp]
"""Numbers of rows, or places in a batch. The type is the one that numpy indexes by, which spares a conversion."""
Ints = NDArray[np.int32]


class Columns:
    """One entry for each of ``num_rows`` rows. Those of a row that nobody holds mean nothing, but for ``left_at``."""

    def __init__(self, num_rows: int, block_size: int):
        # How far it is: see ``request.py``.
        self.computed = np.zeros(num_rows, np.int32)
        self.scheduled = np.zeros(num_rows, np.int32)
        # Two look-ahead caches spare a step the look at every sequence:
        self.horizon = np.zeros(num_rows, np.int32)  # scheduling at or past this position needs a look
        self.milestone = np.zeros(num_rows, np.int32)  # committing this many tokens needs a look
        # Tokens drawn by decodes. The one at position p is in place (p - 1) % block_size; at a milestone, when a block
        # is full and the token after it is drawn, they are fetched, before the next one would take the place of one.
        self.drawn = np.zeros((num_rows, block_size), np.int32)
        self.departures = 0  # how many sequences have left a row
        self.left_at = np.zeros(num_rows, np.int64)  # ``departures`` when one last left this row

    def enter(self, row: int, computed: int) -> None:
        """A sequence takes ``row``, with so much computed."""
        self.computed[row] = computed
        self.scheduled[row] = self.horizon[row] = self.milestone[row] = 0

    def leave(self, row: int) -> None:
        """The sequence in ``row`` gives it up: what a step in flight draws for it counts no more."""
        self.departures += 1
        self.left_at[row] = self.departures

    def schedule(self, rows: Rows, starts: Ints) -> None:
        """One decode of each of ``rows`` is asked for, at ``starts``."""
        self.scheduled[rows] = starts + 1

    def decoded(self, rows: Rows, starts: Ints, tokens: Ints) -> None:
        """The decodes of ``rows`` at ``starts`` are done, and drew ``tokens``."""
        self.drawn[rows, starts % self.drawn.shape[1]] = tokens
        self.computed[rows] = starts + 1

    def fetch_drawn(self, row: int, computed: int, count: int) -> bytes:
        """The last ``count`` tokens that decodes drew, as int32 bytes: a block's at most, up to its milestone."""
        end = (computed - 1) % self.drawn.shape[1] + 1
        return self.drawn[row, end - count : end].tobytes()


class StopIds:
    """The ids below ``vocab_size`` that end some sequence of a replica: a step's tokens are compared with all of them
    at once, and looked at one by one only where there is a hit."""

    def __init__(self, vocab_size: int, of_each: Iterable[frozenset[int]] = ()):
        self._vocab_size = vocab_size
        self._holders: dict[frozenset[int], int] = {}  # how many sequences end by just these ids
        self._ids = np.zeros(0, np.int32)  # of all, in order
        for stops in of_each:
            self.add(stops)

    def add(self, stops: frozenset[int]) -> None:
        """One more sequence ends by each of these."""
        self._holders[stops] = self._holders.get(stops, 0) + 1
        if self._holders[stops] == 1:
            self._sort()

    def remove(self, stops: frozenset[int]) -> None:
        """One sequence less ends by each of these."""
        self._holders[stops] -= 1
        if not self._holders[stops]:
            del self._holders[stops]
            self._sort()

    def among(self, tokens: Ints) -> NDArray[np.bool_]:
        """Which of ``tokens`` are stop ids of somebody."""
        if not self._ids.size:
            return np.zeros(len(tokens), np.bool_)
        nearest = self._ids.take(self._ids.searchsorted(tokens), mode="clip")
        return nearest == tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StopIds) and self._holders == other._holders

    def _sort(self) -> None:
        stops = frozenset[int]().union(*self._holders)
        self._ids = np.array(sorted(stop for stop in stops if 0 <= stop < self._vocab_size), np.int32)


def as_u32(column: bytes) -> NDArray[np.uint32]:
    """A message's column as it is, which cannot be written to. BadFrame if the length is not a multiple of 4."""
    if len(column) % 4:
        raise BadFrame(f"a column of {len(column)} bytes is not a whole number of 4-byte items")
    return np.frombuffer(column, np.uint32)
