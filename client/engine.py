"""Engine: submit, stream, abort, resubmit.

Engine's list of tokens is authoritative; everything downstream is an extension of it that may be thrown away. So when
a detokenizer or the scheduler dies, Engine raises the request's attempt and sends it again with what it has, messages
of lower attempts are dropped, and the consumer never knows.

One Engine lives in one event loop; nothing here is thread-safe but the dropping of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Awaitable, Collection
from typing import Any

import zmq

from ..proto import messages as m
from ..proto.codec import BadFrame, from_i8, from_i32, from_i64, i32, i64
from ..proto.config import ConfigError
from ..proto.params import SamplingParams
from ..proto.pooling import PoolingParams
from ..proto.process import new_incarnation, pulse, resident_bytes
from ..proto.wire.sockets import CONNECTED, Dealer, Keys, front_endpoint
from .best import to_wire
from .logprobs import by_row, unpack
from .placement import Link, Placement
from .pooled import PoolRequest
from .sendable import bad_field, priority_of, size_of
from .stream import OpenRequest, Pooled, Prompt, RequestError, RequestStream, StreamEvent, pack_ids

__all__ = ["Engine", "Pooled", "Prompt", "RequestError", "RequestStream", "StreamEvent"]

log = logging.getLogger(__name__)

BEAT_S = 1.0
OPEN_EVERY = 2
"""Beats between two Opens."""
SILENCE_S = 10.0
"""A peer not heard for so long, though it beats each second, is hung. A detokenizer's requests are sent again, to
another or to itself once it is heard; a scheduler is waited for, and new requests are refused meanwhile."""
JUMP_S = 2.0
"""Where a beat comes so much too late it was this process that stood still: its peers get the time it missed."""
NO_DETOKENIZER_S = 10.0
"""How long a new request waits for a detokenizer before it is refused with 503."""
NO_DETOKENIZER_RESUMED_S = 120.0
"""How long one that has been sent once waits for another: processes are being restarted."""
ACCEPT_S = 15.0
"""A request not accepted within this time goes to another detokenizer, if there is one."""
MAX_UNACCEPTED, MAX_UNACCEPTED_BYTES = 8192, 256 * 2**20
"""Requests, and roughly their bytes, that may be on their way into the scheduler's queue; a new one gets 429."""


class Engine:
    """The way into a running quire at ``scheduler_address`` (``ipc://FOLDER`` or ``tcp://HOST:PORT``)."""

    def __init__(self, scheduler_address: str, keys: Keys | None = None):
        self.address, self._keys = scheduler_address, keys
        self.incarnation = new_incarnation("frontend")
        self._uid = int.from_bytes(os.urandom(4), "little") >> 1 << 32
        self._context: zmq.Context | None = None
        self._scheduler: Dealer | None = None
        self._placement = Placement()
        self._links = self._placement.links
        self._link_count = 0
        self._unreached: dict[str, bool] = {}  # no socket could be made for these; who was silent
        self._peers: m.Peers | None = None  # of the present connection
        self._epoch = 0
        self._heard = 0.0
        self._fatal: str | None = None
        self._open: dict[int, OpenRequest] = {}
        self._unaccepted: dict[int, int] = {}  # of these, those whose prompt's ids are not known yet: bytes
        self._unaccepted_bytes = 0
        self.tokens_at = 0.0  # when tokens, or what was pooled, last came, of any request
        self._changed = asyncio.Event()
        self._asked: dict[int, asyncio.Future[m.Stats]] = {}
        self._asked_count = 0
        self._ticker: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bad_frames = 0  # of links that are gone, and frames whose columns do not agree

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Say Hello; returns at once, the peers may come later (``wait_ready``). Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._scheduler = Dealer(
            m.FromSchedulerFront, front_endpoint(self.address), self.incarnation, self._keys, self._context
        )
        self._scheduler.attach(self._guard(self._on_scheduler), self._on_scheduler_event)
        self._ticker = self._loop.create_task(self._tick())

    async def close(self) -> None:
        """Abort what is open and leave. Idempotent."""
        if self._context is None:
            return
        if self._ticker is not None:
            self._ticker.cancel()
        self.fail_all(RequestError(503, "the engine has been closed."))
        wires = [link.wire for link in self._links.values()] + ([self._scheduler] if self._scheduler else [])
        for wire in wires:
            wire.send(m.Bye())
        await asyncio.sleep(0.01)  # closing gives up what has not left yet
        wires += [link.wire for link in self._links.values()]  # one lost meanwhile was connected to again
        for wire in wires:
            wire.close()
        self._links.clear()
        self._peers = None
        context, self._context = self._context, None
        context.destroy(linger=0)

    @property
    def ready(self) -> bool:
        """True while a request would run: scheduler heard, a replica ready, a detokenizer connected."""
        return (
            self._peers is not None
            and self._peers.ready
            and time.monotonic() - self._heard < SILENCE_S
            and any(link.ready for link in self._links.values())
        )

    @property
    def max_model_len(self) -> int:
        """The longest prompt + output in tokens; 0 until a replica is ready."""
        return self._peers.max_model_len if self._peers is not None else 0

    @property
    def open_requests(self) -> int:
        """Requests not finished."""
        return len(self._open)

    @property
    def bad_frames(self) -> int:
        """Frames dropped so far because they made no sense."""
        wires = [link.wire for link in self._links.values()] + ([self._scheduler] if self._scheduler else [])
        return self._bad_frames + sum(wire.bad_frames for wire in wires)

    @property
    def detokenizers(self) -> set[str]:
        """The incarnations of those it is connected to, or tries to be."""
        return set(self._links)

    async def wait_ready(self, timeout: float | None = None, without: Collection[str] = ()) -> None:
        """Return once a request would run, with none of the detokenizers ``without``.

        Raises TimeoutError, or RuntimeError where the scheduler refuses this version.
        """

        async def wait() -> None:
            while not self.ready or any(incarnation in self._links for incarnation in without):
                if self._fatal is not None:
                    raise RuntimeError(self._fatal)
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(wait(), timeout)

    # ------------------------------------------------------------ requests

    def submit(
        self,
        prompt: str | None = None,
        ids: list[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        params: SamplingParams | None = None,
        *,
        template: dict[str, Any] | None = None,
        add_special_tokens: bool = True,
        key: str = "",
        priority: int = 0,
        seed: int | None = None,
        echo: bool = False,
    ) -> RequestStream:
        """Queue one request and return its stream at once; exactly one of prompt, ids and messages is given.

        ``seed`` is used where params has none; left out, it is random. ``echo`` has ``accepted.prompt`` set where ids
        are given, too. With best_of and beam search every event comes at the end. What is wrong with the request is
        raised by the stream as RequestError; only what could not be sent at all (ids that are no int32, messages that
        are not JSON) is raised here, as RequestError 400.
        """
        if sum(x is not None for x in (prompt, ids, messages)) != 1:
            raise ValueError("exactly one of prompt, ids and messages must be given.")
        params = params if params is not None else SamplingParams()
        seed = params.seed if params.seed is not None else seed
        seed = random.getrandbits(64) if seed is None else seed % 2**64
        message = m.Tokenize(
            uid=0, attempt=0, params=params, seed=seed,
            arrival=time.time(), prompt=prompt, ids=None if ids is None else pack_ids(ids), messages=messages,
            template=template, add_special_tokens=add_special_tokens, key=key, priority=_priority(priority), echo=echo,
        )  # fmt: skip
        self._admit(message)
        message.params = to_wire(params)
        request = OpenRequest(message, params)
        self._enter(request)
        return RequestStream(request, self._abandon, self._abort)

    def pool(
        self,
        *,
        prompt: str | None = None,
        ids: list[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        pair: str | None = None,
        params: PoolingParams | None = None,
        template: dict[str, Any] | None = None,
        add_special_tokens: bool = True,
        key: str = "",
        priority: int = 0,
    ) -> Awaitable[Pooled]:
        """Queue one prompt to be pooled and return at once what its answer will be awaited on; cancelling that aborts
        the request. Exactly one of prompt, ids and messages is given; ``pair`` is the second text of a pair whose
        first is ``prompt``.

        What is wrong with the request is raised by the awaitable as RequestError; only what could not be sent at all
        is raised here, as by ``submit``.
        """
        if sum(x is not None for x in (prompt, ids, messages)) != 1:
            raise ValueError("exactly one of prompt, ids and messages must be given.")
        if pair is not None and prompt is None:
            raise ValueError("the first text of a pair must be given as prompt.")
        message = m.Tokenize(
            uid=0, attempt=0, params=SamplingParams(max_tokens=1), seed=0, arrival=time.time(), prompt=prompt,
            ids=None if ids is None else pack_ids(ids), messages=messages, template=template,
            add_special_tokens=add_special_tokens, key=key, priority=_priority(priority),
            pooling=params if params is not None else PoolingParams(), pair=pair,
        )  # fmt: skip
        self._admit(message)
        request = PoolRequest(message, self._abort)
        self._enter(request)
        return request.answer

    def _enter(self, request: OpenRequest) -> None:
        self._place(request)
        self._open[request.uid] = request

    def _admit(self, message: m.Tokenize) -> None:
        """Give it its number, and count what is on its way in. Raises RequestError: 400 where it could not be sent,
        429 where too much is on its way."""
        self._uid += 1
        message.uid = self._uid
        if (bad := bad_field(message)) is not None:
            raise RequestError(400, f"{bad[0]} cannot be sent: {bad[1]}.", bad[0])
        size = size_of(message)
        count, size_before = len(self._unaccepted), self._unaccepted_bytes
        if count >= MAX_UNACCEPTED or (count and size_before + size > MAX_UNACCEPTED_BYTES):
            text = f"{count} requests ({size_before} bytes) wait to be tokenized; try again in a moment."
            raise RequestError(429, text, retry_after=1.0)
        self._unaccepted[message.uid] = size
        self._unaccepted_bytes += size

    def fail_all(self, error: RequestError) -> None:
        """End every open request with ``error``."""
        for request in list(self._open.values()):
            self._finish(request, error, tell=True)

    async def stats(self, timeout: float = 2.0) -> m.Stats:
        """The scheduler's counters. Raises TimeoutError."""
        self._asked_count += 1
        token = self._asked_count
        answer = self._asked[token] = asyncio.get_running_loop().create_future()
        try:
            if self._scheduler is not None:
                self._scheduler.send(m.GetStats(token=token))
            return await asyncio.wait_for(answer, timeout)
        finally:
            del self._asked[token]

    def _abandon(self, uid: int) -> None:
        """A stream was dropped, perhaps by the garbage collector in another thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the request with it
                self._loop.call_soon_threadsafe(self._abort, uid)

    def _abort(self, uid: int) -> None:
        request = self._open.get(uid)
        if request is not None:
            self._finish(request, None, tell=True)

    def _finish(self, request: OpenRequest, error: RequestError | None, tell: bool = False) -> None:
        """Forget a request; ``tell`` its detokenizer unless that knows."""
        self._open.pop(request.uid, None)
        self._unaccepted_bytes -= self._unaccepted.pop(request.uid, 0)
        link = request.link
        self._placement.forget(request)
        if link is not None and tell and not request.done:
            link.wire.send(m.Abort(uid=request.uid, attempt=request.attempt))
        request.end(error)
        if request.accepted is None:
            self._place_waiting()

    def _place(self, request: OpenRequest, besides: Link | None = None) -> None:
        """Send the present attempt to the detokenizer it has, or to another; else let it wait."""
        link = request.link or self._placement.place(request, besides)
        if link is not None:
            self._send(request, link)

    def _place_waiting(self) -> None:
        for request, link in self._placement.place_waiting():
            self._send(request, link)

    def _send(self, request: OpenRequest, link: Link) -> None:
        link.wire.send(request.again())
        request.since = time.monotonic()

    def _resubmit(self, request: OpenRequest, counts: bool, besides: Link | None = None) -> None:
        """After a loss, which ``counts`` or not. One that was accepted stays with the detokenizer it has."""
        if request.accepted is None and request.link is not None:
            request.link.remove(request)
        if request.lost(counts):
            self._place(request, besides)
            self._place_waiting()  # for one on trial, there is one less beside it
        else:
            message = f"the processes serving this request failed {request.losses.count} times at the same point of it."
            self._finish(request, RequestError(500, message), tell=True)

    # ------------------------------------------------------------ the scheduler

    def _on_scheduler_event(self, event: str) -> None:
        if event == CONNECTED and self._scheduler is not None:
            hello = m.Hello(kind="frontend", incarnation=self.incarnation, protocol=m.PROTOCOL, pid=os.getpid())
            self._scheduler.send(hello)
        else:
            self._peers = None

    def _on_scheduler(self, message: Any) -> None:
        self._heard = time.monotonic()
        if isinstance(message, m.Peers):
            self._on_peers(message)
        elif isinstance(message, m.Stats):
            if (answer := self._asked.get(message.token)) is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, m.Bye):
            if message.reason and self._peers is None:
                log.error("the scheduler refuses this process: %s", message.reason)
                self._fatal = message.reason
            self._peers = None
            self._changed.set()

    def _on_peers(self, peers: m.Peers) -> None:
        if peers.epoch < self._epoch:
            return
        restarted = 0 < self._epoch < peers.epoch
        self._epoch, self._peers = peers.epoch, peers
        listed = {peer.incarnation: peer for peer in peers.peers if peer.kind == "detokenizer"}
        for link in list(self._links.values()):
            # A new scheduler does not know everyone yet: only one it knew and dropped, or one out of reach, is gone.
            if link.incarnation not in listed and (link.listed == peers.epoch or not link.ready):
                self._lose(link)
        self._unreached = {name: silent for name, silent in self._unreached.items() if name in listed}
        for peer in listed.values():
            if peer.incarnation not in self._links:
                self._connect(peer)
            else:
                self._links[peer.incarnation].listed = peers.epoch
        if restarted:
            # What is still being tokenized will be submitted to the new scheduler; the rest was with the old one.
            hit = [request for request in self._open.values() if request.accepted and request.link]
            log.warning("the scheduler was restarted; sending %d requests again", len(hit))
            for request in hit:
                innocent = peers.blamed is not None and peers.blamed != request.uid
                self._resubmit(request, counts=request.started and not innocent)
        self._changed.set()

    # ------------------------------------------------------------ detokenizers

    def _connect(self, peer: m.Peer, silent: bool = False) -> None:
        self._link_count += 1  # a fresh identity: the old one's ROUTER may not have noticed yet that it is gone
        identity = f"{self.incarnation}.{self._link_count}"
        try:
            wire: Dealer = Dealer(m.FromDetokenizer, peer.endpoint, identity, self._keys, self._context)
        except (zmq.ZMQError, ConfigError) as error:
            if peer.incarnation not in self._unreached:
                log.warning("cannot connect to detokenizer %s at %r yet: %s", peer.incarnation, peer.endpoint, error)
            self._unreached[peer.incarnation] = silent
            return
        self._unreached.pop(peer.incarnation, None)
        link = self._links[peer.incarnation] = Link(peer.incarnation, wire, self._epoch, silent)
        link.wire.attach(
            self._guard(lambda message: self._on_detokenizer(link, message)),
            lambda event: self._on_link_event(link, event),
        )

    def _on_link_event(self, link: Link, event: str) -> None:
        if self._links.get(link.incarnation) is not link:
            return
        if event == CONNECTED:
            link.wire.send(m.Heartbeat())  # so that it beats to this process
            if not link.silent:
                self._use(link)
        elif link.ready:
            self._lose(link)

    def _use(self, link: Link) -> None:
        """It takes requests from now on."""
        link.ready, link.heard = True, time.monotonic()
        self._place_waiting()
        self._changed.set()

    def _lose(self, link: Link, left: bool = False, silent: bool = False) -> None:
        """A detokenizer is gone or hung, or its connection is: what it held goes elsewhere, or back under a new
        identity, so that nothing it may still say or hear about the attempts before is taken for the present ones.
        """
        del self._links[link.incarnation]
        self._changed.set()
        link.wire.close()
        self._bad_frames += link.wire.bad_frames
        held, trial = list(link.open.values()), link.trial
        if held:
            log.warning("lost detokenizer %s; sending %d requests again", link.incarnation, len(held))
        for request in held:
            link.remove(request)
        for request in held:
            at_risk = request.started or request.accepted is None
            self._resubmit(request, counts=at_risk and trial in (None, request.uid))
        for peer in self._peers.peers if self._peers is not None else []:
            if peer.incarnation == link.incarnation and not left:
                self._connect(peer, silent)

    def _on_detokenizer(self, link: Link, message: Any) -> None:
        link.heard = time.monotonic()
        if not link.ready:
            self._use(link)
        if isinstance(message, m.TextBatch):
            self._on_text(message)
        elif isinstance(message, m.PromptLogprobs):
            found = unpack(message.logprobs)
            if (request := self._current(message)) is not None and not request.take_prompt(message.start, found):
                self._broken(request)
        elif isinstance(message, m.Accepted):
            if (request := self._current(message)) is not None:
                self._unaccepted_bytes -= self._unaccepted.pop(message.uid, 0)
                request.accept(message)
                link.release(request)
                self._place_waiting()
        elif isinstance(message, m.Pooled):
            request = self._current(message)
            if isinstance(request, PoolRequest):
                self.tokens_at = time.monotonic()
                request.settle(message.rows, message.data)
                self._finish(request, None)
        elif isinstance(message, m.Failed):
            if (request := self._current(message)) is not None:
                error = RequestError(message.status, message.message, message.param, message.retry_after)
                self._finish(request, error)
        elif isinstance(message, m.Unknown):
            for uid, attempt in zip(from_i64(message.uids), from_i32(message.attempts), strict=True):
                request = link.open.get(uid)
                if request is not None and request.attempt == attempt:
                    # One that is never accepted may be one that cannot be read there.
                    self._resubmit(request, counts=request.started or request.accepted is None)
        elif isinstance(message, m.Bye):
            self._lose(link, left=True)

    def _current(self, message: m.Accepted | m.Failed | m.Pooled | m.PromptLogprobs) -> OpenRequest | None:
        request = self._open.get(message.uid)
        return request if request is not None and request.attempt == message.attempt else None

    def _broken(self, request: OpenRequest) -> None:
        log.warning("request %d: what came does not follow what is here; sending it again", request.uid)
        self._resubmit(request, counts=True)

    def _on_text(self, batch: m.TextBatch) -> None:
        now = time.monotonic()
        for uid, cached in zip(from_i64(batch.started_uids), from_i32(batch.started_cached), strict=True):
            if (request := self._open.get(uid)) is not None:
                request.start(now, cached)
        counts, tokens = from_i32(batch.counts), from_i32(batch.tokens)
        if sum(counts) != len(tokens) or min(counts, default=0) < 0:
            raise BadFrame(f"counts add up to {sum(counts)} and there are {len(tokens)} tokens")
        if tokens:
            self.tokens_at = now
        logprobs = by_row(batch, counts)
        end = 0
        for row, (uid, attempt, index, offset, count, text, finish, reason, length) in enumerate(zip(
            from_i64(batch.uids), from_i32(batch.attempts), from_i32(batch.indexes), from_i32(batch.offsets), counts,
            batch.texts, from_i8(batch.finishes), batch.stop_reasons, from_i32(batch.lengths), strict=True,
        )):  # fmt: skip
            end += count
            request = self._open.get(uid)
            if request is None or request.attempt != attempt:
                continue  # aborted, or an attempt given up
            found = unpack(logprobs[row], count) if row in logprobs else []
            if not request.take(index, offset, tokens[end - count : end], text, finish, reason, length, now, found):
                self._broken(request)
            elif request.done:
                self._finish(request, None)

    def _guard(self, handle: Any) -> Any:
        """``handle``, with frames whose columns do not agree counted, logged and dropped like any others."""

        def guarded(message: Any) -> None:
            try:
                handle(message)
            except ValueError as error:
                self._bad_frames += 1
                log.warning("dropped a %s whose columns do not agree: %s", type(message).__name__, error)

        return guarded

    # ------------------------------------------------------------ time

    async def _tick(self) -> None:
        beats, before = 0, time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            pulse()
            now = time.monotonic()
            late, before = now - before - BEAT_S, now
            if late > JUMP_S:
                self._forgive(now, late)
            beats += 1
            if self._scheduler is not None and self._peers is not None:
                self._scheduler.send(m.Heartbeat(memory=resident_bytes(), bad_frames=self.bad_frames))
            for link in list(self._links.values()):
                if link.ready and now - link.heard > SILENCE_S:
                    log.warning("detokenizer %s has been silent for %g s", link.incarnation, SILENCE_S)
                    self._lose(link, silent=True)
                elif link.ready:
                    link.wire.send(m.Heartbeat())
                    if beats % OPEN_EVERY == 0:
                        attempts = i32(request.attempt for request in link.open.values())
                        link.wire.send(m.Reconcile(uids=i64(link.open), attempts=attempts))
            if self._unreached and self._peers is not None:
                for peer in self._peers.peers:
                    if peer.incarnation in self._unreached:
                        self._connect(peer, self._unreached[peer.incarnation])
            self._check_waiting(now)

    def _forgive(self, now: float, late: float) -> None:
        """This process stood still: nobody else is late."""
        log.warning("this process stood still for %.1f s", late)
        if self._heard:
            self._heard = now
        for link in self._links.values():
            link.heard = now
        for request in self._open.values():
            request.since += late

    def _check_waiting(self, now: float) -> None:
        """Refuse what has waited too long for a detokenizer; move what its detokenizer does not accept."""
        for request in self._placement.waiting:
            limit = NO_DETOKENIZER_RESUMED_S if request.attempt else NO_DETOKENIZER_S
            if now - request.since > limit:
                message = f"no detokenizer took the request for {limit:g} s; try again."
                self._finish(request, RequestError(503, message, retry_after=limit))
        if len(self._placement.ready) < 2:
            return
        for request in list(self._open.values()):
            link = request.link
            if link is not None and request.accepted is None and now - request.since > ACCEPT_S:
                link.wire.send(m.Abort(uid=request.uid, attempt=request.attempt))
                self._resubmit(request, counts=False, besides=link)


def _priority(value: int) -> int:
    try:
        return priority_of(value)
    except (TypeError, ValueError) as error:
        raise RequestError(400, str(error), "priority") from None
