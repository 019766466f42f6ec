"""DecoderSpec: everything one decoder has to know about a model, as plain values.

A family (``families/``) turns a Hugging Face config into one of these; ``decoder.py`` reads it and nothing else.
A knob exists here once some family needs it; a new family is new values, or one more knob.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..proto.config import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: which dims are rotated, how fast, and how the speeds are scaled.

    ``scaling`` holds the numbers of the type as config.json names them (factor, beta_fast, short_factor, ...).
    ``trained_len`` is the config's max_position_embeddings, which several types measure themselves by.
    ``interleaved`` rotates dims 2i and 2i + 1 together (GPT-J), else i and i + R/2 (NeoX).
    """

    rotary_dim: int
    theta: float = 10000.0
    type: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    trained_len: int = 2048
    interleaved: bool = False


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts: how a token chooses ``top_k`` of ``experts``, and what each of them is."""

    experts: int
    top_k: int
    width: int  # of one expert's MLP
    scoring: str = "softmax"  # softmax over all | sigmoid | topk_softmax: over the chosen logits alone
    renormalise: bool = False  # the chosen weights sum to 1
    scale: float = 1.0  # factor of the weights
    activation: str = "silu"  # or swiglu_oai
    bias: bool = False  # of the experts' linear layers
    router_bias: bool = False
    correction_bias: bool = False  # added to the scores for the choice, not to the weights
    groups: int = 0  # 0: off; else the choice is from the best topk_groups of so many groups of experts
    topk_groups: int = 0
    shared_width: int = 0  # of the MLP that every token goes through; 0: none
    shared_gate: bool = False  # the shared MLP's output times sigmoid(gate(x))

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ConfigError(f"config.json: each token goes to {self.top_k} experts of {self.experts}.")
        if self.groups and self.experts % self.groups:
            raise ConfigError(f"config.json: {self.experts} experts are not {self.groups} groups of one size.")


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer. Per-layer values are tuples of num_layers entries."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: tuple[int, ...]
    head_dim: int
    intermediate_size: int
    ropes: tuple[RopeSpec | None, ...]  # None: no rotary positions in this layer
    attn_scales: tuple[float, ...]
    windows: tuple[int | None, ...]  # keys a query sees, itself included; None is all of them
    # Norms: RMS with weight w (or Gemma's 1 + w), or LayerNorm with or without bias, or without weights at all.
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    norm_bias: bool = False
    norm_affine: bool = True
    # Where a layer has norms: before ("attn", "mlp") or behind ("attn_out", "mlp_out") its two halves.
    norms: tuple[str, ...] = ("attn", "mlp")
    parallel_residual: bool = False  # both halves read the same input, and are added together
    post_norm: bool = False  # "attn" and "mlp" are norms of the sums with the residual
    residual_from_norm: bool = False  # what is added to is the norm's output
    final_norm: bool = True
    qk_norm: str = ""  # "head": one weight for all heads, "heads": one for each, "full": over all heads together
    qk_norm_kind: str = "rms"
    qk_norm_bias: bool = False
    # Positions besides rope.
    alibi: tuple[float, ...] | None = None  # slope of each head: slope * (key - query position) is added to scores
    positions: int = 0  # rows of a learned table
    position_offset: int = 0
    # Linear layers.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    clip_qkv: float | None = None
    sinks: bool = False  # one more logit for each head in the softmax's sum
    gated: bool = True
    activation: str = "silu"
    moe: MoESpec | None = None
    moe_layers: tuple[bool, ...] = ()
    # Ends of the model.
    embed_size: int = 0  # width of the embedding where it is projected to hidden_size; 0: hidden_size
    embed_scale: float = 1.0  # rounded to the model's dtype before it multiplies
    embed_norm: bool = False
    residual_scale: float = 1.0
    tied: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    attn_softcap: float = 0.0
    # Of models that pool.
    outputs: int = -1  # rows of the head in place of the vocabulary's: a classifier's labels; 0: there is no head
    head: str = ""  # activation of the linear layer before the head; "": there is none
    types: int = 0  # rows of a table of token types

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` has experts in place of an MLP."""
        return self.moe is not None and (not self.moe_layers or self.moe_layers[layer])

    def local(self, shard: Shard) -> DecoderSpec:
        """What one process of ``shard`` holds: its layers and its heads. The vocabulary's size stays the model's."""
        if shard == WHOLE:
            return self
        at, heads = shard.layers(self.num_layers), shard.share(self.heads)
        kv = (shard.kv_range(count) for count in self.kv_heads[at.start : at.stop])
        part = slice(at.start, at.stop)
        return replace(
            self, num_layers=len(at), heads=len(heads), kv_heads=tuple(len(each) for each in kv),
            ropes=self.ropes[part], attn_scales=self.attn_scales[part], windows=self.windows[part],
            moe_layers=self.moe_layers[part], alibi=self.alibi and self.alibi[heads.start : heads.stop],
            intermediate_size=len(shard.share(self.intermediate_size)),
        )  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """Which part of a model one process holds: slice ``rank`` of ``size`` of the layers of ``stage`` of ``stages``."""

    rank: int = 0
    size: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def first(self) -> bool:
        """Whether this stage embeds."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage has the head."""
        return self.stage == self.stages - 1

    def share(self, total: int) -> range:
        """This rank's share of ``total`` rows, heads or experts."""
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def kv_range(self, kv_heads: int) -> range:
        """This rank's key heads: a share of them, or the one that its query heads use where there are fewer."""
        if kv_heads >= self.size:
            return self.share(kv_heads)
        return range(at := kv_heads * self.rank // self.size, at + 1)

    def layers(self, total: int) -> range:
        """This stage's layers."""
        return range(total * self.stage // self.stages, total * (self.stage + 1) // self.stages)


WHOLE = Shard()
"""All of a model."""


@dataclass(frozen=True)
class Layout:
    """How a checkpoint's tensor holds its parameter, where that is not row for row.

    ``order(spec, layer)``: for each row of the decoder's whole parameter, the tensor's row.
    ``transposed``: the tensor is [columns, rows] (GPT-2's Conv1D).
    ``per_expert``: the tensor's first axis is cut into as many pieces as there are experts.
    ``padded``: the tensor may have more rows, which no token uses.
    ``convert``: applied to what was read, [rows, columns] or one expert's piece, before anything else.
    """

    order: Callable[[DecoderSpec, int], np.ndarray] | None = None
    transposed: bool = False
    per_expert: bool = False
    padded: bool = False
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class WeightNames:
    """Where a family's checkpoints keep each parameter.

    ``layer`` maps a parameter of the decoder to the checkpoint's modules whose rows it stacks, in order; a family
    that already stores them fused names one module, and ``{e}`` stands for the number of an expert or a head. A key
    with a suffix ("sinks.weight") names whole tensors; others get the parameter's own suffix, .weight or .bias.
    ``layouts`` says how a parameter's tensors are laid out, by the same keys. ``outer`` is for what is outside the
    layers. ``prefix`` may be left out in the file. ``skip`` are regular expressions of tensors that files carry but
    nobody needs. ``renamed``: what old files call something, and what it is called now. ``apart``: modules of the
    experts in files where each has its own, while ``layer`` names tensors of all of them. ``head_of``: the module of
    whose rows a classifier's head is made, where its checkpoint is a generator's.
    """

    layer: Mapping[str, tuple[str, ...]]
    layer_prefix: str = "model.layers.{}."
    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    outer: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    prefix: str = ""
    skip: tuple[str, ...] = (r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)
    renamed: tuple[tuple[str, str], ...] = ()
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head_of: str = ""

    def found_in(self, files: Collection[str]) -> WeightNames:
        """The names in ``files``, which hold tensors of these names."""
        if not self.apart or not any(".experts.0." in name for name in files):
            return self
        layer = {key: names for key, names in self.layer.items() if key.partition(".")[0] not in self.apart}
        layouts = {key: layout for key, layout in self.layouts.items() if key not in self.apart}
        return replace(self, layer={**layer, **self.apart}, layouts=layouts)
