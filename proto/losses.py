"""How often what served a request was lost, and when the request itself is taken for the cause.

A request that kills the process serving it must be found, and one that was merely there must survive any number of such
deaths. The rule, for every process that counts:

* A loss counts only without progress: where the request had got past the furthest point it had reached at any loss
  before, the count begins again at 1.
* After two losses at one point (``limit`` - 1) the request is in quarantine: it runs alone until it passes that point,
  so that another death tells for certain whose fault it is.
* The third (``limit``) fails it.

What "point" means is the counter's own business: output tokens in the client, computed tokens in the scheduler. Where
there is no progress to speak of, it is 0 always.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_LOSSES = 3
"""A request lost this often at one point is at fault itself and fails."""


@dataclass(slots=True)
class Losses:
    """``count`` losses at one point, ``furthest`` of all points where a loss found the request; -1 before the first."""

    count: int = 0
    furthest: int = -1
    limit: int = MAX_LOSSES

    def lost(self, reached: int = 0) -> None:
        """Count a loss that found the request at point ``reached``."""
        self.count = 1 if reached > self.furthest else self.count + 1
        self.furthest = max(self.furthest, reached)

    def begin(self, reached: int) -> None:
        """It begins again at point ``reached``, which others got to: that is no progress of its own."""
        if self.count:
            self.furthest = max(self.furthest, reached)

    def leave(self, reached: int) -> None:
        """It leaves point ``reached`` with no loss: where that is progress, the losses before are forgotten."""
        if reached > self.furthest:
            self.count = 0

    def in_quarantine(self, reached: int = 0) -> bool:
        """Whether the request must run alone, now that it is at point ``reached``."""
        return self.count >= self.limit - 1 and reached <= self.furthest

    @property
    def exhausted(self) -> bool:
        """Whether the request has used up its chances."""
        return self.count >= self.limit
