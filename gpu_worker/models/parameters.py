"""Every parameter of a decoder: its name, its shape, and which part of it one process holds.

Rows of queries, keys, values, MLPs and the vocabulary, and whole experts, are shared out among the tensor ranks
(``Shard``); what adds their results together is cut by columns. Norms, routers and position tables are everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..layers.formats.base import CHOOSING, Part, Stored, Weight, whole
from ..spec import WHOLE, DecoderSpec, MoESpec, Shard

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Parameter:
    """A parameter of the decoder, or a tensor that its format keeps it in. ``parts`` are what separate checkpoints
    stack along dim 0.

    ``kind``: "linear" (a Linear's weight), "experts" (an ExpertLinear's), "bias", "norm", or "table" (rows looked up).
    ``experts``: the model's number of them, each with as many of the parts. ``stored``: which tensor of its weight it
    is, and ``weight`` that weight's name.
    """

    name: str
    kind: str
    parts: tuple[Part, ...]
    columns: Part | None = None
    experts: int = 0
    stored: Stored | None = None
    weight: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that this process holds."""
        rows = sum(map(len, self.parts))
        return (rows,) if self.columns is None else (rows, len(self.columns))

    @property
    def stem(self) -> str:
        """Its name without the layer: "qkv.weight"."""
        return self.name.split(".", 2)[2] if self.name.startswith("layers.") else self.name

    @property
    def layer(self) -> int:
        """The model's number of its layer; -1 outside the layers."""
        return int(self.name.split(".")[1]) if self.name.startswith("layers.") else -1

    @property
    def repeated(self) -> bool:
        """Whether each part has the same rows of a checkpoint's tensor, which tells of that tensor as a whole."""
        return self.stored is not None and not self.stored.rows.unit

    def rows_of(self, indices: tuple[int, ...]) -> int:
        """Rows of the checkpoint's tensor that holds the parts ``indices``."""
        totals = [self.parts[index].total for index in indices]
        return totals[0] if self.repeated else sum(totals)

    def as_weight(self, dtype: torch.dtype, device: torch.device) -> Weight:
        """What a format is told of it."""
        columns, gated = self.columns or whole(1), self.name.endswith("gate_up.weight")
        if not self.experts:
            chooses = self.name.endswith(CHOOSING)
            return Weight(self.parts, columns, dtype, device, gated=gated, chooses=chooses)
        each = len(self.parts) // self.experts
        held = sum(1 for part in self.parts[::each] if len(part))
        return Weight(tuple(whole(part.total) for part in self.parts[:each]), columns, dtype, device, held, gated)

    def in_tensor(self, stored: Stored) -> Parameter:
        """One of the tensors that the weight is kept in. Raises ConfigError where the format cannot be cut so."""
        name = self.name.removesuffix("weight") + stored.key
        columns = None
        if stored.columns is not None and self.columns is not None:
            columns = stored.columns.cut(self.columns, name)
        each = len(self.parts) // max(1, self.experts)
        parts = tuple(
            stored.rows.cut(part if stored.part in (None, index % each) else Part(part.total, 0, 0), name)
            for index, part in enumerate(self.parts)
        )
        return replace(self, name=name, parts=parts, columns=columns, stored=stored, weight=self.name)


def _cut(size: int, held: range, unit: int = 1) -> Part:
    return Part(size * unit, held.start * unit, held.stop * unit)


def parameters(spec: DecoderSpec, shard: Shard = WHOLE) -> Iterator[Parameter]:
    """What ``shard`` holds of ``spec``, in the order the model uses it. Layers keep the model's numbers."""
    hidden = whole(spec.hidden_size)
    vocabulary = _cut(spec.vocab_size, shard.share(spec.vocab_size))
    width = whole(spec.embed_size or spec.hidden_size)
    if shard.first or (shard.last and spec.tied):
        yield Parameter("embed.weight", "table", (vocabulary,), width)
    if shard.first:
        if spec.embed_size:
            yield Parameter("project_in.weight", "linear", (hidden,), width)
        if spec.positions:
            yield Parameter("positions.weight", "table", (whole(spec.positions),), hidden)
        if spec.types:
            yield Parameter("types.weight", "table", (whole(spec.types),), hidden)
        if spec.embed_norm:
            yield from _norm(spec, "embed_norm", hidden)
    for layer in shard.layers(spec.num_layers):
        yield from _layer(spec, layer, shard)
    if not shard.last:
        return
    if spec.final_norm:
        yield from _norm(spec, "final_norm", hidden)
    if spec.embed_size:
        yield Parameter("project_out.weight", "linear", (width,), hidden)
    if spec.head:
        yield from _linear("head", (width,), width, True)
    outputs = vocabulary if spec.outputs < 0 else whole(spec.outputs)
    if not spec.tied and len(outputs):
        yield Parameter("lm_head.weight", "linear", (outputs,), width)
    if spec.lm_head_bias:
        yield Parameter("lm_head.bias", "bias", (outputs,))


def _norm(spec: DecoderSpec, name: str, size: Part) -> Iterator[Parameter]:
    if spec.norm_affine:
        yield Parameter(f"{name}.weight", "norm", (size,))
        if spec.norm_bias:
            yield Parameter(f"{name}.bias", "bias", (size,))


def _linear(
    name: str, rows: tuple[Part, ...], columns: Part, bias: bool, shard: Shard | None = None
) -> Iterator[Parameter]:
    """``shard``: of a weight whose columns are cut; the ranks' sums are added, so only the first adds the bias."""
    yield Parameter(f"{name}.weight", "linear", rows, columns)
    if bias and (shard is None or shard.rank == 0):
        yield Parameter(f"{name}.bias", "bias", rows)


def _layer(spec: DecoderSpec, layer: int, shard: Shard) -> Iterator[Parameter]:
    prefix, hidden, dim = f"layers.{layer}.", whole(spec.hidden_size), spec.head_dim
    heads = _cut(spec.heads, shard.share(spec.heads), dim)
    kv = _cut(spec.kv_heads[layer], shard.kv_range(spec.kv_heads[layer]), dim)
    for name in ("attn", "attn_out"):
        if name in spec.norms:
            yield from _norm(spec, f"{prefix}{name}_norm", hidden)
    yield from _linear(prefix + "qkv", (heads, kv, kv), hidden, spec.qkv_bias)
    yield from _linear(prefix + "o", (hidden,), heads, spec.o_bias, shard)
    if spec.sinks:
        yield Parameter(prefix + "sinks.weight", "table", (_cut(spec.heads, shard.share(spec.heads)),))
    if spec.qk_norm:
        yield from _qk_norms(spec, layer, shard)
    for name in ("mlp", "mlp_out"):
        if name in spec.norms:
            yield from _norm(spec, f"{prefix}{name}_norm", hidden)
    if spec.is_moe(layer) and spec.moe is not None:
        yield from _experts(spec, spec.moe, prefix, shard)
    else:
        yield from _mlp(spec, prefix, "", spec.intermediate_size, spec.gated, spec.mlp_bias, shard)


def _qk_norms(spec: DecoderSpec, layer: int, shard: Shard) -> Iterator[Parameter]:
    for name, count, held in (
        ("q_norm", spec.heads, shard.share(spec.heads)),
        ("k_norm", spec.kv_heads[layer], shard.kv_range(spec.kv_heads[layer])),
    ):
        columns = None
        if spec.qk_norm == "heads":
            rows, columns = tuple(Part(1, 0, int(head in held)) for head in range(count)), whole(spec.head_dim)
        else:
            rows = (whole(spec.head_dim) if spec.qk_norm == "head" else _cut(count, held, spec.head_dim),)
        yield Parameter(f"layers.{layer}.{name}.weight", "norm", rows, columns)
        if spec.qk_norm_bias:
            yield Parameter(f"layers.{layer}.{name}.bias", "bias", rows, columns)


def _mlp(
    spec: DecoderSpec, prefix: str, kind: str, width: int, gated: bool, bias: bool, shard: Shard
) -> Iterator[Parameter]:
    hidden, wide = whole(spec.hidden_size), _cut(width, shard.share(width))
    name = f"{prefix}{kind}gate_up" if gated else f"{prefix}{kind}up"
    yield from _linear(name, (wide, wide) if gated else (wide,), hidden, bias)
    yield from _linear(f"{prefix}{kind}down", (hidden,), wide, bias, shard)


def _experts(spec: DecoderSpec, moe: MoESpec, prefix: str, shard: Shard) -> Iterator[Parameter]:
    hidden, wide = whole(spec.hidden_size), whole(moe.width)
    held, nothing = shard.share(moe.experts), 0
    yield from _linear(prefix + "router", (whole(moe.experts),), hidden, moe.router_bias)
    if moe.correction_bias:
        yield Parameter(prefix + "correction.bias", "bias", (whole(moe.experts),))
    for name, parts, columns in (("gate_up", (wide, wide), hidden), ("down", (hidden,), wide)):
        rows = tuple(
            part if expert in held else Part(part.total, nothing, nothing)
            for expert in range(moe.experts)
            for part in parts
        )
        yield Parameter(f"{prefix}experts_{name}.weight", "experts", rows, columns, moe.experts)
        if moe.bias:
            yield Parameter(f"{prefix}experts_{name}.bias", "bias", rows, None, moe.experts)
    if moe.shared_width:
        yield from _mlp(spec, prefix, "shared_", moe.shared_width, True, False, shard)
        if moe.shared_gate:
            yield from _linear(prefix + "shared_gate", (whole(1),), hidden, False)
