"""The four shapes of a decoder layer. ``block_of`` chooses a model's, once; each one's forward shows that model.

Hidden states go from layer to layer as a sum that is not made yet, x + residual, because a norm makes that sum and
reads it in one pass. A ``residual`` of None stands for zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from ..batch import StepBatch
from ..kv_cache import KVCache
from ..layers import dispatch
from ..layers.attention import Attention, StepContext
from ..layers.mlp import MLP, MoEBlock
from ..layers.norm import NoNorm, Norm, ResidualFromNorm
from ..lora.linear import AdaptedLinear
from ..lora.slots import Slots
from ..parallel.parallel import Group
from ..spec import DecoderSpec
from .weights import Weights

# Prefill tokens that go through an MLP at a time on a CPU. Wider activations come fresh from the system each time,
# and clearing their pages costs a tenth of the step; these the allocator keeps.
_MLP_ROWS = 256

Tables = tuple[torch.Tensor, torch.Tensor]
Rotary = tuple[Tables | None, torch.Tensor | None]  # of rope_tables, and of query_scales
Stream = tuple[torch.Tensor, torch.Tensor | None]
Maybe = TypeVar("Maybe", torch.Tensor, torch.Tensor | None)


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one step are given. ``context`` is None on a GPU, ``adapters`` where rows cannot have any."""

    batch: StepBatch
    kv: KVCache
    context: StepContext | None
    adapters: Slots | None = None


class Block:
    """One layer; ``index`` is its number in the whole model."""

    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, rotary: Rotary, group: Group) -> None:
        prefix, mine = f"layers.{index}.", spec.local(group.shard)
        self.place = index - group.shard.layers(spec.num_layers).start  # among the layers of this process
        self.last = index == spec.num_layers - 1
        self.attn_norm: Norm
        self.mlp_norm: Norm
        self.attn_norm, self.attn_out_norm, self.mlp_norm, self.mlp_out_norm = (
            weights.norm(f"{prefix}{name}_norm") if name in spec.norms else NoNorm()
            for name in ("attn", "attn_out", "mlp", "mlp_out")
        )
        q_norm, k_norm = (
            (weights.norm(f"{prefix}{name}_norm", spec.qk_norm_kind) if spec.qk_norm else None) for name in "qk"
        )
        slopes = None if mine.alibi is None else torch.tensor(mine.alibi, dtype=torch.float32, device=weights.device)
        self.attention = Attention(
            mine, self.place, weights.linears[prefix + "qkv"], weights.linears[prefix + "o"], q_norm, k_norm,
            rotary[0], slopes, weights.tensors.get(prefix + "sinks.weight"), group, rotary[1],
        )  # fmt: skip
        self.mlp: MLP | MoEBlock
        if spec.is_moe(index):
            self.mlp = MoEBlock(spec, weights.linears, weights.experts, weights.tensors, prefix, group.shard)
        else:
            self.mlp = MLP(spec, weights.linears, prefix)
        self.undivided = isinstance(self.mlp, MoEBlock) or isinstance(self.mlp.up, AdaptedLinear)
        self.group, self.scale = group, spec.residual_scale
        self.sum = group.all_reduce if self.scale == 1.0 else self._scaled_sum

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> Stream:
        """[T, hidden] -> [T, hidden]; the last layer's is of ``step.batch.outputs`` alone, where there are any.

        Writes this step's keys and values to the cache. The CPU may add into ``residual`` itself.
        """
        raise NotImplementedError

    def attend(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """This rank's part of the sum."""
        return self.attention(x, step.batch, step.kv.k[self.place], step.kv.v[self.place], step.context)

    def sampled(self, x: Maybe, step: Step) -> Maybe:
        """``x`` [T, hidden] of the tokens that go on behind the attention: in the last layer those that are sampled."""
        outputs = step.batch.outputs
        if outputs is None or x is None or not self.last:
            return x
        if step.adapters is not None:
            step.adapters.to_outputs()
        return x.index_select(0, outputs)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP or the experts: this rank's part of the sum."""
        if dispatch.use_kernels(x) or x.shape[0] <= _MLP_ROWS or self.undivided:
            return self.mlp(x) if len(x) else x
        out = torch.empty_like(x)
        for part, into in zip(x.split(_MLP_ROWS), out.split(_MLP_ROWS), strict=True):
            into.copy_(self.mlp(part))
        return out

    def _scaled_sum(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(x) * self.scale


class PreNorm(Block):
    """Llama, GPT-2 and most others: a norm before each half, whose result is added to the residual."""

    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, rotary: Rotary, group: Group) -> None:
        super().__init__(spec, index, weights, rotary, group)
        if spec.residual_from_norm:
            self.attn_norm, self.mlp_norm = ResidualFromNorm(self.attn_norm), ResidualFromNorm(self.mlp_norm)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> Stream:
        x, residual = self.attn_norm.add(x, residual)
        x, residual = self.sampled(self.sum(self.attend(x, step)), step), self.sampled(residual, step)
        x, residual = self.mlp_norm.add(x, residual)
        return self.sum(self.feed(x)), residual


class Sandwich(Block):
    """Gemma 2 and 3, GLM-4 of 2025: a norm before each half and one behind it. OLMo 2: those behind alone."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> Stream:
        x, residual = self.attn_norm.add(x, residual)
        x, residual = self.sampled(self.sum(self.attend(x, step)), step), self.sampled(residual, step)
        x, residual = self.mlp_norm.add(self.attn_out_norm(x), residual)
        return self.mlp_out_norm(self.sum(self.feed(x))), residual


class PostNorm(Block):
    """OPT-350m, and BERT (``encoder.py``): each half reads the residual itself; their sum is normalised."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> Stream:
        attended, x = self.sampled(self.sum(self.attend(x, step)), step), self.sampled(x, step)
        x, _ = self.attn_norm.add(attended, x)
        x, _ = self.mlp_norm.add(self.sum(self.feed(x)), x)
        return x, None


class Parallel(Block):
    """GPT-J, Falcon, Command-R, Phi: both halves read the same residual, through one norm or through one each."""

    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, rotary: Rotary, group: Group) -> None:
        super().__init__(spec, index, weights, rotary, group)
        self.shared = "mlp" not in spec.norms

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> Stream:
        x, residual = self.attn_norm.add(x, residual)
        attended = self.sampled(self.attend(x, step), step)
        x, residual = self.sampled(x, step), self.sampled(residual, step)
        return self.sum(attended + self.feed(x if self.shared else self.mlp_norm(residual))), residual


def block_of(spec: DecoderSpec) -> type[Block]:
    """The shape of all layers of ``spec``. Raises ValueError for a spec that is of two shapes, or of none."""
    found: list[type[Block]] = []
    if spec.parallel_residual:
        found.append(Parallel)
    if spec.post_norm:
        found.append(PostNorm)
    if {"attn_out", "mlp_out"} & set(spec.norms):
        found.append(Sandwich)
    if len(found) > 1:
        raise ValueError(f"{spec.architecture} cannot be {' and '.join(block.__name__ for block in found)} at once")
    block = found[0] if found else PreNorm
    if (spec.residual_from_norm and block is not PreNorm) or (
        spec.residual_scale != 1 and block in (Sandwich, PostNorm)
    ):
        raise ValueError(f"{spec.architecture}: no {block.__name__} layer has this spec's residual")
    return block
