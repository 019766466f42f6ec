"""When the next plan is made while a step runs: as late as the worker does not notice.

A plan that is made as soon as the step before it begins leaves out whoever comes while that one runs: such a request
waits for the rest of a step and for a whole one. Steps of nothing but decodes take about as long as each other, so the
plan behind one can wait for a part of that time, and the worker has it before it needs it.
"""

from __future__ import annotations

from .step import Step

SHARE = 0.6
"""Of a step's time, until the plan after it is made. The rest is for making and sending it, on a busy machine too."""
LEAST_S = 0.005
"""Shorter steps are planned for at once: what is to be won is no longer than a process may be kept waiting."""


class Pace:
    """Of one replica. ``until``: no second plan is made before, in seconds of the scheduler's clock."""

    def __init__(self) -> None:
        self.until = 0.0
        self._last = self._before = 0.0  # what the last two steps of nothing but decodes took

    def ended(self, step: Step, seconds: float) -> None:
        """``step`` took so long."""
        if _of_decodes(step):
            self._before, self._last = self._last, seconds

    def begins(self, step: Step, now: float) -> None:
        """The worker runs ``step`` from now on."""
        expected = min(self._before, self._last) if _of_decodes(step) else 0.0
        self.until = now + SHARE * expected if expected >= LEAST_S else 0.0


def _of_decodes(step: Step) -> bool:
    return not step.compute_rows
