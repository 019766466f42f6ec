"""The ring of recent steps, kept only while somebody watches. No IO."""

from __future__ import annotations

from collections import deque
from itertools import islice

from ..proto.messages import StepView
from .step import Step

KEPT_S = 5.0
"""The ring closes so long after it was last asked for."""
ENTRIES = 1024
NEWEST = 256
"""Entries in one answer at most."""


class Watch:
    """Entries of steps, of lost workers and of those that joined. ``number`` is the last entry's; ``preemptions`` and
    ``recomputed`` are what the books had counted by then."""

    def __init__(self, number: int, preemptions: int, recomputed: int):
        self.ring: deque[StepView] = deque(maxlen=ENTRIES)
        self.number, self.asked_at = number, 0.0
        self._preemptions, self._recomputed = preemptions, recomputed

    def ask(self, now: float) -> None:
        """Somebody watches still."""
        self.asked_at = now

    def step(
        self, replica: int, step: Step, now: float, seconds: float, preemptions: int, recomputed: int
    ) -> None:  # fmt: skip
        """The result of ``step`` has come, after ``seconds``. The counts are those since the scheduler started."""
        decodes = len(step.decodes) + len(step.verifications) + sum(len(search.rows) for search in step.searches)
        prefill = sum(chunk.tokens for chunk in step.chunks)
        put_back, again = preemptions - self._preemptions, recomputed - self._recomputed
        self._preemptions, self._recomputed = preemptions, recomputed
        self._put(StepView(self.number + 1, "step", replica, now, seconds, prefill, decodes, put_back, again))

    def event(self, kind: str, replica: int, now: float, requeued: int = 0) -> None:
        """A worker was lost, and so many sequences went back in line; or one joined."""
        self._put(StepView(self.number + 1, kind, replica, now, 0.0, 0, 0, requeued=requeued))

    def _put(self, entry: StepView) -> None:
        self.number = entry.number
        self.ring.append(entry)

    def since(self, number: int) -> list[StepView]:
        """The newest entries after this one, the oldest first. Where they are too many, the oldest steps are left out
        before a loss, a join, a preemption or what is computed again is. A number that is not given out yet is of
        another scheduler: whoever says it knows nothing of these."""
        if number > self.number:
            number = 0
        count = min(self.number - max(number, 0), len(self.ring))
        found = islice(self.ring, len(self.ring) - count, None)
        if (surplus := count - NEWEST) <= 0:
            return list(found)
        kept = []
        for entry in found:
            if surplus and entry.kind == "step" and not (entry.preempted or entry.recomputed):
                surplus -= 1
            else:
                kept.append(entry)
        return kept[-NEWEST:]
