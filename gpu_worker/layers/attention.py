"""One layer's attention: linears, norms of query and key, rotary positions, the write to the cache, paged attention."""

from __future__ import annotations

import torch

from ..batch import StepBatch
from ..kernels import narrow
from ..kernels.attention import Scores, paged_attention
from ..kernels.cpu import attention as native
from ..parallel.parallel import Group
from ..spec import DecoderSpec
from .attention_cpu import AttentionPlan
from .attention_cpu import paged_attention as attention_cpu
from .linear import Linear
from .norm import LayerNorm, RMSNorm
from .rope import rotate

Norm = RMSNorm | LayerNorm


class StepContext:
    """What the layers of one step share on a CPU: rotations of its tokens, and plans of attention.

    Caches that the native kernels can read are theirs; torch does the others.
    """

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        self._native: native.Plan | None = None
        self._slots: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._plans: dict[tuple[int | None, int], AttentionPlan] = {}
        self._rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def rotation(self, tables: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, R / 2] of the step's tokens, looked up by the first layer that asks."""
        found = self._rotations.get(id(tables))
        if found is None:
            cos, sin = (table.index_select(0, self.batch.positions).unsqueeze(1) for table in tables)
            found = self._rotations[id(tables)] = cos, sin
        return found

    def write(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> None:
        """Write k and v [T, kv_heads, head_dim] to the step's slots; a token of slot -1 is not written. ``scores`` has
        the scales of an fp8 cache."""
        if native.native_layout(k_cache, v_cache):
            native.write_cache(k_cache, v_cache, k, v, self.batch.slots, scores)
            return
        if self._slots is None:
            unwritten = bool((self.batch.slots < 0).any())
            written = torch.nonzero(self.batch.slots >= 0).flatten() if unwritten else None
            self._slots = (self.batch.slots if written is None else self.batch.slots[written]), written
        write_cache(k_cache, k, *self._slots, scores.k_scale)
        write_cache(v_cache, v, *self._slots, scores.v_scale)

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Attention of q [T, heads, head_dim] over the step's pages -> [T, heads, head_dim]."""
        if native.native_layout(k_cache, v_cache):
            if self._native is None:
                self._native = native.Plan(self.batch)
            return native.paged_attention(q, k_cache, v_cache, self.batch, scores, self._native)
        page_values = k_cache.shape[1:].numel()
        plan = self._plans.get((scores.window, page_values))
        if plan is None:
            plan = AttentionPlan(self.batch, scores.window, q.dtype, page_values)
            self._plans[scores.window, page_values] = plan
        return attention_cpu(q, k_cache, v_cache, self.batch, scores, plan)


class Attention:
    """Layer ``layer`` of ``spec``, which is one rank's part of it: its heads, and so its part of the sum.

    ``tables`` are those of ``rope_tables``, or None without rotary positions; ``slopes`` and ``sinks`` [heads] or None;
    ``growth`` is of ``query_scales``.
    """

    def __init__(
        self, spec: DecoderSpec, layer: int, qkv: Linear, o: Linear, q_norm: Norm | None, k_norm: Norm | None,
        tables: tuple[torch.Tensor, torch.Tensor] | None, slopes: torch.Tensor | None, sinks: torch.Tensor | None,
        group: Group, growth: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.qkv, self.o, self.q_norm, self.k_norm, self.group = qkv, o, q_norm, k_norm, group
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads[layer], spec.head_dim
        sinks = None if sinks is None else sinks.float()
        self.scores = Scores(spec.attn_scales[layer], spec.windows[layer], spec.attn_softcap, slopes, sinks)
        self.tables, self.clip, self.norm_all = tables, spec.clip_qkv, spec.qk_norm == "full"
        rope = spec.ropes[layer]
        self.interleaved = rope is not None and rope.interleaved
        self.growth = growth

    def __call__(
        self, x: torch.Tensor, batch: StepBatch, k_cache: torch.Tensor, v_cache: torch.Tensor, step: StepContext | None
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; writes this step's keys and values. ``step`` is None on a GPU."""
        qkv = self.qkv(x)
        if self.clip is not None:
            qkv = qkv.clamp_(-self.clip, self.clip)
        qkv = qkv.view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
        if self.growth is not None:  # a factor of all dims, so it may as well come before the rotation
            q = q.mul_(self.growth.index_select(0, batch.positions))
        if step is None:
            out = self._kernels(q, k, v, batch, k_cache, v_cache)
        else:
            if self.tables is not None:
                cos, sin = step.rotation(self.tables)
                rotate(q, cos, sin, self.interleaved)
                rotate(k, cos, sin, self.interleaved)
            step.write(k_cache, v_cache, k, v, self.scores)
            out = step.attend(q, k_cache, v_cache, self.scores)
        return self.o(out.view(x.shape[0], -1))

    def _normed(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        if not self.norm_all:
            return norm(x)
        flat = x.reshape(x.shape[0], -1)
        if self.group.shard.size == 1:
            return norm(flat).view(x.shape)
        # Means are over the heads of all ranks; key heads held twice count twice above and below.
        wide, count = flat.float(), flat.shape[1] * self.group.shard.size
        if isinstance(norm, LayerNorm):
            wide = wide - self.group.all_reduce(wide.sum(-1, keepdim=True)) / count
        squares = self.group.all_reduce(wide.square().sum(-1, keepdim=True)) / count
        normed = (wide * (squares + norm.eps).rsqrt()).to(x.dtype)
        normed = normed if norm.weight is None else normed * norm.weight
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        return (normed if bias is None else normed + bias).view(x.shape)

    def _kernels(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: StepBatch,
        k_cache: torch.Tensor, v_cache: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        from ..kernels.rope import rope_write

        cos, sin = self.tables or (None, None)
        scales = self.scores.k_scale, self.scores.v_scale
        rope_write(q, k, v, cos, sin, batch.positions, batch.slots, k_cache, v_cache, self.interleaved, *scales)
        given = q, k_cache, v_cache, batch, self.scores
        return paged_attention(*given) if batch.attend is None else batch.attend(paged_attention, *given)


def write_cache(
    cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, written: torch.Tensor | None, scale: float = 1.0
) -> None:
    """Copy x [T, kv_heads, head_dim] to ``slots`` of ``cache`` (logical shape, any strides).

    ``slots`` are those of the tokens ``written``, None for all; ``scale`` is that of an fp8 cache.
    """
    if written is not None:
        x = x.index_select(0, written)
    if narrow.is_narrow(cache.dtype):
        narrow.write(cache, x, slots, scale)
        return
    blocks, size, kv_heads, dim = cache.shape
    physical = cache.permute(2, 0, 1, 3)
    if physical.is_contiguous():
        physical.view(kv_heads, blocks * size, dim).index_copy_(1, slots, x.transpose(0, 1))
    else:
        cache[slots // size, slots % size] = x
