"""The detokenizer's event loop around its core: Engines on one side, the scheduler on the other, threads beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ..proto.config import ConfigError
from ..proto.messages import PROTOCOL, FromSchedulerFront, Hello, ToDetokenizer
from ..proto.process import heartbeat, resident_bytes
from ..proto.spans import Spans
from ..proto.wire.sockets import CONNECTED, DISCONNECTED, Dealer, Keys, Router, front_endpoint
from .core import HEARTBEAT_S, SCHEDULER, DetokenizerCore
from .gate import Checker, Gate
from .pool import Pool
from .tokenize import Preparer
from .traced import TracedDetokenizer

log = logging.getLogger(__name__)

THREADS = 2
LONG = 256 * 2**10
"""Bytes of a prompt that shares a thread with its like: it may take seconds, and short ones do not wait behind it."""

T = TypeVar("T")


class Detokenizer:
    """The process. Make it inside a running event loop, then await ``run``."""

    def __init__(
        self,
        preparer: Preparer,
        address: str,
        incarnation: str,
        bind: str,
        advertise: str | None = None,
        keys: Keys | None = None,
        checker: Callable[[], Checker] | None = None,
        spans: Spans | None = None,
    ):
        """``checker`` makes what checks grammars, at the first request that has one; ``spans`` are for requests that
        are traced.

        Raises ConfigError where ``bind`` cannot be bound.
        """
        self._stop = asyncio.Event()
        self._reason: str | None = None
        pool, self._gate = Pool(THREADS), Gate(checker)
        self.router: Router[Any] = Router(ToDetokenizer, bind, keys)
        self.dealer: Dealer[Any] = Dealer(FromSchedulerFront, front_endpoint(address), incarnation, keys)
        self.endpoint = self.router.advertised(advertise)
        self.core: DetokenizerCore = (DetokenizerCore if spans is None else partial(TracedDetokenizer, spans))(
            preparer,
            Hello("detokenizer", incarnation, PROTOCOL, os.getpid(), self.endpoint),
            time.monotonic,
            lambda job, done, size: pool.submit(job, self._then(done), size > LONG),
            lambda spec, done, patient: self._gate.check(spec, self._then(done), patient),
        )
        self.router.attach(self._received, self._router_event)
        self.dealer.attach(partial(self._received, SCHEDULER), self._dealer_event)

    async def run(self) -> str | None:
        """Serve until ``stop``; the scheduler's reason where it sent us away."""
        log.info("listening on %s", self.endpoint)
        ticker = asyncio.create_task(self._tick())
        await self._stop.wait()
        ticker.cancel()
        self._gate.close()
        self.core.close()
        self._flush()
        await asyncio.sleep(0.05)  # sockets are closed without lingering
        self.router.close()
        self.dealer.close()
        if self.router.endpoint.startswith("ipc://"):
            with contextlib.suppress(OSError):  # ZeroMQ removed it already
                os.unlink(self.router.endpoint.removeprefix("ipc://"))
        return self._reason

    def stop(self, reason: str | None = None) -> None:
        """End ``run``."""
        self._reason = reason
        self._stop.set()

    # ------------------------------------------------------------ between the core and the sockets

    def _flush(self) -> None:
        """Send what the core wants sent, but nothing more to an Engine that it has let go meanwhile."""
        core = self.core
        while todo := core.take():
            for peer, message in todo:
                if peer == SCHEDULER:
                    self.dealer.send(message)
                elif peer in core.engines and not self.router.send(peer, message):
                    core.undelivered(peer)

    def _received(self, peer: str, message: Any) -> None:
        try:
            self.core.received(peer, message)
            self._flush()
        except Exception:
            who, kind = peer or "the scheduler", type(message).__name__
            log.exception("a message from %s failed and was dropped: %s", who, kind)
        if self.core.refused is not None:
            self.stop(self.core.refused)

    def _then(self, done: Callable[[T], None]) -> Callable[[T], None]:
        """``done``, and what follows from it is sent."""

        def told(result: T) -> None:
            done(result)
            self._flush()

        return told

    def _router_event(self, event: str) -> None:
        if event == DISCONNECTED:
            self.core.connection_broke()
            self._flush()

    def _dealer_event(self, event: str) -> None:
        if event == CONNECTED:
            self.core.connected()
        else:
            log.warning("lost the scheduler at %s; waiting for it", self.dealer.endpoint)
            self.core.disconnected()
        self._flush()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            heartbeat()
            try:
                self.core.heartbeat(resident_bytes(), self.router.bad_frames + self.dealer.bad_frames)
                self._flush()
            except Exception:
                log.exception("a heartbeat failed; the next comes in %g s", HEARTBEAT_S)


def check_bind(bind: str) -> None:
    """Refuse addresses ZeroMQ knows and we do not want (inproc, udp, …)."""
    if not bind.startswith(("ipc://", "tcp://")):
        raise ConfigError(f"--bind {bind!r} must look like ipc:///path or tcp://host:port.")
