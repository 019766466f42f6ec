"""One decoder for every family: what the spec says, layer after layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..batch import StepBatch
from ..layers import dispatch
from ..layers.attention import Attention, StepContext
from ..layers.linear import Linear
from ..layers.mlp import MLP, MoEBlock
from ..layers.norm import LayerNorm, RMSNorm
from ..layers.rope import query_scales, rope_tables
from ..parallel.parallel import Group
from ..spec import DecoderSpec, RopeSpec
from .model import Cache, Model

# Prefill tokens that go through an MLP at a time on a CPU. Wider activations come fresh from the system each time,
# and clearing their pages costs a tenth of the step; these the allocator keeps.
_MLP_ROWS = 256

Norm = RMSNorm | LayerNorm
Tables = tuple[torch.Tensor, torch.Tensor]
Turn = tuple[Tables | None, torch.Tensor | None]  # of rope_tables, and of query_scales


class Weights:
    """The loaded parameters of one process: ``tensors`` by parameter name, ``products`` as Linears by theirs."""

    def __init__(
        self, spec: DecoderSpec, tensors: dict[str, torch.Tensor], products: dict[str, Linear], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.spec, self.tensors, self.products, self.dtype, self.device = spec, tensors, products, dtype, device

    def norm(self, name: str, kind: str | None = None, affine: bool = True) -> Norm:
        """The norm ``name``, of the model's kind unless another is given."""
        spec, weight, bias = self.spec, self.tensors.get(f"{name}.weight"), self.tensors.get(f"{name}.bias")
        if (kind or spec.norm) == "ln":
            return LayerNorm(weight, bias, spec.norm_eps)
        if weight is None:
            raise KeyError(f"{name}.weight")
        return RMSNorm(weight, spec.norm_eps, spec.norm_plus_one)

    def optional_norm(self, name: str, wanted: bool) -> Norm | None:
        """The norm ``name`` where the model has it."""
        return self.norm(name) if wanted else None


class _Layer:
    """One layer; ``index`` is its number in the whole model."""

    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, turn: Turn, group: Group) -> None:
        prefix = f"layers.{index}."
        self.spec, self.group = spec, group
        self.attn_norm, self.attn_out_norm, self.mlp_norm, self.mlp_out_norm = (
            weights.optional_norm(f"{prefix}{name}_norm", name in spec.norms)
            for name in ("attn", "attn_out", "mlp", "mlp_out")
        )
        q_norm, k_norm = (
            (weights.norm(f"{prefix}{name}_norm", spec.qk_norm_kind) if spec.qk_norm else None) for name in "qk"
        )
        slopes, alibi = None, spec.local(group.shard).alibi
        if alibi is not None:
            slopes = torch.tensor(alibi, dtype=torch.float32, device=weights.device)
        local = index - group.shard.layers(spec.num_layers).start
        self.attention = Attention(
            spec.local(group.shard), local, weights.products[prefix + "qkv"], weights.products[prefix + "o"],
            q_norm, k_norm, turn[0], slopes, weights.tensors.get(prefix + "sinks.weight"), group, turn[1],
        )  # fmt: skip
        self.mlp: MLP | MoEBlock
        if spec.is_moe(index):
            self.mlp = MoEBlock(spec, weights.products, weights.tensors, prefix, group.shard)
        else:
            self.mlp = MLP(spec, weights.products, prefix)

    def general(
        self, x: torch.Tensor, batch: StepBatch, kv: tuple[torch.Tensor, torch.Tensor], step: StepContext | None,
        outputs: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Any placement of norms: hidden states in, hidden states out, those of ``outputs`` alone where given."""
        spec, add = self.spec, self.group.all_reduce
        normed = x if self.attn_norm is None or spec.post_norm else self.attn_norm(x)
        attended = self.attention(normed, batch, *kv, step)
        if outputs is not None:
            x, normed, attended = (each.index_select(0, outputs) for each in (x, normed, attended))
        if spec.parallel_residual:
            second = normed if self.mlp_norm is None else self.mlp_norm(x)
            return x + self._scaled(add(attended + self.run_mlp(second)))
        attended = add(attended)
        if self.attn_out_norm is not None:
            attended = self.attn_out_norm(attended)
        x = (normed if spec.residual_from_norm else x) + self._scaled(attended)
        if spec.post_norm and self.attn_norm is not None:
            x = self.attn_norm(x)
        normed = x if self.mlp_norm is None or spec.post_norm else self.mlp_norm(x)
        out = add(self.run_mlp(normed))
        if self.mlp_out_norm is not None:
            out = self.mlp_out_norm(out)
        x = (normed if spec.residual_from_norm else x) + self._scaled(out)
        return self.mlp_norm(x) if spec.post_norm and self.mlp_norm is not None else x

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.spec.residual_scale == 1.0 else x * self.spec.residual_scale

    def run_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum."""
        if dispatch.use_kernels(x) or x.shape[0] <= _MLP_ROWS or isinstance(self.mlp, MoEBlock):
            return self.mlp(x)
        out = torch.empty_like(x)
        for part, into in zip(x.split(_MLP_ROWS), out.split(_MLP_ROWS), strict=True):
            into.copy_(self.mlp(part))
        return out


class Decoder(Model):
    """A model of a family that the table knows."""

    def __init__(self, spec: DecoderSpec, weights: Weights, max_model_len: int, group: Group) -> None:
        super().__init__(spec, weights.device, weights.dtype, group)
        shard = group.shard
        self.embed = weights.tensors.get("embed.weight")
        self.positions = weights.tensors.get("positions.weight")
        self.project_in = weights.products.get("project_in")
        self.project_out = weights.products.get("project_out")
        self.embed_norm = weights.optional_norm("embed_norm", spec.embed_norm and shard.first)
        self.final_norm = weights.optional_norm("final_norm", spec.final_norm and shard.last)
        self.lm_head = weights.products.get("lm_head")
        # transformers multiplies by the scale as the model's dtype holds it.
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=self.dtype).item()
        made: list[tuple[RopeSpec, Turn]] = []
        self.layers = [
            _Layer(spec, index, weights, self._turn(made, spec.ropes[index], max_model_len), group)
            for index in shard.layers(spec.num_layers)
        ]
        self._plain = not (
            spec.parallel_residual or spec.post_norm or spec.residual_from_norm or spec.residual_scale != 1.0
            or set(spec.norms) != {"attn", "mlp"} or not spec.final_norm
        )  # fmt: skip

    def _turn(self, made: list[tuple[RopeSpec, Turn]], rope: RopeSpec | None, max_model_len: int) -> Turn:
        """Tables are made once for all layers that turn alike."""
        if rope is None:
            return None, None
        for known, turn in made:
            if known == rope:
                return turn
        place = max_model_len, self.device
        made.append((rope, (rope_tables(rope, *place), query_scales(rope, *place))))
        return made[-1][1]

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: Cache, hidden: torch.Tensor | None = None) -> torch.Tensor:
        x = self._enter(batch) if hidden is None else hidden
        step = None if dispatch.use_kernels(x) else StepContext(batch)
        outputs = batch.outputs if self.group.shard.last else None
        if self._plain and self.group.shard.last:
            x = self._forward_plain(x, batch, kv, step, outputs)
        else:
            for index, layer in enumerate(self.layers):
                wanted = outputs if layer is self.layers[-1] else None
                x = layer.general(x, batch, (kv.k[index], kv.v[index]), step, wanted)
            if self.final_norm is not None:
                x = self.final_norm(x)
        return x if self.project_out is None else self.project_out(x)

    def _enter(self, batch: StepBatch) -> torch.Tensor:
        assert self.embed is not None  # the first stage has it
        if len(self.vocabulary) == self.whole.vocab_size:
            x = F.embedding(batch.token_ids, self.embed)
        else:
            ids = batch.token_ids - self.vocabulary.start
            others = (ids < 0) | (ids >= len(self.vocabulary))
            x = F.embedding(ids.masked_fill(others, 0), self.embed).masked_fill_(others[:, None], 0.0)
            x = self.group.all_reduce(x)
        if self.whole.embed_scale != 1.0:
            x = x * self.embed_scale
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + F.embedding(batch.positions + self.whole.position_offset, self.positions)
        return x if self.embed_norm is None else self.embed_norm(x)

    def _forward_plain(
        self, residual: torch.Tensor, batch: StepBatch, kv: Cache, step: StepContext | None,
        outputs: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Llama's placement, each sum and the norm after it in one operation."""
        first, add = self.layers[0], self.group.all_reduce
        assert first.attn_norm is not None and self.final_norm is not None
        x = first.attn_norm(residual)
        for index, layer in enumerate(self.layers):
            x = add(layer.attention(x, batch, kv.k[index], kv.v[index], step))
            if layer is self.layers[-1] and outputs is not None:
                x, residual = x.index_select(0, outputs), residual.index_select(0, outputs)
                if not len(x):
                    return x
            assert layer.mlp_norm is not None
            x, residual = layer.mlp_norm.add(x, residual)
            x = add(layer.run_mlp(x))
            following = self.layers[index + 1].attn_norm if index + 1 < len(self.layers) else self.final_norm
            assert following is not None
            x, residual = following.add(x, residual)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None  # the last stage has it
        logits = self.lm_head(hidden).float()
        if self.whole.logit_scale != 1.0:
            logits.mul_(self.whole.logit_scale)
        if self.whole.logit_softcap:
            logits.div_(self.whole.logit_softcap).tanh_().mul_(self.whole.logit_softcap)
        return logits
