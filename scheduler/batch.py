"""Sequences that decode together, as steps and messages name them. A room above the sequences and below the steps."""

from __future__ import annotations

from bisect import bisect_left
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .columns import Ints, Rows
from .request import Sequence

_key = attrgetter("key")
_FIELDS = 6
"""Of each sequence, as int64 in this order: row, uid, attempt, index, number of its sink in the outbox, tokens of its
prompt."""


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

    It is never changed itself, and steps share it until somebody joins or leaves. ``fields``: _FIELDS by the number of
    sequences.
    """

    def __init__(self, seqs: list[Sequence], fields: NDArray[np.int64]):
        self.seqs, self.fields = seqs, fields
        self.rows: Rows = fields[0]  # theirs
        self._packed = self._numbers = b""
        self._before_output: Ints | None = None
        self._parts: list[Part] = []

    def __len__(self) -> int:
        return len(self.seqs)

    def only(self, which: NDArray[np.bool_]) -> Batch:
        """Some of them."""
        return Batch(list(compress(self.seqs, which.tolist())), self.fields[:, which])

    @property
    def packed(self) -> bytes:
        """The rows, as in a plan."""
        self._packed = self._packed or _i32(self.rows).tobytes()
        return self._packed

    @property
    def numbers(self) -> bytes:
        """0, 1, 2, …, as in a plan."""
        self._numbers = self._numbers or np.arange(len(self.seqs), dtype=np.int32).tobytes()
        return self._numbers

    @property
    def before_output(self) -> Ints:
        """The position from which each draws its first output token."""
        if self._before_output is None:
            self._before_output = _i32(self.fields[5] - 1)
        return self._before_output

    @property
    def parts(self) -> list[Part]:
        """One for each detokenizer."""
        self._parts = self._parts or _divide(self.fields)
        return self._parts

    def place(self, at: int) -> int:
        """Which of its part is the one at this place."""
        if len(self.parts) == 1:
            return at
        sinks = self.fields[4]
        return int(np.count_nonzero(sinks[:at] == sinks[at]))


class Lineup:
    """Those of a replica that go on decoding, in order of their keys. Who joins or leaves moves the others; nothing is
    built anew."""

    def __init__(self, num_rows: int):
        self._seqs: list[Sequence] = []
        self._fields = np.zeros((_FIELDS, num_rows), np.int64)  # theirs, and room for more
        self._batch: Batch | None = None  # what they are now, where somebody asked since they changed

    def batch(self) -> Batch:
        """Who is there now."""
        if self._batch is None:
            self._batch = Batch(self._seqs[:], self._fields[:, : len(self._seqs)].copy())
        return self._batch

    def add(self, seq: Sequence) -> None:
        """``seq`` decodes from here on."""
        seqs, fields, at = self._seqs, self._fields, bisect_left(self._seqs, seq.key, key=_key)
        fields[:, at + 1 : len(seqs) + 1] = fields[:, at : len(seqs)]
        request = seq.request
        fields[:, at] = seq.row, seq.uid, seq.attempt, seq.index, request.sink, request.prompt_len
        seqs.insert(at, seq)
        self._batch = None

    def discard(self, seq: Sequence) -> None:
        """``seq`` leaves, or has nothing left to schedule."""
        seqs, fields, at = self._seqs, self._fields, bisect_left(self._seqs, seq.key, key=_key)
        if at < len(seqs) and seqs[at] is seq:
            fields[:, at : len(seqs) - 1] = fields[:, at + 1 : len(seqs)]
            del seqs[at]
            self._batch = None


NOBODY = Lineup(0).batch()
"""The decodes of a step that has none."""


def _divide(fields: NDArray[np.int64]) -> list[Part]:
    sinks = np.bincount(fields[4]).nonzero()[0].tolist()
    if len(sinks) == 1:
        return [_part(sinks[0], None, fields)]
    places = [np.flatnonzero(fields[4] == sink) for sink in sinks]
    return [_part(sink, at, fields[:, at]) for sink, at in zip(sinks, places, strict=True)]


def _part(sink: int, places: Rows | None, fields: NDArray[np.int64]) -> Part:
    return Part(sink, places, fields[1].tobytes(), _i32(fields[2]).tobytes(), _i32(fields[3]).tobytes())


def _i32(values: NDArray[np.int64]) -> Ints:
    return values.astype(np.int32)
