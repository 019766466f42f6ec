"""What administrators may do to a server that runs: have it sleep, wake it, load and unload adapters. Routes that are
there only where ``--admin-api-key`` names a key, and that ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from . import adapters
from .auth import auth_middleware
from .calls import json_body
from .errors import ApiError, Handler
from .front import FRONT


def admin_routes(keys: Sequence[str]) -> list[web.RouteDef]:
    """The routes, each of which asks for one of ``keys``; none where there is no key."""
    if not keys:
        return []
    authorize = auth_middleware(list(keys))

    def guarded(handler: Handler) -> Handler:
        async def guard(request: web.Request) -> web.StreamResponse:
            return await authorize(request, handler)

        return guard

    return [
        web.post("/sleep", guarded(sleep)),
        web.post("/wake_up", guarded(wake_up)),
        web.get("/is_sleeping", guarded(is_sleeping)),
        web.post("/v1/load_lora_adapter", guarded(adapters.load)),
        web.post("/v1/unload_lora_adapter", guarded(adapters.unload)),
    ]


async def sleep(request: web.Request) -> web.Response:
    """200 when every worker has put its memory away."""
    text = request.query.get("level", "1")
    if not text.isascii() or not text.isdigit():
        raise ApiError(400, f"level must be 1 or 2, got {text!r}.", "level")
    level = min(int(text[:9]), 99)
    await request.app[FRONT].engine.sleep(level, request.query.get("mode", "keep"))
    return web.Response()


async def wake_up(request: web.Request) -> web.Response:
    """200 when every worker has taken back what is asked for, which is everything where no ``tags`` are named."""
    await request.app[FRONT].engine.wake_up(request.query.getall("tags", []))
    return web.Response()


async def is_sleeping(request: web.Request) -> web.Response:
    """Whether something is put away, and what (``tags``)."""
    tags = await request.app[FRONT].engine.asleep()
    return json_body({"is_sleeping": bool(tags), "tags": tags})
