"""How many tokens to draft for each row: fewer where drafts have been wrong, and where many rows share the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

TOKEN_COST = {"cpu": 0.12, "cuda": 0.01}
"""What one more token adds to a step of one row, as a share of it, where that is not measured: a CPU soon computes, a
GPU long only reads weights."""
STEP_S = 150e-6
"""About what a step takes beside its model: plans, results, and whoever reads them."""
FIRST_RATE = 0.7
"""What a row's acceptance is taken to be before anything is known of any row; then what that of all rows has been."""
LEAST_FIRST_RATE = 0.3
"""A row is drafted for at first, where it runs alone, however badly that went with others."""
LEAST_RATE, MOST_RATE = 0.01, 0.99
WEIGHT, WEIGHT_OF_ALL = 0.2, 0.01
"""Of a token's outcome, against all before it: of its row, and of all rows."""
RETRY = 16
"""Steps after which a row whose drafts were not worth their time is tried with one token again."""
CATCH_UP = 16
"""Tokens of keys and values for which what drafts has about the time that a step with drafts saves."""
MOST_WAIT = 8
"""Steps that a row is left without drafts for that, at most."""


class Costs(NamedTuple):
    """What steps take, as shares of what one of one token takes. ``steps``: of 0, 1, ... tokens, as many as a step of
    rows that speculate may have; ``draft``: what each drafted token takes besides, before it is verified."""

    steps: list[float]
    draft: float = 0.0


def even_costs(cost: float, tokens: int) -> Costs:
    """Each of at most ``tokens`` takes as much as any other."""
    return Costs([1 + cost * (count - 1) for count in range(tokens + 1)])


def measured_costs(points: dict[int, float], beside: float, draft: float) -> Costs:
    """``points``: seconds of steps by their tokens, 1 among them; what is between two lies on a line. ``beside``:
    seconds of every step that are in none; ``draft``: of each drafted token."""
    counts = sorted(points)
    longest = list(accumulate((points[count] for count in counts), max))  # a step of more tokens takes no less
    one = points[1] + beside
    found = np.interp(np.arange(counts[-1] + 1), counts, longest)
    return Costs(((found + beside) / one).tolist(), draft / one)


class Lengths:
    """Keeps each row's rate: of the drafted tokens whose predecessors were right, the share that was right too.

    Lists and not arrays: few rows speculate in a step, and theirs are looked at one by one sooner.
    """

    def __init__(self, max_rows: int, costs: Costs, lags: int = 0):
        """``lags``: of what drafts with keys and values of its own, the most tokens that a step with drafts gives a
        row; else 0."""
        self._costs, self._lags = costs, lags
        self._ends = [0] * max_rows  # tokens that each row had when it was last asked for
        self._waits = [0] * max_rows  # steps for which it does without drafts
        self._speed = 1.0  # tokens in the time of a step of one row, as of the last step
        self._rates, self._of_all = [FIRST_RATE] * max_rows, FIRST_RATE
        self._idle = [0] * max_rows  # steps without a draft

    def forget(self, row: int, end: int = 0) -> None:
        """``row`` has a new owner, of whom nothing is known but a prompt of ``end`` tokens."""
        self._rates[row], self._idle[row] = max(self._of_all, LEAST_FIRST_RATE), 0
        self._ends[row], self._waits[row] = end, 0

    def copy(self, src: list[int], dst: list[int]) -> None:
        """Rows ``dst`` go on as rows ``src`` did."""
        found = [(self._rates[row], self._ends[row], self._waits[row]) for row in src]
        for row, each in zip(dst, found, strict=True):
            self._rates[row], self._ends[row], self._waits[row] = each

    def catching_up(self, row: int, end: int) -> bool:
        """Whether ``row``, which has ``end`` tokens now, is left without drafts in this step.

        What drafts must first compute the tokens that were drawn without it, in steps of many rows. That is lost where
        the row ends soon, of which nothing is known: so the row goes on for as long as those tokens would pay for.
        """
        gap, self._ends[row] = end - self._ends[row], end
        if gap > max(self._lags, CATCH_UP):
            self._waits[row] = min(self._waits[row] + gap // CATCH_UP, MOST_WAIT)
        if not self._waits[row]:
            return False
        self._waits[row] -= 1
        return True

    def most(self, rows: list[int], limits: list[int], ends: list[int] | None = None) -> list[int]:
        """How many tokens to draft for each of ``rows``, ``limits`` at most; they have ``ends`` tokens now.

        With rate r the n-th token is kept with a likelihood of r^n. It is worth drafting while that is over the tokens
        that a step gives elsewhere in the time which it takes, for the other rows wait for it too.
        """
        (steps, draft), speed = self._costs, self._speed
        found, gained, tokens, last = [], 0.0, len(rows), len(self._costs.steps) - 1
        if ends is not None and self._lags:
            pairs = zip(rows, limits, ends, strict=True)
            limits = [0 if self.catching_up(row, end) else limit for row, limit, end in pairs]
        for row, limit in zip(rows, limits, strict=True):
            rate = likely = self._rates[row]
            count = 0
            while count < limit and tokens < last and likely > speed * (draft + steps[tokens + 1] - steps[tokens]):
                count += 1
                tokens += 1
                gained += likely
                likely *= rate
            if count:
                self._idle[row] = 0
            else:
                self._idle[row] += 1
                if self._idle[row] >= RETRY:
                    self._idle[row], count = 0, min(1, limit)
            found.append(count)
        self._speed = (len(rows) + gained) / (steps[min(tokens, last)] + draft * (tokens - len(rows)))
        return found

    def learn(self, row: int, tried: int, kept: int) -> None:
        """Of ``tried`` tokens of ``row`` the first ``kept`` were right."""
        rate = self._rates[row]
        for right in [1.0] * kept + [0.0] * (kept < tried):  # what comes after a wrong one says nothing
            rate += WEIGHT * (right - rate)
            self._of_all += WEIGHT_OF_ALL * (right - self._of_all)
        self._rates[row] = min(max(rate, LEAST_RATE), MOST_RATE)


def least_seconds(act: Callable[[], object], times: int = 5, within: float = 0.3) -> float:
    """The least that ``act`` takes, of so many times, or of as many as begin ``within`` these seconds."""
    act()
    end, least = time.perf_counter() + within, float("inf")
    for _ in range(times):
        began = time.perf_counter()
        act()
        now = time.perf_counter()
        least = min(least, now - began)
        if now > end:
            break
    return least
