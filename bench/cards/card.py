"""The card that is measured: its ceilings, and the tensors and rows that the parts have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.gpu_worker.batch import StepBatch

from .floor import LLAMA_3_8B, TINY, Ceilings
from .timing import seconds_each

Row = tuple[dict[str, Any], dict[str, Any]]
"""Labels and values of one measurement."""

PAGE = 16
CACHE_BYTES = 256 << 20
"""More than any second-level cache holds: calls over as much memory in turn find it cold, as a model's layers do."""


@dataclass
class Card:
    """Shapes are Llama-3-8B's in bfloat16; a ``dry`` run has tiny ones in float32, on the CPU."""

    device: torch.device
    dry: bool
    ceilings: Ceilings

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    @property
    def config(self) -> dict[str, Any]:
        return TINY if self.dry else LLAMA_3_8B

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads, head_dim."""
        config = self.config
        return config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def few(self, dry: Any, real: Any) -> Any:
        """``dry`` in a dry run, ``real`` else."""
        return dry if self.dry else real

    def randn(self, *shape: int) -> torch.Tensor:
        """Normal values of the card's type."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def copies(self, size: int, most: int = 64) -> int:
        """How many things of ``size`` bytes to use in turn, so that none is found in the cache."""
        return 2 if self.dry else min(most, max(2, CACHE_BYTES // size))

    def caches(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [blocks, PAGE, kv_heads, head_dim], in a GPU's order of memory."""
        _, kv_heads, dim = self.heads
        shape = (blocks, kv_heads, PAGE, dim)
        return self.randn(*shape).transpose(1, 2), self.randn(*shape).transpose(1, 2)

    def batch(self, rows: int, queries: int, context: int) -> tuple[StepBatch, int]:
        """A step of ``rows`` rows with so many tokens each, over pages in random order; and the number of pages."""
        pages, tokens = -(-context // PAGE), rows * queries
        blocks = rows * pages
        table = torch.randperm(blocks).view(rows, pages)
        at = torch.arange(context - queries, context)
        slots = table[:, at // PAGE] * PAGE + at % PAGE
        batch = StepBatch(
            token_ids=torch.zeros(tokens, dtype=torch.int64, device=self.device),
            positions=at.repeat(rows).to(self.device),
            slots=slots.flatten().to(self.device),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=self.device) * queries,
            context_lens=torch.full((rows,), context, dtype=torch.int32, device=self.device),
            block_tables=table.to(self.device, torch.int32),
            num_decodes=rows if queries == 1 else 0, max_query_len=queries, max_context_len=context, block_size=PAGE,
        )  # fmt: skip
        if self.device.type != "cuda":  # the CPU's attention reads these on the host
            batch.host_query_starts = list(range(0, tokens + 1, queries))
            batch.host_context_lens = [context] * rows
        return batch, blocks

    def row(self, what: str, shape: str, seconds: float, moved: float = 0, flops: float = 0, **more: Any) -> Row:
        """A kernel's measurement beside its floor: bytes it must move, operations it must make."""
        floor = max(moved / self.ceilings.bandwidth, flops / self.ceilings.products)
        values = {"us": seconds * 1e6, "floor_us": floor * 1e6, "share_of_floor": floor / seconds, **more}
        return {"kernel": what, "shape": shape}, values


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
