"""The flight recorder: every input of the scheduler is written down before it is acted on, and a digest of what goes
out after, so that ``replay.py`` can do the same again and say whether the same came of it.

Time is an input, too: with a recorder the scheduler's clock stands still between two of them. The rest of what it does
follows from its state and its inputs, in the order in which they are written.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from ..proto.codec import encode, from_i32, i32
from ..proto.config import ConfigError, EngineArgs
from ..proto.messages import StepFailed, StepResult, Submit
from . import redact, request
from .inputs import Inputs, Outgoing
from .membership import Membership
from .recording import Ring
from .snapshot import SnapshotError, dump

log = logging.getLogger(__name__)

RESERVE = 1024
"""Bytes of a segment for the rest of the turn that fills it."""
MANY = 16
"""So many different ids that end somebody's sequence: more are not looked for one by one."""


class Kind(IntEnum):
    """What an entry is: [kind, time, peer, more]."""

    WORKER = 0  # a message, encoded
    FRONT = 1
    DREW = 2  # a plain result: lease, step, how many tokens, and (slot, number) of those that end somebody's sequence
    WORKER_GONE = 3  # why
    FRONT_GONE = 4
    UNDELIVERED = 5  # which message of the last that were taken
    BAD_FRAMES = 6
    NOTICE = 7
    TICK = 8
    PLANS = 9
    TO_WORKERS = 10  # how many messages, and their digest
    TO_FRONT = 11
    HASHES = 12  # of blocks, as they were made in this turn: where token ids are not recorded
    STOP = 13  # the scheduler ended in order
    EXPELLED = 14  # the result before made no sense: it was not what it was written down as


class TurnClock:
    """Stands still until it is read anew."""

    def __init__(self, source: Callable[[], float] = time.monotonic):
        self._source = source
        self.now = source()

    def __call__(self) -> float:
        return self.now

    def read(self) -> float:
        """What time it is now."""
        self.now = self._source()
        return self.now


class Recorder(Inputs):
    """Inputs that are recorded. ``clock`` is the scheduler's. Raises ConfigError where ``ring`` is too small."""

    def __init__(self, membership: Membership, ring: Ring, clock: TurnClock, tokens: bool):
        super().__init__(membership)
        self._ring, self._clock, self._tokens = ring, clock, tokens
        self._keys = redact.Keys()
        self._pending: list[tuple[Any, ...]] = []
        self._hashes: list[bytes] = []
        self._known: dict[int, int] = {}  # tokens that end somebody's sequence, and the numbers that stand for them
        self._ends: dict[bytes, int] = {}  # the same by the token's int32
        self._sent: Outgoing = []
        self._block_size = membership.config.block_size
        self._on = True
        if not tokens:
            self._hash, request.hash_block = request.hash_block, self._hash_block
        if not self._begin():
            raise ConfigError("--flight-recorder-size is too small for the scheduler's state; give it more.")

    def close(self) -> None:
        """The scheduler ends in order, or by an exception."""
        if self._on:
            self._pending.append((Kind.STOP, self._clock.now, "", 0))
            self._flush()
        if self._on:
            self._off()

    # -- inputs

    def worker(self, peer: str, message: Any) -> None:
        self._message(peer, message, self._from_worker)
        super().worker(peer, message)
        if isinstance(message, StepResult) and peer not in self.registry.workers:
            self._note(Kind.EXPELLED, peer, 0)

    def front(self, peer: str, message: Any) -> None:
        self._message(peer, message, self._from_front)
        super().front(peer, message)

    def _message(self, peer: str, message: Any, entry: Callable[[float, str, Any], tuple[Any, ...]]) -> None:
        now = self._clock.read()
        if self._on:
            try:
                self._pending.append(entry(now, peer, message))
            except (ValueError, TypeError, LookupError, AttributeError):
                log.exception("a %s of %s cannot be recorded", type(message).__name__, peer)
                self._fail("of that")
            else:
                self._flush(ahead=True)

    def worker_gone(self, peer: str, why: str) -> None:
        self._note(Kind.WORKER_GONE, peer, why)
        super().worker_gone(peer, why)

    def front_gone(self, peer: str) -> None:
        self._note(Kind.FRONT_GONE, peer, 0)
        super().front_gone(peer)

    def undelivered(self, peer: str, message: Any) -> None:
        at = next(at for at, (_, sent) in enumerate(self._sent) if sent is message)
        self._note(Kind.UNDELIVERED, peer, at)
        super().undelivered(peer, message)

    def bad_frames(self, count: int) -> None:
        self._note(Kind.BAD_FRAMES, "", count)
        super().bad_frames(count)

    def notice(self) -> None:
        self._note(Kind.NOTICE, "", 0)
        super().notice()

    def tick(self) -> None:
        self._note(Kind.TICK, "", 0)
        super().tick()

    # -- what goes out

    def plans(self) -> None:
        self._note(Kind.PLANS, "", 0)
        super().plans()

    def to_workers(self) -> Outgoing:
        out = super().to_workers()
        self._pending.append((Kind.TO_WORKERS, 0.0, "", (len(out), self._digest(out))))
        return out

    def to_front(self) -> Outgoing:
        self._sent = out = super().to_front()
        if self._on:
            self._note_hashes()
            self._pending.append((Kind.TO_FRONT, 0.0, "", (len(out), self._digest(out))))
            self._flush()
        else:
            self._pending.clear()
        return out

    def _digest(self, out: Outgoing) -> int:
        digest = 0
        what = encode if self._tokens else redact.visible
        for peer, message in out:
            digest = zlib.crc32(what(message), zlib.crc32(peer.encode(), digest))
        return digest

    # -- the file

    def _note(self, kind: Kind, peer: str, more: Any) -> None:
        self._pending.append((kind, self._clock.read(), peer, more))

    def _note_hashes(self) -> None:
        if self._hashes:
            self._pending.append((Kind.HASHES, 0.0, "", b"".join(self._hashes)))
            self._hashes.clear()

    def _flush(self, ahead: bool = False) -> None:
        """Write what is pending. ``ahead``: the last entry has not been acted on yet."""
        record = encode(self._pending)
        if self._ring.fits(len(record) + RESERVE):
            self._ring.write(record)
            self._pending.clear()
        else:
            self._turn_over(self._pending.pop() if ahead else None)

    def _turn_over(self, last: tuple[Any, ...] | None) -> None:
        """The segment is full: what has been acted on still belongs to it, and ``last`` to the next."""
        self._note_hashes()
        done, then = encode(self._pending), encode([last])
        self._pending.clear()
        if self._ring.fits(len(done)):
            self._ring.write(done)
        if not self._begin():
            self._fail("the scheduler's state has grown")
        elif last is not None and not self._ring.fits(len(then) + RESERVE):
            self._fail(f"a message of {len(then)} bytes came")
        elif last is not None:
            self._ring.write(then)

    def _begin(self) -> bool:
        outside = {id(self._clock): "clock", id(self.core.clock): "clock"}
        try:
            return self._ring.begin(dump(self.membership, outside, self._hide))
        except SnapshotError:
            log.exception("the scheduler's state cannot be recorded")
            return False

    def _fail(self, why: str) -> None:
        log.error("the flight recorder stops, because %s; a larger --flight-recorder-size may help", why)
        self._off()

    def _off(self) -> None:
        self._on = False
        self._pending.clear()
        if not self._tokens:
            request.hash_block = self._hash
        self._ring.close()

    # -- what is written in place of tokens and keys

    def _hash_block(self, parent: bytes, tokens: bytes) -> bytes:
        made = self._hash(parent, tokens)
        self._hashes.append(made)
        return made

    def _from_worker(self, now: float, peer: str, message: Any) -> tuple[Any, ...]:
        if not self._tokens and isinstance(message, StepResult):
            return self._result(now, peer, message)
        if not self._tokens and isinstance(message, StepFailed):
            message = redact.failed(message)
        return Kind.WORKER, now, peer, encode(message)

    def _from_front(self, now: float, peer: str, message: Any) -> tuple[Any, ...]:
        if isinstance(message, Submit):
            key = self._keys.alias(message.key)
            if self._tokens:
                message = redact.replace_key(message, key)
            else:
                message = redact.submit(message, self._block_size, self.core.vocab_size, self._known, key)
                if len(self._known) > len(self._ends):
                    self._ends = {i32([token]): number for token, number in self._known.items()}
        return Kind.FRONT, now, peer, encode(message)

    def _result(self, now: float, peer: str, message: StepResult) -> tuple[Any, ...]:
        """Of nearly all results all that counts is how many tokens were drawn, and which of them may end a sequence."""
        tokens, lease = message.tokens, message.lease
        plain = not (message.logprobs or message.prompts or message.failed or message.pooled or message.counts)
        if plain and not message.logprob_slots and len(tokens) % 4 == 0:
            head = lease.epoch, lease.replica, lease.counter, message.step
            return Kind.DREW, now, peer, (*head, len(tokens) // 4, self._find_ends(tokens))
        worker = self.registry.workers.get(peer)
        replica = worker.replica if worker is not None else None
        sequences = []
        if replica is not None and replica.in_flight and replica.in_flight[0].number == message.step:
            sequences = [slot[0] for slot in replica.in_flight[0].slots()]
        vocab_size = replica.vocab_size if replica is not None else 0
        return Kind.WORKER, now, peer, encode(redact.result(message, sequences, vocab_size, self._known))

    def _find_ends(self, tokens: bytes) -> list[tuple[int, int]]:
        found = []
        if len(self._ends) > MANY:
            known = self._known
            return [(at, known[token]) for at, token in enumerate(from_i32(tokens)) if token in known]
        for end, number in self._ends.items():
            at = tokens.find(end)
            while at >= 0:
                if at % 4 == 0:
                    found.append((at // 4, number))
                at = tokens.find(end, at + 1)
        return found

    def _hide(self, obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        if not self._tokens:
            attributes = redact.state(obj, attributes, self._known)
        return self._keys.hide(obj, attributes)


def open_recorder(config: EngineArgs, membership: Membership, clock: TurnClock) -> Recorder:
    """The recorder that the flags ask for. Raises ConfigError."""
    path, size, tokens = config.flight_recorder or "", config.flight_recorder_size, config.flight_recorder_tokens
    recorder = Recorder(membership, Ring(path, size, tokens), clock, tokens)
    log.info("records what happens into %s (%g MB, %s token ids)", path, size, "with" if tokens else "without")
    return recorder
