"""Kernels that Triton compiles, told when they are: once requests are served none should be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

Tell = Callable[[str, float], None]
"""Takes a kernel with its constants, and the seconds that compiling it took."""


def watch(tell: Tell) -> None:
    """Call ``tell`` after each compilation from now on, on the thread that launches the kernel.

    A kernel that Triton finds in its cache on disk counts too: loading it takes milliseconds, and the launch waits.
    """
    try:
        from triton.knobs import runtime
    except ImportError:  # no Triton, or one before 3.4
        log.info("this Triton does not tell what it compiles, so compilations while serving are not counted")
        return
    began, before, after = 0.0, runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def start(**told: Any) -> Any:
        nonlocal began
        began = time.monotonic()
        return before(**told) if before is not None else None

    def end(**told: Any) -> Any:
        tell(_kernel(told), time.monotonic() - began)
        return after(**told) if after is not None else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = start, end


def _kernel(told: dict[str, Any]) -> str:
    """Name and constants of a kernel: from what the hook is told, of which versions tell more or less."""
    fn, compiled = told.get("fn"), told.get("compile") or {}
    names = [param.name for param in getattr(getattr(fn, "jit_function", None), "params", ())]
    constants = compiled.get("constants")
    if not names or not isinstance(constants, dict):
        return str(told.get("repr") or fn)
    parts = [f"{_name(names, key)}={value}" for key, value in constants.items()]
    parts += [f"{key}={compiled[key]}" for key in ("num_warps", "num_stages") if key in compiled]
    types = ", ".join(str(kind) for kind in (compiled.get("signature") or {}).values() if kind != "constexpr")
    aligned = [_name(names, key) for attributes in compiled.get("configs") or () for key in attributes]
    parts += [f"multiples of 16: {' '.join(aligned)}"] if aligned else []
    return f"{getattr(fn, 'name', fn)}({types}) with {', '.join(parts)}"


def _name(names: list[str], key: Any) -> str:
    place = key[0] if isinstance(key, tuple) and key else key
    return names[place] if isinstance(place, int) and place < len(names) else str(key)
