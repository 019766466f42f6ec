"""A recording, run through the same code again: the same plans must come of it. No sockets, no clock but its own."""

from __future__ import annotations

import logging
import re
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..proto.codec import BadFrame, Decoder, i32, i64
from ..proto.hashing import HASH_SIZE
from ..proto.messages import Lease, StepPlan, StepResult, TokenBatch, ToSchedulerFront, ToSchedulerWorkers
from . import request
from .inputs import Outgoing
from .membership import Membership
from .recorder import Kind, digests
from .recording import RecordingError, read
from .redact import given
from .snapshot import SnapshotError, load
from .transcript import Transcript

_from_worker: Decoder[Any] = Decoder(ToSchedulerWorkers)
_from_front: Decoder[Any] = Decoder(ToSchedulerFront)


class NoMoreHashes(Exception):
    """More blocks became full than when it was recorded."""


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
    trace: str = ""
    """Of the exception that ended the scheduler, then and now."""


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
            for segment in self._recording.segments:
                self._clock.now = segment.now
                try:
                    members = load(segment.state, {"clock": self._clock})
                except SnapshotError as error:
                    raise RecordingError(f"{self.path} cannot be replayed: {error}.") from error
                if not isinstance(members, Membership):
                    raise RecordingError(f"{self.path} cannot be replayed: it holds no scheduler's state.")
                inputs = Transcript(members, self.tokens, self._began)
                self._began = inputs.began
                for hashes, entries in segment.turns:
                    yield self._turn(inputs, hashes, entries)
        if not self.ended:
            torn = ", in the middle of a record" if self._recording.torn else ""
            self.ended = f"the scheduler was killed, or still ran{torn}"

    def _turn(self, inputs: Transcript, hashes: bytes, entries: list[list[Any]]) -> Turn:
        """Do what was done in a turn."""
        done, left = Turn([], []), len(entries)
        self._hashes = deque(hashes[i : i + HASH_SIZE] for i in range(0, len(hashes), HASH_SIZE))
        try:
            for kind, *more in entries:
                left -= 1
                if kind == Kind.TO_WORKERS:
                    self._compare(done, inputs.to_workers(), *more)
                elif kind == Kind.NOTICE:
                    (self._clock.now,) = more
                    inputs.notice()
                elif kind == Kind.STOP:
                    self.ended = "the scheduler ended"
                else:
                    _act(inputs, kind, *more)
        except NoMoreHashes:
            if entries[-left:] == [[Kind.STOP]]:  # it was ended in the midst of that
                self.ended = "the scheduler ended by an exception that does not come now"
            else:
                done.different = done.different or "more blocks became full than were recorded"
        except RecordingError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever ended the scheduler then
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            if entries[-left:] == [[Kind.STOP]]:
                self.ended, done.trace = f"the scheduler ended by {said}", traceback.format_exc()
            else:
                done.different = f"{said} came out, where the recording goes on"
        done.lines = inputs.take()
        return done

    def _compare(self, done: Turn, out: Outgoing, recorded: list[int]) -> None:
        plans = [(peer, message.step) for peer, message in out if isinstance(message, StepPlan)]
        done.plans += plans
        if (came := digests(out, self.tokens)) != recorded and not done.different:
            steps = ", ".join(f"step {step} of {peer}" for peer, step in plans) or "none"
            done.different = (
                f"plans with the digests {_hex(recorded)} were recorded, and {_hex(came)} came out ({steps})"
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


def _hex(found: list[int]) -> str:
    return " ".join(f"{digest:08x}" for digest in found) or "(none)"


def _act(inputs: Transcript, kind: int, peer: Any = "", *more: Any) -> None:
    """One input."""
    if kind in (Kind.WORKER, Kind.FRONT, Kind.SUBMIT):
        _take(inputs, kind, peer, *more)
    elif kind == Kind.DREW:
        inputs.worker(peer, _drew(inputs, peer, *more))
    elif kind == Kind.UNFIT:
        lease, step = more
        inputs.worker(peer, StepResult(Lease(*lease), step, i32([-1])))
    elif kind == Kind.WORKER_GONE:
        inputs.worker_gone(peer, *more)
    elif kind == Kind.FRONT_GONE:
        inputs.front_gone(peer)
    elif kind == Kind.UNDELIVERED:
        name, uids = more
        inputs.undelivered(
            peer, TokenBatch(i64(uids), b"", b"", b"", b"", b"", b"", b"") if uids else type(name, (), {})()
        )
    elif kind == Kind.BAD_FRAMES:
        inputs.bad_frames(peer)
    elif kind == Kind.TICK:
        inputs.tick()
    elif kind == Kind.PLANS:
        inputs.plans()
    elif kind == Kind.TO_FRONT:
        inputs.to_front()


def _take(inputs: Transcript, kind: int, peer: str, frame: bytes) -> None:
    try:
        if kind == Kind.WORKER:
            inputs.worker(peer, _from_worker(frame))
        else:
            message = _from_front(frame)
            inputs.front(peer, given(message) if kind == Kind.SUBMIT else message)
    except BadFrame as error:
        raise RecordingError(f"a message of {peer} in the recording does not decode: {error}.") from error


def _drew(inputs: Transcript, peer: str, lease: list[int], step: int, count: int, ended: list[list[int]]) -> StepResult:
    """A plain result: no token is known but that those of ``ended`` end their sequences."""
    tokens = [0] * count
    worker = inputs.registry.workers.get(peer)
    if ended and worker is not None and worker.replica is not None and worker.replica.in_flight:
        by = {(slot.seq.uid, slot.seq.index): at for at, slot in enumerate(worker.replica.in_flight[0].slots())}
        for uid, index in ended:
            if (at := by.get((uid, index))) is not None and at < count:
                tokens[at] = min(worker.replica.in_flight[0].slots()[at].seq.stops, default=0)
    return StepResult(Lease(*lease), step, i32(tokens))


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
