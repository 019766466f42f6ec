"""Medusa's heads (arXiv 2401.10774): each reads the target's last hidden state and draws one token further on.

Head i is blocks of x + SiLU(W x + b), then an output layer; from the hidden state that gave token t it draws token
t + 1 + i. All drafts come of one hidden state, and nothing is kept of a sequence but that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from ...proto.config import ConfigError
from ..layers.linear import Linear
from ..models.families.common import integer
from ..models.model import Model
from .draws import draw
from .head_files import HeadFiles, Taker, head_config, head_files, without_prefix
from .proposer import Proposer

if TYPE_CHECKING:
    from ..state import RowState, Run


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """Its blocks and its output layer."""

    blocks: list[Linear]
    output: Linear

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> logits float32 [S, V]."""
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return self.output(hidden).float()


def load_medusa(folder: str, target: Model) -> list[MedusaHead]:
    """The heads in ``folder``: ``{head}.{block}.linear.weight`` and ``{head}.{blocks}.weight``. Raises ConfigError."""
    hf = head_config(folder)
    try:
        count, blocks = integer(hf, "medusa_num_heads"), integer(hf, "medusa_num_layers", 1)
    except ConfigError as error:
        raise ConfigError(f"{folder}/{error}") from error
    files = HeadFiles(Path(folder), head_files(folder, "medusa_lm_head"), renamed=without_prefix(r"medusa_head\."))
    take, hidden = Taker(files, target.dtype, target.device), target.whole.hidden_size
    heads = [
        MedusaHead(
            [take.linear(f"{head}.{block}.linear", hidden, hidden) for block in range(blocks)],
            take.linear(f"{head}.{blocks}", target.whole.vocab_size, hidden),
        )
        for head in range(count)
    ]
    files.finish()
    return heads


class Medusa(Proposer):
    """Drafts by ``heads``, at most as many as there are."""

    wants_hidden = True

    def __init__(self, state: RowState, heads: list[MedusaHead], dtype: torch.dtype, hidden_size: int) -> None:
        self.state, self.heads, self._dtype = state, heads, dtype
        self._room = len(heads) + 1
        self._kept = torch.zeros((state.max_rows, self._room, hidden_size), dtype=dtype, device=state.device)
        self._first = np.zeros(state.max_rows, np.int64)  # the position of each row's first hidden state kept
        self._count = np.zeros(state.max_rows, np.int64)

    def admit(self, rows: list[int]) -> None:
        self._count[rows] = 0

    def fork(self, src: list[int], dst: list[int]) -> None:
        self._first[dst], self._count[dst] = self._first[src], self._count[src]
        self._kept[dst] = self._kept[src]

    def ran(self, run: Run, hidden: torch.Tensor | None) -> None:
        if hidden is None:  # of rows that are not drafted for
            self._count[run.rows] = self._count[run.sample_rows] = 0
            return
        counts = np.minimum(run.counts, self._room)
        last = run.counts.cumsum()
        of = np.repeat(np.arange(len(counts)), counts)
        where = np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts)
        source, rows, places = self.state.upload(np.repeat(last - counts, counts) + where, run.rows[of], where)
        self._kept[rows, places] = hidden[source].to(self._dtype)
        self._first[run.rows], self._count[run.rows] = run.ends - counts, counts
        sources = run.rows[run.sample_src]
        others = np.flatnonzero(run.sample_rows != sources)
        if len(others):  # the children of one prompt
            self.fork(sources[others].tolist(), run.sample_rows[others].tolist())

    @torch.inference_mode()
    def propose(self, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        known = self.state.known[rows]
        where = known - 2 - self._first[rows]
        there = (where >= 0) & (where < self._count[rows])
        counts = np.where(there, np.minimum(most, len(self.heads)), 0)
        drafts = np.full((len(rows), int(most.max(initial=0))), -1, np.int32)
        if not counts.any():
            return drafts, counts
        rows_there, places = self.state.upload(rows, np.where(there, where, 0))
        hidden = self._kept[rows_there, places]
        for step in range(int(counts.max())):
            drafts[:, step] = draw(self.heads[step](hidden), self.state, rows, known + step).cpu().numpy()
        return drafts, counts
