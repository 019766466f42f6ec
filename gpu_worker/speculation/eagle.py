"""Drafts by a head that goes on from the target's hidden states (``head_model.py`` has the three kinds).

The head's keys and values at position p need the target's hidden state of p and the token at p + 1. So a prompt's chunk
is computed when the target has run it, but for its last position; that one, and those of the tokens that a step
verifies, wait as hidden states until it is known which tokens go on. Where the target finds a prefix in the cache, the
head has its keys and values of it in the same blocks, or cannot draft for the row: the hidden states are gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..kv_cache import KVCache
from .draft_model import KeysAndValues, put
from .draws import draw
from .head_model import Head
from .passes import Passes

if TYPE_CHECKING:
    from ..state import RowState, Run


class Eagle(KeysAndValues):
    """Drafts by ``passes`` of ``head``; at most ``most`` of a row in a step."""

    wants_hidden = True

    def __init__(self, state: RowState, kv: KVCache, head: Head, passes: Passes, most: int) -> None:
        super().__init__(state, kv)
        self.head, self._passes = head, passes
        # Room for what a step verifies, and for some steps without drafts before it must be worked off.
        self._room = max(2 * (most + 1), 16)
        width, dtype = head.spec.hidden_size, torch.float32 if state.on_host else head.dtype
        self._kept = torch.zeros((state.max_rows, self._room, width), dtype=dtype, device=state.device)
        self._first = np.zeros(state.max_rows, np.int64)  # the position of each row's first hidden state kept
        self._count = np.zeros(state.max_rows, np.int64)

    def admit(self, row: int) -> None:
        super().admit(row)
        self._count[row] = 0

    def fork(self, src: list[int], dst: list[int]) -> None:
        super().fork(src, dst)
        self._first[dst], self._count[dst] = self._first[src], self._count[src]
        self._kept[dst] = self._kept[src]

    def reset(self) -> None:
        super().reset()
        self._count[:] = 0

    def ran(self, run: Run, hidden: torch.Tensor | None) -> None:
        if hidden is None:
            raise ValueError("a head is given the hidden states of every token")
        self.reach.ran(run.rows, run.starts, self.state.tables_host, self.state.blocks_set)
        self._take(run, self.head.combined(hidden))
        self._take_over(run)

    def _take(self, run: Run, given: torch.Tensor) -> None:
        """Compute from what a step's tokens are given, or keep it; [T, hidden]."""
        counts, starts = run.counts, run.starts
        firsts = counts.cumsum() - counts
        if run.pure_decode:
            self._keep_decodes(run.rows, starts, given)
            return
        known = self.state.known[run.rows]
        long = counts > self._room // 2
        self._prompts(run.rows[long], starts[long], counts[long], firsts[long], known[long], given)
        for row, start, count, first in zip(
            *(each[~long].tolist() for each in (run.rows, starts, counts, firsts)), strict=True
        ):
            self._keep(row, start, given[first : first + count])

    def _keep_decodes(self, rows: np.ndarray, starts: np.ndarray, given: torch.Tensor) -> None:
        """Keep one hidden state for each row."""
        self._make_room(rows, starts, 1)
        where = starts - self._first[rows]
        r, w = self.state.upload(rows, where)
        self._kept[r, w] = given.to(self._kept.dtype)
        self._count[rows] = where + 1

    def _keep(self, row: int, start: int, given: torch.Tensor) -> None:
        """Keep hidden states of ``row`` from position ``start`` on."""
        one = np.array([row])
        self._make_room(one, np.array([start]), len(given))
        where = start - int(self._first[row])
        self._kept[row, where : where + len(given)] = given
        self._count[row] = where + len(given)

    def _make_room(self, rows: np.ndarray, starts: np.ndarray, count: int) -> None:
        """Let ``count`` hidden states from ``starts`` on follow those kept of ``rows``, or begin anew."""
        end = self._first[rows] + self._count[rows]
        # What was kept of tokens that were not accepted is written over.
        needed = self.reach.computed[rows] < starts
        goes_on = needed & (starts >= self._first[rows]) & (starts <= end) & (self._count[rows] > 0)
        full = goes_on & (starts - self._first[rows] + count > self._room)
        if full.any():
            which = rows[full]
            self._count[which] = starts[full] - self._first[which]
            self._work_off(which)
        anew = ~goes_on | full
        self._first[rows[anew]], self._count[rows[anew]] = starts[anew], 0

    def _work_off(self, rows: np.ndarray) -> None:
        """Compute keys and values of what is kept of ``rows``, all of whose next tokens are known."""
        rows = rows[self._level(rows)]
        starts = self.reach.computed[rows]
        counts = self._first[rows] + self._count[rows] - starts
        some = counts > 0
        self._fill(rows[some], starts[some], counts[some])

    def _level(self, rows: np.ndarray) -> np.ndarray:
        """bool: whether what is kept follows what is computed."""
        return (self._count[rows] > 0) & (self._first[rows] <= self.reach.computed[rows])

    def _given(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        """Hidden states kept of positions ``starts`` and on, one row after another, [T, hidden]."""
        of = np.repeat(rows, counts)
        where = np.arange(len(of)) + np.repeat(starts - (counts.cumsum() - counts) - self._first[rows], counts)
        r, w = self.state.upload(of, where)
        return self._kept[r, w]

    def _fill(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        if len(rows):
            order = np.argsort(counts != 1, kind="stable")
            rows, starts, counts = rows[order], starts[order], counts[order]
            self._passes.fill(rows, starts, counts, self._given(rows, starts, counts))
            self.reach.reached(rows, starts + counts, self.state.tables_host)

    def _prompts(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, firsts: np.ndarray, known: np.ndarray,
        given: torch.Tensor,
    ) -> None:  # fmt: skip
        """Chunks of prompts: all positions whose next token is known are computed, the last of all is kept."""
        for row, start, count, first, length in zip(
            *(each.tolist() for each in (rows, starts, counts, firsts, known)), strict=True
        ):
            if self._level(one := np.array([row])).all():  # what is left of the chunk before
                self._count[row] = start - self._first[row]
                self._work_off(one)
            ready = min(count, length - 1 - start)
            if ready > 0 and self.reach.computed[row] >= start:
                at, size = np.array([start]), np.array([ready])
                self._passes.fill(one, at, size, given[first : first + ready])
                self.reach.reached(one, at + size, self.state.tables_host)
            self._first[row], self._count[row] = start + ready, count - ready
            self._kept[row, : count - ready] = given[first + ready : first + count]

    def propose(self, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drafts = np.full((len(rows), int(most.max(initial=0))), -1, np.int32)
        known = self.state.known[rows]
        starts = self.reach.computed[rows]
        lacking = known - 1 - starts
        enough = self._first[rows] + self._count[rows] >= known - 1
        counts = np.where(self._level(rows) & enough & (lacking > 0), most, 0)
        at = np.flatnonzero(counts > 0)
        if len(at):
            at = at[np.argsort(lacking[at] != 1, kind="stable")]
            self._draft(rows[at], starts[at], known[at], counts[at], drafts, at)
        return drafts, counts

    def _draft(
        self, rows: np.ndarray, starts: np.ndarray, known: np.ndarray, counts: np.ndarray, drafts: np.ndarray,
        at: np.ndarray,
    ) -> None:  # fmt: skip
        lacking = known - 1 - starts
        logits, hidden = self._passes.last(rows, starts, lacking, self._given(rows, starts, lacking))
        self.reach.reached(rows, known - 1, self.state.tables_host)
        # What follows is computed again, from the target's own hidden states, once it is known which tokens go on.
        for step in range(int(counts.max())):
            if step:
                assert hidden is not None
                if (counts <= step).any():
                    going = counts > step
                    (kept,) = self.state.upload(np.flatnonzero(going))
                    rows, known, counts, at, hidden = rows[going], known[going], counts[going], at[going], hidden[kept]
                logits, hidden = self._passes.last(rows, known + (step - 2), np.ones(len(rows), np.int64), hidden)
            tokens = draw(logits, self.state, rows, positions := known + step)
            put(self.state, rows, positions, tokens)
            drafts[at, step] = tokens.cpu().numpy()
