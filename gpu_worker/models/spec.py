"""DecoderSpec: everything one decoder has to know about a model, as plain values.

A family (``families.py``) turns a Hugging Face config into one of these; ``decoder.py`` reads it and nothing else.
A knob exists here once some family needs it; a new family is new values, or one more knob.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: which dims turn, how fast, and how the speeds are scaled.

    ``scaling`` holds the numbers of the type as config.json names them (factor, beta_fast, short_factor, ...).
    ``trained_len`` is the config's max_position_embeddings, which several types measure themselves by.
    """

    rotary_dim: int
    theta: float = 10000.0
    type: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    trained_len: int = 2048


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
    rope: RopeSpec
    attn_scale: float
    windows: tuple[int | None, ...]  # keys a query sees, itself included; None is all of them
    # Norms: RMS with weight w, or Gemma's 1 + w.
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    qk_norm: bool = False  # RMS over each head's query and key, before the rotation
    # Biases of the projections.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"  # silu | gelu | gelu_tanh, on the gate half of a gated MLP
    # Ends of the model.
    embed_scale: float = 1.0  # rounded to the model's dtype before it multiplies
    tied: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    attn_softcap: float = 0.0
    # The dtype that config.json asks for, as its name ("bfloat16"), or None.
    config_dtype: str | None = None

    def qkv_rows(self, layer: int) -> tuple[int, int, int]:
        """Output rows of the query, key and value projections of ``layer``."""
        kv = self.kv_heads[layer] * self.head_dim
        return self.heads * self.head_dim, kv, kv


@dataclass(frozen=True)
class WeightNames:
    """Where a family's checkpoints keep each parameter.

    ``layer`` maps a parameter of the decoder to the checkpoint's modules whose rows it stacks, in order; a family
    that already stores them fused names one module. ``skip`` are regular expressions of tensors that files carry but
    nobody needs.
    """

    layer: Mapping[str, tuple[str, ...]]
    layer_prefix: str = "model.layers.{}."
    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    skip: tuple[str, ...] = (r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)
