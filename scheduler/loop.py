"""The only file here that touches a socket: poll, ingest (which commits), plan, send."""

from __future__ import annotations

import logging
import select
import signal
import socket
import time
from collections.abc import Callable

from ..proto.codec import MAX_FRAME, encode
from ..proto.config import ConfigError, EngineArgs
from ..proto.messages import Heartbeat, ToSchedulerFront, ToSchedulerWorkers
from ..proto.process import heartbeat, tell_ready
from ..proto.wire.sockets import DRAIN_LIMIT, Router, front_endpoint, load_keys, worker_endpoint
from ..proto.wire.wire import descriptor
from .blame import Blame
from .core import Scheduler
from .figures import Figures
from .inputs import Inputs, plans_to
from .membership import Membership
from .recorder import Recorder, TurnClock, open_ring
from .traced import TracedScheduler

log = logging.getLogger(__name__)


class Turns:
    """One turn after the other over both sockets, with the scheduler between them. It waits for nothing."""

    def __init__(self, front: Router, workers: Router, inputs: Inputs, traced: TracedScheduler | None = None):
        self.front, self.workers, self.inputs, self.membership = front, workers, inputs, inputs.membership
        self._traced = traced

    def waits(self) -> bool:
        """Messages wait that ZeroMQ may not tell of again."""
        return self.workers.waits() or self.front.waits()

    def turn(self, workers_told: bool, front_told: bool) -> bool:
        """``told``: that socket's monitor has news of connections. False where somebody is owed something in turn."""
        self.inputs.notice()
        self._ingest(workers_told, front_told)
        self.inputs.notice()  # it may have been stopped while it read
        self.inputs.tick()
        self.inputs.plans()
        return self._send()

    def _ingest(self, workers_told: bool, front_told: bool) -> None:
        """Take what has come. Results first: whoever waits for a token has waited longest."""
        inputs, membership = self.inputs, self.membership
        for wire, handle in ((self.workers, inputs.worker), (self.front, inputs.front)):
            for _ in range(DRAIN_LIMIT):
                if not wire.waits():
                    break
                if (received := wire.recv()) is not None:
                    handle(*received)
        if (bad_frames := self.front.bad_frames + self.workers.bad_frames) != membership.wire_bad_frames:
            inputs.bad_frames(bad_frames)
        if workers_told and _connection_lost(self.workers):
            for peer in list(membership.registry.workers):
                if not self.workers.send(peer, Heartbeat()):
                    inputs.worker_gone(peer, "is gone: its connection broke")
        if front_told and _connection_lost(self.front):
            for peer in list(membership.front):
                if not self.front.send(peer, Heartbeat()):
                    inputs.front_gone(peer)

    def _send(self) -> bool:
        """Everything owed. False where something could not be delivered: others are owed something in turn."""
        inputs, settled = self.inputs, True
        outgoing, unreachable = inputs.to_workers(), set()
        if self._traced is not None:
            outgoing = self._traced.with_rows(outgoing)
        for at, (peer, message) in enumerate(outgoing):
            if peer not in unreachable and not self.workers.send(peer, message):
                unreachable.add(peer)
                at_fault = len(encode(message)) > MAX_FRAME  # a plan that no worker can be sent is not innocent
                inputs.worker_gone(peer, "is gone: it cannot be reached", plans_to(peer, outgoing[at + at_fault :]))
                settled = False
        for peer, message in inputs.to_front():
            if not self.front.send(peer, message):
                inputs.undelivered(peer, message)
                settled = False
        return settled


class Loop:
    """Waits until a socket has something or time has passed, and then has a turn. Raises ConfigError where a socket
    cannot be bound."""

    def __init__(self, config: EngineArgs, epoch: int, blame: Blame):
        assert config.scheduler is not None
        keys = load_keys(config.keys)
        if keys is not None and keys.server != keys.public and config.scheduler.startswith("tcp://"):
            raise ConfigError(
                f"{config.keys} is the key of another process, and nobody would find the scheduler by it; give it the "
                "file scheduler.key of the same folder."
            )
        self.front: Router = Router(ToSchedulerFront, front_endpoint(config.scheduler), keys)
        self.workers: Router = Router(ToSchedulerWorkers, worker_endpoint(config.scheduler), keys)
        ring, clock = open_ring(config), TurnClock(time.monotonic)
        self.core = _core(config, time.monotonic if ring is None else clock)
        self.membership = Membership(self.core, epoch, blame)
        inputs, self.recorder = Inputs(self.membership), None
        if ring is not None:
            inputs = self.recorder = Recorder(self.membership, ring, clock, config.flight_recorder_tokens)
        traced = self.core if isinstance(self.core, TracedScheduler) else None
        self.turns = Turns(self.front, self.workers, inputs, traced)
        self._wake, self._waker = socket.socketpair()
        self._monitors = descriptor(self.workers.monitor()), descriptor(self.front.monitor())
        self._poll = select.poll()
        sockets = descriptor(self.workers.socket), descriptor(self.front.socket)
        for readable in (*sockets, *self._monitors, self._wake.fileno()):
            self._poll.register(readable, select.POLLIN)
        self._stopping = False
        self._figures = None if config.disable_log_stats else Figures(self.core.stats, time.monotonic)

    def run(self) -> None:
        """Until ``stop``."""
        settled, figures = True, self._figures
        while not self._stopping:
            heartbeat()
            if figures is not None and time.monotonic() >= figures.due and (line := figures.line()) is not None:
                log.info("%s", line)
            waits = not settled or self.turns.waits()
            readable = dict(self._poll.poll(0 if waits else int(self.membership.timeout() * 1000) + 1))
            settled = self.turns.turn(self._monitors[0] in readable, self._monitors[1] in readable)

    def stop(self, *_: object) -> None:
        """End ``run`` soon; safe in a signal handler."""
        if not self._stopping:
            self._stopping = True
            self._waker.send(b"x")

    def close(self) -> None:
        """Close the sockets; messages not yet sent are given up."""
        if self.recorder is not None:
            self.recorder.close()
        self._stopping = True  # a signal that comes now finds nobody to wake
        self.front.close()
        self.workers.close()
        self._wake.close()
        self._waker.close()


def _core(config: EngineArgs, clock: Callable[[], float]) -> Scheduler:
    """The scheduler, with traces where there is a collector. Raises ConfigError."""
    if config.otlp_traces_endpoint is None:
        return Scheduler(config, clock)
    from ..proto.tracing import Tracing

    spans = Tracing(config.otlp_traces_endpoint, "scheduler").spans
    return TracedScheduler(config, clock, spans, rows=config.collect_detailed_traces is not None)


def _connection_lost(wire: Router) -> bool:
    """Somebody's connection broke since the last look; a ROUTER does not say whose."""
    lost = False
    while (event := wire.next_event()) is not None:
        lost = lost or event == "disconnected"
    return lost


def serve(config: EngineArgs, epoch: int, blame: Blame) -> None:
    """Run until SIGTERM or SIGINT."""
    loop = Loop(config, epoch, blame)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, loop.stop)
    log.info("listening on %s and %s", loop.front.endpoint, loop.workers.endpoint)
    tell_ready()  # from here on only what others send can end it
    try:
        loop.run()
    finally:
        loop.close()
