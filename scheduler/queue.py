"""Who waits, in what order, how many may, and when a place is likely to become free."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter

from .request import Request, Sequence

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
LOOK = 32
"""Sequences taken from a line at a time while it is looked through."""
SPANS = 32
"""Places that became free lately, by which the rate is measured."""

_key = attrgetter("key")


class DrainRate:
    """How long it takes for a place to become free, measured while somebody waits for one."""

    __slots__ = ("_since", "_spans")

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=SPANS)
        self._since: float | None = None  # when the last place became free, or the wait for the first began

    def waiting(self, now: float) -> None:
        """All places are taken, and somebody waits."""
        if self._since is None:
            self._since = now

    def idle(self) -> None:
        """Nobody waits."""
        self._since = None

    def freed(self, now: float) -> None:
        """A place became free."""
        if self._since is not None:
            self._spans.append(now - self._since)
            self._since = now

    def seconds(self, places: int, now: float) -> float:
        """What to tell somebody who needs so many places. Where none became free yet, as long again as others have
        waited for the first."""
        pending = 0.0 if self._since is None else now - self._since
        each = (sum(self._spans) + pending) / max(1, len(self._spans))
        return round(min(max(places * each, MIN_RETRY_S), MAX_RETRY_S), 1)


class WaitingQueue:
    """Sequences without a row, by key: priority (where the policy asks for it), arrival, uid, index.

    A preempted sequence keeps its key, and so comes back before all that arrived after it. Each account (API key) has
    a line of its own; within one priority, the account with the fewest running sequences is next, and the one that
    came first among equals. ``max_requests`` and ``max_tokens`` bound requests that have never run; those that have
    are never refused.
    """

    def __init__(self, max_requests: int, max_tokens: int | None):
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.fresh_requests = 0
        self.fresh_tokens = 0
        self.rate = DrainRate()
        self._lines: dict[str, list[Sequence]] = {}  # none empty

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Sequence]:
        for line in self._lines.values():
            yield from line

    def in_turn(self, running: Callable[[], Counter[str]]) -> Iterator[Sequence]:
        """Who may run next, best first; they may leave the line meanwhile. ``running``: sequences of each account,
        asked for only where several wait."""
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            part = line[:LOOK]
            while part:
                yield from part
                at = bisect_right(line, part[-1].key, key=_key)
                part = line[at : at + LOOK]
            return
        counts = running() if self._lines else Counter()
        heads = [(line[0].key[0], counts[name], line[0].key, name, line) for name, line in self._lines.items()]
        heapify(heads)
        while heads:
            _, count, key, account, line = heappop(heads)
            seq = line[bisect_left(line, key, key=_key)]
            yield seq
            after = bisect_right(line, key, key=_key)
            if after < len(line):
                key = line[after].key
                heappush(heads, (key[0], count + seq.width, key, account, line))

    def push(self, seq: Sequence) -> None:
        """Take its place in line."""
        account = seq.request.account
        line = self._lines.get(account)
        if line is None:
            line = self._lines[account] = []
        insort(line, seq, key=_key)

    def remove(self, seq: Sequence) -> bool:
        """Leave the line; False where it was not in it."""
        account = seq.request.account
        line = self._lines.get(account, [])
        at = bisect_left(line, seq.key, key=_key)
        if at == len(line) or line[at] is not seq:
            return False
        del line[at]
        if not line:
            del self._lines[account]
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
        if not self.fresh_requests:
            self.rate.idle()

    def retry_after(self, prompt_len: int, now: float) -> float:
        """Seconds until a place for such a prompt is likely to become free, given that ``full`` refused it."""
        self.rate.waiting(now)
        places = 1
        if self.max_tokens is not None and self.fresh_requests:
            excess = min(self.fresh_tokens + prompt_len - self.max_tokens, self.fresh_tokens)
            places = max(1, math.ceil(excess * self.fresh_requests / max(1, self.fresh_tokens)))
        return self.rate.seconds(places, now)

    def time_to_drain(self, now: float) -> float:
        """Seconds until all who wait now are likely to run."""
        return self.rate.seconds(max(1, self.fresh_requests), now)
