"""Who waits, in what order, how many may, and when a place is likely to become free."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter

from .request import Request, Sequence, State

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
SPANS = 32
"""Places that became free lately, by which the rate is measured."""

Lanes = dict[bytes, list[Sequence]]
"""Of one account, by the digest of an adapter, each in order of keys; none is empty."""
Turns = Iterator[tuple[tuple, Sequence]]
"""Places in turn, and who has them."""

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
    that arrived after it. A line has a lane for the model itself and one for each adapter, which are merged again as
    they are read: so a plan passes over all who wait for one adapter at once, however many they are.

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
        self._lines: dict[str, Lanes] = {}  # none empty

    def __len__(self) -> int:
        return sum(len(lane) for lanes in self._lines.values() for lane in lanes.values())

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Sequence]:
        for lanes in self._lines.values():
            for lane in lanes.values():
                yield from lane

    def in_turn(
        self, running: Callable[[], Counter[str]], fits: Callable[[Sequence], bool] = lambda seq: True,
        absent: Container[bytes] = (),
    ) -> Iterator[Sequence]:  # fmt: skip
        """Who may run next, best first; they may leave the line meanwhile. ``running``: rows held by each account,
        asked for only where several wait. Those that do not ``fits`` are passed over, and count for nobody; so are all
        whose adapter's digest is in ``absent``, which may grow meanwhile."""
        if len(self._lines) == 1:
            (lanes,) = self._lines.values()
            yield from filter(fits, _in_lanes(lanes, absent))
            return
        counts, heads = running() if self._lines else Counter(), []
        for account, lanes in self._lines.items():
            turns = filter(fits, _in_lanes(lanes, absent))
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
        lanes = self._lines.setdefault(seq.request.account, {})
        insort(lanes.setdefault(_lane_of(seq), []), seq, key=_key)

    def remove(self, seq: Sequence) -> bool:
        """Leave the line; False where it was not in it."""
        account, name = seq.request.account, _lane_of(seq)
        lanes = self._lines.get(account, {})
        lane = lanes.get(name, [])
        at = bisect_left(lane, seq.key, key=_key)
        if at == len(lane) or lane[at] is not seq:
            return False
        del lane[at]
        if not _has_run(seq):
            self._pass_turn(lanes, lane, at, seq)
        if not lane:
            del lanes[name]
            if not lanes:
                del self._lines[account]
        return True

    def _pass_turn(self, lanes: Lanes, lane: list[Sequence], at: int, seq: Sequence) -> None:
        """``seq`` has left ``lane`` at ``at``: the next of its arrival there, if there is one, comes after all who
        wait."""
        after = lane[at] if at < len(lane) and lane[at].key[:2] == seq.key[:2] else None
        if after is None and len(seq.request.live) == 1:
            return
        last = max(seq.key, *(_last_of(each, seq.key[0]) for each in lanes.values()))
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


def _lane_of(seq: Sequence) -> bytes:
    """The digest of its adapter; empty for the model itself."""
    adapter = seq.request.adapter
    return b"" if adapter is None else adapter.digest


def _last_of(lane: list[Sequence], priority: int) -> tuple:
    """The last key of ``priority`` or a better one; () where there is none."""
    end = bisect_left(lane, (priority, math.inf), key=_key)
    return lane[end - 1].key if end else ()


def _in_lanes(lanes: Lanes, absent: Container[bytes]) -> Iterator[Sequence]:
    """One account's line in turn, without the lanes that are ``absent``, which may grow."""
    if len(lanes) == 1:
        ((name, lane),) = lanes.items()
        for _, waiting in _in_lane(lane):
            if name in absent:
                return
            yield waiting
        return
    # The next of each lane, by its place in turn; at first no earlier than that, for no lane is read in vain.
    heads: list[tuple[tuple, bytes, Sequence | None, Turns | None]]
    heads = [(lane[0].key, name, None, None) for name, lane in lanes.items()]
    heapify(heads)
    passed, most = 0, 8
    while heads:
        _, name, seq, turns = heappop(heads)
        if name in absent:
            if (passed := passed + 1) == most:  # many may have become so at once: out with them, without their turns
                heads, passed, most = [head for head in heads if head[1] not in absent], 0, 2 * most
                heapify(heads)
            continue
        if seq is not None:
            yield seq
        turns = turns or _in_lane(lanes.get(name, []))
        if name not in absent and (after := next(turns, None)) is not None:
            heappush(heads, (after[0], name, after[1], turns))


def _in_lane(line: list[Sequence]) -> Turns:
    """One lane in turn, each with its place. Those of one arrival stand together in it: they are passed over, and
    merged in."""
    apart: list[tuple[tuple, tuple, tuple]] = []  # of an arrival: turn and key of its next, end of its keys
    at = 0
    passed: tuple = ()
    while True:
        if apart and (at == len(line) or apart[0][0] < line[at].key):
            place, key, end = heappop(apart)
            if (seq := _first(line, key, end)) is not None:
                yield place, seq
                if (after := _first(line, (*seq.key, 0), end)) is not None:
                    heappush(apart, (after.request.turn or after.key, after.key, end))
            at = bisect_right(line, passed, key=_key)
        elif at == len(line):
            return
        elif _alone(line, at):
            seq = line[at]
            passed = seq.key
            yield passed, seq
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
