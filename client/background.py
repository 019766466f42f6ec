"""An Engine in a thread with an event loop of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from ..proto.wire.sockets import Keys
from .engine import Engine
from .traced import Traces

CLOSE_S = 5.0


class EngineThread:
    """Works whatever the caller's thread is doing: a plain script, a thread, a notebook with its own running loop."""

    def __init__(self, address: str, keys: Keys | None = None, traces: Traces | None = None):
        """Raises what ``Engine.start`` raises."""
        self.engine = Engine(address, keys, traces)
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="quire-engine", daemon=True)
        self._thread.start()
        self._started.result()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            await self.engine.start()
        except BaseException as error:  # noqa: BLE001 - raised by the constructor
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            await self._stop.wait()
        finally:
            await self.engine.close()

    @property
    def alive(self) -> bool:
        """False once the thread has ended, and in a fork of the process that it runs in."""
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine in the engine's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Any, *args: Any) -> None:
        """Call a function in the engine's loop, soon."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Close the engine and end the thread. Idempotent."""
        if self.alive:
            self.call(self._stop.set)
            if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
                self._thread.join(CLOSE_S)
