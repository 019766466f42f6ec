"""CUDA graphs of the forward pass: one for each captured size, replayed with the step's batch padded up to it.

A graph replays fixed kernels on fixed addresses, so each reads *static* tensors that a step's batch is copied into.
There are two kinds. ``DecodeGraphs`` record whole decode steps, by number of rows. ``PieceGraphs`` record steps of few
tokens, prompts' chunks among them, by number of tokens: as pieces, cut at each attention, which runs between them. What
an attention does follows from the lengths of all rows, which no graph could fix; all else follows from the number of
tokens alone. Eager, a step's several hundred launches take the host longer than such a step takes the device.

The recorder that captures is passed in, so that padding, copying and cutting are tested where there is no GPU.
"""

from __future__ import annotations

import functools
import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..proto.process import shows_bars
from .batch import StepBatch
from .kernels.attention import Scores
from .lora.card import CardSlots, RecordedRows
from .memory import out_of_memory, says_no_memory

log = logging.getLogger(__name__)

Forward = Callable[[StepBatch], torch.Tensor]
"""From a batch to hidden states."""

Replay = Callable[[], object]
"""Runs again what was recorded."""

Cut = Callable[[], None]
"""Ends a recorded piece and begins the next. What the host does between two pieces is for it to repeat."""


class Recorder(Protocol):
    """Runs a step while recording it. The outputs of all recordings stay in place."""

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """As one graph."""

    def pieces(self, step: Callable[[Cut], torch.Tensor]) -> tuple[list[Replay], torch.Tensor]:
        """As one graph more than ``step`` calls what it is given. Runs ``step`` several times."""


def capture_sizes(max_num_seqs: int, wanted: list[int] | None = None, most: int | None = None) -> list[int]:
    """Rows of decode graphs: ``wanted``, or 1, 2, 4, then every eighth up to 256; up to ``most``, or the first that
    holds ``max_num_seqs``. Steps of more rows than the last run without a graph."""
    sizes = sorted(set(wanted or [1, 2, 4, *range(8, 257, 8)]))
    return _up_to([size for size in sizes if most is None or size <= most], max_num_seqs)


def piece_sizes(max_tokens: int) -> list[int]:
    """Tokens of pieces: up to 512, behind which a step keeps the device busy for longer than the host."""
    return _up_to([16, 32, 64, *range(128, 513, 64)], max_tokens)


def _up_to(sizes: list[int], most: int) -> list[int]:
    return sizes[: bisect_left(sizes, most) + 1]


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of every capture: cuBLAS keeps a workspace (32 MiB on Hopper) for each stream it has ever run on."""
    return torch.cuda.Stream(device)


class VoidCapture(RuntimeError):
    """A capture that could not be ended. torch's allocator goes on as if it were under way, and would keep what side
    streams have used for good, so this process cannot serve."""


class CudaRecorder:
    """Captures into one memory pool shared by all graphs; capture the largest first, so that the others fit in it."""

    def __init__(self) -> None:
        gc.collect()  # so that garbage does not take room in the measurement, or from the graphs
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream(torch.cuda.current_device())

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        (replay,), hidden = self.pieces(lambda cut: step())
        return replay, hidden

    def pieces(self, step: Callable[[Cut], torch.Tensor]) -> tuple[list[Replay], torch.Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Outside the capture Triton compiles, and cuBLAS allocates its workspaces, but not in the graph.
            step(lambda: None)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what was allocated on this stream no other could use again
            graphs = [self._begin()]

            def cut() -> None:
                graphs[-1].capture_end()
                graphs.append(self._begin())

            try:
                hidden = step(cut)
            except BaseException as error:
                self._end(graphs[-1], error)
                raise
            graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return [graph.replay for graph in graphs], hidden

    def _end(self, graph: torch.cuda.CUDAGraph, error: BaseException) -> None:
        """End what ``error`` broke off; where that was the end itself (instantiation took memory), there is nothing.

        An end that runs out of memory has ended the capture: what it instantiates comes after.
        """
        if torch.cuda.is_current_stream_capturing():
            try:
                graph.capture_end()
            except RuntimeError as void:
                if not says_no_memory(void):  # ``error``, which it came of, may well be one
                    raise VoidCapture(f"a capture of CUDA graphs broke off ({error}) and could not be ended") from void

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        return graph


class Graphs:
    """What both kinds share. ``sizes`` rise; those that are not recorded are dropped.

    With ``slots`` they are of steps in which some row has an adapter, as ``slots`` say of the step that is run.
    """

    unit: str

    def __init__(self, sizes: Sequence[int], slots: CardSlots | None = None) -> None:
        self.sizes, self._lora = list(sizes), slots
        self._adapted: dict[int, RecordedRows] = {}

    def record(self, size: int, forward: Forward, recorder: Recorder) -> None:
        """Record one size."""
        if (slots := self._lora) is None:
            self._record(size, forward, recorder)
        else:
            rows = self._adapted[size] = RecordedRows(size, slots)
            with slots.recorded(rows):
                self._record(size, forward, recorder)

    def _record(self, size: int, forward: Forward, recorder: Recorder) -> None:
        raise NotImplementedError

    def _fill_adapted(self, size: int) -> None:
        """Before a replay of ``size``."""
        if self._lora is not None:
            self._lora.fill(self._adapted[size])

    def covers(self, batch: StepBatch) -> bool:
        """Whether ``run`` takes ``batch``."""
        raise NotImplementedError

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Hidden states [T, hidden] of all tokens of a batch that is covered; valid until the next run."""
        raise NotImplementedError

    def _least(self, needed: int) -> int:
        """The smallest size that holds ``needed``."""
        return self.sizes[bisect_left(self.sizes, needed)]

    def _holds(self, needed: int) -> bool:
        return bool(self.sizes) and 0 < needed <= self.sizes[-1]


class DecodeGraphs(Graphs):
    """Replays decode steps of up to ``sizes[-1]`` rows and ``max_context`` tokens of context.

    Padding rows have context length 0 and slot -1: attention reads nothing and the cache write skips them. The static
    block tables take ``sizes[-1] * max_context / block_size`` int32: 8 MiB for 256 rows of 131,072 tokens.
    """

    unit = "rows"

    def __init__(
        self, sizes: Sequence[int], max_context: int, block_size: int, device: torch.device,
        slots: CardSlots | None = None,
    ):  # fmt: skip
        super().__init__(sizes, slots)
        self.max_context, self._block_size = max_context, block_size
        rows = sizes[-1]
        self._width = -(-max_context // block_size)
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros((rows, self._width), dtype=torch.int32, device=device)
        self._replays: dict[int, tuple[Replay, torch.Tensor]] = {}

    def capture(self, forward: Forward, recorder: Recorder, progress: bool) -> None:
        """Record every size, largest first."""
        capture([self], forward, recorder, progress)

    def _record(self, size: int, forward: Forward, recorder: Recorder) -> None:
        # A batch for each run: what attention keeps in it for its layers has to lie in the graph's own memory. What the
        # run before the capture has made is freed behind it.
        self._replays[size] = recorder(lambda: forward(self._static_batch(size)))

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
        return rows == batch.num_decodes and self._holds(rows) and batch.max_context_len <= self.max_context

    def run(self, batch: StepBatch) -> torch.Tensor:
        rows = batch.context_lens.numel()
        size = self._least(rows)
        self._token_ids[:rows].copy_(batch.token_ids)
        self._positions[:rows].copy_(batch.positions)
        self._slots[:rows].copy_(batch.slots)
        self._context_lens[:rows].copy_(batch.context_lens)
        self._tables[:rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        if rows < size:
            self._slots[rows:size].fill_(-1)
            self._context_lens[rows:size].zero_()
        self._fill_adapted(size)
        replay, hidden = self._replays[size]
        replay()
        return hidden[:rows]


class PieceGraphs(Graphs):
    """Replays steps of up to ``sizes[-1]`` tokens, whatever their rows and lengths, but for their attention.

    Queries leave a piece, and what was attended enters the next, through one tensor each that all layers and sizes
    share. Padding tokens have slot -1, and no attention looks at them: what they become is nobody's.
    """

    unit = "tokens"

    def __init__(
        self, sizes: Sequence[int], heads: int, head_dim: int, block_size: int, dtype: torch.dtype,
        device: torch.device, slots: CardSlots | None = None,
    ):  # fmt: skip
        """``heads`` of ``head_dim`` values are those of this process's queries."""
        super().__init__(sizes, slots)
        tokens, self._block_size = sizes[-1], block_size
        self._token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self._queries = torch.zeros((tokens, heads, head_dim), dtype=dtype, device=device)
        self._attended = torch.zeros_like(self._queries)
        self._nobody = torch.zeros((2, 1), dtype=torch.int32, device=device)
        self._replays: dict[int, tuple[list[Replay], list[_Attention], torch.Tensor]] = {}

    def _record(self, size: int, forward: Forward, recorder: Recorder) -> None:
        attentions: list[_Attention] = []

        def step(cut: Cut) -> torch.Tensor:
            attentions.clear()

            def attend(
                attention: Callable[..., object], q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                batch: StepBatch, scores: Scores,
            ) -> torch.Tensor:  # fmt: skip
                self._queries[:size].copy_(q)
                attentions.append((attention, k_cache, v_cache, scores))
                cut()
                return self._attended[:size]

            return forward(self._static_batch(size, attend))

        replays, hidden = recorder.pieces(step)
        self._replays[size] = replays, attentions, hidden

    def _static_batch(self, size: int, attend: Callable[..., torch.Tensor]) -> StepBatch:
        """Of tokens without rows: ``attend`` is all that would ask for these."""
        return StepBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=self._nobody[:, 0],
            context_lens=self._nobody[0],
            block_tables=self._nobody[:1],
            num_decodes=0,
            max_query_len=size,
            max_context_len=size,
            block_size=self._block_size,
            attend=attend,
        )

    def covers(self, batch: StepBatch) -> bool:
        """True for a batch of few tokens."""
        return self._holds(len(batch.token_ids))

    def run(self, batch: StepBatch) -> torch.Tensor:
        tokens = len(batch.token_ids)
        size = self._least(tokens)
        self._token_ids[:tokens].copy_(batch.token_ids)
        self._positions[:tokens].copy_(batch.positions)
        self._slots[:tokens].copy_(batch.slots)
        if tokens < size:
            self._slots[tokens:size].fill_(-1)
        self._fill_adapted(size)
        replays, attentions, hidden = self._replays[size]
        queries, attended = self._queries[:tokens], self._attended[:tokens]
        for replay, (attention, k_cache, v_cache, scores) in zip(replays, attentions, strict=False):
            replay()
            attention(queries, k_cache, v_cache, batch, scores, attended)
        replays[-1]()
        return hidden[:tokens]


_Attention = tuple[Callable[..., object], torch.Tensor, torch.Tensor, Scores]
"""What a layer attends with (``paged_attention``), its caches of keys and values, and what becomes of its scores."""


def capture(kinds: Sequence[Graphs], forward: Forward, recorder: Recorder, progress: bool, drop: bool = True) -> None:
    """Record every size of each of ``kinds``, largest first.

    Where memory runs out for a size, it is dropped (its steps take a larger one, or run eagerly), and one warning tells
    of all that were. Without ``drop`` that raises.
    """
    from tqdm import tqdm

    jobs = [(graphs, size) for graphs in kinds for size in graphs.sizes[::-1]]
    dropped: list[str] = []
    for graphs, size in tqdm(jobs, desc="Capturing CUDA graphs", unit="graph", disable=not (progress and shows_bars())):
        try:
            graphs.record(size, forward, recorder)
        except (MemoryError, RuntimeError) as error:
            if not drop or isinstance(error, VoidCapture) or not out_of_memory(error):
                raise
            graphs.sizes.remove(size)
            dropped.append(f"{size} {graphs.unit}")
    if dropped:
        log.warning(
            "no memory for CUDA graphs of %s: such steps take a larger graph or run without one; lower "
            "`gpu_memory_utilization`, `max_num_seqs` or `max_num_batched_tokens`", ", ".join(dropped),
        )  # fmt: skip


def graph_bytes(
    make: Sequence[Callable[[], Graphs]], forward: Forward, recorder: Recorder, used: Callable[[], int], least: int
) -> int:
    """Bytes that all graphs of these kinds will take, extrapolated from the two largest of each.

    The first one of a kind takes its static tensors and the memory that the others then share; each of the others takes
    its nodes and its output. ``used`` tells the bytes of the device that are in use. Growth is counted in the
    allocator's segments, so an output may seem free; ``least`` is the size of a token's.
    """
    total, kept = 0, []
    for new in make:
        before = used()
        graphs = new()
        kept.append(graphs)  # so that the next kind finds the memory they share
        grown = []
        for size in graphs.sizes[-1:-3:-1]:
            graphs.record(size, forward, recorder)
            now = used()
            grown.append(max(now - before, 0))
            before = now
        total += grown[0]
        if len(grown) > 1:
            total += max(grown[1], least * graphs.sizes[-2]) * (len(graphs.sizes) - 1)
    return total
