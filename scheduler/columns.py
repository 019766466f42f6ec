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
_ONE = np.ones(1, np.int32)
"""Added in place of 1, which numpy would have to make an array of each time."""
_NO_ROWS: Rows = np.zeros(0, np.intp)


class Positions:
    """For each row how many of its tokens have come so far.

    Rows that go on together are one array, which each of their steps replaces by the next. It is written back to the
    column only when somebody asks for one of its rows, or other rows go on.
    """

    def __init__(self, num_rows: int):
        self._at = np.zeros(num_rows, np.int32)
        self._rows: Rows = _NO_ROWS  # those that go on together
        self._now: Ints | None = None  # where they are, as long as the column does not say so

    def __getitem__(self, row: int) -> int:
        """Where one row is."""
        self._write_back()
        return self._at.item(row)

    def __setitem__(self, row: int, position: int) -> None:
        self._write_back()
        self._at[row], self._rows = position, _NO_ROWS

    def of(self, rows: Rows) -> Ints:
        """Where these are."""
        if self._now is not None and rows is self._rows:
            return self._now
        self._write_back()
        return self._at[rows]

    def go_on(self, rows: Rows, now: Ints) -> None:
        """These are at ``now``, one further than before."""
        if rows is not self._rows:
            self._write_back()
            self._rows = rows
        self._now = now

    def _write_back(self) -> None:
        if self._now is not None:
            self._at[self._rows], self._now = self._now, None


class Lookout:
    """For each row the position at which it needs a look of its own.

    Rows that go on together come nearer by one a step. So whoever compares them once knows for how many steps none of
    them needs a look, and those steps cost one comparison of two numbers.
    """

    def __init__(self, num_rows: int):
        self.at = np.zeros(num_rows, np.int32)
        self._rows: Rows | None = None  # those that were compared last
        self._quiet = 0  # steps of these from then on in which none gets there

    def set(self, row: int, position: int) -> None:
        """The next look at ``row`` is due at ``position`` or past it."""
        self.at[row] = position
        self._quiet = 0

    def reached(self, rows: Rows, positions: Ints) -> list[int]:
        """Places in ``rows``, which are at ``positions``, of those whose look is due. Whoever asks for the very array
        that was asked for last asks for the step after it: each position is one more."""
        if self._quiet and rows is self._rows:
            self._quiet -= 1
            return []
        ahead = self.at[rows] - positions
        nearest = ahead.item(ahead.argmin())
        self._rows, self._quiet = rows, max(nearest - 1, 0)
        return (ahead < _ONE).nonzero()[0].tolist() if nearest <= 0 else []

    def overlooks(self, rows: Rows, positions: Ints) -> bool:
        """A look would go by, were ``rows`` asked for next at ``positions``: this must never be so."""
        return rows is self._rows and self._quiet > 0 and self._quiet > (self.at[rows] - positions).min()


class Columns:
    """One entry for each of ``num_rows`` rows. Those of a row that nobody holds mean nothing, but for ``left_at``."""

    def __init__(self, num_rows: int, block_size: int):
        # How far it is: see ``request.py``.
        self.computed, self.scheduled = Positions(num_rows), Positions(num_rows)
        # Two look-ahead caches spare a step the look at every sequence:
        self.horizon = Lookout(num_rows)  # scheduling at or past this position needs a look
        self.milestone = Lookout(num_rows)  # computing this many tokens needs a look
        # Tokens drawn by decodes. The one at position p is in place (p - 1) % block_size; at a milestone, when a block
        # is full and the token after it is drawn, they are fetched, before the next one would take the place of one.
        self.drawn = np.zeros((num_rows, block_size), np.int32)
        self._drawn_since: list[tuple[Rows, Ints, Ints]] = []  # rows, starts, tokens of steps that are not in it yet
        self.departures = 0  # how many sequences have left a row
        self.left_at = np.zeros(num_rows, np.int64)  # ``departures`` when one last left this row

    def enter(self, row: int, computed: int) -> None:
        """A sequence takes ``row``, with so much computed."""
        self.computed[row] = computed
        self.scheduled[row] = 0
        self.horizon.set(row, 0)
        self.milestone.set(row, 0)

    def leave(self, row: int) -> None:
        """The sequence in ``row`` gives it up: what a step in flight draws for it counts no more."""
        self.departures += 1
        self.left_at[row] = self.departures

    def schedule(self, rows: Rows, starts: Ints) -> Ints:
        """One decode of each of ``rows`` is asked for, at ``starts``. Returns where they end."""
        ends = starts + _ONE
        self.scheduled.go_on(rows, ends)
        return ends

    def decoded(self, rows: Rows, starts: Ints, ends: Ints, tokens: Ints) -> list[int]:
        """The decodes of ``rows`` from ``starts`` to ``ends`` are done, and drew ``tokens``. Returns the places of
        those at their milestone."""
        self._drawn_since.append((rows, starts, tokens))
        if len(self._drawn_since) == self.drawn.shape[1]:
            self._keep_drawn()
        self.computed.go_on(rows, ends)
        return self.milestone.reached(rows, ends)

    def fetch_drawn(self, row: int, computed: int, count: int) -> bytes:
        """The last ``count`` tokens that decodes drew, as int32 bytes: a block's at most, up to its milestone."""
        if self._drawn_since:
            self._keep_drawn()
        end = (computed - 1) % self.drawn.shape[1] + 1
        return self.drawn[row, end - count : end].tobytes()

    def _keep_drawn(self) -> None:
        """Put tokens in their places: those of several small steps at once, which costs as much as those of one."""
        steps = self._drawn_since
        rows, starts, tokens = map(np.concatenate, zip(*steps, strict=True)) if len(steps) > 1 else steps[0]
        self.drawn[rows, starts % self.drawn.shape[1]] = tokens
        steps.clear()


class StopIds:
    """The ids below ``vocab_size`` that end some sequence of a replica: a step's tokens are compared with all of them
    at once, and looked at one by one only where there is a hit."""

    def __init__(self, vocab_size: int, of_each: Iterable[frozenset[int]] = ()):
        self._vocab_size = vocab_size
        self._holders: dict[frozenset[int], int] = {}  # how many sequences end by just these ids
        self._ids = frozenset[int]()  # of all
        for stops in of_each:
            self.add(stops)

    def add(self, stops: frozenset[int]) -> None:
        """One more sequence ends by each of these."""
        self._holders[stops] = self._holders.get(stops, 0) + 1
        if self._holders[stops] == 1:
            self._unite()

    def remove(self, stops: frozenset[int]) -> None:
        """One sequence less ends by each of these."""
        self._holders[stops] -= 1
        if not self._holders[stops]:
            del self._holders[stops]
            self._unite()

    def among(self, tokens: Ints) -> list[int]:
        """Places in ``tokens`` of stop ids of somebody."""
        drawn = tokens.tolist()
        if self._ids.isdisjoint(drawn):
            return []
        return [place for place, token in enumerate(drawn) if token in self._ids]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StopIds) and self._holders == other._holders

    def _unite(self) -> None:
        stops = frozenset[int]().union(*self._holders)
        self._ids = frozenset(stop for stop in stops if 0 <= stop < self._vocab_size)


def as_u32(column: bytes) -> NDArray[np.uint32]:
    """A message's column as it is, which cannot be written to. BadFrame if the length is not a multiple of 4."""
    if len(column) % 4:
        raise BadFrame(f"a column of {len(column)} bytes is not a whole number of 4-byte items")
    return np.frombuffer(column, np.uint32)
