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

from msgspec.structs import replace

from ..proto.codec import BadFrame
from ..proto.log_lines import counted
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
    Moved,
    NotMoved,
    Profiled,
    Ready,
    Rest,
    Rested,
    Sleep,
    Sleeping,
    StepFailed,
    StepResult,
    Taken,
    Tiers,
)  # fmt: skip
from ..proto.standstill import Standstill
from .adapters import Answer, loads_lost, loads_overdue
from .core import Scheduler
from .moves import Moves
from .offload import heard, moves, tier_of
from .profiling import Profiling
from .replica import Replica
from .slumber import Slumber
from .worker import ROLES, Worker, count, impossible, wrong_protocol
from .worker_phase import GOING, STARTING, Event, Phase

log = logging.getLogger(__name__)

LOADING_LIMIT_S, LOADED_LIMIT_S = 3600.0, 600.0
"""The second is for a worker whose weights are there: it said so in its Hello, or has loaded them since."""
LEAST_TIMEOUT_S = 2.0
"""``worker_timeout`` and ``step_timeout`` are no shorter: heartbeats come, and are checked, once a second."""
STOPPED_S = 15.0
"""After this process itself stood still, connections that break for so long say nothing about what ran there."""
MAX_BLOCKS = 2**22
"""The most blocks of a worker that are used: 64 million tokens in blocks of 16 is plenty, and books cost memory."""
MAX_LOST = 256


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
        self.slumber, self.moves, self.profiling = Slumber(), Moves(core), Profiling()
        self.lost: dict[str, str] = {}  # the last MAX_LOST workers that ended without leaving, and how
        self._leases = 0
        self._stood_still = -math.inf  # when this process last did

    @property
    def ready(self) -> bool:
        """Some replica takes requests, or will when it is woken."""
        return bool(self.slumber.tags) or any(not replica.draining for replica in self.core.replicas.values())

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
            worker.bad_frames, worker.resident = count(message.bad_frames), max(0, message.memory)
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
        elif isinstance(message, Rested):
            self._rested(peer, worker)
        elif isinstance(message, StepResult):
            self._result(peer, worker, message)
        elif isinstance(message, AdapterReady):
            self._adapter_ready(peer, worker, message)
        elif isinstance(message, Taken | NotMoved) and worker.replica is not None:
            self.moves.heard(worker.replica, message)
        elif isinstance(message, Moved | Tiers):
            if wrong := heard(worker, message):
                self._expel(peer, wrong)
        elif isinstance(message, Compiled):
            self.compilations = count(self.compilations + 1)
        elif isinstance(message, Profiled):
            self.profiling.heard(peer, message)
        elif isinstance(message, StepFailed):
            self.gone(peer, f"failed in step {message.step}: {message.error}")

    # -- from Hello to Ready

    def _hello(self, peer: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self.to_workers.append((peer, wrong_protocol(hello)))
            return
        if hello.kind != "gpu_worker" or hello.incarnation != peer or hello.role not in ROLES:
            self.core.bad(peer, f"Hello of {hello.kind!r} as {hello.incarnation!r}, for {hello.role!r}")
            return
        if peer in self.workers:
            self.gone(peer, "said Hello again")
        if hello.asleep >= 0 and self.slumber.adopt(min(hello.asleep, 2)):
            log.info("worker %s sleeps since before this scheduler; so do all", peer)
            self._all_again()
        self._begin(peer, hello)
        self.changed()

    def _begin(self, peer: str, hello: Hello) -> None:
        """A lease begins: the worker is to load, or to rest where all sleep."""
        taken = {w.lease.replica for w in self.workers.values()}
        number = next(i for i in range(len(taken) + 1) if i not in taken)
        self._leases += 1
        lease = Lease(self.epoch, number, self._leases)
        rest, config = self.slumber.rest, self.config
        self.workers[peer] = Worker(hello, lease, self.core.clock(), rest)
        self.core.expect_replica(number)
        if rest is not None:
            log.info("worker %s (%s) is replica %d, and sleeps", peer, hello.device, number)
            self.to_workers.append((peer, Rest(lease, rest)))
            return
        log.info("worker %s (%s) joins as replica %d%s", peer, hello.device, number,
                 ", its weights still loaded" if hello.loaded else "")  # fmt: skip
        assign = Assign(lease, config.block_size, config.max_num_seqs, config.token_budget())
        self.to_workers.append((peer, assign))

    def _loaded(self, peer: str, worker: Worker, message: Loaded) -> None:
        if not self._starts(peer, worker, Event.LOADED):
            return
        if wrong := impossible(message):
            self._expel(peer, wrong)
            return
        if message.num_blocks > MAX_BLOCKS:  # a tiny model has room for more than anybody could use
            log.info("worker %s has room for %d blocks; %d are used", peer, message.num_blocks, MAX_BLOCKS)
            message.num_blocks = MAX_BLOCKS
        worker.loaded = message
        self.to_workers.append((peer, Configure(worker.lease, message.num_blocks)))

    def _ready(self, peer: str, worker: Worker) -> None:
        if not self._starts(peer, worker, Event.READY):
            return
        core, config, loaded = self.core, self.config, worker.loaded
        assert loaded is not None  # it was configured
        worker.heartbeat_at = worker.since
        replica = Replica(
            worker.lease.replica, worker.lease, peer, config.max_num_seqs, loaded.num_blocks, config.block_size,
            loaded.max_model_len, loaded.vocab_size, config.enable_prefix_caching, worker.hello.device, loaded.pools,
            loaded.whole, loaded.adapter_slots, loaded.drafts, loaded.draft_rows, loaded.drafts_always,
            tier_of(core, worker), core.lives)  # fmt: skip
        if not loaded.pools and loaded.block_bytes > 0:
            hello = worker.hello
            replica.set_place(hello.role, hello.endpoint, loaded.kv_format, loaded.block_bytes)
        worker.serve(replica)
        self.core.add_replica(replica)
        log.info(
            "replica %d is ready: %d blocks of %d tokens; %s, %s waiting",
            worker.lease.replica, loaded.num_blocks, config.block_size, counted(len(self.core.replicas), "replica"),
            counted(len(self.core.queue), "sequence"),
        )  # fmt: skip
        self.changed()
        self._tell_awaiting()

    def _rested(self, peer: str, worker: Worker) -> None:
        if self._starts(peer, worker, Event.RESTED):
            worker.rested, worker.heartbeat_at = True, self.core.clock()
            self._tell_awaiting()

    def _starts(self, peer: str, worker: Worker, event: Event) -> bool:
        """True where Loaded, Ready or Rested moves the worker on; it is expelled where neither can be in its phase."""
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

    def _advance_moves(self) -> None:
        outgoing = self.moves.advance()
        self.to_workers += [*moves(self.core), *outgoing]

    def plans(self) -> None:
        """Plan for every replica until it has enough in flight. What plans, or moves, write over is stored before."""
        if self.slumber.falling and not any(replica.sequences() for replica in self.core.replicas.values()):
            self._fall_asleep(self.slumber.falling)
        if moving := self.moves.due:
            self._advance_moves()
        for replica in self.core.replicas.values():
            while (plan := self.core.plan(replica)) is not None:
                if replica.tier is not None:
                    self.to_workers += moves(self.core)
                self.to_workers.append((replica.peer, plan))
                if replica.draining or replica.role == "prefill":  # what it computes follows, before the next step
                    self._advance_moves()
            if replica.adapters is not None:
                self.to_workers += [(replica.peer, order) for order in replica.adapters.take_orders()]
        if self.core.tiers is not None:
            self.to_workers += moves(self.core)
        for peer, worker in list(self.workers.items()) if moving else ():
            if worker.phase is Phase.DRAINING and not worker.running():
                self._let_go(peer, worker)

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

    def gone(self, peer: str, why: str, blame: bool = True, unsent: int = 0) -> None:
        """The lease ends; what ran there goes back in line. ``blame``: what was in flight may be the cause, but for the
        last ``unsent`` plans, which never left."""
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
            worker.replica.withdraw(unsent)
            self.core.end_lease(worker.replica, blame)
            if blame and adapters is not None:
                self.answer(loads_lost(self.core, adapters.loading))
        log.log(
            logging.INFO if worker.phase in (Phase.LEAVING, Phase.RECALLED) else logging.WARNING,
            "worker %s (replica %d, %s) %s; %d sequences ran there and go back in line, %d replicas are left",
            peer, worker.lease.replica, worker.phase.value, why, running, len(self.core.replicas),
        )  # fmt: skip
        self.changed()
        self._tell_awaiting()

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

    # -- sleep

    def sleep(self, peer: str, message: Sleep) -> None:
        """What an administrator asks for. It is answered when every worker that is here has done it."""
        slumber = self.slumber
        if (error := slumber.refusal(message)) or message.action == "ask":
            self.core.outbox.put(peer, Sleeping(message.token, list(slumber.tags), error))
            return
        if message.action == "sleep":
            self._fall_asleep_by(message)
        elif message.action == "wake_up":
            self.core.pause(False)
            if slumber.wake(message.tags):
                away = " and ".join(slumber.tags) or "nothing"
                log.info("an administrator wakes the workers; %s is away still", away)
                self._all_again()
        slumber.wait(peer, message.token)
        self._tell_awaiting()

    def _fall_asleep_by(self, message: Sleep) -> None:
        """What is open is kept, waited for, or aborted; nothing runs where all sleep already."""
        if message.mode == "abort" and not self.slumber.tags:
            for request in list(self.core.requests.values()):
                text = "The request was aborted, because an administrator had the server sleep; send it again."
                self.core.fail(request, 503, text)
        if message.mode != "wait" or self.slumber.tags:
            self._fall_asleep(message.level)
            return
        self.core.pause(True)
        self.slumber.fall(message.level)

    def _fall_asleep(self, level: int) -> None:
        self.core.pause(False)
        if self.slumber.sleep(level):
            log.info("the workers sleep at level %d, as an administrator asked; %d sequences wait", self.slumber.level,
                     len(self.core.queue) + sum(w.running() for w in self.workers.values()))  # fmt: skip
            self._all_again()
        self._tell_awaiting()

    def _all_again(self) -> None:
        """Every worker that stays begins a lease anew, asleep or awake; what ran there goes back in line."""
        for peer, worker in list(self.workers.items()):
            if worker.phase is Phase.DRAINING:
                worker.leave_by = -math.inf
                self._let_go(peer, worker)
            elif worker.phase not in GOING:
                if worker.replica is not None:
                    self.core.end_lease(worker.replica, blame=False)
                else:
                    self.core.give_up_replica(worker.lease.replica)
                del self.workers[peer]
                self._begin(peer, replace(worker.hello, loaded=worker.has_weights))
        self.changed()

    def _tell_awaiting(self) -> None:
        """Answer those who wait for the workers to sleep or to wake, where they do."""
        slumber = self.slumber
        if not slumber.awaited or slumber.falling:
            return
        staying = [worker for worker in self.workers.values() if worker.phase not in GOING]
        if slumber.tags:
            done = all(worker.rested for worker in staying)
        else:
            done = bool(staying) and all(worker.phase is Phase.READY for worker in staying)
        if done:
            for peer, token in slumber.take_waiting():
                self.core.outbox.put(peer, Sleeping(token, list(slumber.tags)))

    # -- time

    def tick(self) -> None:
        """Once a second: a heartbeat to every worker, and a look for those that have failed."""
        now = self.core.clock()
        for peer, worker in list(self.workers.items()):
            self.to_workers.append((peer, Heartbeat()))
            self._check(peer, worker, now)

    def _check(self, peer: str, worker: Worker, now: float) -> None:
        replica = worker.replica
        silent, hung = (max(LEAST_TIMEOUT_S, t) for t in (self.config.worker_timeout, self.config.step_timeout))
        if worker.rested and worker.phase is Phase.RESTING:
            if now - worker.heartbeat_at > silent:
                self._end(peer, f"it was silent for {silent:g} s", again=True)
            return
        if replica is None:
            limit = LOADED_LIMIT_S if worker.hello.loaded else LOADING_LIMIT_S
            if now - worker.since > limit:
                self._end(peer, f"it was {worker.phase.value} for {limit:g} s")
            return
        if now - worker.heartbeat_at > silent:
            self._end(peer, f"it was silent for {silent:g} s", again=True)
        elif replica.waited(now) > hung:
            self._end(peer, f"step {replica.in_flight[0].number} did not end in {hung:g} s")
        elif worker.phase is Phase.DRAINING:
            self._let_go(peer, worker)
        self.answer(loads_overdue(self.core, replica))

    def forgive(self, standstill: Standstill) -> None:
        """This process stood still: what workers did meanwhile could not be seen, and is not held against them."""
        self._stood_still = standstill.noticed_at
        for worker in self.workers.values():
            worker.forgive(standstill)
