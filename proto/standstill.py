"""A process that judges others by time, and stood still itself: it was stopped, starved, or its machine slept.

What the others did meanwhile could not be seen, so they get that time again before they are judged. Whoever judges
calls ``notice`` at every turn of its loop, before it judges, and where that is true moves its times by ``since`` and
``until``.
"""

from __future__ import annotations

import logging
import math

log = logging.getLogger(__name__)


class Standstill:
    """Notices turns that come more than ``limit`` seconds after the one before. ``now`` is in seconds that only rise.

    ``seconds`` is how long the last standstill took, and ``noticed_at`` when it was noticed (-inf: never).
    """

    def __init__(self, limit: float, now: float):
        self._limit, self._turn = limit, now
        self.seconds, self.noticed_at = 0.0, -math.inf

    def notice(self, now: float) -> bool:
        """One turn. True where this process stood still since the turn before."""
        before, self._turn = self._turn, now
        if now - before <= self._limit:
            return False
        self.seconds, self.noticed_at = now - before, now
        log.warning("this process stood still for %.1f s; nobody is held to that time", self.seconds)
        return True

    def since(self, at: float) -> float:
        """From when to count what has lasted since ``at``: the standstill is left out, and what began during it began
        just now. What is still to begin stays as it is."""
        return max(at, min(at + self.seconds, self.noticed_at))

    def until(self, deadline: float) -> float:
        """The deadline for what had to be done by ``deadline``."""
        return deadline + self.seconds
