"""What administrators may do to a server that runs: have it sleep, wake it, load and unload adapters. Routes that are
there only where ``--admin-api-key`` names a key, and that ask for it (``gate.py``)."""

from __future__ import annotations

import msgspec
from aiohttp import web

from ..proto.version import __version__
from . import adapters
from .calls import json_body
from .errors import ApiError
from .front import FRONT


def admin_routes() -> list[web.RouteDef]:
    """The routes."""
    return [
        web.get("/server_info", server_info),
        web.post("/sleep", sleep),
        web.post("/wake_up", wake_up),
        web.get("/is_sleeping", is_sleeping),
        web.post("/reset_prefix_cache", reset_prefix_cache),
        web.post("/start_profile", profile),
        web.post("/stop_profile", profile),
        web.post("/v1/load_lora_adapter", adapters.load),
        web.post("/v1/unload_lora_adapter", adapters.unload),
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


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """200 when no cached block is found any more; 400 while requests hold blocks."""
    await request.app[FRONT].engine.reset_prefix_cache()
    return json_body({"success": True})


async def profile(request: web.Request) -> web.Response:
    """200 when torch's profiler records every worker's steps, or when each has written its trace."""
    await request.app[FRONT].engine.profile(request.path.endswith("/start_profile"))
    return web.Response()


async def is_sleeping(request: web.Request) -> web.Response:
    """Whether something is put away, and what (``tags``)."""
    tags = await request.app[FRONT].engine.asleep()
    return json_body({"is_sleeping": bool(tags), "tags": tags})


async def server_info(request: web.Request) -> web.Response:
    """The flags that frontends read, secrets left out, and the workers. As vLLM: the flags are one text, or an object
    with ``?config_format=json``."""
    front = request.app[FRONT]
    kind = request.query.get("config_format", "text")
    if kind not in ("text", "json"):
        raise ApiError(400, f"config_format must be text or json, got {kind!r:.40}.", "config_format")
    config = front.settings.config
    try:
        stats = await front.engine.stats(front.settings.stats_s)
    except TimeoutError:
        stats = None
    return json_body(
        {
            "version": __version__,
            "vllm_config": config
            if kind == "json"
            else ", ".join(f"{name}={value!r}" for name, value in config.items()),
            "max_model_len": front.engine.max_model_len or None,
            "replicas": None if stats is None else [msgspec.structs.asdict(each) for each in stats.replicas],
        }
    )
