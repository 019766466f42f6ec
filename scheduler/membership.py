"""Who is there: from Hello to Bye, leases, beats, and the timers that find the dead. No IO.

``on_front`` and ``on_worker`` take what the two sockets received; ``peer`` is the sender's identity, which is its
process's incarnation. What workers are owed gathers in ``to_workers``; the front side's messages are in the
scheduler's outbox.

A worker's phases: loading (Assign sent) -> configuring (Configure sent) -> ready (it has a Replica and gets plans).
"""

from __future__ import annotations

import logging
from typing import Any

from ..proto.codec import BadFrame, from_i64, i32, i64
from ..proto.messages import (
    PROTOCOL,
    Abort,
    Assign,
    BeamStopped,
    BeamTokens,
    Beat,
    Bye,
    Configure,
    Drain,
    GetStats,
    Gone,
    Hello,
    Lease,
    Loaded,
    Open,
    Peer,
    Peers,
    PromptLogprobs,
    Ready,
    StepFailed,
    StepResult,
    Stopped,
    Submit,
    TokenBatch,
)
from .core import Scheduler
from .replica import Replica

log = logging.getLogger(__name__)

BEAT_S = 1.0
LOST_FRONT_S = 5.0
"""How long a lost detokenizer's requests wait for it to come back, or for a higher attempt."""
SILENT_WORKER_S = 30.0
"""A ready worker that has not beaten for this long is hung (beats do not wait for a step)."""
STEP_LIMIT_S = 300.0
"""A step that has been in flight for this long is never coming: its kernel hangs."""
MAX_BLOCKS, INT32_MAX = 2**22, 2**31 - 1
"""The most a worker may claim: 64 million tokens in blocks of 16 is beyond any machine, and books cost memory."""


class FrontPeer:
    """A detokenizer or frontend. ``lost_at`` is when its connection broke, None while it stands."""

    __slots__ = ("bad_frames", "hello", "lost_at")

    def __init__(self, hello: Hello):
        self.hello = hello
        self.lost_at: float | None = None
        self.bad_frames = 0  # it has counted, by its last Beat


class Worker:
    """One worker under one lease."""

    __slots__ = ("bad_frames", "beat_at", "hello", "lease", "loaded", "phase", "replica")

    def __init__(self, hello: Hello, lease: Lease, now: float):
        self.hello, self.lease, self.beat_at = hello, lease, now
        self.phase = "loading"
        self.bad_frames = 0  # it has counted, by its last Beat
        self.loaded: Loaded | None = None
        self.replica: Replica | None = None


class Membership:
    """Peers of both sockets. ``epoch`` is this scheduler's start in ms, above any earlier one's."""

    def __init__(self, core: Scheduler, epoch: int):
        self.core, self.epoch, self.config = core, epoch, core.config
        self.front: dict[str, FrontPeer] = {}
        self.workers: dict[str, Worker] = {}
        self.to_workers: list[tuple[str, Any]] = []
        self.wire_bad_frames = 0  # of both sockets, kept up to date by the loop
        self._leases = 0
        self._next_beat = 0.0

    # -- the front side

    def on_front(self, peer: str, message: Any) -> None:
        """One message of a detokenizer or frontend."""
        if isinstance(message, Hello):
            self._front_hello(peer, message)
        elif peer not in self.front:
            self._stranger(peer, message)
        elif isinstance(message, Submit):
            self.core.submit(peer, message)
        elif isinstance(message, Abort):
            self.core.abort(message.uid, message.attempt)
        elif isinstance(message, Stopped):
            self.core.stopped(message)
        elif isinstance(message, BeamStopped | Open):
            try:
                if isinstance(message, Open):
                    self.core.open(peer, message)
                else:
                    self.core.beam_stopped(message)
            except BadFrame as error:
                self._bad(peer, error)
        elif isinstance(message, GetStats):
            self.core.outbox.put(peer, self.core.stats(message.token, self.bad_frames()))
        elif isinstance(message, Beat):
            self.front[peer].bad_frames = _count(message.bad_frames)
        elif isinstance(message, Bye):
            self.front_gone(peer)

    def _front_hello(self, peer: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self.core.outbox.put(peer, _wrong_protocol(hello))
        elif hello.kind not in ("frontend", "detokenizer") or hello.incarnation != peer:
            self._bad(peer, f"Hello of {hello.kind!r} as {hello.incarnation!r}")
        else:
            log.info("%s %s is here", hello.kind, peer)
            self.front[peer] = FrontPeer(hello)
            self.announce()

    def _stranger(self, peer: str, message: Any) -> None:
        """Meant for a scheduler before this one: what it asks for is not here."""
        if isinstance(message, Submit):
            self.core.outbox.put(peer, Gone(i64([message.uid]), i32([message.attempt])))
        elif isinstance(message, Open):
            self.core.outbox.put(peer, Gone(message.uids, message.attempts))
        elif not isinstance(message, Beat | Bye):
            self._bad(peer, f"{type(message).__name__} before Hello")

    def front_gone(self, peer: str) -> None:
        """The connection broke, or the peer left. Its requests wait a little for it, or for a higher attempt."""
        known = self.front.get(peer)
        if known is not None and known.lost_at is None:
            log.info("%s %s is gone", known.hello.kind, peer)
            known.lost_at = self.core.clock()
            self.core.drop_unanswered(peer)
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
        """Tell the whole front side who is there."""
        listed = [p.hello for p in self.front.values() if p.lost_at is None]
        listed += [w.hello for w in self.workers.values()]
        peers = [Peer(hello.kind, hello.incarnation, hello.endpoint) for hello in listed]
        core = self.core
        message = Peers(self.epoch, peers, self.config.block_size, bool(core.replicas), core.max_model_len)
        for peer, known in self.front.items():
            if known.lost_at is None:
                core.outbox.put(peer, message)

    # -- workers

    def on_worker(self, peer: str, message: Any) -> None:
        """One message of a worker. What belongs to another lease than its current one is dropped."""
        worker = self.workers.get(peer)
        if isinstance(message, Hello):
            self._worker_hello(peer, message)
        elif worker is None:
            return  # of a lease that ended, or of a scheduler before this one
        elif isinstance(message, Beat):
            worker.beat_at = self.core.clock()
            worker.bad_frames = _count(message.bad_frames)
        elif isinstance(message, Bye):
            self.worker_gone(peer, "left", blame=False)
        elif message.lease != worker.lease:
            return
        elif isinstance(message, Loaded):
            self._loaded(peer, worker, message)
        elif isinstance(message, Ready):
            self._ready(peer, worker)
        elif isinstance(message, StepResult):
            self._result(peer, worker, message)
        elif isinstance(message, StepFailed):
            self.worker_gone(peer, f"failed in step {message.step}: {message.error}")

    def _worker_hello(self, peer: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self.to_workers.append((peer, _wrong_protocol(hello)))
            return
        if hello.kind != "gpu_worker" or hello.incarnation != peer:
            self._bad(peer, f"Hello of {hello.kind!r} as {hello.incarnation!r}")
            return
        if peer in self.workers:
            self.worker_gone(peer, "said Hello again")
        taken = {w.lease.replica for w in self.workers.values()}
        number = next(i for i in range(len(taken) + 1) if i not in taken)
        self._leases += 1
        lease = Lease(self.epoch, number, self._leases)
        self.workers[peer] = Worker(hello, lease, self.core.clock())
        self.core.loading += 1
        config = self.config
        log.info("worker %s (%s) joins as replica %d", peer, hello.device, number)
        self.to_workers.append(
            (peer, Assign(lease, number, 0, "", config.block_size, config.max_num_seqs, config.max_num_batched_tokens))
        )
        self.announce()

    def _loaded(self, peer: str, worker: Worker, message: Loaded) -> None:
        sizes = (message.num_blocks, message.max_model_len, message.vocab_size)
        sound = 1 <= message.num_blocks <= MAX_BLOCKS and all(1 <= size <= INT32_MAX for size in sizes)
        if worker.phase != "loading" or not sound:
            self._expel(peer, f"it said Loaded{sizes} while {worker.phase}")
            return
        worker.phase, worker.loaded = "configuring", message
        self.to_workers.append((peer, Configure(worker.lease, message.num_blocks)))

    def _ready(self, peer: str, worker: Worker) -> None:
        loaded = worker.loaded
        if worker.phase != "configuring" or loaded is None:
            self._expel(peer, f"it said Ready while {worker.phase}")
            return
        config = self.config
        worker.phase, worker.beat_at = "ready", self.core.clock()
        worker.replica = Replica(
            worker.lease.replica, worker.lease, peer, config.max_num_seqs, loaded.num_blocks, config.block_size,
            loaded.max_model_len, loaded.vocab_size, config.enable_prefix_caching, worker.hello.device,
        )  # fmt: skip
        self.core.loading -= 1
        self.core.add_replica(worker.replica)
        log.info("replica %d is ready: %d blocks of %d tokens", worker.lease.replica, loaded.num_blocks,
                 config.block_size)  # fmt: skip
        self.announce()

    def _result(self, peer: str, worker: Worker, message: StepResult) -> None:
        if worker.replica is None:
            self._expel(peer, f"it sent the result of step {message.step} while {worker.phase}")
            return
        try:
            self.core.commit(worker.replica, message)
        except BadFrame as error:
            self._expel(peer, str(error))

    def worker_gone(self, peer: str, why: str, blame: bool = True) -> None:
        """The lease ends; what ran there goes back in line."""
        worker = self.workers.pop(peer, None)
        if worker is None:
            return
        log.warning("worker %s (replica %d) %s", peer, worker.lease.replica, why)
        if worker.replica is None:
            self.core.loading -= 1
        else:
            self.core.end_lease(worker.replica, blame)
        self.announce()

    def _expel(self, peer: str, why: str) -> None:
        """A worker that breaks the protocol is out of its mind: it must go, and start again from nothing."""
        self._bad(peer, why)
        self.to_workers.append((peer, Bye(f"the scheduler ended this worker's lease: {why}")))
        self.worker_gone(peer, f"is expelled: {why}")

    def drain(self, peer: str, reason: str) -> None:
        """Send this worker's requests elsewhere, and let it go when it has run what was planned."""
        worker = self.workers.get(peer)
        if worker is not None and worker.replica is not None:
            worker.replica.draining = True
            for seq in worker.replica.sequences():
                self.core.requeue(seq)
            self.to_workers.append((peer, Drain(reason)))

    # -- time

    def plans(self) -> None:
        """Plan for every replica until it has enough in flight."""
        now = self.core.clock()
        for replica in self.core.replicas.values():
            while (plan := self.core.plan(replica)) is not None:
                replica.in_flight[-1].sent_at = now
                self.to_workers.append((replica.peer, plan))

    def tick(self) -> None:
        """Beats that are due, and peers whose time is up."""
        now = self.core.clock()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_S
        for peer, known in list(self.front.items()):
            if known.lost_at is None:
                self.core.outbox.put(peer, Beat(bad_frames=self.wire_bad_frames + self.core.bad_messages))
            elif now - known.lost_at >= LOST_FRONT_S:
                for request in self.core.owned_by(peer):
                    self.core.drop(request)
                self.core.outbox.forget(peer)
                del self.front[peer]
        for peer, worker in list(self.workers.items()):
            self.to_workers.append((peer, Beat()))
            steps = worker.replica.in_flight if worker.replica else ()
            if worker.phase == "ready" and now - worker.beat_at > SILENT_WORKER_S:
                self._expel(peer, f"it was silent for {SILENT_WORKER_S:.0f} s")
            elif steps and now - steps[0].sent_at > STEP_LIMIT_S:
                self._expel(peer, f"step {steps[0].number} did not end in {STEP_LIMIT_S:.0f} s")

    def bad_frames(self) -> int:
        """Frames dropped here and, by their last Beats, by everyone else who is here."""
        elsewhere = sum(peer.bad_frames for peer in self.front.values())
        elsewhere += sum(worker.bad_frames for worker in self.workers.values())
        return self.wire_bad_frames + elsewhere

    def timeout(self) -> float:
        """Seconds until ``tick`` has something to do."""
        return max(0.0, self._next_beat - self.core.clock())

    def _bad(self, peer: str, why: object) -> None:
        self.core.bad_messages += 1
        if self.core.bad_messages <= 20 or self.core.bad_messages % 1000 == 0:
            log.warning("dropped a bad message from %s (%d so far): %s", peer, self.core.bad_messages, why)


def _count(claimed: int) -> int:
    """A peer's own count, kept where sums of it still fit a message."""
    return max(0, min(claimed, INT32_MAX))


def _wrong_protocol(hello: Hello) -> Bye:
    return Bye(
        f"this {hello.kind} speaks protocol {hello.protocol} and the scheduler {PROTOCOL}; install the same version of "
        "quire for both."
    )
