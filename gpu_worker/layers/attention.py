"""One layer's attention: projections, norms of query and key, rotation, the write to the cache, paged attention."""

from __future__ import annotations

import torch

from ..batch import StepBatch
from ..models.spec import DecoderSpec
from .attention_cpu import AttentionPlan
from .attention_cpu import paged_attention as attention_cpu
from .linear import Linear
from .norm import RMSNorm
from .rope import rotate


class StepContext:
    """What the layers of one step share on a CPU: rotations of its tokens, and plans by window."""

    def __init__(self, batch: StepBatch, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.batch = batch
        self.cos = cos.index_select(0, batch.positions).unsqueeze(1)
        self.sin = sin.index_select(0, batch.positions).unsqueeze(1)
        # Slot -1 means "write nothing": those tokens are left out of the copy.
        unwritten = bool((batch.slots < 0).any())
        self.written = torch.nonzero(batch.slots >= 0).flatten() if unwritten else None
        self.slots = batch.slots[batch.slots >= 0] if unwritten else batch.slots
        self._plans: dict[tuple[int | None, int], AttentionPlan] = {}

    def plan(self, window: int | None, dtype: torch.dtype, page_values: int) -> AttentionPlan:
        """The attention plan of layers with ``window``, made by the first that asks."""
        found = self._plans.get((window, page_values))
        if found is None:
            found = self._plans[window, page_values] = AttentionPlan(self.batch, window, dtype, page_values)
        return found


class Attention:
    """Layer ``layer`` of ``spec``; ``q_norm`` and ``k_norm`` are norms of each head, or None."""

    def __init__(
        self,
        spec: DecoderSpec,
        layer: int,
        qkv: Linear,
        o: Linear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self.qkv, self.o, self.q_norm, self.k_norm = qkv, o, q_norm, k_norm
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads[layer], spec.head_dim
        self.scale, self.window, self.softcap = spec.attn_scale, spec.windows[layer], spec.attn_softcap
        self.cos, self.sin = tables

    def __call__(
        self, x: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor, step: StepContext | None
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; writes this step's keys and values. ``step`` is None on a GPU."""
        qkv = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if step is None:
            out = self._kernels(q, k, v, batch, k_cache, v_cache)
        else:
            rotate(q, step.cos, step.sin)
            rotate(k, step.cos, step.sin)
            write_cache(k_cache, k, step)
            write_cache(v_cache, v, step)
            plan = step.plan(self.window, q.dtype, k_cache.shape[1] * self.kv_heads * self.head_dim)
            out = attention_cpu(q, k_cache, v_cache, batch, self.scale, self.window, self.softcap, plan=plan)
        return self.o(out.view(x.shape[0], -1))

    def _kernels(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: StepBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        from ..kernels.attention import paged_attention
        from ..kernels.rope import rope_write

        rope_write(q, k, v, self.cos, self.sin, batch.positions, batch.slots, k_cache, v_cache)
        return paged_attention(q, k_cache, v_cache, batch, self.scale, self.window, self.softcap)


def write_cache(cache: torch.Tensor, x: torch.Tensor, step: StepContext) -> None:
    """Copy x [T, kv_heads, head_dim] to the step's slots of ``cache`` (logical shape, any strides)."""
    if step.written is not None:
        x = x.index_select(0, step.written)
    blocks, size, kv_heads, dim = cache.shape
    physical = cache.permute(2, 0, 1, 3)
    if physical.is_contiguous():
        physical.view(kv_heads, blocks * size, dim).index_copy_(1, step.slots, x.transpose(0, 1))
    else:
        cache[step.slots // size, step.slots % size] = x
