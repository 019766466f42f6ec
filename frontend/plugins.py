"""``--middleware``: the operator's own code around every request."""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from typing import Any

from aiohttp import web

from ..proto.config import ConfigError


def load_middlewares(names: list[str]) -> list[Any]:
    """What ``package.module.name`` (or ``package.module:name``) names, in order, the first outermost: functions
    ``async (request, handler)``, and classes, whose objects are called so. Raises ConfigError."""
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return [_load(name) for name in names]


def _load(name: str) -> Any:
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        found = getattr(import_module(module), attribute)
        found = found() if inspect.isclass(found) else found
    except Exception as error:
        raise ConfigError(f"--middleware {name} cannot be loaded: {type(error).__name__}: {error}.") from error
    call = found if inspect.isfunction(found) else getattr(found, "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(call):
        raise ConfigError(
            f"--middleware {name} is no middleware of aiohttp: write `async def {attribute}(request, handler)`."
        )
    return web.middleware(found)
