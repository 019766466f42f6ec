"""How the tokens of a step leave a worker: at once on a CPU, from a waiting thread on a GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from ..proto.messages import Lease
from .outcome import Outcome
from .transfer import RING


class DeviceFailure:
    """Posted by the thread that waits for a GPU: this step failed there."""

    def __init__(self, lease: Lease, step: int, error: Exception):
        self.lease, self.step, self.error = lease, step, error


class Results:
    """Sends each step's tokens when they are there: at once on a CPU, from a waiting thread on a GPU.

    The thread has one step in hand and one in the queue; with the one being launched that is the ring of buffers.
    """

    def __init__(self, link: Any, threaded: bool):
        self._link = link
        self._queue: queue.Queue[tuple[Lease, int, Outcome]] = queue.Queue(maxsize=RING - 2)
        self._threaded = threaded
        self.sent: Callable[[], None] | None = None  # called when a step is done
        if threaded:
            threading.Thread(target=self._run, name="results", daemon=True).start()

    def put(self, lease: Lease, step: int, outcome: Outcome) -> None:
        if self._threaded:
            self._queue.put((lease, step, outcome))
        else:
            self._send(lease, step, outcome)

    def drain(self) -> None:
        """Wait until all is sent."""
        self._queue.join()

    def _send(self, lease: Lease, step: int, outcome: Outcome) -> None:
        self._link.send(outcome.result(lease, step))
        self._link.last_step = step
        if self.sent is not None:
            self.sent()

    def _run(self) -> None:
        while True:
            lease, step, outcome = self._queue.get()
            try:
                self._send(lease, step, outcome)
            except Exception as error:  # noqa: BLE001  # CUDA reports a kernel's failure here
                self._link.post(DeviceFailure(lease, step, error))
            finally:
                self._queue.task_done()
