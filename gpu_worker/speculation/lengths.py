"""How many tokens to draft for each row: fewer where drafts have been wrong, and where many rows share the step."""

from __future__ import annotations

import numpy as np

TOKEN_COST = {"cpu": 0.12, "cuda": 0.01}
"""What one more token adds to a step of one row, as a share of it: a CPU soon computes, a GPU long only reads
weights. docs/speculation.md says how it was measured."""
FIRST_RATE = 0.7
"""What a row's acceptance is taken to be before anything is known."""
WEIGHT = 0.2
"""Of a draft's outcome, against all before it."""
RETRY = 16
"""Steps after which a row whose drafts were not worth their time is tried with one token again."""


class Lengths:
    """Keeps each row's rate: of the drafted tokens whose predecessors were right, the share that was right too."""

    def __init__(self, max_rows: int, cost: float):
        self._cost = cost
        self._rates = np.full(max_rows, FIRST_RATE)
        self._idle = np.zeros(max_rows, np.int64)  # steps without a draft

    def forget(self, rows: list[int]) -> None:
        """``rows`` have new owners, of whom nothing is known."""
        self._rates[rows], self._idle[rows] = FIRST_RATE, 0

    def copy(self, src: list[int], dst: list[int]) -> None:
        """Rows ``dst`` go on as rows ``src`` did."""
        self._rates[dst] = self._rates[src]

    def most(self, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """How many tokens to draft for each of ``rows``, ``limits`` at most; int64 [R] all.

        With rate r the n-th token is kept with a likelihood of r^n. It is worth drafting while that is over the share
        of the step's time that it takes, for the other rows wait for it too.
        """
        share = self._cost * len(rows) / (1 + self._cost * len(rows))
        rates = self._rates[rows]
        wanted = np.floor(np.log(share) / np.log(np.clip(rates, 1e-3, 0.999))).astype(np.int64)
        idle = self._idle[rows] = np.where(wanted > 0, 0, self._idle[rows] + 1)
        wanted[idle % RETRY == RETRY - 1] = 1
        return np.minimum(wanted, limits)

    def learn(self, rows: np.ndarray, tried: np.ndarray, kept: np.ndarray) -> None:
        """Of ``tried`` tokens of each of ``rows`` the first ``kept`` were right; int64 [R] all."""
        some = tried > 0
        rows, tried, kept = rows[some], tried[some], kept[some]
        seen = np.minimum(kept + 1, tried)  # later ones say nothing
        past = (1 - WEIGHT) ** seen
        self._rates[rows] = self._rates[rows] * past + (1 - past) * kept / seen
