"""How many tokens to draft for each row: fewer where drafts have been wrong, and where many rows share the step."""

from __future__ import annotations

import math

TOKEN_COST = {"cpu": 0.12, "cuda": 0.01}
"""What one more token adds to a step of one row, as a share of it: a CPU soon computes, a GPU long only reads
weights. docs/speculation.md says how it was measured."""
FIRST_RATE = 0.7
"""What a row's acceptance is taken to be before anything is known."""
LEAST_RATE, MOST_RATE = 0.01, 0.99
WEIGHT = 0.2
"""Of a token's outcome, against all before it."""
RETRY = 16
"""Steps after which a row whose drafts were not worth their time is tried with one token again."""


class Lengths:
    """Keeps each row's rate: of the drafted tokens whose predecessors were right, the share that was right too.

    Lists and not arrays: few rows speculate in a step, and theirs are looked at one by one sooner.
    """

    def __init__(self, max_rows: int, cost: float):
        self._cost = cost
        self._rates = [FIRST_RATE] * max_rows
        self._idle = [0] * max_rows  # steps without a draft

    def forget(self, row: int) -> None:
        """``row`` has a new owner, of whom nothing is known."""
        self._rates[row], self._idle[row] = FIRST_RATE, 0

    def copy(self, src: list[int], dst: list[int]) -> None:
        """Rows ``dst`` go on as rows ``src`` did."""
        rates = [self._rates[row] for row in src]
        for row, rate in zip(dst, rates, strict=True):
            self._rates[row] = rate

    def most(self, rows: list[int], limits: list[int]) -> list[int]:
        """How many tokens to draft for each of ``rows``, ``limits`` at most.

        With rate r the n-th token is kept with a likelihood of r^n. It is worth drafting while that is over the share
        of the step's time that it takes, for the other rows wait for it too.
        """
        share = math.log(self._cost * len(rows) / (1 + self._cost * len(rows)))
        found = []
        for row, limit in zip(rows, limits, strict=True):
            wanted = int(share / math.log(self._rates[row]))
            if not wanted:
                self._idle[row] += 1
                if self._idle[row] >= RETRY:
                    wanted = 1
            if wanted:
                self._idle[row] = 0
            found.append(wanted if wanted < limit else limit)
        return found

    def learn(self, row: int, tried: int, kept: int) -> None:
        """Of ``tried`` tokens of ``row`` the first ``kept`` were right."""
        rate = self._rates[row]
        for right in [1.0] * kept + [0.0] * (kept < tried):  # what comes after a wrong one says nothing
            rate += WEIGHT * (right - rate)
        self._rates[row] = min(max(rate, LEAST_RATE), MOST_RATE)
