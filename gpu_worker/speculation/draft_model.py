"""A second, smaller model that drafts: any family, with keys and values of its own under the target's block tables.

It is behind the target after a prompt, a prefix from the cache, a preemption, or steps without drafts; then it first
computes what it lacks, at most a step's tokens at a time, and drafts for a row once it is level with it. What it had
computed for drafts that were not accepted is computed again over it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..kv_cache import KVCache
from .draws import draw
from .lengths import least_seconds
from .passes import NativePasses, Passes
from .proposer import Proposer
from .reach import Ints, Reach

if TYPE_CHECKING:
    from ..state import RowState, Run


class KeysAndValues(Proposer):
    """What proposers with keys and values of their own share."""

    lags = True

    def __init__(self, state: RowState, kv: KVCache) -> None:
        self.state, self.kv = state, kv
        self.reach = Reach(state.max_rows, kv.num_blocks, state.block_size)

    def ran(self, run: Run, hidden: torch.Tensor | None) -> None:
        self._began(run.rows, run.starts)
        self._take_over(run)

    def _began(self, rows: Ints, starts: Ints) -> None:
        self.reach.ran(rows, starts, self.state.tables_host, self.state.blocks_set)

    def _take_over(self, run: Run) -> None:
        """Rows that draw from another one's logits, the children of one prompt, go on from what that one has."""
        sources = run.rows[run.sample_src]
        others = np.flatnonzero(run.sample_rows != sources)
        if len(others):
            self.fork(sources[others].tolist(), run.sample_rows[others].tolist())

    def admit(self, rows: list[int]) -> None:
        self.reach.admit(rows)

    def given(self, rows: np.ndarray, blocks: np.ndarray) -> None:
        self.reach.given(rows, blocks)

    def drop(self, rows: list[int]) -> None:
        self.reach.drop(rows)

    def fork(self, src: list[int], dst: list[int]) -> None:
        self.reach.fork(src, dst)

    def copy_blocks(self, src: np.ndarray, dst: np.ndarray) -> None:
        self.kv.copy_blocks(*self.state.upload(src, dst))  # they are not whole, and are given to their rows too


class Job(NamedTuple):
    """``wanted`` drafts of ``row``, the ``at``-th that is asked for: it has ``known`` tokens, and keys and values of
    those before ``start``."""

    at: int
    row: int
    start: int
    known: int
    wanted: int


class DraftModel(KeysAndValues):
    """Drafts by ``passes`` of the draft model, over sequences of at most ``length`` tokens.

    ``max_tokens``: of one pass that catches up.
    """

    def __init__(self, state: RowState, kv: KVCache, passes: Passes, max_tokens: int, length: int) -> None:
        super().__init__(state, kv)
        self._passes, self._max_tokens, self._length = passes, max_tokens, length
        self._base = [0] * state.max_rows  # where each row's last drafts begin

    def verified(self, rows: list[int], starts: list[int], counts: list[int], hidden: torch.Tensor | None) -> None:
        self._began(rows, starts)

    def kept(self, rows: list[int], tried: list[int], kept: list[int]) -> None:
        reach = self.reach
        for row, count, right in zip(rows, tried, kept, strict=True):
            if count:  # the others computed nothing that may be wrong
                base = self._base[row]
                end = min(reach.computed.item(row), base + right)
                reach.computed[row] = base
                reach.advance(row, end, self.state.tables_host)  # blocks that right drafts filled are whole

    def seconds(self, count: int) -> float:
        passes = self._passes
        if not isinstance(passes, NativePasses) or passes.drafter is None or count >= self._length:
            return 0.0
        drafter = passes.drafter
        return least_seconds(lambda: drafter.draft([0], [0], [1], [count])) / count

    def propose(self, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        state, known = self.state, self.state.known[rows]
        found = np.array(self.draft(state, rows.tolist(), most.tolist()))
        places = np.minimum(known[:, None] + np.arange(int(most.max(initial=1))), state.max_model_len)
        if state.on_host:
            return state.tokens_host[rows[:, None], places], found
        drafts = state.tokens[tuple(state.upload(rows[:, None], places))]
        return drafts.cpu().numpy(), found

    def draft(self, state: RowState, rows: list[int], most: list[int]) -> list[int]:
        counts = [0] * len(rows)
        jobs = self._jobs(rows, most)
        for at, _, _, _, count in jobs:
            counts[at] = count
        if jobs:
            self._draw(jobs)
        return counts

    def _jobs(self, rows: list[int], most: list[int]) -> list[Job]:
        """Who is drafted for. The others that lack more than a pass can have are brought on meanwhile."""
        state, computed, room = self.state, self.reach.computed, self._max_tokens
        found, late = [], []
        for at, (row, limit) in enumerate(zip(rows, most, strict=True)):
            known = self._base[row] = state.known.item(row)
            # Drafting position p computes those before it.
            count = min(limit, self._length + 1 - known)
            if count <= 0:
                continue
            start = min(computed.item(row), known - 1)
            lacking = known - 1 - start
            if lacking > room:
                if room > 0:
                    late.append((row, start, room))
                room = 0
            else:
                room -= lacking
                found.append(Job(at, row, start, known, count))
        if late:
            self._fill(*(np.array(column) for column in zip(*late, strict=True)))
        return found

    def _fill(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        self._passes.fill(rows, starts, counts)
        self.reach.reached(rows, starts + counts, self.state.tables_host)

    def _draw(self, jobs: list[Job]) -> None:
        """Draw the drafts of ``jobs`` into their rows."""
        reach, tables = self.reach, self.state.tables_host
        if isinstance(self._passes, NativePasses) and self._passes.drafter is not None:
            if len(jobs) > 1:
                jobs.sort(key=lambda job: -job.wanted)
            _, rows, starts, known, counts = (list(column) for column in zip(*jobs, strict=True))
            self._passes.drafter.draft(rows, starts, known, counts)
        else:
            jobs.sort(key=lambda job: job.known - job.start != 1)
            self._draw_by_passes(jobs)
        for job in jobs:
            reach.advance(job.row, job.known, tables)
            reach.computed[job.row] = job.known + job.wanted - 1  # of the last draft nothing is computed

    def _draw_by_passes(self, jobs: list[Job]) -> None:
        _, rows, starts, known, counts = (np.array(column) for column in zip(*jobs, strict=True))
        logits, _ = self._passes.last(rows, starts, known - starts)
        for step in range(int(counts.max())):
            if step:
                if (counts <= step).any():
                    going = counts > step
                    rows, known, counts = rows[going], known[going], counts[going]
                logits, _ = self._passes.last(rows, known + (step - 1), np.ones(len(rows), np.int64))
            tokens = draw(logits, self.state, rows, positions := known + step)
            put(self.state, rows, positions, tokens)


def put(state: RowState, rows: np.ndarray, positions: np.ndarray, tokens: torch.Tensor) -> None:
    """Write drafts, int32 [S], where passes read them: behind the tokens that are known."""
    if state.on_host:
        state.tokens_host[rows, positions] = tokens.numpy()
    else:
        r, p = state.upload(rows, positions)
        state.tokens.index_put_((r, p), tokens)
