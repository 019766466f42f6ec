"""The core of the detokenizer: which requests are open, and what is owed to whom. It does no IO.

It is told what happens (``received``, ``connected``, ``heartbeat``, ...), and what is to be sent about it waits in
``take``. Its clock is given to it, and so is what prepares prompts and checks grammars elsewhere: the process has
sockets and threads around it (`loop.py`), a test has neither.

A request lives here from its Tokenize to the end of its last child: encoded elsewhere, its grammar (if it has one)
checked (`gate.py`), submitted, its tokens turned into text (`step.py`). Four things end it early: its Engine aborts
it, its Engine is lost, the scheduler fails it, or the scheduler does not know it (Unknown, which its Engine is told).

An Engine is lost when its connection breaks, or when it reads nothing: one that sends no heartbeat for a while is let
go, so what it leaves unread is bounded by what is generated for it in that time. A silent scheduler is waited for.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from ..proto.codec import BadFrame, encode, from_i32, i32, i64
from ..proto.errors import Refused
from ..proto.losses import MAX_LOSSES
from ..proto.messages import (
    Abort,
    Accepted,
    BeamStopped,
    BeamTokens,
    Bye,
    Failed,
    Heartbeat,
    Hello,
    Peers,
    Pooled,
    PromptLogprobs,
    Quarantined,
    Reconcile,
    Submit,
    TokenBatch,
    Tokenize,
    Unknown,
)
from ..proto.request_name import about
from ..proto.standstill import Standstill
from ..proto.structured import StructuredOutputsParams
from ..proto.work import Generate, Text, bytes_of, with_embeds
from .beams import LostBeams
from .columns import Outbox, check_tokenize, pairs_of
from .logprobs import check_logprobs
from .request import Request
from .step import Step
from .tokenize import Prepared, Preparer

log = logging.getLogger(__name__)

SCHEDULER = ""
"""The peer that is the scheduler. The others are Engines, by identity, which is never empty."""

HEARTBEAT_S = 1.0
RECONCILE_EVERY = 2
"""Heartbeats between two Reconciles."""
HEALTH_CHECK = "health-"
"""How the identities of deploy/healthcheck.py begin, which connects and leaves every few seconds."""
SILENCE_S = 20.0
"""An Engine not heard for so long, though it sends a Heartbeat each second, is hung; on its return it submits again."""
STOOD_STILL_S = 3.0
"""So many seconds between two heartbeats mean that this process stood still: Engines get the time it missed."""
MAX_QUEUED = 8192
MAX_QUEUED_BYTES = 256 * 2**20

Prepare = Callable[[Callable[[], Prepared | None], Callable[[Prepared | Exception | None], None], int], None]
"""``prepare(job, done, size)`` runs ``job`` (on about ``size`` bytes) elsewhere; ``done`` is given what comes of it."""
Check = Callable[[StructuredOutputsParams, Callable[[Exception | None], None], bool], None]
"""``check(spec, done, patient)`` checks a grammar as ``Gate.check`` does."""


class DetokenizerCore:
    """``hello`` is what the scheduler is told of this process. ``clock`` gives seconds that only rise."""

    def __init__(self, preparer: Preparer, hello: Hello, clock: Callable[[], float], prepare: Prepare, check: Check):
        self.preparer, self.clock = preparer, clock
        self._hello, self._run, self._check = hello, prepare, check
        self._todo: list[tuple[str, Any]] = []
        self.requests: dict[int, Request] = {}
        self.engines: dict[str, float] = {}  # when each was last heard
        self._standstill = Standstill(STOOD_STILL_S, clock())
        self._heartbeats = 0
        self.bad_frames = 0
        """Messages dropped because their columns make no sense."""
        self.epoch = -1
        self.block_size = 0
        self.max_model_len = preparer.model.max_model_len
        self.queued = self.queued_bytes = 0
        self._seconds_each = 0.001  # recent time between finished preparations while some wait
        self._last_done = 0.0  # or when the first of those that wait came
        self._line: deque[tuple[Request, Tokenize]] = deque()  # to be prepared
        self._preparing = 0
        self._alone: Request | None = None  # the one in quarantine that is prepared now, or next
        self._asked: Tokenize | None = None  # its message, until its Engine has let it begin
        self._online = False
        self.refused: str | None = None
        """Why the scheduler will never talk to this process."""

    def take(self) -> list[tuple[str, Any]]:
        """What is to be sent, in order: (peer, message)."""
        todo, self._todo = self._todo, []
        return todo

    def _put(self, peer: str, message: Any) -> None:
        self._todo.append((peer, message))

    def _put_all(self, message: Any) -> None:
        for engine in self.engines:
            self._put(engine, message)

    def close(self) -> None:
        """Take leave of everyone. Nothing that comes after means anything."""
        self._put_all(Bye())
        self._put(SCHEDULER, Bye())

    # ------------------------------------------------------------ keeping in touch

    def connected(self) -> None:
        """The connection to the scheduler stands."""
        self._online = True
        self._introduce()

    def disconnected(self) -> None:
        """The connection to the scheduler broke, and may be made again by itself."""
        self._online = False

    def connection_broke(self) -> None:
        """The connection of some Engine broke, and only sending to each tells whose."""
        self._put_all(Heartbeat())

    def undelivered(self, engine: str) -> None:
        """Something of ``take`` could not be sent to ``engine``, which is gone."""
        self._lose_engine(engine)

    def heartbeat(self, memory: int, bad_frames: int) -> None:
        """To be called every ``HEARTBEAT_S``. ``memory`` is what this process holds in bytes, ``bad_frames`` what its
        sockets have dropped so far; the scheduler is told both."""
        if self._online:  # a socket keeps what it cannot send; old heartbeats are of no use to anyone
            self._put(SCHEDULER, Heartbeat(memory=memory, bad_frames=self.bad_frames + bad_frames))
        now = self.clock()
        if self._standstill.notice(now):
            self.engines = {engine: self._standstill.since(heard) for engine, heard in self.engines.items()}
        for engine in [engine for engine, heard in self.engines.items() if now - heard > SILENCE_S]:
            self._lose_engine(engine, f"has been silent for {SILENCE_S:g} s")
        self.connection_broke()
        self._heartbeats += 1
        if self._online and self._heartbeats % RECONCILE_EVERY == 0:
            self._reconcile()

    def _introduce(self) -> None:
        self._put(SCHEDULER, self._hello)
        self._reconcile()

    def _reconcile(self) -> None:
        known = [r for r in self.requests.values() if r.submitted]
        self._put(SCHEDULER, Reconcile(i64([r.uid for r in known]), i32([r.attempt for r in known])))

    def _lose_engine(self, engine: str, why: str = "is gone") -> None:
        self.engines.pop(engine, None)
        lost = [r for r in self.requests.values() if r.peer == engine]
        for request in lost:
            self._drop(request)
        level = logging.DEBUG if engine.startswith(HEALTH_CHECK) else logging.INFO
        log.log(level, "%s %s; dropped %d of its requests", engine, why, len(lost))

    def _drop(self, request: Request) -> None:
        """Forget a request, and have the scheduler forget it."""
        if self.requests.get(request.uid) is request:
            del self.requests[request.uid]
        if request.submitted:
            self._put(SCHEDULER, Abort(request.uid, request.attempt))
        if request is self._alone and self._asked is not None:  # it will not begin
            self._asked, self.queued, self.queued_bytes = None, self.queued - 1, self.queued_bytes - request.size
            self._settle(request)

    def received(self, peer: str, message: Any) -> None:
        """``message`` came from ``peer``. Where its columns make no sense it is counted, logged and dropped."""
        try:
            if peer == SCHEDULER:
                self._on_scheduler(message)
            else:
                self._on_engine(peer, message)
        except BadFrame as error:
            self.bad_frames += 1
            if self.bad_frames <= 20 or self.bad_frames % 1000 == 0:
                who, count = peer or "the scheduler", self.bad_frames
                log.warning("dropped a message from %s with bad columns (%d so far): %s", who, count, error)

    # ------------------------------------------------------------ from Engines

    def _on_engine(self, peer: str, message: Any) -> None:
        if isinstance(message, Bye):
            self._lose_engine(peer)
            return
        if peer not in self.engines and self._alone is not None:
            self._put(peer, Quarantined(self._alone.uid, self._alone.attempt))
        self.engines[peer] = self.clock()
        if isinstance(message, Tokenize):
            self._tokenize(peer, message)
        elif isinstance(message, Abort):
            request = self.requests.get(message.uid)
            if request is not None and request.peer == peer and request.attempt <= message.attempt:
                self._drop(request)
        elif isinstance(message, Quarantined):
            self._begin_alone(peer, message)
        elif isinstance(message, Reconcile):
            self._compare(peer, message)

    def _compare(self, peer: str, message: Reconcile) -> None:
        """Answer Unknown for what we lack; drop what the Engine no longer lists."""
        listed = dict(pairs_of(message.uids, message.attempts))
        for request in [r for r in self.requests.values() if r.peer == peer and r.attempt > listed.get(r.uid, -1)]:
            self._drop(request)
        gone = []
        for uid, attempt in listed.items():
            found = self.requests.get(uid)
            if found is None or found.attempt < attempt:
                gone.append((uid, attempt))
        if gone:
            self._put(peer, Unknown(i64([u for u, _ in gone]), i32([a for _, a in gone])))

    def _tokenize(self, peer: str, message: Tokenize) -> None:
        check_tokenize(message)
        old = self.requests.get(message.uid)
        if old is not None:
            if old.attempt >= message.attempt:
                return
            self._drop(old)
        size = _size(message)
        full = self.queued >= MAX_QUEUED or self.queued_bytes + size > MAX_QUEUED_BYTES
        if full and message.attempt < 1:  # a resubmission (Engine counts from 0) is never refused for load
            wait = max(1.0, round(self.queued * self._seconds_each, 1))
            text = f"{self.queued} prompts ({self.queued_bytes} bytes) wait to be encoded; try again in {wait:g} s."
            self._put(peer, Failed(message.uid, message.attempt, 429, text, retry_after=wait))
            return
        request = Request(message.uid, message.attempt, peer, size)
        self.requests[message.uid] = request
        if not self.queued:
            self._last_done = self.clock()  # nothing was being prepared before
        self.queued += 1
        self.queued_bytes += size
        self._line.append((request, message))
        self._start()

    # ------------------------------------------------------------ prompts

    def _start(self) -> None:
        """Prepare those that wait. One in quarantine waits until nothing is being prepared, and all wait for it."""
        while self._line and self.block_size and self._alone is None:
            request, message = self._line[0]
            quarantined = message.losses >= MAX_LOSSES - 1 and self.requests.get(request.uid) is request
            if quarantined and self._preparing:
                break
            self._line.popleft()
            if quarantined:
                self._alone, self._asked = request, message
                self._put_all(Quarantined(request.uid, request.attempt))
            else:
                self._prepare(request, message)

    def _begin_alone(self, peer: str, message: Quarantined) -> None:
        """The Engine of the request in quarantine knows that this process may die of it now."""
        request, asked = self.requests.get(message.uid), self._asked
        if asked is None or request is None or request is not self._alone:
            return
        if request.peer == peer and request.attempt == message.attempt:
            self._asked = None
            self._prepare(request, asked)

    def _settle(self, request: Request) -> None:
        """A request has been prepared, or is gone."""
        if request is self._alone:
            self._alone = None
            self._put_all(Quarantined(0, 0))
        self._start()

    def _prepare(self, request: Request, message: Tokenize) -> None:
        block_size, limit = self.block_size, self.max_model_len

        def job() -> Prepared | None:
            if self.requests.get(request.uid) is not request:
                return None  # aborted while it waited
            return self.preparer.prepare(message, block_size, limit)

        self._preparing += 1
        self._run(job, lambda result: self._prepared(request, message, result), request.size)

    def _prepared(self, request: Request, message: Tokenize, result: Prepared | Exception | None) -> None:
        self._preparing -= 1
        self.queued -= 1
        self.queued_bytes -= request.size
        now = self.clock()
        if self.queued:
            self._seconds_each += 0.1 * (min(now - self._last_done, 10.0) - self._seconds_each)
        self._last_done = now
        if self.requests.get(request.uid) is not request:
            pass  # aborted, replaced, or its Engine is gone
        elif not isinstance(result, Prepared):
            self._refuse(request, result)
        elif not isinstance(result.work, Generate) or (spec := result.work.params.structured_outputs) is None:
            self._submit(request, message, result)
        else:
            self._check(spec, lambda error: self._checked(request, message, result, error), message.attempt > 0)
            self._start()
            return
        self._settle(request)

    def _checked(self, request: Request, message: Tokenize, prepared: Prepared, error: Exception | None) -> None:
        """A request's grammar has passed, or not; other requests went on meanwhile."""
        if self.requests.get(request.uid) is not request:
            pass  # aborted, replaced, or its Engine is gone
        elif error is not None:
            self._refuse(request, error)
        else:
            self._submit(request, message, prepared)
        self._settle(request)

    def _refuse(self, request: Request, result: Exception | None) -> None:
        self.requests.pop(request.uid)
        uid, attempt = request.uid, request.attempt
        if isinstance(result, Refused):
            wait = 1.0 if result.status == 429 else None
            self._put(request.peer, Failed(uid, attempt, result.status, result.message, result.param, wait))
        else:
            log.error("a request failed while its prompt was prepared", exc_info=result, extra=about(uid))
            text = f"the prompt could not be prepared ({type(result).__name__}); the server's log says more."
            self._put(request.peer, Failed(uid, attempt, 500, text))

    def _submit(self, request: Request, message: Tokenize, prepared: Prepared) -> None:
        uid, attempt, work = request.uid, request.attempt, prepared.work
        told = with_embeds(work, None) if isinstance(work, Generate) else work  # Engine has them
        self._put(request.peer, Accepted(uid, attempt, prepared.ids, prepared.prompt, told))
        if prepared.replayed:
            outbox = Outbox()
            for index, offset, news in prepared.replayed:
                outbox.add(uid, attempt, index, offset, [], news)
            self._put(request.peer, outbox.batch())
        if isinstance(work, Generate):
            request.open(work, prepared.sequences, prepared.beams)
        if isinstance(work, Text) or (isinstance(work, Generate) and not request.sequences):
            self.requests.pop(uid, None)  # all children had ended before, and only the news of it was lost
            return
        request.submitted, request.epoch = True, self.epoch
        hashes = prepared.hashes if prepared.block_size == self.block_size else b""  # the scheduler was restarted
        submit = Submit(
            uid=uid, attempt=attempt, ids=prepared.ids, hashes=hashes, work=work, arrival=message.arrival,
            children=prepared.children, key=message.key, priority=message.priority, losses=message.losses,
            prompt_logprobs_from=message.prompt_logprobs_from, root=prepared.root,
        )  # fmt: skip
        self._put(SCHEDULER, submit)

    # ------------------------------------------------------------ from the scheduler

    def _on_scheduler(self, message: Any) -> None:
        if isinstance(message, TokenBatch):
            self._tokens(message)
        elif isinstance(message, BeamTokens):
            self._beams(message)
        elif isinstance(message, PromptLogprobs):
            self._prompt_logprobs(message)
        elif isinstance(message, Peers):
            self._peers(message)
        elif isinstance(message, Failed | Pooled):  # either ends the request
            request = self.requests.get(message.uid)
            if request is not None and request.attempt == message.attempt:
                del self.requests[message.uid]
                self._put(request.peer, message)
        elif isinstance(message, Unknown):
            self._gone(message)
        elif isinstance(message, Bye):
            self.refused = message.reason or self.refused

    def _peers(self, message: Peers) -> None:
        if message.epoch < self.epoch or message.block_size < 1:
            return
        restarted = message.epoch > self.epoch >= 0
        self.epoch, self.block_size = message.epoch, message.block_size
        own = self.preparer.model.max_model_len
        self.max_model_len = min(own, message.max_model_len) if message.max_model_len > 0 else own
        if restarted:  # a new scheduler knows nothing of this process, nor of what was sent to the one before
            self._introduce()
        self._start()

    def _gone(self, message: Unknown) -> None:
        """The scheduler does not have these. Of what was with a scheduler before this one Engine learns from this one,
        together with which request ended that; told here first, it would hold the loss against all."""
        lost: dict[str, list[Request]] = {}
        for uid, attempt in pairs_of(message.uids, message.attempts):
            request = self.requests.get(uid)
            if request is not None and request.submitted and request.attempt == attempt:
                del self.requests[uid]
                if request.epoch == self.epoch:
                    lost.setdefault(request.peer, []).append(request)
        for peer, requests in lost.items():
            self._put(peer, Unknown(i64([r.uid for r in requests]), i32([r.attempt for r in requests])))

    def _tokens(self, message: TokenBatch) -> None:
        """One step's tokens: decode each child's, and send each Engine its share in one frame."""
        step = Step(self.requests, self.preparer.texts)
        step.take(message)
        for stopped in step.stopped:
            self._put(SCHEDULER, stopped)
        for peer, outbox in step.outboxes.items():
            self._put(peer, outbox.batch())
        for request in step.lost:
            self._lose(request)

    def _beams(self, message: BeamTokens) -> None:
        """Tell the scheduler which candidates of a beam search a stop string ends."""
        request = self.requests.get(message.uid)
        if request is None or request.attempt != message.attempt or request.beams is None:
            return  # aborted, or of another attempt
        parents, tokens = from_i32(message.parents), from_i32(message.tokens)
        try:
            stopped = request.beams.advance(message.step, parents, tokens)
        except LostBeams as error:
            log.error("a beam search is out of step: %s", error, extra=about(request.uid))
            self._lose(request)
            return
        self._put(SCHEDULER, BeamStopped(request.uid, request.attempt, message.step, i32(stopped)))

    def _prompt_logprobs(self, message: PromptLogprobs) -> None:
        """Give the prompt's logprobs their texts, and pass them on."""
        request = self.requests.get(message.uid)
        if request is None or request.attempt != message.attempt:
            return
        check_logprobs(message.logprobs, len(message.logprobs.ranks) // 4)
        if self.preparer.texts is not None and not request.silent:
            self.preparer.texts.fill(message.logprobs)
        self._put(request.peer, message)

    def _lose(self, request: Request) -> None:
        """What the scheduler sends does not follow from what is here; the request's Engine starts it again."""
        self._drop(request)
        self._put(request.peer, Unknown(i64([request.uid]), i32([request.attempt])))


def _size(message: Tokenize) -> int:
    """Roughly the bytes a waiting prompt holds."""
    size = 512 + len(message.prompt or "") + len(message.ids or b"") + sum(len(each.ids) for each in message.resume)
    size += bytes_of(message.work)
    return size + len(encode((message.messages, message.template))) if message.messages is not None else size
