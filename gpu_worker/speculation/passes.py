"""Forward passes of a drafting model over the target's rows: by its own native program on a CPU, else by torch.

The model reads the rows' own token ids and block tables; its keys and values lie in pages of its own. A head is given
hidden states besides (``given``), and reads at each position the token behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..batch import StepBatch, longest_first
from ..device import LongSteps
from ..kv_cache import KVCache
from ..models.model import Model
from ..models.program import Program, runs_natively
from ..sampling.sampler import chooser
from .head_model import Head
from .head_program import HeadProgram
from .native import Drafter

if TYPE_CHECKING:
    from ..state import RowState


class Passes(Protocol):
    """What runs a drafting model. What a method gives is valid until the next call."""

    def last(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run ``counts`` tokens of each row from ``starts`` on, int64 [R] each.

        ``given``: a head's hidden states [T, hidden] of those tokens, one row after another. Returns logits [R, V]
        behind each row's last token, and of a head the hidden states [R, hidden] that it made there.
        """
        raise NotImplementedError

    def fill(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, given: torch.Tensor | None = None) -> None:
        """The same for the keys and values alone."""
        raise NotImplementedError


def passes_of(model: Model, kv: KVCache, state: RowState, long: LongSteps | None, beside: Program | None) -> Passes:
    """Native ones where C can run ``model``, by the threads of ``beside``; torch's elsewhere."""
    if runs_natively(model, kv):
        return NativePasses(model, kv, state, long, beside)
    return TorchPasses(model, kv, state)


class NativePasses(Passes):
    """A program beside the target's. ``drafter`` does what ``last``, a draw and its token written to the row come to,
    over and over."""

    def __init__(
        self, model: Model, kv: KVCache, state: RowState, long: LongSteps | None, beside: Program | None
    ) -> None:
        self._head: HeadProgram | None = None
        if isinstance(model, Head):
            # A head at position p reads the token behind it.
            behind = state.tokens[:, 1:]
            self._head = HeadProgram(model, kv, behind, state.tables, state.max_rows, long, beside)
            self._program: Program = self._head
        elif runs_natively(model, kv):
            self._program = Program(model, kv, state.tokens, state.tables, state.max_rows, long, beside)
        self._none = np.zeros(0, np.int64)
        native = chooser()
        self.drafter = None if native is None else Drafter(self._program, native, state, state.max_rows)

    def last(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._head is not None and given is not None:
            self._head.give(given)
        logits = self._program.logits(rows, starts, counts, counts.cumsum() - 1)
        return logits, None if self._head is None else self._program.result.rows(len(rows)).clone()

    def fill(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, given: torch.Tensor | None = None) -> None:
        if self._head is not None and given is not None:
            self._head.give(given)
        self._program.logits(rows, starts, counts, self._none)


class TorchPasses(Passes):
    """The model's own forward."""

    def __init__(self, model: Model, kv: KVCache, state: RowState) -> None:
        self._model, self._kv, self._state = model, kv, state
        self._shift = 1 if isinstance(model, Head) else 0

    @torch.inference_mode()
    def last(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch = step_batch(self._state, rows, starts, counts, counts.cumsum() - 1, self._shift)
        hidden = self._model.forward(batch, self._kv, None if given is None else given.to(self._model.dtype))
        return self._model.logits(hidden), hidden

    @torch.inference_mode()
    def fill(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, given: torch.Tensor | None = None) -> None:
        batch = step_batch(self._state, rows, starts, counts, rows[:0], self._shift)
        self._model.forward(batch, self._kv, None if given is None else given.to(self._model.dtype))


def step_batch(
    state: RowState, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, outputs: np.ndarray, shift: int
) -> StepBatch:
    """What torch's forward reads of a pass; int64 [R] each, ``outputs`` [S] tokens of it whose result is wanted.

    ``shift``: the token read at a position is so many further on.
    """
    size, single = state.block_size, counts == 1
    order = np.argsort(~single, kind="stable")  # rows of one token come first
    if (order[:-1] > order[1:]).any():
        raise ValueError("a pass has its rows of one token first")
    ends = starts + counts
    query_starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    token_rows = np.repeat(rows, counts)
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
    slots = state.tables_host[token_rows, positions // size].astype(np.int64) * size + positions % size
    decodes, width = int(np.count_nonzero(single)), -(-int(ends.max()) // size)
    orders = () if state.on_host or decodes == len(rows) else longest_first(counts, ends, decodes)
    (
        rows_d, token_rows_d, read_d, positions_d, slots_d, outputs_d, starts_d, ends_d, *orders_d,
    ) = state.upload(
        rows, token_rows, positions + shift, positions, slots, outputs, query_starts.astype(np.int32),
        ends.astype(np.int32), *orders,
    )  # fmt: skip
    return StepBatch(
        token_ids=state.tokens[token_rows_d, read_d].long(),
        positions=positions_d,
        slots=slots_d,
        query_starts=starts_d,
        context_lens=ends_d,
        block_tables=state.tables[:, :width].index_select(0, rows_d),
        num_decodes=decodes,
        max_query_len=int(counts.max()),
        max_context_len=int(ends.max()),
        block_size=size,
        outputs=outputs_d,
        host_query_starts=query_starts.tolist() if state.on_host else [],
        host_context_lens=ends.tolist() if state.on_host else [],
        order=orders_d[0] if orders_d else None,
        order_starts=orders_d[1] if orders_d else None,
    )
