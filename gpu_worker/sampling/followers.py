"""Followers: state of rows that lives on the host and needs each row's tokens in order. There are two kinds, grammars'
matchers and the token histories that users' logits processors are given.

The device draws a step's tokens before the host has seen those of the step before. So a follower queues what a plan
does to its rows (admit, fork, append, drop) behind tokens that have not arrived. A step that needs the state calls
``catch_up``, which works off the queue; the forward pass is running by then, so waiting costs the device nothing. Rows
that no follower follows cost nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from ...proto.work import Generate
from ..transfer import Arrival


class Histories:
    """The state of rows that a ``Follower`` keeps up to date: ``grammar.Grammars`` or ``processors.Processors``.

    This class itself keeps none: another process does, and here it is only known of which rows there is any.
    """

    def admit(self, row: int, work: Generate, prompt_len: int, ids: np.ndarray) -> None:
        """``row`` begins; ``ids`` are its prompt of ``prompt_len`` tokens and the outputs it resumes from."""

    def copy(self, src: list[int], dst: list[int]) -> None:
        """Rows ``dst`` become what rows ``src`` are; all are read before any is written."""

    def drop(self, rows: list[int]) -> None:
        """Release what ``rows`` hold."""

    def advance(self, rows: list[int], tokens: list[int]) -> None:
        """One more token for each of ``rows``."""

    def reset(self) -> None:
        """Release everything."""


H = TypeVar("H", bound=Histories)


class Follower(Generic[H]):
    """Applies to one ``Histories`` what happens to its rows, each thing once its tokens are there.

    ``rows`` are the rows it follows as of the last plan. ``histories`` is up to date after ``catch_up``. The compute
    thread alone uses it.
    """

    def __init__(self, histories: H):
        self.rows: set[int] = set()
        self.histories = histories
        self._waiting: deque[tuple[Arrival | None, Callable[[], None]]] = deque()

    def admit(self, row: int, work: Generate, prompt_len: int, ids: np.ndarray) -> None:
        """Follow ``row`` from now on."""
        self.rows.add(row)
        self._in_order(lambda: self.histories.admit(row, work, prompt_len, ids))

    def drop(self, rows: Sequence[int]) -> None:
        """Follow ``rows`` no more."""
        gone = [row for row in rows if row in self.rows]
        if gone:
            self.rows.difference_update(gone)
            self._in_order(lambda: self.histories.drop(gone))

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Fork: ``dst`` are followed where ``src`` are."""
        pairs = [(a, b) for a, b in zip(src, dst, strict=True) if a in self.rows]
        lost = [b for a, b in zip(src, dst, strict=True) if a not in self.rows]
        if pairs:
            sources, copies = [a for a, _ in pairs], [b for _, b in pairs]
            self.rows.update(copies)
            # Never at once: what is copied may still be in the making.
            self._waiting.append((None, lambda: self.histories.copy(sources, copies)))
        self.drop(lost)

    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Tokens that the scheduler chose."""
        pairs = [pair for pair in zip(rows, tokens, strict=True) if pair[0] in self.rows]
        if pairs:
            self._in_order(lambda: self.histories.advance([row for row, _ in pairs], [token for _, token in pairs]))

    def drawn(self, rows: Sequence[int], arrival: Arrival) -> None:
        """Tokens on their way from the device; ``rows`` has the row of each, -1 where it is not kept."""
        slots = [slot for slot, row in enumerate(rows) if row in self.rows]
        if not slots:
            return
        kept = [rows[slot] for slot in slots]

        def advance() -> None:
            tokens = np.frombuffer(arrival.wait(), np.int32)[slots].tolist()
            drawn = [pair for pair in zip(kept, tokens, strict=True) if pair[1] >= 0]  # a mark: the row has failed
            self.histories.advance([row for row, _ in drawn], [token for _, token in drawn])

        self._waiting.append((arrival, advance))

    def catch_up(self, wait: bool) -> None:
        """Apply what is queued, all of it with ``wait``, else what needs no sleep for tokens to arrive."""
        while self._waiting:
            arrival, act = self._waiting[0]
            if not wait and arrival is not None and not arrival.landed:
                return
            self._waiting.popleft()
            act()

    def reset(self) -> None:
        """Follow nothing."""
        self.rows.clear()
        self._waiting.clear()
        self.histories.reset()

    def _in_order(self, act: Callable[[], None]) -> None:
        if self._waiting:
            self._waiting.append((None, act))
        else:
            act()
