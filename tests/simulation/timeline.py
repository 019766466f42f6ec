"""The one clock of a simulated cluster, and what is going to happen on it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timer:
    """Something that is going to happen."""

    __slots__ = ("action", "arguments", "when")

    def __init__(self, when: float, action: Callable[..., Any], arguments: tuple[Any, ...]):
        self.when, self.action, self.arguments = when, action, arguments

    def cancel(self) -> None:
        """It is not going to happen."""
        self.action, self.arguments = _nothing, ()


class Timeline:
    """Seconds since the beginning, and actions in the order of their time; those of one time in the order in which they
    were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._count = 0
        self._ahead: list[tuple[float, int, Timer]] = []

    def clock(self) -> float:
        """The time, as a function to give away."""
        return self.now

    def at(self, when: float, action: Callable[..., Any], *arguments: Any) -> Timer:
        """Have ``action`` happen at ``when``, or now where that is past."""
        timer = Timer(max(when, self.now), action, arguments)
        self._count += 1
        heapq.heappush(self._ahead, (timer.when, self._count, timer))
        return timer

    def after(self, delay: float, action: Callable[..., Any], *arguments: Any) -> Timer:
        """The same, ``delay`` seconds from now."""
        return self.at(self.now + delay, action, *arguments)

    def step(self, until: float) -> bool:
        """Let the next thing happen. False, and it is ``until``, where nothing is left to happen before that."""
        if not self._ahead or self._ahead[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, timer = heapq.heappop(self._ahead)
        self.happened += 1
        timer.action(*timer.arguments)
        return True


def _nothing() -> None:
    """What a cancelled timer does."""
