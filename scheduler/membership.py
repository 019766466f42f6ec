"""Who is there: detokenizers, frontends and operators on the front socket, from Hello to Bye. No IO.

``on_front`` takes what the socket received; ``peer`` is the sender's identity, which is its process's incarnation.
What the front side is owed gathers in the scheduler's outbox. The workers are the ``registry``'s.
"""

from __future__ import annotations

import logging
from typing import Any

from ..proto.codec import BadFrame, from_i64, i32, i64
from ..proto.messages import (
    PROTOCOL,
    Abort,
    AdapterEntry,
    Adapters,
    BeamStopped,
    BeamTokens,
    Bye,
    Failed,
    GetStats,
    GetView,
    Heartbeat,
    Hello,
    Lease,
    Manage,
    Managed,
    Peer,
    Peers,
    PromptLogprobs,
    Reconcile,
    Register,
    Registered,
    Sleep,
    Sleeping,
    Stopped,
    Submit,
    TokenBatch,
    Unknown,
    Unregister,
)
from ..proto.standstill import Standstill
from .adapter_names import Wish
from .adapters import Answer, wishes_overdue
from .awaited import Awaited
from .blame import Blame
from .core import Scheduler
from .operators import manage
from .profiling import START, STOP
from .view import Views
from .worker import count, wrong_protocol
from .worker_registry import WorkerRegistry

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
STOOD_STILL_S = 2.0
"""The loop turns at least once in HEARTBEAT_S. Where a turn took so long, this process was stopped or starved."""
LOST_FRONT_S = 5.0
"""How long a lost detokenizer's requests wait for it to come back, or for a higher attempt."""
KINDS = ("frontend", "detokenizer", "operator")


class FrontPeer:
    """A detokenizer, frontend or operator. ``lost_at`` is when its connection broke, None while it stands."""

    __slots__ = ("bad_frames", "hello", "lost_at")

    def __init__(self, hello: Hello):
        self.hello = hello
        self.lost_at: float | None = None
        self.bad_frames = 0  # it has counted, by its last Heartbeat


class Membership:
    """Peers of the front socket. ``epoch`` is this scheduler's start in ms, above any earlier one's; ``blame`` knows
    what ended those."""

    def __init__(self, core: Scheduler, epoch: int, blame: Blame | None = None):
        self.blame = blame if blame is not None else Blame()
        self.core, self.epoch, self.config = core, epoch, core.config
        core.names.begin(epoch)
        self.registry = WorkerRegistry(core, epoch, self.announce, self.answer_wishes)
        self.views, self.awaited = Views(self.registry), Awaited(self.registry)
        self.front: dict[str, FrontPeer] = {}
        self.wire_bad_frames = 0  # of both sockets, kept up to date by the loop
        self._next_heartbeat = 0.0
        self._standstill = Standstill(STOOD_STILL_S, core.clock())

    def on_front(self, peer: str, message: Any) -> None:
        """One message of a detokenizer, frontend or operator."""
        if isinstance(message, Hello):
            self._hello(peer, message)
        elif peer not in self.front:
            self._stranger(peer, message)
        elif isinstance(message, Submit):
            self._submit(peer, message)
        elif isinstance(message, Abort):
            self.core.abort(message.uid, message.attempt)
        elif isinstance(message, Stopped):
            self.core.stopped(message)
        elif isinstance(message, BeamStopped | Reconcile):
            try:
                if isinstance(message, Reconcile):
                    self.core.open(peer, message)
                else:
                    self.core.beam_stopped(message)
            except BadFrame as error:
                self.core.bad(peer, error)
        elif isinstance(message, GetStats):
            registry = self.registry
            stats = self.core.stats(message.token, self.bad_frames(), registry.compilations, registry.slumber.state)
            self.core.outbox.put(peer, stats)
        elif isinstance(message, GetView):
            self.core.outbox.put(peer, self.views.answer(message, self.bad_frames()))
        elif isinstance(message, Sleep) and message.action == "reset_prefix_cache":
            self.core.outbox.put(peer, Sleeping(message.token, [], self.core.reset_prefix_cache()))
        elif isinstance(message, Sleep) and message.action in (START, STOP):
            self.registry.to_workers += self.registry.profiling.ask(peer, message, self._leases())
        elif isinstance(message, Sleep):
            if not self.registry.slumber.waits(peer, message.token):  # else it was told, and is told again
                self.registry.sleep(peer, message)
        elif isinstance(message, Heartbeat):
            self.front[peer].bad_frames = count(message.bad_frames)
        elif isinstance(message, Bye):
            self.front_gone(peer)
        elif isinstance(message, Manage):
            if self.front[peer].hello.kind == "operator":
                self.core.outbox.put(peer, manage(self.registry, message))
            else:
                self.core.bad(peer, f"Manage of a {self.front[peer].hello.kind}")
        elif isinstance(message, Adapters | Register | Unregister):
            if self.front[peer].hello.kind == "frontend":
                self._name(peer, message)
            else:
                self.core.bad(peer, f"{type(message).__name__} of a {self.front[peer].hello.kind}")

    # -- adapters' names

    def _name(self, peer: str, message: Adapters | Register | Unregister) -> None:
        """A frontend tells what it knows, or has a name mean something else."""
        names = self.core.names
        if isinstance(message, Adapters):
            self._merge_names(peer, message.entries)
        elif isinstance(message, Unregister):
            known = names.get(message.name) is not None
            if known:
                self.tell_names([names.set(message.name, None)])
            error = f"The lora adapter '{message.name}' cannot be found."
            answer = Registered(message.token) if known or message.again else Registered(message.token, 404, error)
            self.core.outbox.put(peer, answer)
        elif (refused := names.refusal(message)) is not None:
            self.core.outbox.put(peer, Registered(message.token, *refused))
        elif message.again and names.get(message.adapter.name) == message.adapter:
            self.core.outbox.put(peer, Registered(message.token))
        elif any(r.adapters is not None and r.adapters.has(message.adapter) for r in self.core.replicas.values()):
            self.answer_wishes([Answer(Wish(peer, message))])
        elif self.core.replicas and all(each.adapters is None for each in self.core.replicas.values()):
            error = "LoRA is not enabled on any worker; start the workers with --enable-lora."
            self.core.outbox.put(peer, Registered(message.token, 400, error))
        else:
            names.wish(peer, message, self.core.clock())

    def _merge_names(self, peer: str, entries: list[AdapterEntry]) -> None:
        """Take over what is new. Where a frontend was started with other --lora-modules than one before it, what this
        process knows counts: that frontend has been told on its Hello, or is told by what it was."""
        names = self.core.names
        self.tell_names(names.merge(entries))
        for entry in entries:
            known = names.entries.get(entry.name)
            if known is not None and known.generation == entry.generation and known.adapter != entry.adapter:
                has, there = (each.adapter.path if each.adapter is not None else "" for each in (entry, known))
                log.warning(
                    "frontend %s has lora adapter %r from %s, and the server has it from %s%s, which is used; start "
                    "all frontends with the same --lora-modules, or load it in place", peer, entry.name, has, there,
                    " with other files" if has == there else "",
                )  # fmt: skip
                self.tell_names([known])

    def answer_wishes(self, answers: list[Answer]) -> None:
        """Adapters that somebody wished for are loaded, and get their names; or they cannot be."""
        for wish, status, error in answers:
            if status == 200:
                self.tell_names([self.core.names.set(wish.adapter.name, wish.adapter, wish.asked.parent)])
            self.core.outbox.put(wish.peer, Registered(wish.asked.token, status, error))

    def tell_names(self, entries: list[AdapterEntry]) -> None:
        """Tell all frontends what names mean now, and have workers drop what none means any more."""
        self.core.drop_adapters()
        for peer, known in self.front.items():
            if entries and known.lost_at is None and known.hello.kind == "frontend":
                self.core.outbox.put(peer, Adapters(entries))

    def _submit(self, peer: str, message: Submit) -> None:
        """Write down what is being taken in, so that one that ends this process is known to the next."""
        losses = self.blame.losses(message.uid)
        if losses.exhausted:
            text = (
                f"The scheduler died {losses.count} times while taking in this request ({message.uid}); it is given up."
            )
            self.core.outbox.put(peer, Failed(message.uid, message.attempt, 500, text))
        elif -(2**63) <= message.uid < 2**63:
            self.blame.begin(message.uid)
            self.core.submit(peer, message)
            self.blame.end()
        else:
            self.core.submit(peer, message)  # refuses it

    def _hello(self, peer: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self.core.outbox.put(peer, wrong_protocol(hello))
        elif hello.kind not in KINDS or hello.incarnation != peer:
            self.core.bad(peer, f"Hello of {hello.kind!r} as {hello.incarnation!r}")
        else:
            log.log(_level(hello), "%s %s is here", hello.kind, peer)
            self.front[peer] = FrontPeer(hello)
            self.core.owner_returned(peer)
            if hello.kind == "frontend" and self.core.names.entries:  # before it is told that it may begin
                self.core.outbox.put(peer, Adapters(list(self.core.names.entries.values())))
            if hello.kind != "operator":
                self.announce()

    def _stranger(self, peer: str, message: Any) -> None:
        """Meant for a scheduler before this one: what it asks for is not here, and what it tells is of no use."""
        if isinstance(message, Submit):
            try:
                gone = Unknown(i64([message.uid]), i32([message.attempt]))
            except OverflowError as error:
                self.core.bad(peer, f"Submit of {message.uid}, attempt {message.attempt}: {error}")
            else:
                self.core.outbox.put(peer, gone)
        elif isinstance(message, Reconcile):
            self.core.outbox.put(peer, Unknown(message.uids, message.attempts))
        elif isinstance(message, Manage):
            self.core.outbox.put(peer, Managed(message.token, [], "The scheduler was started meanwhile; ask again."))
        elif not isinstance(
            message,
            Abort
            | Stopped
            | BeamStopped
            | GetStats
            | GetView
            | Sleep
            | Adapters
            | Register
            | Unregister
            | Heartbeat
            | Bye,
        ):
            self.core.bad(peer, f"{type(message).__name__} before Hello")

    def front_gone(self, peer: str) -> None:
        """The connection broke, or the peer left. Its requests wait a little for it, or for a higher attempt."""
        known = self.front.get(peer)
        if known is not None and known.lost_at is None:
            log.log(_level(known.hello), "%s %s is gone", known.hello.kind, peer)
            known.lost_at = self.core.clock()
            self.core.owner_lost(peer)
            if known.hello.kind != "operator":
                self.announce()

    def undelivered(self, peer: str, message: Any) -> None:
        """A send to ``peer`` failed. Requests whose tokens are lost can go on only as a higher attempt."""
        self.front_gone(peer)
        if isinstance(message, TokenBatch | PromptLogprobs | BeamTokens):
            for uid in from_i64(message.uids) if isinstance(message, TokenBatch) else [message.uid]:
                request = self.core.requests.get(uid)
                if request is not None and request.owner == peer:
                    self.core.drop(request)

    def announce(self) -> None:
        """Tell detokenizers and frontends who is there, and who comes."""
        self.awaited.look()
        there = {peer: p.hello for peer, p in self.front.items() if p.lost_at is None and p.hello.kind != "operator"}
        listed = [*there.values(), *(worker.hello for worker in self.awaited.staying)]
        peers = [Peer(hello.kind, hello.incarnation, hello.endpoint) for hello in listed]
        if self.awaited.follows:
            peers.append(Peer("gpu_worker", "", ""))
        core = self.core
        message = Peers(
            self.epoch, peers, self.config.block_size, self.registry.ready, core.max_model_len, self.blame.last
        )
        for peer in there:
            core.outbox.put(peer, message)

    # -- time

    def notice(self) -> None:
        """In every turn of the loop, before anything is read and before anybody is judged: where this process itself
        stood still, everybody gets that time again."""
        if self._standstill.notice(self.core.clock()):
            self.registry.forgive(self._standstill)
            self.awaited.forgive(self._standstill)
            for known in self.front.values():
                if known.lost_at is not None:
                    known.lost_at = self._standstill.since(known.lost_at)

    def tick(self) -> None:
        """Heartbeats that are due, and those whose time is up."""
        now = self.core.clock()
        if self.registry.profiling.waits:
            for peer, answer in self.registry.profiling.settle(self._leases()):
                self.core.outbox.put(peer, answer)
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + HEARTBEAT_S
        for peer, known in list(self.front.items()):
            if known.lost_at is None:
                self.core.outbox.put(peer, Heartbeat(bad_frames=self.wire_bad_frames + self.core.bad_messages))
            elif now - known.lost_at >= LOST_FRONT_S:
                self.core.forget_owner(peer)
                del self.front[peer]
        self.registry.tick()
        if self.awaited.look():
            self.announce()
        self.awaited.expire()
        if self.core.names.wishes:
            self.answer_wishes(wishes_overdue(self.core))
        self.core.expire()
        if self.core.close_watch():
            self.views.forget()

    def _leases(self) -> dict[str, Lease]:
        """Of the workers that take plans."""
        return {peer: worker.lease for peer, worker in self.registry.workers.items() if worker.replica is not None}

    def bad_frames(self) -> int:
        """Frames dropped here and, by their last Heartbeat, by everyone else who is here."""
        elsewhere = sum(peer.bad_frames for peer in self.front.values())
        elsewhere += sum(worker.bad_frames for worker in self.registry.workers.values())
        return self.wire_bad_frames + elsewhere

    def timeout(self) -> float:
        """Seconds until ``tick`` has something to do, or a plan that waits is to be made."""
        now = self.core.clock()
        return max(0.0, min(self._next_heartbeat, self.registry.moves.wake_at, self.core.planning_at(now)) - now)


def _level(hello: Hello) -> int:
    """Of a peer's coming and going: an operator's may be a script that asks every few seconds."""
    return logging.DEBUG if hello.kind == "operator" else logging.INFO
