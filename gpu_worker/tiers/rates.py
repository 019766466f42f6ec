"""How long blocks take to load and prompt tokens to compute, by what was measured last.

All are medians: one load that had to wait for a processor says nothing of the next.
"""

from __future__ import annotations

from collections import deque
from statistics import median

KEPT = 8
"""Loads that a rate is the median of."""
KEPT_STEPS, ENOUGH = 32, 3
"""Steps that are kept, and how many of one size say what it takes."""
FEW_TOKENS = 32
"""Prompt tokens of a step, by fewer of which no rate is measured."""


class Rate:
    """Seconds for each block."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=KEPT)

    @property
    def each(self) -> float:
        """The median of the last; 0 before any."""
        return median(self._kept) if self._kept else 0.0

    def add(self, count: int, seconds: float) -> None:
        """So many took so long."""
        if count:
            self._kept.append(seconds / count)


class PromptRate:
    """Seconds for each prompt token.

    A short step takes longer for each token than a long one, as much of it is for the step itself. What a prompt saves
    that begins with loaded blocks is a part of its step, so the sizes of steps that were quickest for each token count.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=KEPT_STEPS)  # class of size, seconds for each token

    @property
    def each(self) -> float:
        """0 before any. Any thread may ask while another adds."""
        steps, sizes = list(self._steps), dict[int, list[float]]()
        for size, seconds in steps:
            sizes.setdefault(size, []).append(seconds)
        known = [median(each) for each in sizes.values() if len(each) >= ENOUGH]
        if known:
            return min(known)
        return median(seconds for _, seconds in steps) if steps else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step of so many prompt tokens took so long."""
        if tokens >= FEW_TOKENS:
            self._steps.append((tokens.bit_length(), seconds / tokens))
