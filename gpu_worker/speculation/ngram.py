"""Drafts from a row's own tokens, without a model: what followed when its last tokens came before.

``Ngram`` (vLLM's ngram, "prompt lookup"): of the suffixes of ``lowest`` to ``highest`` tokens that occur earlier, the
longest; at its first occurrence, the tokens that followed. ``Suffix`` (arXiv 2411.04975, of a request's own past
alone): all occurrences of the longest suffix vote on each next token, as long as the path has a likelihood of at least
``least`` and is no longer than ``factor`` times the suffix.

Both look at each row once a step: one comparison of its tokens with the last, then only at places that still match.
"""

from __future__ import annotations

import numpy as np

from ..state import RowState
from .lengths import least_seconds
from .proposer import Proposer

WINDOW = 1 << 16
"""Tokens of a row, its last, among which one looks: what is compared in a step has a bound."""
SAMPLE = 512
"""Tokens of a row in which a lookup is timed."""


class Lookup(Proposer):
    """What both share. ``most``: tokens of a draft, at most."""

    def __init__(self, state: RowState, most: int):
        self._state, self._most = state, most

    def propose(self, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drafts, found = np.zeros((len(rows), self._most), np.int32), np.zeros(len(rows), np.int64)
        for at, (row, limit) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            if limit > 0:
                draft = self.of(self._tokens_of(row), min(limit, self._most))
                found[at] = len(draft)
                drafts[at, : len(draft)] = draft
        return drafts, found

    def seconds(self, count: int) -> float:
        tokens = np.arange(SAMPLE, dtype=np.int32) % (SAMPLE // 8)
        return least_seconds(lambda: self.of(tokens, count)) / count

    def _tokens_of(self, row: int) -> np.ndarray:
        state, end = self._state, self._state.known.item(row)
        begin = max(0, end - WINDOW)
        if state.on_host:
            return state.tokens_host[row, begin:end]
        return state.tokens[row, begin:end].cpu().numpy()

    def of(self, tokens: np.ndarray, most: int) -> np.ndarray:
        """At most ``most`` tokens that may come after ``tokens``, int32 both."""
        raise NotImplementedError


class Ngram(Lookup):
    """The first occurrence of the longest suffix of ``lowest`` to ``highest`` tokens."""

    def __init__(self, state: RowState, most: int, lowest: int, highest: int):
        super().__init__(state, most)
        self._lowest, self._highest = lowest, highest

    def of(self, tokens: np.ndarray, most: int) -> np.ndarray:
        ends, length = occurrences(tokens, self._highest)
        if length < self._lowest:
            return tokens[:0]
        first = ends.item(0) + 1
        return tokens[first : first + most]


class Suffix(Lookup):
    """What most often followed the longest suffix of at most ``depth`` tokens."""

    def __init__(self, state: RowState, most: int, depth: int, factor: float, least: float):
        super().__init__(state, most)
        self._depth, self._factor, self._least = depth, factor, least

    def of(self, tokens: np.ndarray, most: int) -> np.ndarray:
        ends, length = occurrences(tokens, self._depth)
        draft: list[int] = []
        likelihood, places = 1.0, ends + 1
        while length and len(draft) < min(most, int(length * self._factor)):
            places = places[places < len(tokens)]
            if not len(places):
                break
            ids, counts = np.unique(tokens[places], return_counts=True)
            best = int(counts.argmax())
            likelihood *= counts.item(best) / len(places)
            if likelihood < self._least:
                break
            draft.append(ids.item(best))
            places = places[tokens[places] == ids[best]] + 1
        return np.array(draft, np.int32)


def occurrences(tokens: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
    """Where the longest suffix of ``tokens`` ends before, int64, rising, and its length: 0 where the last token is
    new, ``longest`` at most."""
    last = len(tokens) - 1
    if last < 1:
        return np.zeros(0, np.int64), 0
    ends, length = np.flatnonzero(tokens[:last] == tokens[last]), 1
    if not len(ends):
        return ends, 0
    while length < longest:
        inside = ends if ends.item(0) >= length else ends[ends >= length]  # others begin with the row
        further = inside[tokens[inside - length] == tokens[last - length]]
        if not len(further):
            break
        ends, length = further, length + 1
    return ends, length
