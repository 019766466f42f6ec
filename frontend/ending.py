"""How a frontend ends: it drains, for nobody follows it, or it hands over to another process on the same socket."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web

from ..client.results import RequestError
from ..proto.process import tell_left
from .front import Front
from .protocol import Runner

log = logging.getLogger(__name__)

NOTICE_S = 0.5
"""How long /health/ready answers 503 before the port closes, for who asks in time."""
ABORT_S = 2.0
"""How long those that are ended then have to be told."""
ARRIVE_S = 0.5
"""How long a connection that was accepted may take to be one on which requests come: with TLS it is not so at once."""
IDLE_S = 5.0
"""How long a connection may be idle after a hand-over. Clients expect servers that close sooner than that."""
TELL_S = 0.5
"""How often the launcher is told how many requests are left."""


class Ending:
    """What the signals have asked for. ``stop``: end. ``hurry``: do not wait for what is open."""

    def __init__(self) -> None:
        self.stop, self.hurry, self.hands_over = asyncio.Event(), asyncio.Event(), False

    def act(self) -> None:
        """SIGTERM, SIGINT: the first one stops, any later one hurries."""
        (self.hurry if self.stop.is_set() else self.stop).set()

    def hand_over(self) -> None:
        """HAND_OVER: stop, for a successor listens. Means nothing to a process that ends already."""
        self.hands_over = self.hands_over or not self.stop.is_set()
        self.stop.set()


async def hand_over(front: Front, site: web.BaseSite, runner: Runner, hurry: asyncio.Event) -> None:
    """Accept no connection more, answer what comes on those that are open and close each, until ``hurry``: then fail
    what is still open with 503.

    A connection that waits to be accepted stays in the socket's queue, which is the successor's too.
    """
    front.parting = True
    await site.stop()
    log.info("handing over: %d requests are open here, new connections are another process's", front.active)
    tell = asyncio.create_task(_tell_left(front))
    hurried, over = asyncio.ensure_future(hurry.wait()), asyncio.create_task(_used_up(front, runner))
    await asyncio.wait([over, hurried], return_when=asyncio.FIRST_COMPLETED)
    if not over.done():
        front.draining = True
        await _fail_open(front, "its time to finish what it had begun is over", asyncio.create_task(front.idle()))
    for task in (tell, hurried, over):
        task.cancel()


async def _used_up(front: Front, runner: Runner) -> None:
    """Wait until no request is open, and no connection is, or none that was used lately."""
    await asyncio.sleep(ARRIVE_S)
    while True:
        await front.idle()
        answered = runner.requests
        try:
            async with asyncio.timeout(IDLE_S):
                return await runner.emptied()
        except TimeoutError:
            if not front.active and answered == runner.requests:
                return None


async def _tell_left(front: Front) -> None:
    while True:
        tell_left(front.active)
        await asyncio.sleep(TELL_S)


async def drain(front: Front, site: web.BaseSite, limit: float, hurry: asyncio.Event) -> None:
    """Say that nothing new is taken, close the port, wait for open requests up to ``limit``, fail the rest with 503.

    Idle connections stay until the end, so that what is sent on them still gets its 503.
    """
    front.draining = True
    hurried = asyncio.ensure_future(hurry.wait())
    began = time.monotonic()
    await asyncio.wait([hurried], timeout=min(NOTICE_S, limit))
    await site.stop()
    idle = asyncio.ensure_future(front.idle())
    left = limit - (time.monotonic() - began)
    await asyncio.wait([idle, hurried], timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
    if not idle.done():
        why = "it was told to hurry" if hurry.is_set() else f"the {limit:g} s of --shutdown-timeout are over"
        await _fail_open(front, why, idle)
    for waited in (idle, hurried):
        waited.cancel()


async def _fail_open(front: Front, why: str, idle: asyncio.Future[None]) -> None:
    log.warning("ending %d requests that are still open", front.active)
    message = f"the server is shutting down and {why}; send the request again."
    front.engine.fail_all(RequestError(503, message, retry_after=5))
    await asyncio.wait([idle], timeout=ABORT_S)
    idle.cancel()
