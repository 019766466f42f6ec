"""The workers: from Hello to Bye, leases, drains, and the timers that find the dead. No IO.

``on_worker`` takes what the workers' socket received; ``peer`` is the sender's identity, which is its process's
incarnation. What workers are owed gathers in ``to_workers``. The phases a worker goes through are a table in
``worker_phase.py``.

Five things find a worker that has failed: its connection breaks (killed); nothing is heard of it for
``worker_timeout`` (stopped, or its machine hangs; its heartbeats do not wait for a step); a step does not end in
``step_timeout`` (a hung kernel; counted from the end of the step before it, and long enough for a first step that
still compiles); loading and configuring, which may take minutes, take longer than ``LOADING_LIMIT_S`` each; or it says
what cannot be. In any case what ran there goes back in line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from ..proto.codec import BadFrame
from ..proto.messages import (
    PROTOCOL,
    AdapterReady,
    Assign,
    Bye,
    Compiled,
    Configure,
    Drain,
    Heartbeat,
    Hello,
    Lease,
    Loaded,
    Manage,
    Managed,
    Ready,
    StepFailed,
    StepResult,
    WorkerInfo,
)
from ..proto.standstill import Standstill
from .adapters import Answer, loads_lost, loads_overdue
from .core import Scheduler
from .replica import Replica
from .worker_phase import GOING, STARTING, TRANSITIONS, Event, Phase

log = logging.getLogger(__name__)

LOADING_LIMIT_S, LOADED_LIMIT_S = 3600.0, 600.0
"""The second is for a worker that said in its Hello that its weights are there."""
LEAST_TIMEOUT_S = 2.0
"""``worker_timeout`` and ``step_timeout`` are no shorter: heartbeats come, and are checked, once a second."""
STOPPED_S = 15.0
"""After this process itself stood still, connections that break for so long say nothing about what ran there."""
LEAST_NAME = 4
"""What is shorter is a replica's number, and of one that has left, it must not be taken for the beginning of a name."""
MAX_BLOCKS, INT32_MAX = 2**22, 2**31 - 1
"""The most blocks of a worker that are used: 64 million tokens in blocks of 16 is plenty, and books cost memory."""
MAX_LOST, MAX_SLOTS = 256, 4096
MAX_DRAFTS = 64
"""Tokens that a worker may draft for a row in one step."""


class Worker:
    """One worker under one lease. ``since`` is when its phase began, ``leave_by`` when a drain's patience ends."""

    __slots__ = (
        "bad_frames", "drained", "heartbeat_at", "hello", "lease", "leave_by", "loaded", "phase", "reason", "replica",
        "since",
    )  # fmt: skip

    def __init__(self, hello: Hello, lease: Lease, now: float):
        self.hello, self.lease, self.heartbeat_at, self.since = hello, lease, now, now
        self.phase = Phase.LOADING
        self.bad_frames = 0  # it has counted, by its last Heartbeat
        self.loaded: Loaded | None = None
        self.replica: Replica | None = None
        self.leave_by, self.reason, self.drained = math.inf, "", 0

    def follow(self, event: Event, now: float) -> bool:
        """Go where the table says; False, and nowhere, where it does not know the event in this phase."""
        after = TRANSITIONS[self.phase].get(event)
        if after is None:
            return False
        if after is not self.phase:
            self.phase, self.since = after, now
        return True

    def running(self) -> int:
        """Sequences there."""
        return len(self.replica.sequences()) if self.replica is not None else 0


class WorkerRegistry:
    """All workers. ``changed`` is called where the front side must be told, ``answer`` with what became of adapters
    that it wished for."""

    def __init__(
        self, core: Scheduler, epoch: int, changed: Callable[[], None],
        answer: Callable[[list[Answer]], None] = lambda answers: None,
    ):  # fmt: skip
        self.core, self.epoch, self.config, self.changed, self.answer = core, epoch, core.config, changed, answer
        self.workers: dict[str, Worker] = {}
        self.to_workers: list[tuple[str, Any]] = []
        self.compilations = 0  # of kernels while requests were served, as workers told
        self.lost: dict[str, str] = {}  # the last MAX_LOST workers that ended without leaving, and how
        self._leases = 0
        self._stood_still = -math.inf  # when this process last did

    @property
    def ready(self) -> bool:
        """Some replica takes requests."""
        return any(not replica.draining for replica in self.core.replicas.values())

    def on_worker(self, peer: str, message: Any) -> None:
        """One message of a worker. What belongs to another lease than its current one is dropped."""
        worker = self.workers.get(peer)
        if isinstance(message, Hello):
            self._hello(peer, message)
        elif worker is None:
            # Of a lease that ended, or of a scheduler before this one. A Heartbeat says that it does not know.
            if isinstance(message, Heartbeat):
                self.to_workers.append((peer, Bye("it has no lease here", again=True)))
        elif isinstance(message, Heartbeat):
            worker.heartbeat_at = self.core.clock()
            worker.bad_frames = count(message.bad_frames)
        elif isinstance(message, Bye):
            # One that drains first has nothing to answer for; any other may have been made to go by what it ran.
            self.gone(peer, f"left ({message.reason or 'no reason given'})", worker.phase not in GOING)
        elif isinstance(message, Drain):
            self.drain(peer, message.reason or "it asked to leave", self.config.drain_timeout)
        elif message.lease != worker.lease:
            return
        elif isinstance(message, Loaded):
            self._loaded(peer, worker, message)
        elif isinstance(message, Ready):
            self._ready(peer, worker)
        elif isinstance(message, StepResult):
            self._result(peer, worker, message)
        elif isinstance(message, AdapterReady):
            self._adapter_ready(peer, worker, message)
        elif isinstance(message, Compiled):
            self.compilations = count(self.compilations + 1)
        elif isinstance(message, StepFailed):
            self.gone(peer, f"failed in step {message.step}: {message.error}")

    # -- from Hello to Ready

    def _hello(self, peer: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self.to_workers.append((peer, wrong_protocol(hello)))
            return
        if hello.kind != "gpu_worker" or hello.incarnation != peer:
            self.core.bad(peer, f"Hello of {hello.kind!r} as {hello.incarnation!r}")
            return
        if peer in self.workers:
            self.gone(peer, "said Hello again")
        taken = {w.lease.replica for w in self.workers.values()}
        number = next(i for i in range(len(taken) + 1) if i not in taken)
        self._leases += 1
        lease = Lease(self.epoch, number, self._leases)
        self.workers[peer] = Worker(hello, lease, self.core.clock())
        self.core.expect_replica(number)
        config = self.config
        log.info("worker %s (%s) joins as replica %d%s", peer, hello.device, number,
                 ", its weights still loaded" if hello.loaded else "")  # fmt: skip
        assign = Assign(lease, config.block_size, config.max_num_seqs, config.token_budget())
        self.to_workers.append((peer, assign))
        self.changed()

    def _loaded(self, peer: str, worker: Worker, message: Loaded) -> None:
        if not self._starts(peer, worker, Event.LOADED):
            return
        sizes = (message.num_blocks, message.max_model_len, message.vocab_size)
        if not all(1 <= size <= INT32_MAX for size in sizes) or not 0 <= message.adapter_slots <= MAX_SLOTS:
            self._expel(peer, f"it said Loaded{sizes}, with {message.adapter_slots} slots for adapters")
            return
        if not (0 <= message.drafts <= MAX_DRAFTS and 0 <= message.draft_rows <= INT32_MAX):
            self._expel(peer, f"it would draft {message.drafts} tokens for each of {message.draft_rows} rows")
            return
        if message.num_blocks > MAX_BLOCKS:  # a tiny model has room for more than anybody could use
            log.info("worker %s has room for %d blocks; %d are used", peer, message.num_blocks, MAX_BLOCKS)
            message.num_blocks = MAX_BLOCKS
        worker.loaded = message
        self.to_workers.append((peer, Configure(worker.lease, message.num_blocks)))

    def _ready(self, peer: str, worker: Worker) -> None:
        if not self._starts(peer, worker, Event.READY):
            return
        config, loaded = self.config, worker.loaded
        assert loaded is not None  # it was configured
        worker.heartbeat_at = worker.since
        worker.replica = Replica(
            worker.lease.replica, worker.lease, peer, config.max_num_seqs, loaded.num_blocks, config.block_size,
            loaded.max_model_len, loaded.vocab_size, config.enable_prefix_caching, worker.hello.device, loaded.pools,
            loaded.whole, loaded.adapter_slots, loaded.drafts, loaded.draft_rows,
        )  # fmt: skip
        self.core.add_replica(worker.replica)
        log.info(
            "replica %d is ready: %d blocks of %d tokens; %d replicas, %d sequences wait",
            worker.lease.replica, loaded.num_blocks, config.block_size, len(self.core.replicas), len(self.core.queue),
        )  # fmt: skip
        self.changed()

    def _starts(self, peer: str, worker: Worker, event: Event) -> bool:
        """True where Loaded or Ready moves the worker on; it is expelled where neither can be in its phase."""
        if not worker.follow(event, self.core.clock()):
            self._expel(peer, f"it said {event.value} while {worker.phase.value}")
            return False
        return worker.phase is not Phase.RECALLED

    # -- results

    def _result(self, peer: str, worker: Worker, message: StepResult) -> None:
        now = self.core.clock()
        if not worker.follow(Event.RESULT, now):
            self._expel(peer, f"it sent the result of step {message.step} while {worker.phase.value}")
            return
        assert worker.replica is not None  # it is ready, or was
        worker.heartbeat_at = now
        try:
            self.core.commit(worker.replica, message)
        except BadFrame as error:
            self._expel(peer, str(error))
            return
        if worker.phase is Phase.DRAINING:
            self._let_go(peer, worker)

    def plans(self) -> None:
        """Plan for every replica until it has enough in flight."""
        for replica in self.core.replicas.values():
            while (plan := self.core.plan(replica)) is not None:
                self.to_workers.append((replica.peer, plan))
            if replica.adapters is not None:
                self.to_workers += [(replica.peer, load) for load in replica.adapters.take_loads()]

    def _adapter_ready(self, peer: str, worker: Worker, message: AdapterReady) -> None:
        if worker.replica is None:
            self._expel(peer, f"it said AdapterReady while {worker.phase.value}")
            return
        try:
            answers = self.core.adapter_ready(worker.replica, message)
        except BadFrame as error:
            self._expel(peer, str(error))
            return
        if message.error:
            log.warning("worker %s could not load an adapter: %s", peer, message.error)
        self.answer(answers)

    # -- leaving

    def gone(self, peer: str, why: str, blame: bool = True) -> None:
        """The lease ends; what ran there goes back in line. ``blame``: what was in flight may be the cause."""
        worker = self.workers.pop(peer, None)
        if worker is None:
            return
        if blame:
            self.lost[peer] = why
            if len(self.lost) > MAX_LOST:
                del self.lost[next(iter(self.lost))]
        running = worker.running()
        if worker.phase in STARTING:
            self.core.give_up_replica(worker.lease.replica)
        if worker.replica is not None:
            blame = blame and self.core.clock() - self._stood_still > STOPPED_S
            adapters = worker.replica.adapters
            self.core.end_lease(worker.replica, blame)
            if blame and adapters is not None:
                self.answer(loads_lost(self.core, adapters.loading))
        log.log(
            logging.INFO if worker.phase in (Phase.LEAVING, Phase.RECALLED) else logging.WARNING,
            "worker %s (replica %d, %s) %s; %d sequences ran there and go back in line, %d replicas are left",
            peer, worker.lease.replica, worker.phase.value, why, running, len(self.core.replicas),
        )  # fmt: skip
        self.changed()

    def _expel(self, peer: str, why: str) -> None:
        """A worker that breaks the protocol is not to be trusted: it must end, and start again from nothing."""
        self.core.bad(peer, why)
        self._end(peer, why)

    def _end(self, peer: str, why: str, again: bool = False) -> None:
        self.to_workers.append((peer, Bye(f"the scheduler ended this worker's lease: {why}", again)))
        self.gone(peer, f"loses its lease: {why}")

    def drain(self, peer: str, reason: str, patience: float) -> None:
        """Place nothing new on this worker, and let it go when what runs there has ended, at most ``patience`` seconds
        from now; the rest goes back in line then. Asked again, the shorter patience counts."""
        worker, now = self.workers.get(peer), self.core.clock()
        if worker is None:
            return
        before = worker.phase
        worker.follow(Event.DRAIN, now)  # of one that leaves already it changes nothing
        worker.leave_by = min(worker.leave_by, now + patience)
        if worker.phase is not before:
            worker.reason, worker.drained = reason, worker.running()
            log.info("worker %s (replica %d) drains (%s): %d sequences may run there for at most %g s more",
                     peer, worker.lease.replica, reason, worker.drained, patience)  # fmt: skip
            if worker.replica is not None:
                worker.replica.drain()
            else:
                self.core.give_up_replica(worker.lease.replica)
                self.to_workers.append((peer, Drain(reason)))
            self.changed()
        if worker.phase is Phase.DRAINING:
            self._let_go(peer, worker)

    def _let_go(self, peer: str, worker: Worker) -> None:
        """Send Drain if nothing runs there any more that somebody is there to read, or time is up."""
        assert worker.replica is not None  # it was ready
        left, now = worker.replica.sequences(), self.core.clock()
        if now < worker.leave_by and any(seq.request.owner not in self.core.lost_owners for seq in left):
            return
        for seq in left:
            self.core.requeue(seq)
        log.info("worker %s (replica %d) is drained after %.1f s: %d of %d sequences go back in line",
                 peer, worker.lease.replica, now - worker.since, len(left), worker.drained)  # fmt: skip
        worker.follow(Event.EMPTY, now)
        self.to_workers.append((peer, Drain(worker.reason)))

    # -- time

    def tick(self) -> None:
        """Once a second: a heartbeat to every worker, and a look for those that have failed."""
        now = self.core.clock()
        for peer, worker in list(self.workers.items()):
            self.to_workers.append((peer, Heartbeat()))
            self._check(peer, worker, now)

    def _check(self, peer: str, worker: Worker, now: float) -> None:
        replica = worker.replica
        if replica is None:
            limit = LOADED_LIMIT_S if worker.hello.loaded else LOADING_LIMIT_S
            if now - worker.since > limit:
                self._end(peer, f"it was {worker.phase.value} for {limit:g} s")
            return
        silent, hung = (max(LEAST_TIMEOUT_S, t) for t in (self.config.worker_timeout, self.config.step_timeout))
        if now - worker.heartbeat_at > silent:
            self._end(peer, f"it was silent for {silent:g} s", again=True)
        elif replica.waited(now) > hung:
            self._end(peer, f"step {replica.in_flight[0].number} did not end in {hung:g} s")
        elif worker.phase is Phase.DRAINING:
            self._let_go(peer, worker)
        self.answer(loads_overdue(self.core, replica))

    def forgive(self, standstill: Standstill) -> None:
        """This process stood still: what workers did meanwhile could not be seen, and is not held against them."""
        since = standstill.since
        self._stood_still = standstill.noticed_at
        for worker in self.workers.values():
            worker.heartbeat_at, worker.since = since(worker.heartbeat_at), since(worker.since)
            worker.leave_by = standstill.until(worker.leave_by)
            if worker.replica is not None:
                worker.replica.forgive(standstill)

    # -- operators

    def manage(self, message: Manage) -> Managed:
        """What an operator asks for: list, drain, remove. A list that names a worker also says whether it was lost."""
        error = ""
        if message.action in ("drain", "remove"):
            patience = message.timeout if 0 <= message.timeout < math.inf else self.config.drain_timeout
            try:
                self.drain(
                    self._find(message.worker), f"an operator's {message.action}",
                    0.0 if message.action == "remove" else patience,
                )  # fmt: skip
            except LookupError as no:
                error = str(no)
        elif message.action == "list":
            if why := self.lost.get(message.worker):
                error = f"{message.worker} did not leave: it {why}. One started in its place serves: drain that."
        else:
            error = f"unknown action {message.action!r}; it must be list, drain or remove."
        return Managed(message.token, [_info(peer, worker) for peer, worker in self.workers.items()], error)

    def _find(self, name: str) -> str:
        """The worker of a replica's number, an incarnation, or a beginning of one. Raises LookupError."""
        for peer, worker in self.workers.items():
            if name in (peer, _short(peer), str(worker.lease.replica)):
                return peer
        found = []
        if len(name) >= LEAST_NAME:
            found = [peer for peer in self.workers if peer.startswith(name) or _short(peer).startswith(name)]
        if len(found) == 1:
            return found[0]
        many = f"{len(found)} workers begin with {name!r}" if found else f"no worker {name!r} is here"
        names = ", ".join(f"{w.lease.replica} ({_short(peer)[:8]})" for peer, w in self.workers.items())
        raise LookupError(f"{many}; name one of: {names}." if names else f"{many}: there are no workers.")


def _short(peer: str) -> str:
    return peer.rpartition("-")[2]


def _info(peer: str, worker: Worker) -> WorkerInfo:
    state = (Phase.DRAINING if worker.phase in GOING else worker.phase).value
    replica, pid = worker.replica, count(worker.hello.pid)
    blocks = (replica.pool.num_blocks, replica.pool.used, replica.last_step) if replica is not None else (0, 0, 0)
    return WorkerInfo(peer, worker.lease.replica, state, worker.hello.device, pid, worker.running(), *blocks)


def count(claimed: int) -> int:
    """A peer's own count, kept where sums of it still fit a message."""
    return max(0, min(claimed, INT32_MAX))


def wrong_protocol(hello: Hello) -> Bye:
    """The answer to a Hello of another version."""
    return Bye(
        f"this {hello.kind} speaks protocol {hello.protocol} and the scheduler {PROTOCOL}; install the same version of "
        "quire for both."
    )
