"""The most time that a request may take: ``--request-timeout``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ..client.results import RequestError
from .errors import ApiError, Handler

ENDLESS = frozenset(("/dashboard/events",))
"""Routes that have no end of their own, and so no deadline: whoever asks for them stays until it leaves."""

BEGUN: Any = web.RequestKey("begun", list) if hasattr(web, "RequestKey") else "quire.begun"
"""Where a request that has a deadline keeps the numbers of what it has begun in the engine."""


def note_begun(request: web.Request, uid: int) -> None:
    """A request with a deadline has begun one of the engine's."""
    if (begun := request.get(BEGUN)) is not None:
        begun.append(uid)


def deadline_middleware(limit_s: float, fail: Callable[[int, RequestError], bool]) -> Any:
    """End what takes longer. ``fail`` ends a request of the engine with an error, which is told as every other: by the
    status, or inside a stream that has begun; it is False where that has ended before. All else is cancelled."""
    late = f"the request took over {limit_s:g} s; ask for less, or raise --request-timeout."

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in ENDLESS:
            return await handler(request)
        loop = asyncio.get_running_loop()
        request[BEGUN] = begun = list[int]()
        try:
            async with asyncio.timeout(None) as scope:

                def expire() -> None:
                    if not [uid for uid in begun if fail(uid, RequestError(408, late))]:
                        scope.reschedule(loop.time())

                timer = loop.call_later(limit_s, expire)
                try:
                    return await handler(request)
                finally:
                    timer.cancel()
        except TimeoutError:
            if not scope.expired():
                raise
            raise ApiError(408, late) from None

    return limit
