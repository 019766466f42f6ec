"""What each step reads and changes of the sequences that run at one replica: a column for each thing, an entry a row.

The columns live as long as the replica, and they are the truth about a sequence for as long as it holds a row: a step
of 256 decodes is a handful of array operations on them, and ``Sequence`` reads and writes its own entries. What only
some sequences need in a step (a new block, a full block, an end) is found by comparing columns; everything else about
them stays in their objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from ..proto.codec import BadFrame

Rows = NDArray[np.intp]
"""Numbers of rows, or places in a batch. The type is the one that numpy indexes by, which spares a conversion."""
Ints = NDArray[np.int32]
_ONE = np.array(1, np.int32)
"""Added in place of 1, which numpy would have to make an array of each time: that takes as long as the sum."""
_NO_ROWS: Rows = np.zeros(0, np.intp)
HashBlock = Callable[[bytes, bytes], bytes]
"""The hash of a full block by its parent's and its tokens, as ``hash_block``."""
FEW = 64
"""So few tokens are looked up sooner one by one."""


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
        if self._now is not None:
            self._write_back()
        return self._at.item(row)

    def __setitem__(self, row: int, position: int) -> None:
        if self._now is not None:
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

    def set(self, rows: int | Rows, positions: int | Ints) -> None:
        """The next look at one row, or at each of several, is due at its position or past it."""
        self.at[rows] = positions
        self._quiet = 0

    def interrupt(self) -> None:
        """The rows that were compared last do not go on by one each."""
        self._quiet = 0

    def reached(self, rows: Rows, positions: Ints) -> Rows:
        """Places in ``rows``, which are at ``positions``, of those whose look is due. Whoever asks for the very array
        that was asked for last asks for the step after it: each position is one more."""
        if self._quiet and rows is self._rows:
            self._quiet -= 1
            return _NO_ROWS
        ahead = self.at[rows] - positions
        due = (ahead < _ONE).nonzero()[0]
        if len(due):
            self._quiet = 0
        else:
            self._rows, self._quiet = rows, ahead.item(ahead.argmin()) - 1
        return due

    def overlooks(self, rows: Rows, positions: Ints) -> bool:
        """A look would go by, were ``rows`` asked for next at ``positions``: this must never be so."""
        return rows is self._rows and self._quiet > 0 and self._quiet > (self.at[rows] - positions).min()


class Columns:
    """One entry for each of ``num_rows`` rows. Those of a row that nobody holds mean nothing, but for ``left_at``."""

    def __init__(self, num_rows: int, block_size: int, max_blocks: int):
        self.block_size = block_size
        self.size = np.array(block_size, np.int32)  # the same, for sums with columns
        # Whose it is, as messages name it, and the position from which its first output token is drawn.
        self.uids = np.zeros(num_rows, np.int64)
        self.attempts, self.indexes, self.sinks, self.before_output = np.zeros((4, num_rows), np.int32)
        # How far it is: see ``request.py``.
        self.computed, self.scheduled = Positions(num_rows), Positions(num_rows)
        self.end = np.zeros(num_rows, np.int32)  # the position at which nothing is left to schedule
        # Two look-ahead caches spare a step the look at every sequence:
        self.horizon = Lookout(num_rows)  # scheduling at or past this position needs a look
        self.milestone = Lookout(num_rows)  # computing this many tokens needs a look
        # Its block table; past ``num_blocks`` there are zeros.
        self.tables = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self.chains = [b""] * num_rows  # the hash of its last full block, from which the next one's is made
        # Tokens drawn here, and those before them in the block of the first, which begins at ``kept_from``: full blocks
        # as int32 bytes in ``kept``; of the last block the token at position p in place p % block_size.
        self.kept_from = array("i", bytes(4 * num_rows))
        self.kept: list[list[bytes]] = [[] for _ in range(num_rows)]
        self.drawn = np.zeros((num_rows, block_size), np.int32)
        self._drawn_since: list[tuple[Rows, Ints, Ints]] = []  # rows, positions, tokens of steps that are not in it yet
        self.departures = 0  # how many sequences have left a row
        self.left_at = np.zeros(num_rows, np.int64)  # ``departures`` when one last left this row

    def name(self, row: int, uid: int, attempt: int, index: int, sink: int, prompt_len: int) -> None:
        """Whose ``row`` is from here on. ``sink``: the number of its detokenizer's in the outbox."""
        self.uids[row], self.attempts[row], self.indexes[row] = uid, attempt, index
        self.sinks[row], self.before_output[row] = sink, prompt_len - 1

    def enter(self, row: int, computed: int, scheduled: int, end: int, blocks: list[int]) -> None:
        """A sequence takes ``row`` with these blocks and so much computed and scheduled; nothing is scheduled at or
        past ``end``."""
        self.computed[row] = computed
        self.scheduled[row] = scheduled
        self.end[row] = end
        self.look_at(row, 0)
        self.num_blocks[row] = len(blocks)
        self.tables[row, : len(blocks)] = blocks

    def continue_chain(self, row: int, last: bytes) -> None:
        """``last`` is the hash of its last full block."""
        self.chains[row] = last

    def continue_chains(self, rows: Rows, blocks: list[bytes], hash_block: HashBlock) -> list[bytes]:
        """Of each of ``rows`` a block is full that holds these tokens. Returns their hashes."""
        chains, numbers = self.chains, rows.tolist()
        hashes = list(map(hash_block, [chains[row] for row in numbers], blocks))
        for row, last in zip(numbers, hashes, strict=True):
            chains[row] = last
        return hashes

    def leave(self, row: int) -> None:
        """The sequence in ``row`` gives it up: what a step in flight draws for it counts no more."""
        self.departures += 1
        self.left_at[row] = self.departures
        self.kept[row] = []
        self.forget_table(row)

    # -- block tables

    def table(self, row: int, first: int = 0, stop: int | None = None) -> list[int]:
        """The block table of one row, or what it has in these slots, which it fills."""
        return self.tables[row, first : self.num_blocks.item(row) if stop is None else stop].tolist()

    def cut(self, row: int, count: int) -> list[int]:
        """The row's table ends behind ``count`` blocks. Returns those that it had behind them."""
        end = self.num_blocks.item(row)
        if count >= end:
            return []
        blocks: list[int] = self.tables[row, count:end].tolist()
        self.tables[row, count:end] = 0
        self.num_blocks[row] = count
        return blocks

    def forget_table(self, row: int) -> None:
        """Somebody else has its blocks now."""
        self.tables[row, : self.num_blocks.item(row)] = 0
        self.num_blocks[row] = 0

    def block_at(self, row: int, slot: int) -> int | None:
        """The block in one slot of a row's table; None past its end."""
        return self.tables.item(row, slot) if slot < self.num_blocks[row] else None

    def put_block(self, row: int, slot: int, block: int) -> None:
        """``block`` is in this slot of the row's table, which may be the first past its end."""
        self.tables[row, slot] = block
        self.num_blocks[row] = max(self.num_blocks.item(row), slot + 1)

    def grow(self, rows: Rows, starts: Ints, blocks: Ints) -> Ints:
        """The tables of all of ``rows``, which are full, get one block more each, to write ``starts`` in. Returns its
        slots."""
        slots = starts // self.size
        self.tables[rows, slots] = blocks
        self.num_blocks[rows] = slots + _ONE
        self.horizon.set(rows, np.minimum(starts + self.size, self.end[rows]))
        return slots

    def need_blocks(self, rows: Rows, starts: Ints) -> NDArray[np.bool_]:
        """Which need a new block to write ``starts`` in, and nothing else."""
        return (self.num_blocks[rows] * self.size == starts) & (starts < self.end[rows])

    # -- when to look again

    def look_at(self, row: int, position: int) -> None:
        """Look when ``position`` is to be scheduled: a block may be shared."""
        self.horizon.set(row, position)

    def expect_end_of_room(self, row: int, scheduled: int) -> None:
        """So much is scheduled: look at the first position past the block table, or at the end."""
        room, end = self.num_blocks.item(row) * self.block_size, self.end.item(row)
        if end < room:
            room = end
        self.horizon.set(row, room if room > scheduled else scheduled)

    def expect_full_block(self, row: int, full: int) -> None:
        """So many blocks are full: look when the next is, or at the end."""
        next_look, end = (full + 1) * self.block_size, self.end.item(row)
        self.milestone.set(row, next_look if next_look < end else end)

    def expect_next_blocks(self, rows: Rows, computed: Ints) -> None:
        """So much is computed of ``rows``, which are at their milestones: look when the next block is full, or at the
        end."""
        self.milestone.set(rows, np.minimum(computed + self.size, self.end[rows]))

    def at_end(self, rows: Rows, computed: Ints) -> Rows:
        """Places in ``rows``, of which so much is computed, of those that are as long as they may grow."""
        return (computed >= self.end[rows]).nonzero()[0]

    # -- steps

    def schedule(self, rows: Rows, starts: Ints) -> Ints:
        """One decode of each of ``rows`` is asked for, at ``starts``. Returns where they end."""
        ends = starts + _ONE
        self.scheduled.go_on(rows, ends)
        return ends

    def decoded(self, rows: Rows, ends: Ints, tokens: Ints) -> Rows:
        """The decodes of ``rows`` are done: so much is computed now, and they drew ``tokens``. Returns the places of
        those at their milestone: blocks of theirs that are full are to be taken at once, by ``fill_blocks``."""
        due = self.milestone.reached(rows, ends)
        if len(due) or len(self._drawn_since) == self.block_size:
            self._keep_drawn()
        self._drawn_since.append((rows, ends, tokens))  # they may be the first of the next blocks
        self.computed.go_on(rows, ends)
        return due

    # -- what was drawn

    def begin_drawn(self, row: int, position: int, tokens: bytes) -> None:
        """The token at ``position`` was drawn in ``row``, and nobody asks for earlier ones. It is the last of
        ``tokens``: those of its block, as int32 bytes."""
        self._keep_drawn()
        self.drawn[row, : len(tokens) // 4] = np.frombuffer(tokens, np.int32)
        self.kept_from[row] = position - position % self.block_size
        self.kept[row] = []

    def draw_more(self, row: int, position: int, tokens: list[int]) -> None:
        """These were drawn in ``row`` behind those of ``begin_drawn``, up to ``position``, in the same block."""
        self._keep_drawn()
        self.milestone.interrupt()
        end = position % self.block_size + 1
        self.drawn[row, end - len(tokens) : end] = tokens

    def fetch_drawn(self, row: int, end: int, count: int) -> bytes:
        """What was drawn for ``count`` positions before ``end``, as int32 bytes."""
        self._keep_drawn()
        size, blocks, first = self.block_size, self.kept[row], end - count
        passed = (first - self.kept_from[row]) // size
        begin = self.kept_from[row] + passed * size
        last = self.drawn[row].tobytes()
        return b"".join([*blocks[passed:], last])[4 * (first - begin) : 4 * (end - begin)]

    def fill_blocks(self, rows: Rows) -> list[bytes]:
        """Blocks of ``rows`` have become full, the last token of each drawn here in the step before the one that is
        ``decoded``. Returns their tokens as int32 bytes."""
        kept, lines = self.kept, self.drawn.view(f"V{4 * self.block_size}").reshape(-1)
        blocks: list[bytes] = lines[rows].tolist()
        for row, block in zip(rows.tolist(), blocks, strict=True):
            kept[row].append(block)
        return blocks

    def _keep_drawn(self) -> None:
        """Put tokens in their places: those of several small steps at once, which costs as much as those of one."""
        steps = self._drawn_since
        if steps:
            rows, positions, tokens = map(np.concatenate, zip(*steps, strict=True)) if len(steps) > 1 else steps[0]
            # One index and no division: half the time of self.drawn[rows, positions % size].
            self.drawn.reshape(-1)[rows * self.size + (positions & self.size - _ONE)] = tokens
            steps.clear()


class StopIds:
    """The ids below ``vocab_size`` that end some sequence of a replica: a step's tokens are compared with all of them
    at once, and looked at one by one only where there is a hit."""

    def __init__(self, vocab_size: int, of_each: Iterable[frozenset[int]] = ()):
        self._vocab_size = vocab_size
        self._holders: dict[frozenset[int], int] = {}  # how many sequences end by just these ids
        self._ids = frozenset[int]()  # of all
        self._column = np.zeros((0, 1), np.int32)  # the same
        for stops in of_each:
            self.add(stops)

    def add(self, stops: frozenset[int]) -> None:
        """One more sequence ends by each of these."""
        holders = self._holders[stops] = self._holders.get(stops, 0) + 1
        if holders == 1:
            self._unite()

    def remove(self, stops: frozenset[int]) -> None:
        """One sequence less ends by each of these."""
        holders = self._holders[stops] = self._holders[stops] - 1
        if not holders:
            del self._holders[stops]
            self._unite()

    def among(self, tokens: Ints) -> list[int]:
        """Places in ``tokens`` of stop ids of somebody."""
        if len(tokens) < FEW:
            drawn = tokens.tolist()
            if self._ids.isdisjoint(drawn):
                return []
            return [place for place, token in enumerate(drawn) if token in self._ids]
        hits = tokens == self._column
        return hits.any(axis=0).nonzero()[0].tolist() if hits.size and hits.item(hits.argmax()) else []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StopIds) and self._holders == other._holders

    def _unite(self) -> None:
        stops = frozenset[int]().union(*self._holders)
        self._ids = frozenset(stop for stop in stops if 0 <= stop < self._vocab_size)
        self._column = np.array(sorted(self._ids), np.int32).reshape(-1, 1)


def as_u32(column: bytes) -> NDArray[np.uint32]:
    """A message's column as it is, which cannot be written to. BadFrame if the length is not a multiple of 4."""
    if len(column) % 4:
        raise BadFrame(f"a column of {len(column)} bytes is not a whole number of 4-byte items")
    return np.frombuffer(column, np.uint32)
