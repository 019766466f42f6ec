"""Who waits, in what order, how many may, and when a place is likely to become free."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter

from .request import Request, Sequence, State

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
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

    Each account (API key) has a line of its own; within one priority, the account with the fewest running sequences is
    next, and the one that came first among equals. A preempted sequence keeps its key, and so comes back before all
    that arrived after it.

    Within a line it is first come, first served. Those of one arrival - the children of one request, and the prompts of
    one call, which its client gives one arrival - take turns with the others: when one of them leaves the line, the
    next of them comes after all who wait then, and before all who arrive later.

    ``max_requests`` and ``max_tokens`` bound requests that have never run; those that have are never refused.
    """

    def __init__(self, max_requests: int, max_tokens: int | None):
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.fresh_requests = 0
        self.fresh_tokens = 0
        self.rate = DrainRate()
        self._turns = 0  # given out
        self._lines: dict[str, list[Sequence]] = {}  # none empty

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Sequence]:
        for line in self._lines.values():
            yield from line

    def in_turn(
        self, running: Callable[[], Counter[str]], fits: Callable[[Sequence], bool] = lambda seq: True
    ) -> Iterator[Sequence]:
        """Who may run next, best first; they may leave the line meanwhile. ``running``: rows held by each account,
        asked for only where several wait. Those that do not ``fits`` are passed over, and count for nobody."""
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            yield from filter(fits, _in_line(line))
            return
        counts, heads = running() if self._lines else Counter(), []
        for account, line in self._lines.items():
            turns = filter(fits, _in_line(line))
            if (first := next(turns, None)) is not None:
                heads.append((first.key[0], counts[account], first.key, account, first, turns))
        heapify(heads)
        while heads:
            _, rows, _, account, seq, turns = heappop(heads)
            siblings = seq.siblings  # who may start with it
            yield seq
            if seq.state is State.RUNNING or seq.request.adapter is None:  # not passed over for want of its adapter
                rows += seq.width + sum(each.state is State.RUNNING for each in siblings)
            if (after := next(turns, None)) is not None:
                heappush(heads, (after.key[0], rows, after.key, account, after, turns))

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
        if not _has_run(seq):
            self._pass_turn(line, at, seq)
        if not line:
            del self._lines[account]
        return True

    def _pass_turn(self, line: list[Sequence], at: int, seq: Sequence) -> None:
        """``seq`` has left ``line`` at ``at``: the next of its arrival, if there is one, comes after all who wait."""
        after = line[at] if at < len(line) and line[at].key[:2] == seq.key[:2] else None
        if after is None and len(seq.request.live) == 1:
            return
        end = bisect_left(line, (seq.key[0], math.inf), key=_key)  # of its priority
        last = max(seq.key, line[end - 1].key if end else seq.key)
        self._turns += 1
        turn = (*last, self._turns)
        seq.request.set_turn(turn)
        if after is not None:
            after.request.set_turn(turn)

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
        """A request counted by ``enter`` runs now, or has ended before it ran."""
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


def _in_line(line: list[Sequence]) -> Iterator[Sequence]:
    """One account's line in turn. Those of one arrival stand together in it: they are passed over, and merged in."""
    apart: list[tuple[tuple, tuple, tuple]] = []  # of an arrival: turn and key of its next, end of its keys
    at = 0
    passed: tuple = ()
    while True:
        if apart and (at == len(line) or apart[0][0] < line[at].key):
            _, key, end = heappop(apart)
            if (seq := _first(line, key, end)) is not None:
                yield seq
                if (after := _first(line, (*seq.key, 0), end)) is not None:
                    heappush(apart, (after.request.turn or after.key, after.key, end))
            at = bisect_right(line, passed, key=_key)
        elif at == len(line):
            return
        elif _alone(line, at):
            seq = line[at]
            passed = seq.key
            yield seq
            at = at + 1 if at < len(line) and line[at] is seq else bisect_right(line, passed, key=_key)
        else:
            seq = line[at]
            passed = (*seq.key[:2], math.inf)
            heappush(apart, (seq.request.turn or seq.key, seq.key, passed))
            at = bisect_right(line, passed, key=_key)


def _first(line: list[Sequence], key: tuple, end: tuple) -> Sequence | None:
    """The first of a line at or past ``key`` and before ``end``."""
    at = bisect_left(line, key, key=_key)
    return line[at] if at < len(line) and line[at].key < end else None


def _alone(line: list[Sequence], at: int) -> bool:
    """Whether a sequence comes by its own key: it has run before, or no other of its arrival is there."""
    seq = line[at]
    if _has_run(seq):
        return True
    return seq.request.turn is None and (at + 1 == len(line) or line[at + 1].key[:2] != seq.key[:2])


def _has_run(seq: Sequence) -> bool:
    """It had a row before, here or in an earlier attempt."""
    return seq.generation > 0 or bool(seq.outputs)
