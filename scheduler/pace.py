"""When the next plan is made while a step runs: as late as the worker does not notice.

A plan that is made as soon as the step before it begins leaves out whoever comes while that one runs: such a request
waits for the rest of a step and for a whole one. How long a step takes is known well enough from those before it, so
the plan behind it can wait for a part of that time, and the worker has it before it needs it. Where a step takes less
than was expected, the next is planned when it ends.
"""

from __future__ import annotations

from .step import Step

SHARE, REST_S = 0.8, 0.002
"""Of a step's time, until the plan after it is made, and what is left of it at least: for making and sending that plan,
on a busy machine too."""
LEAST_S = 0.005
"""Shorter steps are planned for at once: what is to be won is no longer than a process may be kept waiting."""


class Pace:
    """Of one replica. ``until``: no second plan is made before, in seconds of the scheduler's clock."""

    def __init__(self) -> None:
        self.until = 0.0
        self._last = self._before = 0.0  # what the last two steps of nothing but decodes took
        self._one = self._other = 1, 0.0  # tokens and seconds of the last two with prompts

    @property
    def decode_s(self) -> float:
        """Seconds that a step of nothing but decodes takes; 0 where that is not known."""
        return min(self._before, self._last)

    def ended(self, step: Step, seconds: float) -> None:
        """``step`` took so long."""
        if not step.compute_rows:
            self._before, self._last = self._last, seconds
        elif step.of_prompts:
            self._one, self._other = self._other, (step.tokens, seconds)

    def begins(self, step: Step, now: float) -> None:
        """The worker runs ``step`` from now on."""
        expected = self.decode_s if not step.compute_rows else self._of_prompts(step)
        self.until = now + min(SHARE * expected, expected - REST_S) if expected >= LEAST_S else 0.0

    def _of_prompts(self, step: Step) -> float:
        """At least about so long a step takes that has prompts in it: as long as those before it, or as much less as it
        has fewer tokens. Drafts and beams are another matter."""
        (one, seconds), (other, others) = self._one, self._other
        if seconds < LEAST_S or others < LEAST_S or not step.of_prompts:
            return 0.0
        return min(seconds * min(1.0, step.tokens / one), others * min(1.0, step.tokens / other))
