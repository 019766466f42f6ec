"""The flight recorder: every input of the scheduler is written down, and a digest of each plan that came of it, so that
``replay.py`` can do the same again and say whether the same comes of it.

Time is an input, too: with a recorder the scheduler's clock stands still but where ``notice`` reads it, twice in a turn
of the loop. The rest of what the scheduler does follows from its state and its inputs, in the order in which they are
written. A turn is one record, written at its end. Where token ids are not recorded, what the scheduler found in them
is, so those entries are made after it looked.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from msgspec.structs import replace

from ..proto.codec import encode, from_i64
from ..proto.config import ConfigError, EngineArgs
from ..proto.hashing import noting
from ..proto.messages import BeamTokens, Move, PromptLogprobs, StepFailed, StepPlan, StepResult, Submit, TokenBatch
from . import redact, request
from .inputs import Inputs, Outgoing
from .membership import Membership
from .recording import Ring, holds_recording
from .request import Sequence
from .snapshot import SnapshotError, dump

log = logging.getLogger(__name__)


class Kind(IntEnum):
    """What an entry is; what follows the kind in its list."""

    NOTICE = 0  # the time
    WORKER = 1  # peer, the message encoded
    FRONT = 2
    SUBMIT = 3  # peer, ``redact.submit`` encoded
    DREW = 4  # peer, lease, step, how many tokens, (uid, index) of those whose token ended them: a plain result
    UNFIT = 5  # peer, lease, step: a result that was not taken
    WORKER_GONE = 6  # peer, why, how many of its last plans never left
    FRONT_GONE = 7  # peer
    UNDELIVERED = 8  # peer, the kind of message, whose tokens were in it
    BAD_FRAMES = 9  # how many
    TICK = 10
    PLANS = 11
    TO_WORKERS = 12  # a digest of each plan
    TO_FRONT = 13
    STOP = 14  # the scheduler ended in order


class TurnClock:
    """``source``, which stands still until it is read anew."""

    def __init__(self, source: Callable[[], float]):
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
        self._turn: list[tuple[Any, ...]] = []
        self._hashes: list[bytes] = []
        self._on = True
        if not tokens:
            self._hash_block = request.hash_block
            setattr(request, "hash_block", noting(self._hashes))  # noqa: B010
        if not self._begin(b""):
            raise ConfigError("--flight-recorder-size is too small for the scheduler's state; give it more.")

    def close(self) -> None:
        """The scheduler ends in order, or by an exception."""
        if self._on:
            self._turn.append((Kind.STOP,))
            self._write()
        if self._on:
            self._off()

    # -- inputs

    def worker(self, peer: str, message: Any) -> None:
        if self._tokens or not isinstance(message, StepResult | StepFailed):
            self._turn.append((Kind.WORKER, peer, encode(message)))
            self.registry.on_worker(peer, message)
        elif isinstance(message, StepFailed):
            self._turn.append((Kind.WORKER, peer, encode(replace(message, error=""))))
            self.registry.on_worker(peer, message)
        else:
            self._result(peer, message)

    def _result(self, peer: str, message: StepResult) -> None:
        """Of nearly all results all that counts is how many tokens were drawn, and whom they ended."""
        more = message.logprobs or message.prompts or message.failed or message.pooled or message.counts
        sequences = self._sequences(peer) if more else []
        steps, taken = self.core.steps, True
        try:
            self.registry.on_worker(peer, message)
            taken = self.core.steps != steps
        finally:
            if not taken:
                self._turn.append((Kind.UNFIT, peer, message.lease, message.step))
            elif more:
                self._turn.append((Kind.WORKER, peer, encode(redact.result(message, sequences))))
            else:
                count, stopped = len(message.tokens) // 4, self.core.outbox.stopped()
                self._turn.append((Kind.DREW, peer, message.lease, message.step, count, stopped))

    def _sequences(self, peer: str) -> list[Sequence]:
        """Whose the slots of a worker's oldest step are."""
        worker = self.registry.workers.get(peer)
        steps = worker.replica.in_flight if worker is not None and worker.replica is not None else ()
        return [slot.seq for slot in steps[0].slots()] if steps else []

    def front(self, peer: str, message: Any) -> None:
        if not isinstance(message, Submit):
            self._turn.append((Kind.FRONT, peer, encode(message)))
            self.membership.on_front(peer, message)
        elif self._tokens:
            self._turn.append((Kind.FRONT, peer, encode(replace(message, key=self._keys.alias(message.key)))))
            self.membership.on_front(peer, message)
        else:
            vocab_size = self.core.vocab_size
            try:
                self.membership.on_front(peer, message)
            finally:
                self._submit(peer, message, vocab_size)

    def _submit(self, peer: str, message: Submit, vocab_size: int) -> None:
        """Whoever was taken in was sound; of others it is looked for once more."""
        taken = self.core.requests.get(message.uid)
        here = taken is not None and taken.attempt == message.attempt
        hashes = message.hashes if message.hashes or taken is None else b"".join(taken.hashes)
        sound = here or redact.is_sound(message, vocab_size)
        bare = redact.submit(message, hashes, self._keys.alias(message.key), sound)
        self._turn.append((Kind.SUBMIT, peer, encode(bare)))

    def worker_gone(self, peer: str, why: str, unsent: int = 0) -> None:
        self._turn.append((Kind.WORKER_GONE, peer, why, unsent))
        super().worker_gone(peer, why, unsent)

    def front_gone(self, peer: str) -> None:
        self._turn.append((Kind.FRONT_GONE, peer))
        self.membership.front_gone(peer)

    def undelivered(self, peer: str, message: Any) -> None:
        uids: list[int] = []
        if isinstance(message, TokenBatch | PromptLogprobs | BeamTokens):
            uids = from_i64(message.uids) if isinstance(message, TokenBatch) else [message.uid]
        self._turn.append((Kind.UNDELIVERED, peer, type(message).__name__, uids))
        self.membership.undelivered(peer, message)

    def bad_frames(self, count: int) -> None:
        self._turn.append((Kind.BAD_FRAMES, count))
        super().bad_frames(count)

    def notice(self) -> None:
        self._turn.append((Kind.NOTICE, self._clock.read()))
        self.membership.notice()

    def tick(self) -> None:
        self._turn.append((Kind.TICK,))
        self.membership.tick()

    # -- what goes out

    def plans(self) -> None:
        self._turn.append((Kind.PLANS,))
        self.registry.plans()

    def to_workers(self) -> Outgoing:
        out = super().to_workers()
        self._turn.append((Kind.TO_WORKERS, digests(out, self._tokens)))
        return out

    def to_front(self) -> Outgoing:
        out = self.core.outbox.take()
        if self._on:
            self._turn.append((Kind.TO_FRONT,))
            self._write()
        else:
            self._turn.clear()
        return out

    # -- the file

    def _write(self) -> None:
        """The turn is over: one record. What finds no room in its segment opens the next."""
        try:
            record = encode((b"".join(self._hashes), self._turn))
        except (ValueError, TypeError, OverflowError):
            log.exception("a turn cannot be recorded")
            self._fail("of that")
            return
        self._turn.clear()
        self._hashes.clear()
        fits = self._ring.fits(len(record))
        if fits:
            self._ring.write(record)
            if self.core.requests or self._ring.fits(self._ring.size // 4):
                return  # else the next segment is due soon, and nobody waits now while the state is written down
        if not self._begin(b"" if fits else record):
            self._fail("its file has no room for the scheduler's state, or for what came in a turn")

    def _begin(self, before: bytes) -> bool:
        """The next segment: the state as it is now, and the turn ``before`` it, which the last one has no room for."""
        outside = {id(self._clock): "clock", id(self.core.clock): "clock"}
        try:
            return self._ring.begin(dump(self.membership, outside, self._hide), self._clock.now, before)
        except SnapshotError:
            log.exception("the scheduler's state cannot be recorded")
            return False

    def _hide(self, obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        return self._keys.hide(obj, attributes if self._tokens else redact.state(obj, attributes))

    def _fail(self, why: str) -> None:
        log.error("the flight recorder stops, because %s; a larger --flight-recorder-size may help", why)
        self._off()

    def _off(self) -> None:
        self._on = False
        self._turn.clear()
        if not self._tokens:
            request.hash_block = self._hash_block
            self._hashes.clear()
        self._ring.close()


def digests(out: Outgoing, tokens: bool) -> list[int]:
    """Of each plan; ``tokens``: with the token ids in it."""
    what = encode if tokens else redact.visible
    return [
        zlib.crc32(what(message), zlib.crc32(peer.encode()))
        for peer, message in out
        if isinstance(message, StepPlan | Move)
    ]


def open_ring(config: EngineArgs) -> Ring | None:
    """The file that the flags ask for, or None. Raises ConfigError where there never was one: where a scheduler has
    recorded there before, a disk that is full by now must not keep the next one from serving."""
    path, size, tokens = config.flight_recorder, config.flight_recorder_size, config.flight_recorder_tokens
    if path is None:
        return None
    earlier = holds_recording(path)
    try:
        ring = Ring(path, size, tokens)
    except ConfigError as error:
        if not earlier:
            raise
        log.error("nothing is recorded: %s", error)
        return None
    log.info("records what happens into %s (%g MB, %s token ids)", path, size, "with" if tokens else "without")
    return ring
