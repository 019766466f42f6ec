"""Sequences that decode together, as steps and messages name them. A room above the sequences and below the steps."""

from __future__ import annotations

from bisect import bisect_left
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .columns import Columns, Ints, Rows
from .request import NOWHERE, Sequence

_key = attrgetter("key")


class Part(NamedTuple):
    """Those of a batch whose tokens go to one detokenizer, in columns of a TokenBatch."""

    sink: int  # its number in the outbox
    places: Rows | None  # theirs in the batch; None: all
    uids: bytes
    attempts: bytes
    indexes: bytes

    def of(self, column: Ints) -> bytes:
        """What a column of the batch has of them."""
        return (column if self.places is None else column[self.places]).tobytes()


class Batch:
    """The decodes of a step, in order: what does not change while the same sequences go on.

    It is never changed itself, and steps share it until somebody joins or leaves. Whose the rows are is read from the
    columns, so ``parts`` are those of a batch of which nobody has left.
    """

    __slots__ = ("_before_output", "_columns", "_numbers", "_packed", "_parts", "count", "rows", "seqs")

    def __init__(self, columns: Columns, seqs: list[Sequence], rows: Rows):
        self._columns, self.seqs, self.rows, self.count = columns, seqs, rows, len(seqs)
        self._packed = self._numbers = b""
        self._before_output: Ints | None = None
        self._parts: list[Part] = []

    def __len__(self) -> int:
        return self.count

    def only(self, which: NDArray[np.bool_]) -> Batch:
        """Some of them."""
        return Batch(self._columns, list(compress(self.seqs, which.tolist())), self.rows[which])

    @property
    def packed(self) -> bytes:
        """The rows, as in a plan."""
        if not self._packed:
            self._packed = self.rows.astype(np.int32).tobytes()
        return self._packed

    @property
    def numbers(self) -> bytes:
        """0, 1, 2, …, as in a plan."""
        if not self._numbers:
            self._numbers = np.arange(self.count, dtype=np.int32).tobytes()
        return self._numbers

    @property
    def before_output(self) -> Ints:
        """The position from which each draws its first output token."""
        if self._before_output is None:
            self._before_output = self._columns.before_output[self.rows]
        return self._before_output

    @property
    def parts(self) -> list[Part]:
        """One for each detokenizer."""
        if not self._parts:
            self._parts = self._divide()
        return self._parts

    def _divide(self) -> list[Part]:
        sinks = self._columns.sinks[self.rows]
        others = sinks != sinks[0]
        if not others.item(others.argmax()):
            return [self._part(sinks.item(0), None)]
        return [self._part(sink, np.flatnonzero(sinks == sink)) for sink in np.unique(sinks).tolist()]

    def _part(self, sink: int, places: Rows | None) -> Part:
        columns, rows = self._columns, self.rows if places is None else self.rows[places]
        uids, attempts, indexes = columns.uids[rows], columns.attempts[rows], columns.indexes[rows]
        return Part(sink, places, uids.tobytes(), attempts.tobytes(), indexes.tobytes())

    def place(self, at: int) -> int:
        """Which of its part is the one at this place."""
        if len(self.parts) == 1:
            return at
        sinks = self._columns.sinks[self.rows]
        return int(np.count_nonzero(sinks[:at] == sinks[at]))


class Lineup:
    """Those of a replica that go on decoding, in order of their keys. Who joins or leaves moves the others; nothing is
    built anew."""

    def __init__(self, columns: Columns):
        self._columns = columns
        self._seqs: list[Sequence] = []
        self._rows: Rows = np.zeros(len(columns.uids), np.intp)  # theirs, and room for more
        self._now: Rows | None = None  # theirs, where somebody asked since they changed
        self._batch: Batch | None = None  # the same

    def __len__(self) -> int:
        return len(self._seqs)

    def rows(self) -> Rows:
        """Those of all who are there now."""
        if self._now is None:
            self._now = self._rows[: len(self._seqs)].copy()
        return self._now

    def at(self, places: Rows) -> list[Sequence]:
        """Who is there, at these places."""
        return [self._seqs[place] for place in places.tolist()]

    def batch(self) -> Batch:
        """Who is there now."""
        if self._batch is None:
            self._batch = Batch(self._columns, self._seqs[:], self.rows())
        return self._batch

    def add(self, seq: Sequence) -> None:
        """``seq`` decodes from here on."""
        seqs, rows, at = self._seqs, self._rows, len(self._seqs)
        if seqs and seq.key < seqs[-1].key:  # most come last
            at = bisect_left(seqs, seq.key, key=_key)
            rows[at + 1 : len(seqs) + 1] = rows[at : len(seqs)]
        rows[at] = seq.row
        seqs.insert(at, seq)
        self._now = self._batch = None

    def discard(self, seq: Sequence) -> None:
        """``seq`` leaves, or has nothing left to schedule."""
        seqs, rows, at = self._seqs, self._rows, bisect_left(self._seqs, seq.key, key=_key)
        if at < len(seqs) and seqs[at] is seq:
            rows[at : len(seqs) - 1] = rows[at + 1 : len(seqs)]
            del seqs[at]
            self._now = self._batch = None


NOBODY = Lineup(NOWHERE).batch()
"""The decodes of a step that has none."""
