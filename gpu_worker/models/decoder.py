"""One decoder for every family: what the spec says, layer after layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ..batch import StepBatch
from ..layers import dispatch
from ..layers.attention import Attention, StepContext
from ..layers.linear import Linear
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import rope_tables
from .spec import DecoderSpec

# Prefill tokens that go through an MLP at a time on a CPU. Wider activations come fresh from the system each time,
# and clearing their pages costs a tenth of the step; these the allocator keeps.
_MLP_ROWS = 256


@dataclass(frozen=True)
class Parameter:
    """A tensor of the decoder. ``rows`` are the parts that separate checkpoints stack along dim 0.

    ``kind``: "product" (a Linear's weight), "bias", "norm", or "table" (rows looked up).
    """

    name: str
    kind: str
    rows: tuple[int, ...]
    columns: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        total = sum(self.rows)
        return (total,) if self.columns is None else (total, self.columns)


def parameters(spec: DecoderSpec) -> Iterator[Parameter]:
    """Every parameter of ``spec``, in the order the model uses them."""
    hidden, wide = spec.hidden_size, spec.intermediate_size
    yield Parameter("embed.weight", "table", (spec.vocab_size,), hidden)
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        yield Parameter(prefix + "attn_norm.weight", "norm", (hidden,))
        products = (
            ("qkv", spec.qkv_rows(layer), hidden, spec.qkv_bias),
            ("o", (hidden,), spec.heads * spec.head_dim, spec.o_bias),
            ("gate_up", (wide, wide), hidden, spec.mlp_bias),
            ("down", (hidden,), wide, spec.mlp_bias),
        )
        for name, rows, columns, bias in products:
            yield Parameter(f"{prefix}{name}.weight", "product", rows, columns)
            if bias:
                yield Parameter(f"{prefix}{name}.bias", "bias", rows)
        if spec.qk_norm:
            yield Parameter(prefix + "q_norm.weight", "norm", (spec.head_dim,))
            yield Parameter(prefix + "k_norm.weight", "norm", (spec.head_dim,))
        yield Parameter(prefix + "mlp_norm.weight", "norm", (hidden,))
    yield Parameter("final_norm.weight", "norm", (hidden,))
    if not spec.tied:
        yield Parameter("lm_head.weight", "product", (spec.vocab_size,), hidden)


class Cache(Protocol):
    """The paged cache, per layer, of logical shape [num_blocks, block_size, kv_heads, head_dim]."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]


class _Layer:
    def __init__(
        self,
        spec: DecoderSpec,
        index: int,
        weights: dict[str, torch.Tensor],
        products: dict[str, Linear],
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        prefix = f"layers.{index}."

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights[f"{prefix}{name}.weight"], spec.norm_eps, spec.norm_plus_one)

        q_norm, k_norm = (norm("q_norm"), norm("k_norm")) if spec.qk_norm else (None, None)
        self.attn_norm, self.mlp_norm = norm("attn_norm"), norm("mlp_norm")
        self.attention = Attention(
            spec, index, products[prefix + "qkv"], products[prefix + "o"], q_norm, k_norm, tables
        )
        self.mlp = GatedMLP(products[prefix + "gate_up"], products[prefix + "down"], spec.activation)


class Decoder:
    """A loaded model. ``weights`` holds tables and norms by parameter name, ``products`` the Linears by theirs."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: dict[str, torch.Tensor],
        products: dict[str, Linear],
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self.embed = weights["embed.weight"]
        self.device, self.dtype = self.embed.device, self.embed.dtype
        self.tables = rope_tables(spec.rope, max_model_len, self.device)
        self.layers = [_Layer(spec, index, weights, products, self.tables) for index in range(spec.num_layers)]
        self.final_norm = RMSNorm(weights["final_norm.weight"], spec.norm_eps, spec.norm_plus_one)
        self.lm_head = products["lm_head"]
        # transformers multiplies by the scale as the model's dtype holds it.
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=self.dtype).item()

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: Cache) -> torch.Tensor:
        """Hidden states after the last norm, [T, hidden] or [S, hidden] of ``batch.outputs``; writes the cache."""
        hidden = F.embedding(batch.token_ids, self.embed)
        if self.spec.embed_scale != 1.0:
            hidden = hidden * self.embed_scale
        step = None if dispatch.use_kernels(hidden) else StepContext(batch, *self.tables)
        first = self.layers[0]
        residual, x = hidden, first.attn_norm(hidden)
        for index, layer in enumerate(self.layers):
            x = layer.attention(x, batch, kv.k[index], kv.v[index], step)
            if layer is self.layers[-1] and batch.outputs is not None:
                x, residual = x.index_select(0, batch.outputs), residual.index_select(0, batch.outputs)
                if not len(x):
                    return x
            x, residual = layer.mlp_norm.add(x, residual)
            x = self._mlp(layer.mlp, x)
            following = self.layers[index + 1].attn_norm if index + 1 < len(self.layers) else self.final_norm
            x, residual = following.add(x, residual)
        return x

    def _mlp(self, mlp: GatedMLP, x: torch.Tensor) -> torch.Tensor:
        if dispatch.use_kernels(x) or x.shape[0] <= _MLP_ROWS:
            return mlp(x)
        out = torch.empty_like(x)
        for part, into in zip(x.split(_MLP_ROWS), out.split(_MLP_ROWS), strict=True):
            into.copy_(mlp(part))
        return out

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab_size] float32 of ``hidden`` [S, hidden], rows that ``forward`` gave."""
        logits = self.lm_head(hidden).float()
        if self.spec.logit_scale != 1.0:
            logits.mul_(self.spec.logit_scale)
        if self.spec.logit_softcap:
            logits.div_(self.spec.logit_softcap).tanh_().mul_(self.spec.logit_softcap)
        return logits
