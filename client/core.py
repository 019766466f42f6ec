"""The core of Engine: which requests are open, where each of them is, and what is owed to whom. It does no IO.

It is told what happens (``submit``, ``received``, ``connected``, ``heartbeat``, ...), and what is to be done about it
waits in ``take``. Clocks and chance are given to it, so whoever drives it decides both: Engine with sockets and the
machine's clocks, a test with neither.

Its list of tokens is authoritative; everything downstream is an extension of it that may be thrown away. So when a
detokenizer or the scheduler dies, the request's attempt is raised and it is sent again with what it has, messages of
lower attempts are dropped, and the consumer never knows.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..proto import messages as m
from ..proto.codec import BadFrame, from_i8, from_i32, from_i64, i32, i64
from ..proto.request_name import about
from ..proto.standstill import Standstill
from ..proto.work import Generate, Pool, adapter_of, embeds_of, with_adapter, with_embeds
from .adapters import AdapterBook
from .best import to_wire
from .generation import OpenGeneration
from .logprobs import by_row, unpack
from .placement import Link, Placement
from .pooled import OpenPooling, OpenText
from .request import OpenRequest, R
from .results import RequestError
from .sendable import bad_field, size_of

log = logging.getLogger(__name__)

SCHEDULER = "scheduler"
"""The peer that is the scheduler. The others are connections to detokenizers, by identity."""

HEARTBEAT_S = 1.0
RECONCILE_EVERY = 2
"""Heartbeats between two Reconciles."""
SILENCE_S = 10.0
"""A peer not heard for so long, though it sends a heartbeat each second, is hung. A detokenizer's requests are sent
again, to another or to itself once it is heard; a scheduler is waited for, and new requests are refused meanwhile."""
STOOD_STILL_S = 3.0
"""A heartbeat of this process that comes so long after the one before means that this process stood still."""
NO_DETOKENIZER_S = 10.0
"""How long a new request waits for a detokenizer before it is refused with 503."""
NO_DETOKENIZER_RESUMED_S = 120.0
"""How long a request that was sent before waits for another detokenizer, while processes are being restarted."""
ACCEPT_S = 15.0
"""A request not accepted within this time goes to another detokenizer, if there is one."""
MAX_UNACCEPTED, MAX_UNACCEPTED_BYTES = 8192, 256 * 2**20
"""Requests, and roughly their bytes, that may be on their way into the scheduler's queue; a new one gets 429."""


@dataclass(frozen=True, slots=True)
class Connect:
    """To be done: open the connection to a detokenizer, under the peer's name as identity."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """To be done: close the connection, and hear nothing from it any more."""


class EngineCore:
    """``hello`` is what the scheduler is told of this process. ``clock`` gives seconds that only rise, ``wall_clock``
    those since 1970; ``rng`` draws the uids, and the seeds that nobody gives."""

    def __init__(self, hello: m.Hello, clock: Callable[[], float], wall_clock: Callable[[], float], rng: random.Random):
        self.clock, self.wall_clock, self.rng = clock, wall_clock, rng
        self._hello = hello
        self._uid = rng.getrandbits(31) << 32
        self._todo: list[tuple[str, Any]] = []
        self._placement = Placement()
        self.links = self._placement.links
        self._link_count = 0
        self.peers: m.Peers | None = None  # of the present connection
        self._epoch = 0
        self._heard = 0.0
        self.refused: str | None = None
        """Why the scheduler will never talk to this process."""
        self.open: dict[int, OpenRequest] = {}
        """The requests that have not ended, by uid."""
        self._unaccepted: dict[int, int] = {}  # of these, those whose prompt's ids are not known yet: bytes
        self._unaccepted_bytes = 0
        self.adapters = AdapterBook()
        self.tokens_at = 0.0
        """When tokens, or what was pooled, last came, of any request."""
        self._heartbeats = 0
        self._standstill: Standstill | None = None  # from the first heartbeat on
        self._closed = False
        self.bad_frames = 0  # dropped because their columns do not agree

    def take(self) -> list[tuple[str, Any]]:
        """What is to be done, in order: (peer, a message to send, Connect or Disconnect)."""
        todo, self._todo = self._todo, []
        return todo

    def _put(self, peer: str, what: Any) -> None:
        self._todo.append((peer, what))

    @property
    def ready(self) -> bool:
        """True while a request would run: scheduler heard, a replica ready, a detokenizer connected."""
        return self.reaches and self.peers is not None and self.peers.ready

    @property
    def reaches(self) -> bool:
        """True while a request would come as far as the scheduler's line."""
        return self.peers is not None and self.clock() - self._heard < SILENCE_S and bool(self._placement.ready)

    def close(self, error: RequestError) -> None:
        """End every open request with ``error`` and leave. Nothing that comes after means anything."""
        self.fail_all(error)
        for peer in (*self.links, SCHEDULER):
            self._put(peer, m.Bye())
        self.links.clear()
        self.peers = None
        self._closed = True

    # ------------------------------------------------------------ requests

    def submit(self, message: m.Tokenize, asked: Generate) -> OpenGeneration:
        """Queue one request: ``message`` with the work that the user asked for. It is given its uid here, and its
        arrival where it has none.

        Raises RequestError: 400 where it could not be sent, 429 where too much is on its way.
        """
        self._admit(message)
        work = with_adapter(Generate(to_wire(asked.params), asked.seed), adapter_of(asked))
        message.work = work = with_embeds(work, embeds_of(asked))
        return self._enter(OpenGeneration(message, work, asked.params, self.clock()))

    def pool(self, message: m.Tokenize, work: Pool) -> OpenPooling:
        """The same for one prompt to be pooled."""
        self._admit(message)
        return self._enter(OpenPooling(message, work, self.clock()))

    def text(self, message: m.Tokenize) -> OpenText:
        """The same for one that a detokenizer answers alone."""
        self._admit(message)
        return self._enter(OpenText(message, self.clock()))

    def abort(self, uid: int) -> None:
        """End a request that nobody wants any more. A uid that is not open is ignored."""
        if (request := self.open.get(uid)) is not None:
            self.finish(request, None, tell=True)

    def ask_adapter(self, asked: m.Register | m.Unregister) -> int:
        """Have a name of an adapter mean something else, for all frontends. The token that the answer will have."""
        token = self.adapters.ask(asked)
        if self.peers is not None:
            self._put(SCHEDULER, asked)
        return token

    def fail_all(self, error: RequestError) -> None:
        """End every open request with ``error``."""
        for request in list(self.open.values()):
            self.finish(request, error, tell=True)

    def _admit(self, message: m.Tokenize) -> None:
        """Give a request its uid and arrival. RequestError 429 where too much is on its way in."""
        self._uid += 1
        message.uid, message.arrival = self._uid, message.arrival or self.wall_clock()
        if (bad := bad_field(message)) is not None:
            raise RequestError(400, f"{bad[0]} cannot be sent: {bad[1]}.", bad[0])
        size = size_of(message)
        count, size_before = len(self._unaccepted), self._unaccepted_bytes
        if count >= MAX_UNACCEPTED or (count and size_before + size > MAX_UNACCEPTED_BYTES):
            text = f"{count} requests ({size_before} bytes) wait to be tokenized; try again in a moment."
            raise RequestError(429, text, retry_after=1.0)
        self._unaccepted[message.uid] = size
        self._unaccepted_bytes += size

    def _enter(self, request: R) -> R:
        self._place(request)
        self.open[request.uid] = request
        return request

    def finish(self, request: OpenRequest, error: RequestError | None, tell: bool = False) -> None:
        """Forget a request; ``tell`` its detokenizer unless that knows."""
        self.open.pop(request.uid, None)
        self._unaccepted_bytes -= self._unaccepted.pop(request.uid, 0)
        link = request.link
        self._placement.forget(request)
        if link is not None and tell:
            self._put(link.identity, m.Abort(uid=request.uid, attempt=request.attempt))
        request.end(self.clock(), error)

    def _place(self, request: OpenRequest, besides: Link | None = None) -> None:
        """Send the present attempt to the request's detokenizer, or to another one; else let it wait."""
        request.since = self.clock()
        link = request.link or self._placement.place(request, besides)
        if link is not None:
            self._put(link.identity, request.again())

    def _place_waiting(self) -> None:
        for request, link in self._placement.place_waiting():
            request.since = self.clock()
            self._put(link.identity, request.again())

    def _resubmit(self, request: OpenRequest, counts: bool, besides: Link | None = None) -> None:
        """Send a request again after a loss, which ``counts`` or not. An accepted request keeps its detokenizer."""
        if request.accepted is None and request.link is not None:
            request.link.remove(request)
        if request.lost(counts):
            self._place(request, besides)
        else:
            message = f"the processes serving this request failed {request.losses.count} times at the same point of it."
            self.finish(request, RequestError(500, message), tell=True)

    # ------------------------------------------------------------ connections

    def connected(self, peer: str) -> None:
        """The connection to ``peer`` stands."""
        if peer == SCHEDULER:
            self._put(SCHEDULER, self._hello)
        elif (link := self.links.get(peer)) is not None:
            self._put(peer, m.Heartbeat())  # so that it sends its own to this process
            if not link.silent:
                self._use(link)

    def disconnected(self, peer: str) -> None:
        """The connection to ``peer`` broke, and may be made again by itself."""
        if peer == SCHEDULER:
            self.peers = None
        elif (link := self.links.get(peer)) is not None and link.ready:
            self._lose(link)

    def unreachable(self, peer: str, error: Exception) -> None:
        """Connect could not even be tried: it is asked for again at the next heartbeat."""
        if (link := self.links.get(peer)) is not None:
            if not link.failed:
                log.warning("cannot connect to detokenizer %s at %r yet: %s", link.incarnation, link.endpoint, error)
            link.failed = link.retry = True

    def received(self, peer: str, message: Any) -> None:
        """``message`` came from ``peer``. Where its columns do not agree it is counted, logged and dropped."""
        try:
            if peer == SCHEDULER:
                if not self._closed:
                    self._on_scheduler(message)
            elif (link := self.links.get(peer)) is not None:
                self._on_detokenizer(link, message)
        except ValueError as error:
            self.bad_frames += 1
            log.warning("dropped a %s whose columns do not agree: %s", type(message).__name__, error)

    # ------------------------------------------------------------ the scheduler

    def _on_scheduler(self, message: Any) -> None:
        self._heard = self.clock()
        if isinstance(message, m.Peers):
            self._on_peers(message)
        elif isinstance(message, m.Adapters):
            self.adapters.merge(message.entries)
        elif isinstance(message, m.Bye):
            if message.reason and self.peers is None:
                log.error("the scheduler refuses this process: %s", message.reason)
                self.refused = message.reason
            self.peers = None

    def _on_peers(self, peers: m.Peers) -> None:
        if peers.epoch < self._epoch:
            return
        restarted = 0 < self._epoch < peers.epoch
        if self.peers is None or restarted:  # it may know nothing of what the one before did
            self._todo += [(SCHEDULER, told) for told in self.adapters.introduction()]
        self._epoch, self.peers = peers.epoch, peers
        listed = {peer.incarnation: peer for peer in peers.peers if peer.kind == "detokenizer"}
        for link in list(self.links.values()):
            # A new scheduler does not know everyone yet: only one it knew and dropped, or one out of reach, is gone.
            if link.incarnation not in listed and (link.listed == peers.epoch or not link.ready):
                self._lose(link)
        known = {link.incarnation: link for link in self.links.values()}
        for peer in listed.values():
            if peer.incarnation in known:
                known[peer.incarnation].listed = peers.epoch
            else:
                self._connect(peer)
        if restarted:
            # What is still being tokenized will be submitted to the new scheduler; the rest was with the old one.
            hit = [request for request in self.open.values() if request.accepted and request.link]
            log.warning("the scheduler was restarted; sending %d requests again", len(hit))
            for request in hit:
                innocent = peers.blamed is not None and peers.blamed != request.uid
                self._resubmit(request, counts=request.started and not innocent)

    # ------------------------------------------------------------ detokenizers

    def _connect(self, peer: m.Peer, silent: bool = False) -> None:
        self._link_count += 1  # a fresh identity: the old one's ROUTER may not have noticed yet that it is gone
        identity = f"{self._hello.incarnation}.{self._link_count}"
        self.links[identity] = Link(identity, peer.incarnation, peer.endpoint, self._epoch, silent)
        self._put(identity, Connect(peer.endpoint))

    def _use(self, link: Link) -> None:
        """The link takes requests from now on."""
        link.ready, link.heard = True, self.clock()
        self._place_waiting()

    def _lose(self, link: Link, left: bool = False, silent: bool = False) -> None:
        """A detokenizer, or the connection to it, is gone or hung. Its requests go to another one, or back to it under
        a new identity, so that no message about the attempts before is taken for one about the present attempts.
        """
        del self.links[link.identity]
        self._put(link.identity, Disconnect())
        held = [(request, not left and link.blames(request)) for request in link.open.values()]
        if held:
            log.warning("lost detokenizer %s; sending %d requests again", link.incarnation, len(held))
        for request, _ in held:
            link.remove(request)
        for request, counts in held:
            if request.in_quarantine and link.quarantined is None:
                request.unblamed += 1
            self._resubmit(request, counts)
        for peer in self.peers.peers if self.peers is not None else []:
            if peer.incarnation == link.incarnation and not left:
                self._connect(peer, silent)

    def _on_detokenizer(self, link: Link, message: Any) -> None:
        link.heard = self.clock()
        if not link.ready:
            self._use(link)
        if isinstance(message, m.TextBatch):
            self._on_text(message)
        elif isinstance(message, m.Unknown):
            self._on_unknown(link, message)
        elif isinstance(message, m.Bye):
            self._lose(link, left=True)
        elif isinstance(message, m.Quarantined):
            link.quarantined = message.uid or None
            request = link.open.get(message.uid)
            if request is not None and request.attempt == message.attempt:
                self._put(link.identity, message)
        elif isinstance(message, m.Accepted | m.Failed | m.Pooled | m.PromptLogprobs):
            request = self.open.get(message.uid)
            if request is not None and request.attempt == message.attempt:
                self._on_answer(request, message)

    def _on_answer(self, request: OpenRequest, message: m.Accepted | m.Failed | m.Pooled | m.PromptLogprobs) -> None:
        """A message about one open request in its present attempt."""
        if isinstance(message, m.Accepted):
            self._unaccepted_bytes -= self._unaccepted.pop(message.uid, 0)
            request.accept(message)
            if isinstance(request, OpenText):
                self.finish(request, None)
        elif isinstance(message, m.Failed):
            self.finish(request, RequestError(message.status, message.message, message.param, message.retry_after))
        elif isinstance(message, m.Pooled):
            if isinstance(request, OpenPooling):
                self.tokens_at = self.clock()
                request.take(message.rows, message.data)
                self.finish(request, None)
        elif isinstance(request, OpenGeneration) and not request.take_prompt(message.start, unpack(message.logprobs)):
            self._broken(request)

    def _on_unknown(self, link: Link, message: m.Unknown) -> None:
        for uid, attempt in zip(from_i64(message.uids), from_i32(message.attempts), strict=True):
            request = link.open.get(uid)
            if request is not None and request.attempt == attempt:
                # A request that is never accepted may be what keeps the detokenizer from reading on.
                self._resubmit(request, counts=request.started or request.accepted is None)

    def _broken(self, request: OpenRequest) -> None:
        log.warning("what came does not follow what is here; sending it again", extra=about(request.uid))
        self._resubmit(request, counts=True)

    def _on_text(self, batch: m.TextBatch) -> None:
        now = self.clock()
        if batch.started_uids or batch.started_cached:
            for uid, cached in zip(from_i64(batch.started_uids), from_i32(batch.started_cached), strict=True):
                if (started := self.open.get(uid)) is not None:
                    started.start(now, cached)
        counts, tokens = from_i32(batch.counts), from_i32(batch.tokens)
        if sum(counts) != len(tokens) or min(counts, default=0) < 0:
            raise BadFrame(f"counts add up to {sum(counts)} and there are {len(tokens)} tokens")
        if tokens:
            self.tokens_at = now
        logprobs = by_row(batch, counts) if batch.logprobs or batch.logprob_rows else {}
        end = 0
        for row, (uid, attempt, index, offset, count, text, finish, reason, length) in enumerate(zip(
            from_i64(batch.uids), from_i32(batch.attempts), from_i32(batch.indexes), from_i32(batch.offsets), counts,
            batch.texts, from_i8(batch.finishes), batch.stop_reasons, from_i32(batch.lengths), strict=True,
        )):  # fmt: skip
            end += count
            request = self.open.get(uid)
            if not isinstance(request, OpenGeneration) or request.attempt != attempt:
                continue  # aborted, or an attempt given up
            if count == 1 and not finish and request.take_one(index, offset, tokens[end - 1], text, now):
                continue
            found = unpack(logprobs[row], count) if row in logprobs else []
            if not request.take(index, offset, tokens[end - count : end], text, finish, reason, length, now, found):
                self._broken(request)
            elif request.done:
                self.finish(request, None)

    # ------------------------------------------------------------ time

    def heartbeat(self, memory: int, bad_frames: int) -> None:
        """To be called every ``HEARTBEAT_S``. ``memory`` is what this process holds in bytes, ``bad_frames`` what its
        sockets have dropped so far; the scheduler is told both."""
        now = self.clock()
        if self._standstill is None:
            self._standstill = Standstill(STOOD_STILL_S, now)
        if self._standstill.notice(now):
            self._forgive(self._standstill)
        self._heartbeats += 1
        if self.peers is not None:
            self._put(SCHEDULER, m.Heartbeat(memory=memory, bad_frames=self.bad_frames + bad_frames))
        for link in list(self.links.values()):
            if link.retry:
                link.retry = False
                self._put(link.identity, Connect(link.endpoint))
            if link.ready and now - link.heard > SILENCE_S:
                log.warning("detokenizer %s has been silent for %g s", link.incarnation, SILENCE_S)
                self._lose(link, silent=True)
            elif link.ready:
                self._put(link.identity, m.Heartbeat())
                if self._heartbeats % RECONCILE_EVERY == 0:
                    attempts = i32(request.attempt for request in link.open.values())
                    self._put(link.identity, m.Reconcile(uids=i64(link.open), attempts=attempts))
        self._check_waiting(now)

    def _forgive(self, standstill: Standstill) -> None:
        self._heard = standstill.since(self._heard)
        for link in self.links.values():
            link.heard = standstill.since(link.heard)
        for request in self.open.values():
            request.since = standstill.since(request.since)

    def _check_waiting(self, now: float) -> None:
        """Refuse what has waited too long for a detokenizer; move what its detokenizer does not accept."""
        for request in self._placement.waiting:
            limit = NO_DETOKENIZER_RESUMED_S if request.attempt else NO_DETOKENIZER_S
            if now - request.since > limit:
                message = f"no detokenizer took the request for {limit:g} s; try again."
                self.finish(request, RequestError(503, message, retry_after=limit))
        if len(self._placement.ready) < 2:
            return
        for request in list(self.open.values()):
            link = request.link
            if link is not None and request.accepted is None and now - request.since > ACCEPT_S:
                self._put(link.identity, m.Abort(uid=request.uid, attempt=request.attempt))
                self._resubmit(request, counts=False, besides=link)
