"""A thread that does what is handed over, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Line:
    """``do`` is called with each thing that is ``put``, by one thread. The queue is as short as the scheduler's bound
    on Moves, or what the caller bounds."""

    def __init__(self, name: str, do: Callable[[Any], None]):
        self._do = do
        self._queue: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, job: Any) -> None:
        """Hand over."""
        self._queue.put(job)

    def empty(self) -> bool:
        """Nothing waits behind what is done now."""
        return self._queue.empty()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until all is done, but no longer than so many seconds; whether it is."""
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, seconds)

    def close(self) -> None:
        """End the thread when all is done."""
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._do(job)
            finally:
                self._queue.task_done()
        self._queue.task_done()
