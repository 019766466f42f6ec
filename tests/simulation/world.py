"""One history: a cluster with what its users ask and what goes wrong, from the first process to the last request's end.

First the plan happens. Then the faults stop: links are healed, what stands still goes on, what died is started again by
its supervisor. From then on every request has to end, and nothing may be left of it anywhere.
"""

from __future__ import annotations

import os
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.scheduler.worker import DROPPED

from . import bounds, chance, faults, toy
from .checks import Rules, check_end, leftovers
from .consumer import Consumer
from .exchange import Exchange
from .host import Host
from .network import Network
from .plan import Ask, Fault, Plan, WorkerShape
from .processes import Detokenizer, Frontend, Process, Scheduler
from .supervisor import Supervisor
from .timeline import Timeline
from .workers import Worker

SERVICES = {"w": "gpu_worker", "s": "scheduler", "d": "detokenizer", "f": "frontend"}
AFTER_S = 8.0
"""So long after the last ask or fault that has a time, those that wait for a message strike no more."""
PATIENCE_S, HUNG_PATIENCE_S, WOKEN_PATIENCE_S = 300.0, 800.0, 3800.0
"""By when all requests have to end once the faults have stopped. The longest the product lets one wait without a sign
is NO_DETOKENIZER_RESUMED_S; a worker that hung may be waited for LOADED_LIMIT_S, while its step still hangs, and for
LOADING_LIMIT_S where it slept without its weights."""
CLEAN_S = 60.0
"""By when nothing is left after the last has ended: a silent Engine is let go after 20 s, a lost connection found after
12, and what it leads to is given up 5 s later."""
START_S, LOOK_S = 30.0, 0.25
MOST_EVENTS = 2_000_000
INTEGRITY_EVERY = 16
"""Turns of the scheduler between two looks at all of its books."""


@dataclass
class Failure:
    """What must not be. ``rule`` is a short name that stays the same from history to history."""

    rule: str
    text: str
    at: float


@dataclass
class Outcome:
    """What came of a history: none of it is wrong where there are no failures."""

    failures: list[Failure] = field(default_factory=list)
    marks: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ended: float = 0.0
    happened: int = 0
    digest: int = 0


class World:
    """The cluster of ``plan``. ``lines`` gathers a transcript; without them it costs nothing."""

    def __init__(self, plan: Plan, lines: list[str] | None = None):
        self.plan, self.lines, self.outcome = plan, lines, Outcome()
        shape = plan.shape
        self.args = shape.args().check()
        self.timeline = Timeline()
        self.network = Network(self.timeline, plan.seed)
        self.preparer, self.vocab = toy.preparer(shape.max_model_len, shape.pools, shape.whole), toy.VOCAB
        self.rules = Rules(shape, self.fail, self.say if lines is not None else None)
        self.exchange = Exchange(self.fail, lambda kind: any(blow[2] == kind for blow in self.blows))
        self.lock = os.memfd_create("scheduler.lock")
        self.processes: dict[str, Process] = {}  # the present or last one of each place
        self.shapes = {f"w{at}": worker for at, worker in enumerate(shape.workers)}
        self.supervisor = self._supervisor(shape.places(), self._is_ready)
        self.supervisors = [self.supervisor]
        self.wall_offsets: dict[str, float] = {}  # of machines whose clock was set
        self.poisoned: dict[int, str] = {}
        self.sizes: set[int] = set()
        self.disks: dict[str, dict[bytes, Any]] = {}  # of workers, which outlive them
        self.consumers: list[Consumer] = []
        self.blows: list[list[Any]] = []  # at, until (inf: not over yet), kind, target
        self.calm = float("inf")
        self.quiet = False
        self.gave_up = ""
        self.links: set[tuple[str, str]] = set()  # that something was done to
        self._unbegun = len(plan.asks)
        self._waiting: dict[str, dict[int, list[Fault]]] = {}  # faults by the event they wait for, and its number
        self._happened: Counter[str] = Counter()
        self._names: Counter[str] = Counter()
        self._turns = self._said = self.tellers = 0
        self._hung = False

    # -- what processes tell and ask

    @property
    def scheduler(self) -> Any:
        """The scheduler's present process; one that has ended, where no other has begun."""
        return self.processes.get("s")

    @property
    def workers(self) -> list[Any]:
        """Of each place for a worker the present or last process."""
        return self._of("w")

    @property
    def detokenizers(self) -> list[Any]:
        """Of each place for a detokenizer."""
        return self._of("d")

    @property
    def frontends(self) -> list[Any]:
        """Of each place for a frontend."""
        return self._of("f")

    def _of(self, letter: str) -> list[Any]:
        return [self.processes[place] for place in sorted(self.processes) if place[0] == letter]

    def say(self, *lines: str) -> None:
        """Write lines of the transcript, with the time before them where it is another."""
        if self.lines is None or not lines:
            return
        if self.timeline.now != self._said:
            self._said = self.timeline.now
            self.lines.append(f"@ {self._said:.4f} s")
        self.lines.extend(lines)

    def mark(self, *key: str) -> None:
        """Count what was reached."""
        self.outcome.marks[key] += 1

    def fail(self, line: str) -> None:
        """Something is wrong: "rule | what"."""
        rule, _, text = line.partition(" | ")
        self.outcome.failures.append(Failure(rule, text, self.timeline.now))
        self.say(f"!! {line}")

    def turned(self, scheduler: Scheduler) -> None:
        """The scheduler had a turn."""
        self._turns += 1
        if self._turns % INTEGRITY_EVERY == 0:
            scheduler.core.check_integrity()
            self.exchange.turned(scheduler.membership)
            for line in bounds.over_limits(scheduler.core, self.plan.shape):
                self.fail(line)

    def served(self, place: str) -> None:
        """A process has begun to serve."""
        self.say(f"! {place} serves")
        for blow in self.blows:
            if blow[3] == place and blow[2] in faults.DEATHS:
                blow[1] = min(blow[1], self.timeline.now)

    def begun(self, consumer: Consumer) -> None:
        """A request has its uid."""
        self.consumers.append(consumer)
        if consumer.ask.poison and consumer.uid:
            self.poisoned[consumer.uid] = consumer.ask.poison

    def blow(self, kind: str, target: str, seconds: float = float("inf")) -> list[Any]:
        """Remember that something was done, for so long."""
        self.blows.append([self.timeline.now, self.timeline.now + seconds, kind, target])
        return self.blows[-1]

    # -- processes

    def _supervisor(self, places: list[str], is_ready: Callable[[], bool] = lambda: True) -> Supervisor:
        """One machine's; workers first, as the product starts them."""
        ordered = sorted(places, key=lambda place: ("wsfd".index(place[0]), place))
        return Supervisor(
            self.timeline, [(place, SERVICES[place[0]], None) for place in ordered], self._spawn, is_ready=is_ready,
            gave_up=self._gave_up, terminate=self._terminate,
        )  # fmt: skip

    def join(self, place: str) -> None:
        """Somebody starts another process, on a machine with a supervisor of its own."""
        if not self._names[place]:
            self.supervisors.append(self._supervisor([place]))
            self.supervisors[-1].ready = True  # where it has joined, a server runs
            self.supervisors[-1].start()

    def _spawn(self, place: str) -> Host:
        """A new process."""
        before = self.processes.get(place)
        if before is not None and place[0] == "w" and before.host.code == 0:
            self.fail(f"started again | {place}: expected nobody where a worker has left, got another")
        self._names[place] += 1
        host = Host(self.timeline, SERVICES[place[0]], f"{place}.{self._names[place]}", machine=place)
        host.ended.append(lambda: self._ended(place, host))
        self.say(f"! {host.name} is started")
        host.after(0.01 + 0.05 * chance.draw(chance.key(self.plan.seed, host.name), 0), self._make, place, host)
        return host

    def _make(self, place: str, host: Host) -> None:
        kind: Callable[..., Process] = {"s": Scheduler, "d": Detokenizer, "f": Frontend, "w": Worker}[place[0]]
        host.wall_offset = self.wall_offsets.get(place, 0.0)
        extra = (self.shapes.setdefault(place, self.shapes.get("w0", WorkerShape())),) if place[0] == "w" else ()
        self.processes[place] = kind(self, host, place, *extra)

    def _ended(self, place: str, host: Host) -> None:
        self.say(f"! {host.name} has ended ({host.code})")
        last = [blow for blow in self.blows if blow[3] == place and blow[2] in faults.DEATHS and blow[1] > 1e300]
        if host.code == 0 and place[0] == "w":
            for line in bounds.late_to_leave(self, place):
                self.fail(line)
            for blow in last:
                blow[1] = self.timeline.now  # it has left, and nobody follows
        elif not last:
            self.blow("ends", place)

    def _terminate(self, host: Host) -> None:
        process = self.processes.get(host.name.partition(".")[0])
        if process is not None and process.host is host:
            process.terminate()
        else:
            host.end(0)

    def _is_ready(self) -> bool:
        return any(isinstance(each, Frontend) and each.core.ready for each in self.processes.values())

    def _gave_up(self, message: str, code: int) -> None:
        self.gave_up = message
        self.say(f"! the supervisor gives up: {message}")

    # -- the plan

    def _ask(self, ask: Ask, tries: int = 0) -> None:
        """A client comes; where nobody listens, it comes again."""
        frontends = [each for each in self.frontends if each.place == f"f{ask.frontend}" and each.host.alive]
        if frontends and not frontends[0].asked_to_end:
            self._unbegun -= 1
            consumer = Consumer(ask, frontends[0].core, self.timeline.clock, self.rules)
            frontends[0].host.do(frontends[0].begin, consumer)
        elif tries < 600 and not self.gave_up:
            self.timeline.after(0.1 if tries < 100 else 1.0, self._ask, ask, tries + 1)
        else:
            self._unbegun -= 1

    def _schedule(self) -> float:
        """Have it all ahead. Returns when the faults stop."""
        stop = 0.0
        for ask in self.plan.asks:
            self.timeline.after(ask.when, self._ask, ask)
            stop = max(stop, ask.when)
        for fault in self.plan.faults:
            if fault.after:
                self._waiting.setdefault(fault.after, {}).setdefault(fault.nth, []).append(fault)
            else:
                self.timeline.after(fault.when, self._strike, fault)
                stop = max(stop, fault.when + fault.seconds)
        if self._waiting:
            self.network.tap = self._tap
        return self.timeline.now + stop + AFTER_S

    def _tap(self, frame: bytes) -> None:
        """A message is being sent."""
        at = 1 if frame[0] < 0xDC else 3
        kind = faults.EVENT_OF.get(frame[at + 1 : at + 1 + (frame[at] & 31)])
        if kind is not None:
            self._happened[kind] += 1
            for fault in self._waiting.get(kind, {}).pop(self._happened[kind], ()):
                self.timeline.after(fault.when, self._strike, fault)  # never in the middle of what sends it

    def _strike(self, fault: Fault) -> None:
        if not self.quiet:
            self.strike(fault)

    def strike(self, fault: Fault) -> None:
        """The one door by which faults come."""
        faults.strike(self, fault)

    # -- a history

    def run(self) -> Outcome:
        """All of it."""
        try:
            self._run()
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - of the product's code, in some process: that is what is looked for
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(frame.filename)}:{frame.name}"
            self.fail(f"exception {type(error).__name__} at {where} | {error}")
            if self.lines is not None:
                self.lines += traceback.format_exception(error)
        finally:
            os.close(self.lock)
        self.outcome.ended, self.outcome.happened = self.timeline.now, self.timeline.happened
        self.outcome.digest = zlib.crc32(repr((self.timeline.now, self.timeline.happened, self._turns)).encode())
        return self.outcome

    def _run(self) -> None:
        self.supervisor.start()
        if not self.plan.early:
            self._until(lambda: self.supervisor.ready, START_S)
        self._until(self._all_over, self._schedule())
        self._calm_down()
        if not self._until(self._look_calm, self.timeline.now + self._patience(), LOOK_S):
            for line in check_end(self):
                self.fail(line)
            return
        self._until(lambda: not leftovers(self), self.timeline.now + CLEAN_S, LOOK_S)
        if self.scheduler is not None and self.scheduler.host.alive:
            self.scheduler.core.check_integrity()
        for line in [*check_end(self), *bounds.without_cause(self), *bounds.counted_too_often(self)]:
            self.fail(line)

    def _patience(self) -> float:
        if not self._hung:
            return PATIENCE_S
        dropped = any(each.kind == "sleep" and each.value >= DROPPED for each in self.plan.faults)
        return WOKEN_PATIENCE_S if dropped else HUNG_PATIENCE_S

    def _until(self, reached: Callable[[], bool], until: float, every: float = 0.0) -> bool:
        """Let things happen until ``reached``, which is asked after each, or every so many seconds."""
        step = self.timeline.step
        while not reached():
            if self.timeline.now >= until or self.outcome.failures:
                return False
            if self.timeline.happened > MOST_EVENTS:
                self.fail(f"endless | {MOST_EVENTS} events in {self.timeline.now} s")
                return False
            end = min(until, self.timeline.now + every) if every else until
            if not step(end) or not every:
                continue
            while step(end):
                pass
        return True

    def _all_over(self) -> bool:
        return not self._unbegun and all(consumer.over for consumer in self.consumers)

    def _calm_down(self) -> None:
        """The faults stop."""
        self.quiet = True
        self.say("! the faults stop")
        self._hung = any(worker.hung or worker.may_hang for worker in self.workers if worker.host.alive)
        for a, b in sorted(self.links):
            self.network.heal(a, b)
        for stands in [*self.supervisors, *self.processes.values()]:
            stands.host.go_on()
        if any(blow[2] == "sleep" for blow in self.blows):
            faults.wake(self, "calm")
        if not any(self._stays(worker) for worker in self.workers):
            biggest = max((worker.blocks for worker in self.plan.shape.workers), default=WorkerShape().blocks)
            self.shapes["w9"] = WorkerShape(biggest)
            self.join("w9")

    def _stays(self, worker: Worker) -> bool:
        """It serves, or will: it was not told to leave."""
        return not worker.asked_to_end and not worker.drained and not self.gave_up

    def _look_calm(self) -> bool:
        """Whether all has ended; on the way, since when all who should run do."""
        if self.calm == float("inf") and self._all_serve():
            self.calm = self.timeline.now
            for blow in self.blows:
                blow[1] = min(blow[1], self.calm)
        return self._all_over()

    def _all_serve(self) -> bool:
        places = [place for place in self.supervisor.places if place[0] != "w"]
        there = all(place in self.processes and self.processes[place].host.serving for place in places)
        return there and self.scheduler.membership.registry.ready
