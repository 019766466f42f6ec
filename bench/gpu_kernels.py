"""The card's ceilings, and each kernel against its floor: attention, norm, rope, activation, sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gpu_floor import Ceilings, decode_bytes, prefill_flops
from gpu_timing import seconds_each

from quire.gpu_worker.batch import StepBatch
from quire.gpu_worker.kernels import activation, attention, norm, rope
from quire.gpu_worker.sampling.sample_batch import SampleBatch
from quire.gpu_worker.sampling.sampler import sample
from quire.gpu_worker.sampling.sampling_state import SamplingState
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

Row = dict[str, Any]
HEADS, KV_HEADS, DIM, HIDDEN, WIDE, PAGE = 32, 8, 128, 4096, 14336, 16
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=1.0, top_k=50),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "all": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
}


def measure_ceilings(device: torch.device, dry: bool) -> Ceilings:
    """Copy bandwidth (read plus written) and the rate of a square half-precision product."""
    count, side = (1 << 12, 64) if dry else (1 << 30, 8192)
    return Ceilings(_bandwidth(count, device), _products(side, torch.float32 if dry else torch.bfloat16, device))


def _bandwidth(count: int, device: torch.device) -> float:
    source = torch.zeros(count, dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_each([lambda: target.copy_(source)], device)


def _products(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / seconds_each([lambda: torch.mm(a, b, out=out)], device, 1.0)


class Bench:
    """Shapes are Llama-3-8B's; ``dry`` makes them tiny and float32, for Triton's interpreter."""

    def __init__(self, device: torch.device, ceilings: Ceilings, dry: bool):
        self.device, self.ceilings, self.dry = device, ceilings, dry
        self.dtype = torch.float32 if dry else torch.bfloat16
        self.heads, self.kv_heads, self.dim = (4, 2, 16) if dry else (HEADS, KV_HEADS, DIM)

    def run(self) -> Iterator[Row]:
        """Every measurement, one row each."""
        yield from self.layer_kernels()
        yield from self.decode_attention()
        yield from self.prefill_attention()
        yield from self.sampler()

    def _row(self, kernel: str, shape: str, seconds: float, moved: float = 0, flops: float = 0, **more: Any) -> Row:
        floor = max(moved / self.ceilings.bandwidth, flops / self.ceilings.products)
        return {
            "kernel": kernel, "shape": shape, "us": seconds * 1e6, "floor_us": floor * 1e6,
            "share_of_floor": floor / seconds, **more,
        }  # fmt: skip

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def layer_kernels(self) -> Iterator[Row]:
        """Norm, activation and rope, over enough tensors in turn that none is found in the cache."""
        hidden, wide = (64, 96) if self.dry else (HIDDEN, WIDE)
        for tokens in (4,) if self.dry else (1, 64, 256, 2048):
            shape = f"tokens {tokens}"
            copies = self._copies(tokens * hidden * 4)
            xs = [(self._randn(tokens, hidden), self._randn(tokens, hidden)) for _ in range(copies)]
            weight = self._randn(hidden)
            calls = [lambda x=x, r=r, w=weight: norm.rms_norm(x, w, 1e-5, r) for x, r in xs]
            yield self._row("rms_norm + residual", shape, seconds_each(calls, self.device), 4 * xs[0][0].nbytes)
            wides = [self._randn(tokens, 2 * wide) for _ in range(self._copies(tokens * wide * 4))]
            calls = [lambda x=x: activation.gated_activation(x, "silu") for x in wides]
            yield self._row("gated silu", shape, seconds_each(calls, self.device), 1.5 * wides[0].nbytes)
            yield self._rope(tokens, shape)

    def _rope(self, tokens: int, shape: str) -> Row:
        fused = self._randn(tokens, self.heads + 2 * self.kv_heads, self.dim)
        q, k, v = fused.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        caches = self._caches(-(-tokens // PAGE))
        table = torch.rand(tokens, self.dim // 2, device=self.device)
        at = torch.arange(tokens, device=self.device)
        seconds = seconds_each([lambda: rope.rope_write(q, k, v, table, table, at, at, *caches)], self.device)
        return self._row("rope + kv write", shape, seconds, 2 * (fused.nbytes - v.numel() * v.itemsize // 2))

    def _copies(self, size: int) -> int:
        return 2 if self.dry else min(64, max(1, (256 << 20) // size))

    def _caches(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (blocks, self.kv_heads, PAGE, self.dim)
        return self._randn(*shape).transpose(1, 2), self._randn(*shape).transpose(1, 2)

    def _batch(self, rows: int, queries: int, context: int, blocks: int) -> StepBatch:
        pages = -(-context // PAGE)
        table = torch.randperm(blocks)[: rows * pages].view(rows, pages)
        none = torch.zeros(rows * queries, dtype=torch.int64, device=self.device)
        return StepBatch(
            token_ids=none, positions=none, slots=none,
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=self.device) * queries,
            context_lens=torch.full((rows,), context, dtype=torch.int32, device=self.device),
            block_tables=table.to(self.device, torch.int32),
            num_decodes=rows if queries == 1 else 0, max_query_len=queries, max_context_len=context, block_size=PAGE,
        )  # fmt: skip

    def decode_case(self, rows: int, context: int) -> tuple[list, int]:
        """Arguments of paged attention for several layers in turn, more than the cache holds; bytes of one call."""
        size = decode_bytes(rows, context, self.kv_heads, self.dim, self.dtype.itemsize)
        blocks = rows * -(-context // PAGE)
        layers = 1 if self.dry else min(32, max(2, (512 << 20) // size))
        batch, q = self._batch(rows, 1, context, blocks), self._randn(rows, self.heads, self.dim)
        return [(q, *self._caches(blocks), batch, attention.Scores(self.dim**-0.5)) for _ in range(layers)], size

    def decode_attention(self) -> Iterator[Row]:
        """Share of the copy bandwidth that reading the keys and values reaches."""
        for rows in (2,) if self.dry else (1, 8, 64, 256):
            for context in (40,) if self.dry else (512, 1024, 4096):
                cases, size = self.decode_case(rows, context)
                calls = [lambda c=case: attention.paged_attention(*c) for case in cases]
                yield self._row(
                    "decode attention", f"batch {rows} context {context}", seconds_each(calls, self.device), size
                )
                del cases, calls

    def prefill_case(self, rows: int, tokens: int) -> tuple[tuple, float]:
        """Arguments of paged attention for whole prompts, and the operations they take."""
        blocks = rows * -(-tokens // PAGE)
        q = self._randn(rows * tokens, self.heads, self.dim)
        case = (q, *self._caches(blocks), self._batch(rows, tokens, tokens, blocks), attention.Scores(self.dim**-0.5))
        return case, rows * prefill_flops(tokens, self.heads, self.dim)

    def prefill_attention(self) -> Iterator[Row]:
        """Paged prefill, and torch's attention backends on the same lengths unpaged."""
        for rows, tokens in ((2, 20),) if self.dry else ((1, 1024), (1, 4096), (1, 16384), (8, 1024)):
            case, flops = self.prefill_case(rows, tokens)
            seconds = seconds_each([lambda case=case: attention.paged_attention(*case)], self.device)
            others = dict(self._sdpa(rows, tokens))
            best = min(others.values(), default=None)
            yield self._row(
                "prefill attention", f"{rows} x {tokens} tokens", seconds, flops=flops,
                sdpa_us={name: s * 1e6 for name, s in others.items()},
                share_of_best_sdpa=best / seconds if best else None,
            )  # fmt: skip

    def _sdpa(self, rows: int, tokens: int) -> Iterator[tuple[str, float]]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = (self._randn(rows, self.heads, tokens, self.dim) for _ in range(3))
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    call = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
                    yield backend.name, seconds_each([call], self.device)
            except RuntimeError as error:
                print(f"  {backend.name} does not run here: {str(error).splitlines()[0]}")

    def sampler(self) -> Iterator[Row]:
        """From logits to tokens; the floor is reading the logits once."""
        for vocab in (300,) if self.dry else (128_256, 151_936):
            for rows in (2,) if self.dry else (1, 64, 256):
                logits = torch.randn(rows, vocab, device=self.device) * 3
                for name, params in SAMPLINGS.items():
                    seconds = self._sample(logits, params)
                    yield self._row(f"sampler {name}", f"batch {rows} vocab {vocab}", seconds, logits.nbytes)

    def _sample(self, logits: torch.Tensor, params: SamplingParams) -> float:
        rows = len(logits)
        state = SamplingState(rows, logits.shape[1], self.device)
        for row in range(rows):
            state.admit(row, Generate(params, row), row, 0, np.zeros(0, np.int32))
        host, at = np.arange(rows), torch.arange(rows, device=self.device)
        state.of(at)  # parameters are uploaded before anything is captured
        needs, history = state.needs(host, host), torch.zeros((rows, 1), dtype=torch.int32, device=self.device)
        batch = SampleBatch(at, at, host, host, history, needs)
        return seconds_each([lambda: sample(logits, state, batch)], self.device)

    def sweep(self) -> Iterator[Row]:
        """Other tiles for attention than the ones chosen: what a change of ``decode_tiles`` would bring."""
        for rows, context in ((2, 40),) if self.dry else ((8, 1024), (64, 1024), (256, 1024)):
            cases, size = self.decode_case(rows, context)
            for tiles in _decode_variants(self.dry):
                seconds = self._launch(cases, rows, tiles)
                if seconds:
                    yield self._row("decode sweep", f"batch {rows} context {context} {tiles}", seconds, size)
            del cases
        for rows, tokens in ((2, 20),) if self.dry else ((1, 4096),):
            case, flops = self.prefill_case(rows, tokens)
            for tiles in _prefill_variants(self.dry):
                seconds = self._launch([case], rows, tiles)
                if seconds:
                    yield self._row("prefill sweep", f"{rows} x {tokens} tokens {tiles}", seconds, flops=flops)

    def _launch(self, cases: list, rows: int, tiles: attention.Tiles) -> float | None:
        out = torch.empty_like(cases[0][0])
        calls = [lambda c=c: attention.launch(*c[:3], out, c[3], c[4], 0, rows, tiles) for c in cases]
        try:
            return seconds_each(calls, self.device)
        except Exception as error:  # noqa: BLE001 - too much shared memory is an exception of Triton's own
            print(f"  {tiles} does not run here: {str(error).splitlines()[0]}")
            return None


def _decode_variants(dry: bool) -> Iterator[attention.Tiles]:
    for block_n in (16,) if dry else (32, 64, 128):
        for stages in (3,) if dry else (3, 4, 5):
            for warps in (4,) if dry else (2, 4, 8):
                for splits in (2,) if dry else (1, 2, 4, 8):
                    if splits in (1, 2, 8) or (stages, warps) == (3, 4):
                        yield attention.Tiles(16, block_n, splits, warps, stages)


def _prefill_variants(dry: bool) -> Iterator[attention.Tiles]:
    for block_m in (16,) if dry else (64, 128):
        for block_n in (16,) if dry else (32, 64, 128):
            for stages in (3,) if dry else (2, 3, 4):
                for warps in (4,) if dry else (4, 8):
                    yield attention.Tiles(block_m, block_n, 1, warps, stages)
