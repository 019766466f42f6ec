"""Requests with a grammar wait here until it has been checked; all others pass by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ..proto.errors import Refused
from ..proto.structured import StructuredOutputsParams

RETRY_S = 0.25


class Checker(Protocol):
    """What `grammar_check.py` does for this process."""

    async def check(self, spec: StructuredOutputsParams) -> None:
        """Raises Refused."""

    def close(self) -> None: ...


class Gate:
    """Runs checks beside the event loop. ``make`` makes the checker, at the first request that needs it."""

    def __init__(self, make: Callable[[], Checker] | None):
        self._make = make
        self._checker: Checker | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def check(
        self, spec: StructuredOutputsParams, done: Callable[[Exception | None], None], patient: bool = False
    ) -> None:
        """Check ``spec``, then call ``done(None)`` in the loop, or ``done(error)``: a Refused, or what went wrong here.

        ``patient``: a request submitted again, which is never refused for load, tries until there is room.
        """
        task = asyncio.create_task(self._check(spec, done, patient))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Forget what waits, and end the checker."""
        for task in self._tasks:
            task.cancel()
        if self._checker is not None:
            self._checker.close()

    async def _check(
        self, spec: StructuredOutputsParams, done: Callable[[Exception | None], None], patient: bool
    ) -> None:
        while True:
            error: Exception | None = None
            try:
                if self._checker is None:
                    self._checker = self._new()
                await self._checker.check(spec)
            except Exception as caught:  # noqa: BLE001 - it becomes that request's reply
                error = caught
            if not (patient and isinstance(error, Refused) and error.status == 429):
                break
            await asyncio.sleep(RETRY_S)
        done(error)

    def _new(self) -> Checker:
        if self._make is None:
            raise Refused("structured outputs are not available here.", "structured_outputs")
        try:
            return self._make()
        except ImportError as error:
            raise Refused(
                f"structured_outputs needs the package {error.name or 'llguidance'}, which is not installed where the "
                "server runs: pip install llguidance",
                "structured_outputs",
            ) from error
