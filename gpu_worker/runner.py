"""One step: a plan in, sampled tokens out.

``launch`` applies a plan to the rows, runs the model and the sampler, and writes each token into its row on the
device, so that the next plan can be launched before anybody has seen the tokens. ``Arrival.wait`` hands them over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..proto.messages import StepPlan
from .batch import StepBatch
from .graphs import CudaRecorder, DecodeGraphs, capture_sizes
from .kv_cache import KVCache
from .sampler import sample
from .state import RowState, Run
from .transfer import Arrival, Download

if TYPE_CHECKING:
    from .models.decoder import Decoder


class Runner:
    """Owns the step of one device. Not thread-safe: one compute thread, one compute stream."""

    def __init__(self, model: Decoder, state: RowState, kv: KVCache, max_tokens: int):
        self.model, self.state, self.kv = model, state, kv
        self.max_tokens = max_tokens
        self.graphs: DecodeGraphs | None = None
        self._on_host = state.device.type == "cpu"
        self._download = Download(state.max_rows, state.device)

    @torch.inference_mode()
    def capture(self, max_context: int, progress: bool) -> None:
        """Record CUDA graphs for decode batches whose longest context is at most ``max_context``."""
        state = self.state
        graphs = DecodeGraphs(
            capture_sizes(state.max_rows), min(max_context, state.max_model_len), state.block_size, state.device
        )
        graphs.capture(lambda batch: self.model.forward(batch, self.kv), CudaRecorder(), progress)
        self.graphs = graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Arrival:
        """Carry out a plan. Raises PlanError on one that cannot be; any exception leaves the rows undefined."""
        state = self.state
        state.apply(plan, self.kv)
        run = state.checked_run(plan, self.max_tokens)
        if not len(run.rows):
            return self._download(torch.empty(0, dtype=torch.int32, device=state.device))
        batch, last, rows, positions = self._batch(run)
        if self.graphs is not None and self.graphs.covers(batch):
            hidden = self.graphs.run(batch).index_select(0, last)
        else:
            batch.outputs = last
            hidden = self.model.forward(batch, self.kv)
        if not len(run.sample_src):
            return self._download(torch.empty(0, dtype=torch.int32, device=state.device))
        logits = self.model.logits(hidden)
        needs = state.sampling.needs(run.sample_rows)
        tokens = sample(logits, state.sampling, rows, positions, needs).to(torch.int32)
        state.tokens.index_put_((rows, positions), tokens)
        state.known[run.sample_rows] = run.positions + 1
        return self._download(tokens)

    def _batch(self, run: Run) -> tuple[StepBatch, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The batch, and for each sample slot: index of its token, destination row, position to write."""
        state, size = self.state, self.state.block_size
        ends = run.starts + run.counts
        query_starts = np.zeros(len(run.rows) + 1, np.int64)
        np.cumsum(run.counts, out=query_starts[1:])
        longest = int(run.counts.max())
        if longest == 1:
            num_decodes, token_rows, positions = len(run.rows), run.rows, run.starts
        else:
            num_decodes = int((run.counts != 1).argmax())
            token_rows = np.repeat(run.rows, run.counts)
            positions = np.arange(query_starts[-1]) + np.repeat(run.starts - query_starts[:-1], run.counts)
        slots = state.tables_host[token_rows, positions // size].astype(np.int64) * size + positions % size
        last = query_starts[1:][run.sample_src] - 1
        longest_context = int(ends.max())
        uploaded = state.upload(
            run.rows, token_rows, positions, slots, last, run.sample_rows, run.positions,
            query_starts.astype(np.int32), ends.astype(np.int32),
        )  # fmt: skip
        rows_d, token_rows_d, positions_d, slots_d, last_d, sample_rows_d, sample_positions_d, starts_d, ends_d = (
            uploaded
        )
        batch = StepBatch(
            token_ids=state.tokens[token_rows_d, positions_d].long(),
            positions=positions_d,
            slots=slots_d,
            query_starts=starts_d,
            context_lens=ends_d,
            block_tables=state.tables[:, : -(-longest_context // size)].index_select(0, rows_d),
            num_decodes=num_decodes,
            max_query_len=longest,
            max_context_len=longest_context,
            block_size=size,
            host_query_starts=query_starts.tolist() if self._on_host else [],
            host_context_lens=ends.tolist() if self._on_host else [],
        )
        return batch, last_d, sample_rows_d, sample_positions_d
