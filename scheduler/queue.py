"""Who waits, in what order, and how many may."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter

from .request import Request, Sequence

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
RATE_WINDOW_S = 30.0

_key = attrgetter("key")


class WaitingQueue:
    """Sequences without a row, by key: priority (where the policy asks for it), arrival, uid, index.

    A preempted sequence keeps its key, and so comes back before all that arrived after it. ``max_requests`` and
    ``max_tokens`` bound requests that have never run; those that have are never refused.
    """

    def __init__(self, max_requests: int, max_tokens: int | None):
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.fresh_requests = 0
        self.fresh_tokens = 0
        self._items: list[Sequence] = []
        self._finished: deque[float] = deque(maxlen=256)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def first(self, count: int) -> list[Sequence]:
        """The next ``count`` in line."""
        return self._items[:count]

    def push(self, seq: Sequence) -> None:
        """Take its place in line."""
        insort(self._items, seq, key=_key)

    def remove(self, seq: Sequence) -> bool:
        """Leave the line; False where it was not in it."""
        at = bisect_left(self._items, seq.key, key=_key)
        if at == len(self._items) or self._items[at] is not seq:
            return False
        del self._items[at]
        return True

    # -- bounds

    def full(self, prompt_len: int) -> str | None:
        """Why a new request cannot wait here, or None."""
        if self.fresh_requests >= self.max_requests:
            return f"{self.fresh_requests} requests are waiting already, the limit is {self.max_requests}"
        if self.max_tokens is not None and self.fresh_requests and self.fresh_tokens + prompt_len > self.max_tokens:
            return (
                f"{self.fresh_tokens} prompt tokens are waiting already, and {prompt_len} more would pass "
                f"the limit of {self.max_tokens}"
            )
        return None

    def enter(self, request: Request) -> None:
        """Count a request that has not run yet."""
        self.fresh_requests += 1
        self.fresh_tokens += request.prompt_len

    def leave(self, request: Request) -> None:
        """It runs, or ended before it did."""
        self.fresh_requests -= 1
        self.fresh_tokens -= request.prompt_len

    def finished(self, now: float) -> None:
        """A request ended: what ``retry_after`` is measured by."""
        self._finished.append(now)

    def retry_after(self, now: float) -> float:
        """Seconds until those who wait now are likely through: their number by the rate of recent finishes."""
        recent = [t for t in self._finished if now - t <= RATE_WINDOW_S]
        if not recent:
            return MAX_RETRY_S
        rate = len(recent) / max(now - recent[0], 0.1)
        return round(min(max(self.fresh_requests / rate, MIN_RETRY_S), MAX_RETRY_S), 1)
