"""Drafts by a head that goes on from the target's hidden states (``head_model.py`` has the three kinds).

The head's keys and values at position p need the target's hidden state of p and the token at p + 1. So a prompt's chunk
is computed when the target has run it, but for its last position; that one, and those of the tokens that a step
verifies, wait as hidden states until it is known which tokens go on. Where the target finds a prefix in the cache, the
head has its keys and values of it in the same blocks.

Nothing is kept up in steps of more rows than may speculate, while nobody is drafted for, nor of a prefix that came
without the head's: those hidden states are gone. When such a row speculates after all, what is missing is computed as
if they had been zeros. Drafts are less often right then, until the row has gone on for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..kv_cache import KVCache
from .draft_model import Job, KeysAndValues, put
from .draws import draw
from .head_model import Head
from .lengths import least_seconds
from .passes import NativePasses, Passes

if TYPE_CHECKING:
    from ..state import RowState, Run


class Eagle(KeysAndValues):
    """Drafts by ``passes`` of ``head``; at most ``most`` of a row in a step.

    ``max_tokens``: of one pass that makes up for hidden states that are gone.
    """

    wants_hidden = True

    def __init__(
        self, state: RowState, kv: KVCache, head: Head, passes: Passes, most: int, max_tokens: int = 2048
    ) -> None:
        super().__init__(state, kv)
        self.head, self._passes, self._max_tokens = head, passes, max_tokens
        # Room for what a step verifies, and for some steps without drafts before it must be worked off.
        self._room = max(2 * (most + 1), 16)
        width, dtype = head.spec.hidden_size, torch.float32 if state.on_host else head.dtype
        self._kept = torch.zeros((state.max_rows, self._room, width), dtype=dtype, device=state.device)
        # Of one row numpy copies sooner.
        self._into = self._kept.numpy() if state.on_host else self._kept
        self._first = np.zeros(state.max_rows, np.int64)  # the position of each row's first hidden state kept
        self._count = np.zeros(state.max_rows, np.int64)

    def admit(self, rows: list[int]) -> None:
        super().admit(rows)
        self._count[rows] = 0

    def fork(self, src: list[int], dst: list[int]) -> None:
        super().fork(src, dst)
        self._first[dst], self._count[dst] = self._first[src], self._count[src]
        self._kept[dst] = self._kept[src]

    def ran(self, run: Run, hidden: torch.Tensor | None) -> None:
        self._began(run.rows, run.starts)
        if hidden is not None:
            self._take(run, self.head.combined(hidden))
        else:
            self._count[run.rows] = 0
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
        of = self._one_by_one(given)
        for row, start, count, first in zip(
            *(each[~long].tolist() for each in (run.rows, starts, counts, firsts)), strict=True
        ):
            self._keep(row, start, of[first : first + count])

    def _keep_decodes(self, rows: np.ndarray, starts: np.ndarray, given: torch.Tensor) -> None:
        """Keep one hidden state for each row."""
        self._make_room(rows, starts, 1)
        where = starts - self._first[rows]
        r, w = self.state.upload(rows, where)
        self._kept[r, w] = given.to(self._kept.dtype)
        self._count[rows] = where + 1

    def _one_by_one(self, given: torch.Tensor) -> Any:
        """What is copied row by row."""
        return given.float().numpy() if self.state.on_host else given

    def _keep(self, row: int, start: int, given: Any) -> None:
        """Keep hidden states of ``row`` from position ``start`` on: ``_make_room`` of one row, and they."""
        first, count, size = self._first.item(row), self._count.item(row), len(given)
        goes_on = self.reach.computed.item(row) < start and count > 0 and first <= start <= first + count
        if goes_on and start - first + size > self._room:
            self._count[row] = start - first
            self._work_off(np.array([row]))
            goes_on = False
        if not goes_on:
            first = self._first[row] = start
        where = start - first
        self._into[row, where : where + size] = given
        self._count[row] = where + size

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
            self._make_up(one, np.array([start]))
            ready = min(count, length - 1 - start)
            if ready > 0 and self.reach.computed[row] >= start:
                at, size = np.array([start]), np.array([ready])
                self._passes.fill(one, at, size, given[first : first + ready])
                self.reach.reached(one, at + size, self.state.tables_host)
            self._first[row], self._count[row] = start + ready, count - ready
            self._kept[row, : count - ready] = given[first + ready : first + count]

    def _make_up(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Compute what ``rows`` lack before positions ``ends`` from zeros, where their hidden states are gone."""
        starts = self.reach.computed[rows]
        lacking = np.clip(ends - starts, 0, None)
        take = np.clip(np.minimum(lacking, self._max_tokens - (lacking.cumsum() - lacking)), 0, None)
        some = np.flatnonzero(take)
        if len(some):
            some = some[np.argsort(take[some] != 1, kind="stable")]
            rows, starts, take = rows[some], starts[some], take[some]
            self._passes.fill(rows, starts, take, self._kept.new_zeros((int(take.sum()), self._kept.shape[2])))
            self.reach.reached(rows, starts + take, self.state.tables_host)

    def propose(self, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drafts = np.full((len(rows), int(most.max(initial=0))), -1, np.int32)
        known = self.state.known[rows]
        gone = (most > 0) & (self._count[rows] > 0) & (self._first[rows] > self.reach.computed[rows])
        if gone.any():
            self._make_up(rows[gone], self._first[rows[gone]])
        starts = self.reach.computed[rows]
        lacking = known - 1 - starts
        enough = self._first[rows] + self._count[rows] >= known - 1
        counts = np.where(self._level(rows) & enough & (lacking > 0), most, 0)
        at = np.flatnonzero(counts > 0)
        if len(at):
            at = at[np.argsort(lacking[at] != 1, kind="stable")]
            self._draft(rows[at], starts[at], known[at], counts[at], drafts, at)
        return drafts, counts

    def seconds(self, count: int) -> float:
        passes = self._passes
        if not isinstance(passes, NativePasses) or passes.drafter is None:
            return 0.0
        drafter, given = passes.drafter, self._kept[0, :1]
        return least_seconds(lambda: drafter.draft([0], [0], [2], [count], given)) / count

    def verified(self, rows: list[int], starts: list[int], counts: list[int], hidden: torch.Tensor | None) -> None:
        assert hidden is not None
        self._began(rows, starts)
        given, at = self._one_by_one(self.head.combined(hidden)), 0
        for row, start, count in zip(rows, starts, counts, strict=True):
            self._keep(row, start, given[at : at + count])
            at += count

    def draft(self, state: RowState, rows: list[int], most: list[int]) -> list[int]:
        passes = self._passes
        if not isinstance(passes, NativePasses) or passes.drafter is None:
            return super().draft(state, rows, most)
        counts, jobs = [0] * len(rows), self._jobs(rows, most)
        for job in jobs:
            counts[job.at] = job.wanted
        if jobs:
            jobs.sort(key=lambda job: -job.wanted)
            _, told, starts, known, wanted = (list(column) for column in zip(*jobs, strict=True))
            states = [self._kept_of(job) for job in jobs]
            passes.drafter.draft(told, starts, known, wanted, states[0] if len(states) == 1 else torch.cat(states))
            for job in jobs:
                # What follows is computed again, from the target's own hidden states.
                self.reach.advance(job.row, job.known - 1, state.tables_host)
        return counts

    def _jobs(self, rows: list[int], most: list[int]) -> list[Job]:
        """Who is drafted for, as ``propose`` decides."""
        found = []
        for at, (row, limit) in enumerate(zip(rows, most, strict=True)):
            known, start = self.state.known.item(row), self.reach.computed.item(row)
            first, count = self._first.item(row), self._count.item(row)
            if limit and count and first > start:
                self._make_up(np.array([row]), np.array([first]))
                start = self.reach.computed.item(row)
            if limit and count and first <= start < known - 1 <= first + count:
                found.append(Job(at, row, start, known, limit))
        return found

    def _kept_of(self, job: Job) -> torch.Tensor:
        """What the head is given in the first pass."""
        first = self._first.item(job.row)
        return self._kept[job.row, job.start - first : job.known - 1 - first]

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
