"""What the front side is owed: tokens gathered in columns for each detokenizer, and single messages, in order.

A room above the sequences and below the books.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any, NamedTuple

from ..proto.codec import from_i32, from_i64, i32, i64
from ..proto.messages import Finish, Logprobs, TokenBatch
from .batch import Batch
from .columns import Ints
from .request import Request, Sequence

_ONE, _MINUS_ONE = i32([1]), i32([-1])


Piece = tuple[bytes, bytes, bytes, bytes, bytes]
"""Columns of a TokenBatch, for some of its sequences: uids, attempts, indexes, offsets, tokens."""
_LINE = struct.Struct("<qiii")
_NOTHING = b"", b"", b"", b"", b""


class TokenSink:
    """New tokens of one detokenizer's sequences, gathered while a step is committed."""

    __slots__ = ("count", "finishes", "logprobs", "number", "pieces", "several", "started")

    def __init__(self, number: int) -> None:
        self.number = number
        self.clear()

    def clear(self) -> None:
        """Begin the next batch."""
        self.pieces: list[Piece] = []
        self.count = 0  # sequences in them
        self.finishes: list[Ending] = []
        self.several: dict[int, int] = {}  # by place, the tokens of those that have more than one
        self.logprobs: dict[tuple[int, int], Logprobs] = {}  # by (uid, index), of those who ask for them
        self.started: list[tuple[int, int]] = []  # (uid, cached prompt tokens)

    def add(self, count: int, piece: Piece) -> int:
        """So many sequences more. Returns the place of the first in the batch."""
        place = self.count
        self.pieces.append(piece)
        self.count += count
        return place


class Ending(NamedTuple):
    """How a sequence of a batch ends."""

    place: int  # among the batch's sequences
    uid: int
    child: int
    finish: Finish
    stop_id: int
    with_token: bool


class Outbox:
    """Messages to send, by peer. Tokens of one ``take`` travel in one TokenBatch for each detokenizer."""

    def __init__(self) -> None:
        self._sinks: dict[str, TokenSink] = {}
        self._numbered: dict[int, TokenSink] = {}
        self._numbers = 0  # of sinks, given out
        self._messages: list[tuple[str, Any]] = []

    def _sink(self, owner: str) -> TokenSink:
        """Where the tokens of this detokenizer's sequences go."""
        sink = self._sinks.get(owner)
        if sink is None:
            sink = self._sinks[owner] = self._numbered[self._numbers] = TokenSink(self._numbers)
            self._numbers += 1
        return sink

    def number(self, owner: str) -> int:
        """The number of this detokenizer's sink, by which columns name it."""
        return self._sink(owner).number

    def forget(self, owner: str) -> None:
        """A detokenizer is gone for good and owns no request any more."""
        sink = self._sinks.pop(owner, None)
        if sink is not None:
            del self._numbered[sink.number]

    def started(self, request: Request, cached: int) -> None:
        """``request`` is in its first plan, with so many prompt tokens found in the prefix cache."""
        self._sink(request.owner).started.append((request.uid, cached))

    def decoded(self, batch: Batch, offsets: Ints, tokens: Ints) -> None:
        """Each of ``batch`` has one token more. They are the first of a message: a commit begins with a flush."""
        for part in batch.parts:
            piece = part.uids, part.attempts, part.indexes, part.of(offsets), part.of(tokens)
            self._numbered[part.sink].add(len(part.uids) // 8, piece)

    def token(self, seq: Sequence, token: int) -> int:
        """``seq`` has one token more. Returns its place in its detokenizer's batch."""
        return self._sink(seq.owner).add(1, _piece(seq, seq.output_len - 1, i32([token])))

    def tokens(self, seq: Sequence, offset: int, tokens: list[int]) -> int:
        """``seq`` has these tokens more, behind ``offset`` outputs. Returns its place in its detokenizer's batch."""
        sink, count = self._sink(seq.owner), len(tokens)
        place = sink.add(1, _piece(seq, offset, i32(tokens)))
        if count > 1:
            sink.several[place] = count
        return place

    def logprobs(self, seq: Sequence, record: Logprobs) -> None:
        """Logprobs of what ``seq`` gets in this batch."""
        self._sink(seq.owner).logprobs[seq.uid, seq.index] = record

    def finished(self, seq: Sequence, finish: Finish, stop_id: int, place: int | None) -> None:
        """``seq`` ends: with its token at ``place``, or with none (an end found before it ran)."""
        sink, with_token = self._sink(seq.owner), place is not None
        if place is None:
            place = sink.add(1, _piece(seq, seq.output_len, b""))
        sink.finishes.append(Ending(place, seq.uid, seq.index, finish, stop_id, with_token))

    def stopped(self) -> list[tuple[int, int]]:
        """(uid, index) of those whose last token ended them, since the last batch was closed."""
        ends = [end for sink in self._sinks.values() for end in sink.finishes]
        return [(end.uid, end.child) for end in ends if end.finish is Finish.STOP and end.with_token]

    def put(self, peer: str, message: Any) -> None:
        """A message of its own."""
        self.flush()
        self._messages.append((peer, message))

    def take(self) -> list[tuple[str, Any]]:
        """All that waits, in order."""
        self.flush()
        messages, self._messages = self._messages, []
        return messages

    def flush(self) -> None:
        """Close the batches: a sequence may be in each only once."""
        for owner, sink in self._sinks.items():
            if sink.count or sink.started:
                self._messages.append((owner, _batch(sink)))
                sink.clear()


def _piece(seq: Sequence, offset: int, tokens: bytes) -> Piece:
    """Of one sequence."""
    line = _LINE.pack(seq.uid, seq.attempt, seq.index, offset)
    return line[:8], line[8:12], line[12:16], line[16:], tokens


def _batch(sink: TokenSink) -> TokenBatch:
    """One token for each sequence, but for the few that end without one. Most columns are mostly constant."""
    count, pieces, started, logprobs = sink.count, sink.pieces or [_NOTHING], sink.started, sink.logprobs
    found = pieces[0] if len(pieces) == 1 else map(b"".join, zip(*pieces, strict=True))
    uids, attempts, indexes, offsets, tokens = found
    counts, stop_ids, finishes = _ONE * count, _MINUS_ONE * count, bytes(count)
    if sink.several:
        counts = _with_several(sink.several, counts)
    if sink.finishes:
        counts, stop_ids, finishes = _with_endings(sink.finishes, counts, stop_ids, finishes)
    asked = []  # places of those with logprobs, and whose they are
    if logprobs:
        keys = enumerate(zip(from_i64(uids), from_i32(indexes), strict=True))
        asked = [(place, key) for place, key in keys if key in logprobs]
    return TokenBatch(
        uids=uids,
        attempts=attempts,
        indexes=indexes,
        offsets=offsets,
        counts=counts,
        tokens=tokens,
        finishes=finishes,
        stop_ids=stop_ids,
        started_uids=i64([uid for uid, _ in started]) if started else b"",
        started_cached=i32([cached for _, cached in started]) if started else b"",
        logprob_rows=i32([place for place, _ in asked]) if asked else b"",
        logprobs=[logprobs[key] for _, key in asked] if asked else [],
    )


def _with_several(several: dict[int, int], counts: bytes) -> bytes:
    """The column of counts of a batch in which these have more tokens than one."""
    column = array("i", counts)
    for place, count in several.items():
        column[place] = count
    return column.tobytes()


def _with_endings(endings: list[Ending], counts: bytes, stop_ids: bytes, finishes: bytes) -> tuple[bytes, bytes, bytes]:
    """The three columns of a batch in which these end. Most end with a token and by no stop id, as the columns say."""
    how = bytearray(finishes)
    for ending in endings:
        how[ending.place] = ending.finish.value
    if any(ending.stop_id >= 0 or not ending.with_token for ending in endings):
        tokens, stops = array("i", counts), array("i", stop_ids)
        for ending in endings:
            stops[ending.place] = ending.stop_id
            if not ending.with_token:
                tokens[ending.place] = 0
        counts, stop_ids = tokens.tobytes(), stops.tobytes()
    return counts, stop_ids, bytes(how)
