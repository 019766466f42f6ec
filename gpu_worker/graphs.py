"""CUDA graphs of the decode step: one for each captured batch size, replayed with the batch padded up to it.

A graph replays fixed kernels on fixed addresses, so each reads *static* tensors that a step's batch is copied into.
Padding rows have context length 0 and slot -1: attention reads nothing and the cache write skips them. The recorder
that captures is passed in, so that padding and copying are tested where there is no GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from .batch import StepBatch

Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]
"""Runs a step once while recording it; the result replays it. The outputs of all recordings stay in place."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every eighth up to 256 or the first that holds ``max_num_seqs``."""
    sizes = [1, 2, 4, *range(8, 257, 8)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class CudaRecorder:
    """Captures into one memory pool shared by all sizes; capture the largest first, so that the others fit in it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        # Warm-up outside the capture: Triton compiles and cuBLAS allocates its workspaces here, not in the graph.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = step()
        return graph.replay, hidden


class DecodeGraphs:
    """Replays decode steps of up to ``sizes[-1]`` rows and ``max_context`` tokens of context."""

    def __init__(self, sizes: list[int], max_context: int, block_size: int, device: torch.device):
        self.sizes, self.max_context, self._block_size = sizes, max_context, block_size
        rows = sizes[-1]
        self._width = -(-max_context // block_size)
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros((rows, self._width), dtype=torch.int32, device=device)
        self._replays: dict[int, tuple[Callable[[], object], torch.Tensor]] = {}

    def capture(self, forward: Callable[[StepBatch], torch.Tensor], record: Recorder, progress: bool) -> None:
        """Record every size, largest first. ``forward`` maps a batch to hidden states."""
        from tqdm import tqdm

        for size in tqdm(self.sizes[::-1], desc="Capturing CUDA graphs", unit="graph", disable=not progress):
            batch = self._static_batch(size)
            self._replays[size] = record(lambda batch=batch: forward(batch))  # type: ignore[misc]

    def _static_batch(self, size: int) -> StepBatch:
        return StepBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=self._query_starts[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._tables[:size],
            num_decodes=size,
            max_query_len=1,
            max_context_len=self.max_context,
            block_size=self._block_size,
        )

    def covers(self, batch: StepBatch) -> bool:
        """True for a batch of decodes alone, few and short enough."""
        rows = batch.context_lens.numel()
        return 0 < rows == batch.num_decodes and rows <= self.sizes[-1] and batch.max_context_len <= self.max_context

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Hidden states [rows, hidden] of a batch that is covered; valid until the next run."""
        rows = batch.context_lens.numel()
        size = self.sizes[bisect_left(self.sizes, rows)]
        self._token_ids[:rows].copy_(batch.token_ids)
        self._positions[:rows].copy_(batch.positions)
        self._slots[:rows].copy_(batch.slots)
        self._context_lens[:rows].copy_(batch.context_lens)
        self._tables[:rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        if rows < size:
            self._slots[rows:size].fill_(-1)
            self._context_lens[rows:size].zero_()
        replay, hidden = self._replays[size]
        replay()
        return hidden[:rows]
