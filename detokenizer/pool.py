"""A few threads for work that must not hold up the event loop.

Threads are daemons: a rendering or an encoding that is under way when the process is told to end does not delay it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

log = logging.getLogger(__name__)

_Jobs = SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]]


class Pool:
    """Runs jobs in order of submission on ``threads`` threads, and long ones on one of their own, so that no other job
    waits behind them; gives results back in the loop's thread."""

    def __init__(self, threads: int):
        self._loop = asyncio.get_running_loop()
        self._jobs: _Jobs = SimpleQueue()
        self._long: _Jobs = SimpleQueue()
        for n in range(threads):
            threading.Thread(target=self._work, args=(self._jobs,), name=f"text-{n}", daemon=True).start()
        threading.Thread(target=self._work, args=(self._long,), name="text-long", daemon=True).start()

    def submit(self, job: Callable[[], Any], done: Callable[[Any], None], long: bool = False) -> None:
        """Run ``job``; then ``done(result)`` in the loop. An exception of the job is its result."""
        (self._long if long else self._jobs).put((job, done))

    def _work(self, jobs: _Jobs) -> None:
        while True:
            job, done = jobs.get()
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - it becomes that request's reply
                result = error
            try:
                self._loop.call_soon_threadsafe(done, result)
            except RuntimeError:
                return  # the loop has ended
