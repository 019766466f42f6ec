"""BERT, RoBERTa and their like: encoders, whose tokens see those after them too.

A prompt is run whole, in one step, and leaves nothing behind: there is no cache. One code path serves all of them; the
loader fills their parameters as it does a decoder's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import torch
import torch.nn.functional as F

from ...proto.checkpoint.pooler_config import family_of, position_offset
from ...proto.config import ConfigError
from ..batch import StepBatch
from ..kv_cache import KVCache
from ..layers.formats.table import embedding
from ..layers.mlp import MLP
from ..spec import DecoderSpec, WeightNames
from ..transfer import to_device
from .families.common import Config, decoder, integer, positive, with_aliases
from .families.common import activation as activation_of
from .model import Model
from .weights import Weights

_BERT_LAYER = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "o": ("attention.output.dense",),
    "attn_norm": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}
_DISTIL_LAYER = {
    "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "o": ("attention.out_lin",),
    "attn_norm": ("sa_layer_norm",),
    "up": ("ffn.lin1",),
    "down": ("ffn.lin2",),
    "mlp_norm": ("output_layer_norm",),
}


def _names(base: str, layers: str, layer: dict[str, tuple[str, ...]], head: tuple[str, str]) -> WeightNames:
    outer = {
        "positions": f"{base}embeddings.position_embeddings",
        "types": f"{base}embeddings.token_type_embeddings",
        "embed_norm": f"{base}embeddings.LayerNorm",
        "head": head[0],
        "lm_head": head[1],
    }
    return WeightNames(
        layer, f"{base}{layers}.{{}}.", f"{base}embeddings.word_embeddings", lm_head=head[1], outer=outer, prefix=base,
        renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
        skip=(r"(.*\.)?embeddings\.position_ids", r"(.*\.)?pooler\..*", r"(cls|lm_head|vocab_\w+)\..*"),
    )  # fmt: skip


_BERT = _names("bert.", "encoder.layer", _BERT_LAYER, ("bert.pooler.dense", "classifier"))
_COLBERT = _names("bert.", "encoder.layer", _BERT_LAYER, ("bert.pooler.dense", "linear"))
_ROBERTA = _names("roberta.", "encoder.layer", _BERT_LAYER, ("classifier.dense", "classifier.out_proj"))
_DISTIL = _names("distilbert.", "transformer.layer", _DISTIL_LAYER, ("pre_classifier", "classifier"))
_DISTIL_KEYS = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim", "hidden_act": "activation",
}  # fmt: skip


def find_encoder(hf: Config, labels: int, late: int = 0) -> tuple[DecoderSpec, WeightNames]:
    """The spec and weight names of ``hf``, with a head of so many ``labels`` (0: none), or one that makes an embedding
    of ``late`` numbers of each token. Raises ConfigError."""
    architecture = (hf.get("architectures") or [""])[0]
    family, _ = family_of(architecture)
    distil = family == "DistilBert"
    hf = with_aliases({**{key: hf[other] for key, other in _DISTIL_KEYS.items() if distil and other in hf}, **hf})
    for key, plain in (("position_embedding_type", "absolute"), ("is_decoder", False), ("add_cross_attention", False)):
        if hf.get(key, plain) != plain:
            raise ConfigError(f"config.json: {key} {hf[key]!r} is not supported for {architecture}; only {plain!r} is.")
    hidden, heads = integer(hf, "hidden_size"), integer(hf, "num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    spec = decoder(
        {**hf, "num_key_value_heads": None, "head_dim": None},
        rope=None,
        norm="ln",
        norm_bias=True,
        norm_eps=1e-12 if distil else positive(hf, "layer_norm_eps", 1e-12),
        post_norm=True,
        final_norm=False,
        embed_norm=True,
        positions=integer(hf, "max_position_embeddings", 512),
        position_offset=position_offset(hf, family),
        types=0 if distil else integer(hf, "type_vocab_size", 2),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        activation=activation_of(hf, default="gelu"),
        tied=False,
        outputs=labels or late,
        head=("relu" if distil else "tanh") if labels else "",
        lm_head_bias=labels > 0,
    )
    if late:
        return spec, _COLBERT
    return spec, _DISTIL if distil else _BERT if family == "Bert" else _ROBERTA


class Encoder(Model):
    """A model whose layers see each prompt at once and keep nothing."""

    capturable = False

    def __init__(self, spec: DecoderSpec, weights: Weights) -> None:
        super().__init__(spec, weights.device, weights.dtype)
        self.products = weights.choosers()
        self.spec = replace(spec, kv_heads=())  # no layer has a cache
        self.table, self.places = weights.table("embed.weight"), weights.tensors["positions.weight"]
        self.types = weights.tensors.get("types.weight")
        self.enter_norm = weights.norm("embed_norm")
        self.stack = [_Layer(spec, weights, f"layers.{index}.") for index in range(spec.num_layers)]
        self.head, self.classes = weights.linears.get("head"), weights.linears.get("lm_head")

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: KVCache, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of the last layer, [T, hidden] or [S, hidden] of ``batch.outputs``; ``kv`` is not touched."""
        assert self.table is not None  # a model of one process has it
        x = embedding(batch.token_ids, self.table)
        if self.types is not None:
            last = len(self.types) - 1
            x = x + (self.types[0] if batch.types is None else F.embedding(batch.types.clamp(max=last), self.types))
        x = x + F.embedding(batch.positions + self.spec.position_offset, self.places)
        x = self.enter_norm(x)
        groups = _alike(batch.host_query_starts, self.device)
        for layer in self.stack:
            x = layer(x, groups, batch.outputs if layer is self.stack[-1] else None)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, labels] float32 of ``hidden`` [S, hidden]; of late interaction the tokens' embeddings."""
        assert self.classes is not None  # asked of models with a head alone
        if self.head is None:
            return self.classes(hidden).float()
        hidden = self.head(hidden)
        return self.classes(torch.tanh(hidden) if self.spec.head == "tanh" else torch.relu(hidden)).float()


class _Layer:
    def __init__(self, spec: DecoderSpec, weights: Weights, prefix: str) -> None:
        self.spec, self.mlp = spec, MLP(spec, weights.linears, prefix)
        self.qkv, self.o = weights.linears[prefix + "qkv"], weights.linears[prefix + "o"]
        self.attn_norm, self.mlp_norm = weights.norm(prefix + "attn_norm"), weights.norm(prefix + "mlp_norm")

    def __call__(self, x: torch.Tensor, groups: list[torch.Tensor], outputs: torch.Tensor | None) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], or those of ``outputs`` alone."""
        attended = self._attend(self.qkv(x), groups)
        if outputs is not None:
            attended, x = attended.index_select(0, outputs), x.index_select(0, outputs)
        x, _ = self.attn_norm.add(self.o(attended), x)
        x, _ = self.mlp_norm.add(self.mlp(x), x)
        return x

    def _attend(self, qkv: torch.Tensor, groups: list[torch.Tensor]) -> torch.Tensor:
        """Every token to all of its own prompt: prompts of one length at a time, so that none is filled up."""
        qkv = qkv.view(len(qkv), 3, self.spec.heads, self.spec.head_dim)
        out = torch.empty_like(qkv[:, 0])
        for tokens in groups:  # [prompts, length]
            q, k, v = qkv[tokens].permute(2, 0, 3, 1, 4)
            out[tokens] = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return out.flatten(1)


def _alike(starts: list[int], device: torch.device) -> list[torch.Tensor]:
    """The tokens of a step's prompts, [prompts, length] int64 for each length; ``starts`` end with the last's end.

    However many lengths there are, a GPU gets one copy and is not waited for.
    """
    lengths = sorted((end - start, start) for start, end in pairwise(starts))
    groups = []
    for length, same in groupby(lengths, key=lambda pair: pair[0]):
        first = np.array([start for _, start in same])
        groups.append(first[:, None] + np.arange(length))
    flat = to_device(np.concatenate([group.ravel() for group in groups]), device)
    parts = flat.split([group.size for group in groups])
    return [part.view(group.shape) for part, group in zip(parts, groups, strict=True)]
