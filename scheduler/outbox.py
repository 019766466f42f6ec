"""What the front side is owed: tokens gathered in columns for each detokenizer, and single messages, in order.

A room above the sequences and below the books.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from ..proto.codec import i32, i64
from ..proto.messages import Finish, Logprobs, TokenBatch
from .request import Request, Sequence

_ONE, _MINUS_ONE = i32([1]), i32([-1])


class TokenSink:
    """New tokens of one detokenizer's sequences, gathered while a step is committed."""

    __slots__ = ("finishes", "logprobs", "seqs", "started", "tokens")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin the next batch."""
        self.seqs: list[Sequence] = []
        self.tokens: list[int] = []
        self.finishes: list[Ending] = []
        self.logprobs: dict[Sequence, Logprobs] = {}  # of the tokens of those who ask for them
        self.started: list[tuple[int, int]] = []  # (uid, cached prompt tokens)


class Ending(NamedTuple):
    """How a sequence of a batch ends."""

    at: int  # its place among the batch's sequences
    finish: Finish
    stop_id: int
    with_token: bool


class Outbox:
    """Messages to send, by peer. Tokens of one ``take`` travel in one TokenBatch for each detokenizer."""

    def __init__(self) -> None:
        self._sinks: dict[str, TokenSink] = {}
        self._messages: list[tuple[str, Any]] = []

    def sink(self, owner: str) -> TokenSink:
        """Where to put the tokens of this detokenizer's sequences."""
        sink = self._sinks.get(owner)
        if sink is None:
            sink = self._sinks[owner] = TokenSink()
        return sink

    def forget(self, owner: str) -> None:
        """A detokenizer is gone for good and owns no request any more."""
        self._sinks.pop(owner, None)

    def started(self, request: Request, cached: int) -> None:
        """``request`` is in its first plan, with so many prompt tokens found in the prefix cache."""
        self.sink(request.owner).started.append((request.uid, cached))

    def token(self, seq: Sequence, token: int) -> None:
        """``seq`` has one token more. (The loop over decodes puts theirs into the sink itself.)"""
        sink = self.sink(seq.owner)
        sink.seqs.append(seq)
        sink.tokens.append(token)

    def finished(self, seq: Sequence, finish: Finish, stop_id: int, with_token: bool) -> None:
        """``seq`` ends: with the token just put into its sink, or with none (an end found before it ran)."""
        sink = self.sink(seq.owner)
        if not with_token:
            sink.seqs.append(seq)
        sink.finishes.append(Ending(len(sink.seqs) - 1, finish, stop_id, with_token))

    def stopped(self) -> list[tuple[int, int]]:
        """(uid, index) of those whose last token ended them, since the last batch was closed."""
        return [
            (sink.seqs[end.at].uid, sink.seqs[end.at].index)
            for sink in self._sinks.values()
            for end in sink.finishes
            if end.finish is Finish.STOP and end.with_token
        ]

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
        """Close the batches: at most one token of a sequence may be in each."""
        for owner, sink in self._sinks.items():
            if sink.seqs or sink.started:
                self._messages.append((owner, _batch(sink)))
                self._sinks[owner].clear()


def _batch(sink: TokenSink) -> TokenBatch:
    """One token for each sequence, but for the few that end without one. Most columns are mostly constant."""
    seqs, count, logprobs = sink.seqs, len(sink.seqs), sink.logprobs
    offsets = [len(seq.outputs) - 1 for seq in seqs]
    counts, stop_ids, finishes = array("i", _ONE * count), array("i", _MINUS_ONE * count), bytearray(count)
    for at, finish, stop_id, with_token in sink.finishes:
        finishes[at], stop_ids[at] = finish.value, stop_id
        if not with_token:
            counts[at] = 0
            offsets[at] += 1
    return TokenBatch(
        uids=i64([seq.uid for seq in seqs]),
        attempts=i32([seq.attempt for seq in seqs]),
        indexes=i32([seq.index for seq in seqs]),
        offsets=i32(offsets),
        counts=counts.tobytes(),
        tokens=i32(sink.tokens),
        finishes=bytes(finishes),
        stop_ids=stop_ids.tobytes(),
        started_uids=i64([uid for uid, _ in sink.started]),
        started_cached=i32([cached for _, cached in sink.started]),
        logprob_rows=i32([at for at, seq in enumerate(seqs) if seq in logprobs]) if logprobs else b"",
        logprobs=[logprobs[seq] for seq in seqs if seq in logprobs] if logprobs else [],
    )
