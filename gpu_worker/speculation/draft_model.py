"""A second, smaller model that drafts: any family, with keys and values of its own under the target's block tables.

It is behind the target after a prompt, a prefix from the cache, a preemption, or steps without drafts; then it first
computes what it lacks, at most a step's tokens at a time, and drafts for a row once it is level with it. What it had
computed for drafts that were not accepted is computed again over it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..kv_cache import KVCache
from .draws import draw
from .passes import NativePasses, Passes
from .proposer import Proposer
from .reach import Reach

if TYPE_CHECKING:
    from ..state import RowState, Run


class KeysAndValues(Proposer):
    """What proposers with keys and values of their own share."""

    def __init__(self, state: RowState, kv: KVCache) -> None:
        self.state, self.kv = state, kv
        self.reach = Reach(state.max_rows, kv.num_blocks, state.block_size)

    def ran(self, run: Run, hidden: torch.Tensor | None) -> None:
        self.reach.ran(run.rows, run.starts, self.state.tables_host, self.state.blocks_set)
        self._take_over(run)

    def _take_over(self, run: Run) -> None:
        """Rows that draw from another one's logits, the children of one prompt, go on from what that one has."""
        sources = run.rows[run.sample_src]
        others = np.flatnonzero(run.sample_rows != sources)
        if len(others):
            self.fork(sources[others].tolist(), run.sample_rows[others].tolist())

    def admit(self, row: int) -> None:
        self.reach.admit(row)

    def fork(self, src: list[int], dst: list[int]) -> None:
        self.reach.fork(src, dst)

    def copy_blocks(self, src: np.ndarray, dst: np.ndarray) -> None:
        self.kv.copy_blocks(*self.state.upload(src, dst))
        self.reach.copy_blocks(src, dst)

    def reset(self) -> None:
        self.reach.reset()


class DraftModel(KeysAndValues):
    """Drafts by ``passes`` of the draft model, over sequences of at most ``length`` tokens.

    ``max_tokens``: of one pass that catches up.
    """

    def __init__(self, state: RowState, kv: KVCache, passes: Passes, max_tokens: int, length: int) -> None:
        super().__init__(state, kv)
        self._passes, self._max_tokens, self._length = passes, max_tokens, length
        self._base = np.zeros(state.max_rows, np.int64)  # where each row's last drafts begin

    def kept(self, rows: list[int], tried: list[int], kept: list[int]) -> None:
        which = np.flatnonzero(tried)  # the others computed nothing that may be wrong
        if len(which):
            at, right = np.array(rows)[which], np.array(kept)[which]
            base = self._base[at]
            ends = np.minimum(self.reach.computed[at], base + right)
            self.reach.computed[at] = base
            self.reach.reached(at, ends, self.state.tables_host)  # blocks that right drafts filled are whole

    def propose(self, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        known = self.state.known[rows]
        # Drafting position p computes those before it.
        counts = np.clip(np.minimum(most, self._length + 1 - known), 0, None)
        drafts = np.full((len(rows), int(most.max(initial=0))), -1, np.int32)
        starts = np.minimum(self.reach.computed[rows], known - 1)
        behind = known - starts
        if (late := behind > 1).any():
            counts = np.where(late & ~self._caught_up(rows, starts, known, counts), 0, counts)
            starts = np.minimum(self.reach.computed[rows], known - 1)
            behind = known - starts
        self._base[rows] = known
        at = np.flatnonzero(counts > 0)
        if not len(at):
            return drafts, counts
        at = at[np.argsort(behind[at] != 1, kind="stable")]
        self._draft(rows[at], starts[at], known[at], counts[at], drafts, at)
        self.reach.computed[rows[at]] = known[at] + counts[at] - 1  # of the last draft nothing is computed
        return drafts, counts

    def _caught_up(self, rows: np.ndarray, starts: np.ndarray, known: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Bring rows on that lack more than a pass can have; bool [R]: whether each is level now, or nearly so."""
        lacking = np.where(counts > 0, known - 1 - starts, 0)
        before = lacking.cumsum() - lacking
        take = np.clip(np.minimum(lacking, self._max_tokens - before), 0, None)
        level = take == lacking
        late = np.flatnonzero((take > 0) & ~level)
        self._fill(rows[late], starts[late], take[late])
        return level

    def _fill(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        if not len(rows):
            return
        order = np.argsort(counts != 1, kind="stable")
        rows, starts, counts = rows[order], starts[order], counts[order]
        self._passes.fill(rows, starts, counts)
        self.reach.reached(rows, starts + counts, self.state.tables_host)

    def _draft(
        self, rows: np.ndarray, starts: np.ndarray, known: np.ndarray, counts: np.ndarray, drafts: np.ndarray,
        at: np.ndarray,
    ) -> None:  # fmt: skip
        """Draw ``counts`` drafts of each of ``rows`` into ``drafts[at]`` and into the rows."""
        most = int(counts.max())
        if isinstance(self._passes, NativePasses) and (counts == most).all():
            found = self._passes.drafts(rows, starts, known, most)
            if found is not None:
                self.reach.reached(rows, known, self.state.tables_host)
                drafts[at, :most] = found
                return
        logits, _ = self._passes.last(rows, starts, known - starts)
        self.reach.reached(rows, known, self.state.tables_host)
        for step in range(most):
            if step:
                if (counts <= step).any():
                    going = counts > step
                    rows, known, counts, at = rows[going], known[going], counts[going], at[going]
                logits, _ = self._passes.last(rows, known + (step - 1), np.ones(len(rows), np.int64))
            tokens = draw(logits, self.state, rows, positions := known + step)
            put(self.state, rows, positions, tokens)
            drafts[at, step] = tokens.cpu().numpy()


def put(state: RowState, rows: np.ndarray, positions: np.ndarray, tokens: torch.Tensor) -> None:
    """Write drafts, int32 [S], where passes read them: behind the tokens that are known."""
    if state.on_host:
        state.tokens_host[rows, positions] = tokens.numpy()
    else:
        r, p = state.upload(rows, positions)
        state.tokens.index_put_((r, p), tokens)
