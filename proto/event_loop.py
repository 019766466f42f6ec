"""The event loop of the processes that run in one. Only these need uvloop."""

from __future__ import annotations

import asyncio


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's event loop, or asyncio's own where there is no uvloop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
