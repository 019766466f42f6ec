"""Whether this server lives, whether it takes requests, and whether the model really answers.

``/health/live``: this process answers; restart it where it does not. ``/health/ready``: requests would be run; 503
while loading and while shutting down. ``/health/generate``: one token is made, or pooled. ``/health`` and ``/ping``
are ready's.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from ..client.engine import Engine
from ..client.results import RequestError
from ..proto.params import SamplingParams
from ..proto.pooling import PoolingParams
from .errors import ApiError
from .front import FRONT

FIRST = -(2**31)
"""The priority that goes before every other, where the scheduler looks at priorities."""
LOOK_S = 0.1


async def live(request: web.Request) -> web.Response:
    """200 as long as this process answers."""
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    """200 while requests can be run, 503 otherwise."""
    request.app[FRONT].check_ready()
    return web.Response()


async def generate(request: web.Request) -> web.Response:
    """200 once a token has been made, 503 where none is within the limit."""
    front = request.app[FRONT]
    front.check_ready()
    await request.app[PROBE].run()
    return web.Response()


class Probe:
    """One token of one request; whoever asks meanwhile waits for the same one, so checks never pile up.

    A full queue is no illness: where the request is refused or waits, tokens that others are sent count as well.
    """

    def __init__(self, engine: Engine, limit_s: float, pools: bool):
        self._engine, self._limit_s, self._pools = engine, limit_s, pools
        self._task: asyncio.Task[RequestError | None] | None = None

    async def run(self) -> None:
        """Raises ApiError 503."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._make())
        if (error := await asyncio.shield(self._task)) is not None:
            raise ApiError(503, f"no token was made: {error.message}", retry_after=error.retry_after or self._limit_s)

    async def _make(self) -> RequestError | None:
        """None once a token has been made, else why not."""
        began = time.monotonic()
        error = RequestError(503, f"nothing came within {self._limit_s:g} s.")
        try:
            async with asyncio.timeout(self._limit_s):
                try:
                    await (self._pooled() if self._pools else self._generated())
                    return None
                except RequestError as refused:
                    error = refused
                while error.status == 429 and self._engine.tokens_at < began:  # noqa: ASYNC110 - as rare as slow
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            pass
        return None if self._engine.tokens_at >= began else error

    async def _generated(self) -> None:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        stream = self._engine.submit(ids=[0], params=params, priority=FIRST)
        try:
            await stream.collect()
        finally:
            stream.abort()

    async def _pooled(self) -> None:
        await self._engine.pool(ids=[0], params=PoolingParams(), priority=FIRST)


PROBE = web.AppKey("probe", Probe)
