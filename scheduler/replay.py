"""A recording, run through the same code again: the same plans must come of it. No sockets, no clock but its own."""

from __future__ import annotations

import logging
import re
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..proto.codec import BadFrame, Decoder, encode, i32
from ..proto.hashing import HASH_SIZE
from ..proto.messages import Lease, StepPlan, StepResult, ToSchedulerFront, ToSchedulerWorkers
from . import redact, request
from .inputs import Outgoing
from .recorder import Kind
from .recording import RecordingError, read
from .snapshot import SnapshotError, load
from .transcript import Transcript

_from_worker: Decoder[Any] = Decoder(ToSchedulerWorkers)
_from_front: Decoder[Any] = Decoder(ToSchedulerFront)


class NoMoreHashes(Exception):
    """The recording ends in the middle of a turn."""


class Clock:
    """Says what the recording says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Turn:
    """One turn of the loop, replayed: its lines, and the plans that were sent in it, as (worker, step)."""

    lines: list[str]
    plans: list[tuple[str, int]]
    different: str = ""
    """What did not come out as it was recorded; "" where all did."""


@dataclass
class Replay:
    """A file that is replayed. ``turns`` does it; the rest is known before, and ``ended`` after."""

    path: str
    tokens: bool = field(init=False)
    whole: bool = field(init=False)
    """It goes back to the scheduler's start."""
    ended: str = ""
    """How the recording ends."""

    def __post_init__(self) -> None:
        """Raises RecordingError."""
        self._recording = read(self.path)
        self.tokens, self.whole = self._recording.header.tokens, self._recording.number == 1
        self._hashes: deque[bytes] = deque()
        self._clock = Clock()
        self._began: float | None = None

    def turns(self) -> Iterator[Turn]:
        """Every turn, in order. Raises RecordingError where the file's state is not of this version."""
        with self._hashing():
            for state, entries in self._recording.segments:
                try:
                    members = load(state, {"clock": self._clock})
                except SnapshotError as error:
                    raise RecordingError(f"{self.path} cannot be replayed: {error}.") from error
                for entry in entries[:1]:
                    self._clock.now = entry[1]
                inputs = Transcript(members, self.tokens, self._began)
                self._began = inputs.began
                yield from self._segment(inputs, entries)
        if not self.ended:
            torn = ", in the middle of a record" if self._recording.torn else ""
            self.ended = f"the scheduler was killed, or still ran{torn}"

    def _segment(self, inputs: Transcript, entries: list[list[Any]]) -> Iterator[Turn]:
        sent: Outgoing = []
        turn: list[list[Any]] = []
        for at, entry in enumerate(entries):
            turn.append(entry)
            if entry[0] == Kind.TO_FRONT or at == len(entries) - 1:
                done = Turn([], [])
                try:
                    sent = self._turn(inputs, turn, sent, done)
                except NoMoreHashes:
                    inputs.take()
                    return
                done.lines = inputs.take()
                yield done
                turn = []

    def _turn(self, inputs: Transcript, turn: list[list[Any]], sent: Outgoing, done: Turn) -> Outgoing:
        """Act on the entries of a turn; the messages to the front side that came of it."""
        self._hashes.clear()
        for kind, _, _, more in turn:
            if kind == Kind.HASHES:
                self._hashes.extend(more[i : i + HASH_SIZE] for i in range(0, len(more), HASH_SIZE))
        for place, (kind, at, peer, more) in enumerate(turn):
            if at:
                self._clock.now = at
            if kind == Kind.TO_WORKERS:
                plans = inputs.to_workers()
                done.plans += [(to, message.step) for to, message in plans if isinstance(message, StepPlan)]
                done.different = done.different or self._compare("to workers", plans, more)
            elif kind == Kind.TO_FRONT:
                sent = inputs.to_front()
                done.different = done.different or self._compare("to the front side", sent, more)
            elif kind == Kind.UNDELIVERED:
                inputs.undelivered(peer, sent[more][1])
            elif kind == Kind.STOP:
                self.ended = "the scheduler ended"
            elif kind == Kind.DREW:
                wrong = any(later[0] == Kind.EXPELLED for later in turn[place + 1 : place + 2])
                inputs.worker(peer, _drew(more, wrong))
            else:
                _act(inputs, kind, peer, more)
        return sent

    def _compare(self, where: str, out: Outgoing, recorded: list[int]) -> str:
        digest = 0
        for peer, message in out:
            what = encode(message) if self.tokens else redact.visible(message)
            digest = zlib.crc32(what, zlib.crc32(peer.encode(), digest))
        if [len(out), digest] == recorded:
            return ""
        steps = [f"step {message.step} of {peer}" for peer, message in out if isinstance(message, StepPlan)]
        return (
            f"messages {where}{' (' + ', '.join(steps) + ')' if steps else ''}: {recorded[0]} with digest "
            f"{recorded[1]:08x} were recorded, and {len(out)} with digest {digest:08x} came out"
        )

    @contextmanager
    def _hashing(self) -> Iterator[None]:
        """Where token ids were not recorded, the hashes of blocks were."""
        before, level = request.hash_block, logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # what went wrong then is not going wrong now
        if not self.tokens:
            request.hash_block = self._next_hash
        try:
            yield
        finally:
            request.hash_block = before
            logging.disable(level)

    def _next_hash(self, parent: bytes, tokens: bytes) -> bytes:
        if not self._hashes:
            raise NoMoreHashes
        return self._hashes.popleft()


def _act(inputs: Transcript, kind: int, peer: str, more: Any) -> None:
    """One input."""
    try:
        if kind == Kind.WORKER:
            inputs.worker(peer, _from_worker(more))
        elif kind == Kind.FRONT:
            inputs.front(peer, _from_front(more))
    except BadFrame as error:
        raise RecordingError(f"a message of {peer} in the recording does not decode: {error}.") from error
    if kind == Kind.WORKER_GONE:
        inputs.worker_gone(peer, more)
    elif kind == Kind.FRONT_GONE:
        inputs.front_gone(peer)
    elif kind == Kind.BAD_FRAMES:
        inputs.bad_frames(more)
    elif kind == Kind.NOTICE:
        inputs.notice()
    elif kind == Kind.TICK:
        inputs.tick()
    elif kind == Kind.PLANS:
        inputs.plans()


def _drew(more: list[Any], wrong: bool) -> StepResult:
    """A plain result. ``wrong``: some token was none of the vocabulary's."""
    epoch, replica, counter, step, count, ends = more
    tokens = [-1 if wrong else 0] * count
    for slot, number in ends if not wrong else ():
        tokens[slot] = number
    return StepResult(Lease(epoch, replica, counter), step, i32(tokens))


def about(lines: list[str], uid: int) -> list[str]:
    """Those of a turn's lines that name a request, each below what it belongs to."""
    named = re.compile(rf"(?<![\w.-])({uid}\.\d|{uid} starts|(uid|submit|request) {uid}(?!\d))")
    kept: list[str] = []
    heads: list[str] = []
    for line in lines:
        if not line.startswith("    "):
            heads = [*(heads[-1:] if heads and heads[-1].startswith("@ ") else []), line]
            if line.startswith("@ "):
                continue
        if named.search(line):
            kept += [head for head in heads if head not in (line, *kept[-2:])] + [_only(line, named)]
    return kept


def _only(line: str, named: re.Pattern[str]) -> str:
    """Without the parts of a list that name others."""
    head, colon, rest = line.partition(": ")
    if ";" in rest:
        return head + colon + "; ".join(part for part in rest.split("; ") if named.search(part))
    if line.startswith("    decode "):
        return "    decode " + ", ".join(part for part in line[11:].split(", ") if named.search(part))
    return line
