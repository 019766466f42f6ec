"""GET /dashboard/events: what "Look inside" shows, as server-sent events. While nobody listens, nothing is asked.

However many listen here, the scheduler is asked once in ``PERIOD_S`` and one event is made. Who reads slowly misses
events, and never delays another: each event is the whole state but for the steps, which have numbers.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

from ..client.results import RequestError
from ..proto.messages import Running, View, Waiting
from ..proto.version import __version__
from .errors import ApiError
from .front import Front
from .metrics import Metrics
from .sse import Outlet, to_json

log = logging.getLogger(__name__)

PERIOD_S = 0.5
STALL_S = 30.0
"""Who reads nothing for so long is cut off."""
MOST_LISTENERS = 32


class Hub:
    """Who listens at one frontend, and the task that makes their events. It runs while somebody listens."""

    def __init__(self, front: Front):
        self._front = front
        self._listeners: set[asyncio.Event] = set()
        self._event = b""  # the last
        self._task: asyncio.Task[None] | None = None
        self._since = 0  # the last step that was told

    async def tell(self, request: web.Request) -> web.StreamResponse:
        """Events until the client leaves or the server ends. Raises ApiError 429."""
        if len(self._listeners) >= MOST_LISTENERS:
            raise ApiError(
                429, f"{MOST_LISTENERS} clients listen to /dashboard/events, which is the limit; close one.",
                retry_after=PERIOD_S,
            )  # fmt: skip
        outlet, news = Outlet(request, STALL_S), asyncio.Event()
        self._listeners.add(news)
        try:
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run())
            await outlet.open()
            while True:
                await news.wait()
                news.clear()
                if not self._event:
                    return await outlet.close()
                outlet.write(self._event)
                if outlet.behind:
                    await outlet.catch_up()
        finally:
            self._listeners.discard(news)
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        """One event after the other; an empty one is the end, also where making one fails: nobody waits for nothing."""
        self._since = 0
        try:
            while not (self._front.draining or self._front.parting):
                self._spread(await self._make())
                await asyncio.sleep(PERIOD_S)
        except Exception:
            log.exception("no event of /dashboard/events could be made; its listeners are let go")
        self._spread(b"")

    def _spread(self, event: bytes) -> None:
        self._event = event
        for news in self._listeners:
            news.set()

    async def _make(self) -> bytes:
        view = None
        with suppress(RequestError, TimeoutError):
            view = await self._front.engine.view(self._since, self._front.settings.stats_s)
        if view is not None and view.steps:
            self._since = view.steps[-1].number
        figures = self._front.metrics
        if self._front.shared is not None:  # a listener's events are of the frontend that the kernel chose
            figures = figures.with_others(await self._front.shared.others())
        return b"data: %b\n\n" % to_json(event_of(self._front, figures, view))


HUB = web.AppKey("dashboard", Hub)


async def events(request: web.Request) -> web.StreamResponse:
    """The server's state twice a second: queue, running rows, workers, KV blocks, recent steps."""
    return await request.app[HUB].tell(request)


ROUTES = [web.get("/dashboard/events", events, allow_head=False)]


def event_of(front: Front, figures: Metrics, view: View | None) -> dict[str, Any]:
    """One event; ``figures`` are those of all frontends on this port. Without a view (no scheduler answers) it has
    only them."""
    now = time.time()
    event = {
        "time": now,
        "model": front.settings.names[0],
        "version": __version__,
        "scheduler": view is not None,
        "ttft": _bins(figures.first_token.bounds, figures.first_token.counts),
        "itl": _bins(figures.inter_token.bounds, figures.inter_token.counts),
    }
    if view is None:
        return event
    stats = view.stats
    return event | {
        "counters": {
            name: getattr(stats, name)
            for name in (
                "running", "waiting", "blocks", "blocks_used", "preemptions", "prefix_queries", "prefix_hits",
                "prompt_tokens", "generation_tokens", "steps", "drafts", "draft_tokens", "accepted",
                "recomputed_tokens",
            )
        },
        "block_size": stats.work.block_size if stats.work is not None else 0,
        "workers": [
            msgspec.structs.asdict(worker.info)
            | {"phase": worker.phase, "resident": worker.resident, "block_bytes": worker.block_bytes}
            for worker in view.workers
        ],
        "queue": [_line(each, now) for each in view.waiting],
        "rows": [_line(each, now) for each in view.running],
        "maps": [msgspec.structs.asdict(each) | {"cells": _base64(each.cells)} for each in view.maps],
        "steps": [
            msgspec.structs.asdict(each) | {"ended": round(now - view.now + each.ended, 4)} for each in view.steps
        ],
    }  # fmt: skip


def _line(each: Waiting | Running, now: float) -> dict[str, Any]:
    """A sequence; its id as text, because JavaScript's numbers have 53 bits."""
    line = msgspec.structs.asdict(each)
    arrival = line.pop("arrival")
    line["uid"] = f"{each.uid % 2**64:016x}"
    line["age"] = round(max(0.0, now - arrival), 3) if arrival > 0 else None
    if isinstance(each, Running):
        line["cells"] = _base64(each.cells)
    return line


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bins(bounds: Sequence[float], counts: Sequence[int]) -> list[list[float | None]]:
    """[upper bound in seconds, count] of each bucket; the last has no bound. Trailing empty ones are left out."""
    pairs: list[list[float | None]] = [[bound, count] for bound, count in itertools.zip_longest(bounds, counts)]
    while pairs and not pairs[-1][1]:
        pairs.pop()
    return pairs
