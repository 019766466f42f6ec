"""The services as simulated processes: the real objects, driven as their own loops drive them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.client import core as client_core
from quire.client.results import RequestError
from quire.detokenizer import core as detokenizer_core
from quire.proto import messages as m
from quire.proto.codec import from_i32, from_i64
from quire.scheduler import blame, core, inputs, loop, main, membership, transcript

from .chance import Draws
from .exchange import STOOD_S, watch_blame, watch_scheduler
from .fairness import watch_line
from .host import Host
from .idle import watch_idle

if TYPE_CHECKING:
    from .consumer import Consumer
    from .world import World

FRONT, WORKERS = "ipc:///sim/front", "ipc:///sim/workers"
"""The scheduler's two addresses."""
THREADS = 2
"""A detokenizer's, that prepare prompts."""


class Killed(Exception):
    """Poison: the process ends here, in the middle of what it does."""


class Process:
    """What all of them have. ``place`` is where it runs ("w0"); the next process there has another ``name``."""

    def __init__(self, world: World, host: Host, place: str):
        self.world, self.host, self.place, self.name = world, host, place, host.name
        self.asked_to_end = False
        self._draw = Draws(world.plan.seed, host.name)

    def later(self, least: float, most: float, action: Callable[..., Any], *arguments: Any) -> None:
        """Have it happen in this process, after a delay between these that is its own."""
        self.host.after(least + (most - least) * self._draw(), self.guard, action, *arguments)

    def guard(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Do it; where poison kills the process, it is killed."""
        try:
            action(*arguments)
        except Killed:
            self.world.say(f"! {self.name} dies of poison")
            self.world.blow("poison", self.place)
            self.host.end(-9)

    def serves(self) -> None:
        """It says so to its supervisor."""
        if not self.host.serving:
            self.host.serving = True
            self.world.served(self.place)

    def terminate(self) -> None:
        """SIGTERM."""
        self.host.end(0)


class Scheduler(Process):
    """``scheduler/loop.py`` with simulated sockets. What its lock file holds outlives it."""

    def __init__(self, world: World, host: Host, place: str):
        super().__init__(world, host, place)
        self._born = host.clock()
        epoch = main.next_epoch(world.lock, int(host.wall_clock() * 1000))
        self.core = core.Scheduler(world.args, host.clock)
        watch_line(self.core, world.exchange.places, world.fail)
        watch_idle(self.core, world.fail)
        self._submit, self.core.submit = self.core.submit, self._submitted  # type: ignore[method-assign]
        self.membership = membership.Membership(self.core, epoch, blame.Blame(world.lock))
        watch_scheduler(self.membership, world.fail, self._stood_still)
        world.exchange.listens(self.membership)
        written = world.lines is not None
        self.inputs = transcript.Transcript(self.membership) if written else inputs.Inputs(self.membership)
        front = world.network.listen(host, FRONT, m.ToSchedulerFront, wake=self._wake_front)
        workers = world.network.listen(host, WORKERS, m.ToSchedulerWorkers, wake=self._wake_workers)
        watch_blame(self.core, workers, world.fail)
        self.turns = loop.Turns(front, workers, self.inputs)
        self._due = self._ticks = False
        self.serves()
        self._turn()

    def _wake_front(self) -> None:
        self._wake()

    def _wake_workers(self) -> None:
        self._wake()

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self.later(0.00005, 0.0005, self._turn)

    def _tick(self) -> None:
        self._ticks = False
        self._wake()

    def _turn(self) -> None:
        self._due = False
        settled = self.turns.turn(True, True)
        if isinstance(self.inputs, transcript.Transcript):
            self.world.say(*(line for line in self.inputs.take() if line[:1] != "@"))
        if not settled or self.turns.waits():
            self._wake()
        if not self._ticks:
            self._ticks = True
            self.host.after(self.membership.timeout() + 0.001, self._tick)
        elif self.membership.registry.moves.wake_at < math.inf:
            self.host.after(self.membership.timeout() + 0.001, self._wake)
        self.world.turned(self)

    def _stood_still(self) -> float:
        """When it last went on after it had not run for long. Of standstills that overlap the first to end ends all."""
        stood = [blow for blow in self.world.blows if blow[2] in ("stop", "hang") and blow[3] == self.place]
        ends = [
            until for at, until, *_ in stood
            if at >= self._born and at + STOOD_S <= until <= self.host.clock()
            and sum(each[0] <= until and each[1] >= at for each in stood) == 1
        ]  # fmt: skip
        return max(ends, default=-math.inf)

    def _submitted(self, owner: str, message: m.Submit) -> None:
        """Poison kills it while it takes the request in, and Blame has it written down."""
        if self.world.poisoned.get(message.uid) == "scheduler":
            raise Killed
        self._submit(owner, message)


class Detokenizer(Process):
    """``detokenizer/loop.py``."""

    def __init__(self, world: World, host: Host, place: str):
        super().__init__(world, host, place)
        self.endpoint = f"ipc:///sim/{host.name}"
        hello = m.Hello("detokenizer", f"detokenizer-{host.name}", m.PROTOCOL, 1, self.endpoint)
        self._jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self._aborted: dict[int, int] = {}  # the last attempt of each request that its Engine has aborted here
        self._unwanted: set[int] = set()  # what the scheduler is to be told of that
        self._busy = 0
        self._cut: set[tuple[int, int]] = set()  # attempts that were open when the connection to the scheduler broke
        self.core = detokenizer_core.DetokenizerCore(
            _Poisoned(world),
            hello,
            host.clock,
            self._prepare,
            self._check,  # type: ignore[arg-type]
        )
        self._router = world.network.listen(host, self.endpoint, m.ToDetokenizer, self._received, self._router_event)
        self._dealer = world.network.dial(
            host, FRONT, m.FromSchedulerFront, hello.incarnation, self._from_scheduler, self._dealer_event
        )
        self.serves()
        host.every(detokenizer_core.HEARTBEAT_S, self._heartbeat)

    def _heartbeat(self) -> None:
        self.core.heartbeat(0, self._router.bad_frames + self._dealer.bad_frames)
        self._flush()

    def _received(self, peer: str, message: Any) -> None:
        known = self.core.requests.get(message.uid) if isinstance(message, m.Abort) else None
        self.core.received(peer, message)
        if isinstance(message, m.Abort):
            self._aborted[message.uid] = message.attempt
            if known is not None and known.submitted and known.uid not in self.core.requests:
                self._unwanted.add(known.uid)
        self._flush()
        for uid in self._unwanted:
            self.world.fail(f"abort lost | {self.name} does not tell the scheduler that nobody wants {uid}")

    def _from_scheduler(self, message: Any) -> None:
        if isinstance(message, m.TokenBatch):
            self.world.exchange.tokens(self.core, message, self._cut)
        self.core.received(detokenizer_core.SCHEDULER, message)
        self._flush()

    def _router_event(self, event: str) -> None:
        if event == "disconnected":
            self.core.connection_broke()
            self._flush()

    def _dealer_event(self, event: str) -> None:
        if event == "connected":
            self.core.connected()
        else:
            self.core.disconnected()
            self._cut.update((request.uid, request.attempt) for request in self.core.requests.values())
        self._flush()

    def _prepare(self, job: Callable[[], Any], done: Callable[[Any], None], size: int) -> None:
        self._jobs.append((job, done))
        self._work()

    def _work(self) -> None:
        while self._jobs and self._busy < THREADS:
            self._busy += 1
            self.later(0.0002, 0.003, self._worked, *self._jobs.pop(0))

    def _worked(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self._busy -= 1
        self._work()
        try:
            result = job()
        except Killed:
            raise
        except Exception as error:  # noqa: BLE001 - as the product's pool of threads
            result = error
        done(result)
        self._flush()

    def _check(self, spec: Any, done: Callable[[Exception | None], None], patient: bool) -> None:
        self.later(0.005, 0.2, self._checked, done)

    def _checked(self, done: Callable[[Exception | None], None]) -> None:
        done(None)
        self._flush()

    def _flush(self) -> None:
        while todo := self.core.take():
            gone = set()
            for peer, message in todo:
                if peer == detokenizer_core.SCHEDULER:
                    if isinstance(message, m.Submit):
                        self.world.exchange.submitted(message, self._aborted)
                    elif isinstance(message, m.Abort):
                        self._unwanted.discard(message.uid)
                    self._dealer.send(message)
                elif peer not in gone and not self._router.send(peer, message):
                    gone.add(peer)
                    self.core.undelivered(peer)
                    if any(request.peer == peer for request in self.core.requests.values()):
                        self.world.fail(f"kept for nobody | {self.name} has requests of {peer}, which is gone")
        if self.core.refused is not None:
            self.world.fail(f"refused | {self.name}: {self.core.refused}")
            self.host.end(78)

    def terminate(self) -> None:
        self.asked_to_end = True
        self.core.close()
        self._flush()
        self.host.after(0.05, self.host.end, 0)


class _Poisoned:
    """A Preparer, and one prompt kills who prepares it."""

    def __init__(self, world: World):
        self._world, self._preparer = world, world.preparer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._preparer, name)

    def prepare(self, message: m.Tokenize, block_size: int, max_model_len: int) -> Any:
        if self._world.poisoned.get(message.uid) == "detokenizer":
            raise Killed
        return self._preparer.prepare(message, block_size, max_model_len)


class Frontend(Process):
    """``client/engine.py``, and the clients of it."""

    def __init__(self, world: World, host: Host, place: str):
        super().__init__(world, host, place)
        hello = m.Hello("frontend", f"frontend-{host.name}", m.PROTOCOL, 1)
        rng = random.Random(f"{world.plan.seed} {host.name}")
        self.core = client_core.EngineCore(hello, host.clock, host.wall_clock, rng)
        self.consumers: list[Consumer] = []
        self._wires: dict[str, Any] = {}
        self._dial(client_core.SCHEDULER, FRONT, m.FromSchedulerFront, hello.incarnation)
        host.ended.append(self._lost)
        host.needed = lambda: self.core.ready or bool(self.core.open)
        self.serves()
        host.every(client_core.HEARTBEAT_S, self._heartbeat)

    def begin(self, consumer: Consumer) -> None:
        """A client comes."""
        self.consumers.append(consumer)
        consumer.start()
        self.world.begun(consumer)
        if consumer.ask.abort_at is not None:
            self.host.after(consumer.ask.abort_at, self._abort, consumer)
        self.flush()

    def leave(self) -> None:
        """All its clients leave."""
        for consumer in list(self.consumers):
            if consumer.request is not None and not consumer.over:
                self._abort(consumer)

    def _abort(self, consumer: Consumer) -> None:
        request = consumer.request
        link = request.link if request is not None and not consumer.over else None
        consumer.abort()
        if link is not None and not any(isinstance(what, m.Abort) for _, what in self.core._todo):
            self.world.fail(f"abort lost | {self.name} does not tell {link.incarnation} that it left {consumer.uid}")
        self.flush()

    def _heartbeat(self) -> None:
        self.core.heartbeat(0, sum(wire.bad_frames for wire in self._wires.values()))
        self.world.exchange.after_heartbeat(self.core)
        self.flush()

    def _received(self, peer: str, message: Any) -> None:
        self._say("<", peer, message)
        if isinstance(message, m.TextBatch):
            self.world.exchange.text(self.core, message)
        before = self._with_scheduler(message) if isinstance(message, m.Peers) else []
        self.core.received(peer, message)
        self.world.exchange.after_peers(self.core, before)
        self.flush()

    def _with_scheduler(self, peers: m.Peers) -> list[tuple[Any, int]]:
        """What is open and accepted, with its attempt, where another scheduler says who is there."""
        if not 0 < self.core._epoch < peers.epoch:
            return []
        return [(each, each.attempt) for each in self.core.open.values() if each.accepted and each.link]

    def _say(self, way: str, peer: str, message: Any) -> None:
        """Write down what goes (``>``) to a detokenizer, or comes (``<``) from there, but for texts and heartbeats."""
        if (
            self.world.lines is not None
            and (link := self.core.links.get(peer)) is not None
            and (said := _said(message))
        ):
            self.world.say(f"{self.name} {way} {link.incarnation}: {said}")

    def _event(self, peer: str, event: str) -> None:
        if event == "connected":
            self.core.connected(peer)
        else:
            self.core.disconnected(peer)
        self.flush()

    def flush(self) -> None:
        """Do what the core wants done, and let clients read."""
        self._put()
        for consumer in self.consumers:
            consumer.collect()
        self._put()
        self.consumers = [consumer for consumer in self.consumers if not consumer.over]

    def _put(self) -> None:
        for peer, what in self.core.take():
            if isinstance(what, client_core.Connect):
                self._dial(peer, what.endpoint, m.FromDetokenizer, peer)
            elif isinstance(what, client_core.Disconnect):
                if (wire := self._wires.pop(peer, None)) is not None:
                    wire.close()
            elif (wire := self._wires.get(peer)) is not None:
                self._say(">", peer, what)
                if isinstance(what, m.Tokenize):
                    self.world.exchange.asked(what)
                wire.send(what)

    def _dial(self, peer: str, endpoint: str, union: Any, identity: str) -> None:
        self._wires[peer] = self.world.network.dial(
            self.host, endpoint, union, identity,
            lambda message: self._received(peer, message), lambda event: self._event(peer, event),
        )  # fmt: skip

    def _lost(self) -> None:
        for consumer in self.consumers:
            if not consumer.over:
                consumer.lost()

    def terminate(self) -> None:
        self.asked_to_end = True
        self.core.close(RequestError(503, "the engine has been closed."))
        self.flush()
        self.host.after(0.01, self.host.end, 0)


def _said(message: Any) -> str:
    """A message between an Engine and a detokenizer in words; nothing for those that come all the time."""
    name = type(message).__name__
    if isinstance(message, m.Unknown):
        pairs = zip(from_i64(message.uids), from_i32(message.attempts), strict=True)
        return "Unknown: " + ", ".join(f"{uid} attempt {attempt}" for uid, attempt in pairs)
    if isinstance(message, m.TextBatch | m.Heartbeat | m.Reconcile):
        return ""
    words = [name, str(getattr(message, "uid", "")), f"attempt {getattr(message, 'attempt', 0)}"]
    if isinstance(message, m.Tokenize):
        words += [f"resumes {each.index} with {len(each.ids) // 4} tokens" for each in message.resume]
        words += [f"after {message.losses} losses"] if message.losses else []
    elif isinstance(message, m.Failed):
        words.append(f"{message.status} {message.message}")
    return name if isinstance(message, m.Bye) else " ".join(words)
