"""Adapters over HTTP: the names that requests may give as their model, and the routes that change them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from ..proto.config import ConfigError
from .errors import ApiError
from .front import FRONT
from .parsing import Request


class LoadRequest(Request):
    """POST /v1/load_lora_adapter."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None
    base_model_name: str | None = None

    def check(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.")


class UnloadRequest(Request):
    """POST /v1/unload_lora_adapter."""

    lora_name: str | None = None
    lora_int_id: int | None = None

    def check(self) -> None:
        if not self.lora_name:
            raise ApiError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")


async def load(request: web.Request) -> web.Response:
    """Load an adapter on a worker and give it a name, for all frontends."""
    front = request.app[FRONT]
    body = await front.read(request, LoadRequest)
    folders, root = front.settings.adapters, front.settings.lora_root
    if folders is None:
        raise ApiError(400, "LoRA is not enabled; start the server with --enable-lora.")
    if root is None:
        raise ApiError(403, "no folder is named that adapters may come from; start the server with --lora-root FOLDER.")
    name, path = body.lora_name or "", body.lora_path or ""
    if name in front.settings.names:
        raise ApiError(400, f"'{name}' is the model's own name; give the adapter another.", "lora_name")
    if not body.load_inplace and front.engine.adapters.get(name) is not None:
        raise ApiError(
            400, f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.", "lora_name",
        )  # fmt: skip
    try:
        adapter = await asyncio.to_thread(folders.adapter, name, path, root)
    except ConfigError as error:
        raise ApiError(400, str(error), "lora_path") from error
    await front.wait_ready()
    await front.engine.register(adapter, body.base_model_name or "", bool(body.load_inplace))
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload(request: web.Request) -> web.Response:
    """Forget an adapter's name, for all frontends; requests that have begun go on with it."""
    front = request.app[FRONT]
    body = await front.read(request, UnloadRequest)
    name = body.lora_name or ""
    await front.wait_ready()
    await front.engine.unregister(name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
