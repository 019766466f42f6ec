"""One decoder for every family: its ends, and between them layers of the shape that the spec says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..batch import Chooser, StepBatch
from ..kv_cache import KVCache
from ..layers import dispatch
from ..layers.attention import StepContext
from ..layers.formats.table import embedding
from ..layers.norm import NoNorm
from ..layers.rope import query_scales, rope_tables
from ..parallel.parallel import Group
from ..spec import DecoderSpec, RopeSpec
from .blocks import Rotary, Step, block_of
from .model import Model
from .weights import Weights


class Decoder(Model):
    """A model of a family that the table knows."""

    def __init__(self, spec: DecoderSpec, weights: Weights, max_model_len: int, group: Group) -> None:
        super().__init__(spec, weights.device, weights.dtype, group)
        self.products = weights.choosers()
        shard = group.shard
        self.embed = weights.table("embed.weight")
        self.positions = weights.tensors.get("positions.weight")
        self.project_in = weights.linears.get("project_in")
        self.project_out = weights.linears.get("project_out")
        self.embed_norm = weights.norm("embed_norm") if spec.embed_norm and shard.first else NoNorm()
        self.final_norm = weights.norm("final_norm") if spec.final_norm and shard.last else NoNorm()
        self.lm_head = weights.linears.get("lm_head")
        # transformers multiplies by the scale as the model's dtype holds it.
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=self.dtype).item()
        made: list[tuple[RopeSpec, Rotary]] = []
        block = block_of(spec)
        self.taps: tuple[int, ...] = ()
        """Layers before each of which ``forward`` keeps the hidden states of all tokens, side by side in ``tapped``."""
        self.tapped: torch.Tensor | None = None
        self.layers = [
            block(spec, index, weights, self._rotary(made, spec.ropes[index], max_model_len), group)
            for index in shard.layers(spec.num_layers)
        ]

    def set_kv_scales(self, scales: Sequence[tuple[float, float]]) -> None:
        super().set_kv_scales(scales)
        for layer, (k, v) in zip(self.layers, scales, strict=True):
            layer.attention.scores = replace(layer.attention.scores, k_scale=k, v_scale=v)

    def _rotary(self, made: list[tuple[RopeSpec, Rotary]], rope: RopeSpec | None, max_model_len: int) -> Rotary:
        """The tables of ``rope``, made once for all layers that share it."""
        if rope is None:
            return None, None
        for known, tables in made:
            if known == rope:
                return tables
        place = max_model_len, self.device
        made.append((rope, (rope_tables(rope, *place), query_scales(rope, *place))))
        return made[-1][1]

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: KVCache, hidden: torch.Tensor | None = None) -> torch.Tensor:
        x = self._enter(batch) if hidden is None else hidden
        step = Step(batch, kv, None if dispatch.use_kernels(x) else StepContext(batch), self.adapters)
        residual: torch.Tensor | None = None
        taken: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(self.layers):
            if number in self.taps:
                taken[number] = x.clone() if residual is None else x + residual
            x, residual = layer(x, residual, step)
        if self.taps:
            self.tapped = torch.cat([taken[number] for number in self.taps], -1)
        x, _ = self.final_norm.add(x, residual)
        return x if self.project_out is None else self.project_out(x)

    def choosers(self) -> set[Chooser]:
        return super().choosers().union(*(layer.mlp.choosers(self.dtype) for layer in self.layers))

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.embed is not None  # the first stage has it
        x, adapters = embedding(ids, self.embed), self.adapters
        return x if adapters is None or not adapters.active else adapters.add_embedding(ids, x)

    def _enter(self, batch: StepBatch) -> torch.Tensor:
        if len(self.vocabulary) == self.whole.vocab_size:
            x = self._embedded(batch.token_ids)
        else:
            ids = batch.token_ids - self.vocabulary.start
            others = (ids < 0) | (ids >= len(self.vocabulary))
            x = self._embedded(ids.masked_fill(others, 0)).masked_fill_(others[:, None], 0.0)
            x = self.group.all_reduce(x)
        if self.whole.embed_scale != 1.0:
            x = x * self.embed_scale
        if self.given is not None:
            self.given.fill(x)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + F.embedding(batch.positions + self.whole.position_offset, self.positions)
        return self.embed_norm(x)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None  # the last stage has it
        logits = self.lm_head(hidden)
        plain = self.whole.logit_scale == 1.0 and not self.whole.logit_softcap
        if plain and dispatch.use_kernels(logits):
            return logits
        logits = logits.float()
        if self.whole.logit_scale != 1.0:
            logits.mul_(self.whole.logit_scale)
        if self.whole.logit_softcap:
            logits.div_(self.whole.logit_softcap).tanh_().mul_(self.whole.logit_softcap)
        return logits
