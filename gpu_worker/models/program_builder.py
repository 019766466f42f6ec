"""From a decoder to the list of operations that C runs as its step (``kernels/cpu/program.py``).

Hidden states are float32 throughout; what a product reads is rounded to its weight's type by the operation that makes
it. A linear layer without a packed weight, and experts, are *calls*: torch does them on views of the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, addressof
from dataclasses import dataclass

import torch

from ..kernels.cpu import program as native
from ..kernels.cpu.attention import layer_of
from ..kernels.cpu.library import BF16, F32
from ..kernels.cpu.linear import ACTIVATED, ADD, GATED, GROUP, STORE
from ..kernels.cpu.structs import Epilogue, Rows, Weight
from ..kv_cache import KVCache
from ..layers.activation import activation, gated_activation
from ..layers.attention import Attention
from ..layers.linear import Linear
from ..layers.mlp import MLP, MoEBlock
from ..layers.norm import LayerNorm, NoNorm, Norm, ResidualFromNorm, RMSNorm
from .blocks import Block, Parallel, PostNorm, PreNorm, Sandwich
from .decoder import Decoder

TYPES = {torch.float32: F32, torch.bfloat16: BF16}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "swiglu_oai")
"""In the order of kernels.h's Q_SILU and those after it."""


@dataclass(frozen=True)
class Area:
    """A buffer of rows: ``width`` values of each are used, and zeros follow up to the next multiple of GROUP."""

    name: str
    tensor: torch.Tensor
    width: int

    @property
    def buffer(self) -> native.Buffer:
        """Where it lies, for C."""
        return self.part(0)

    def part(self, first: int) -> native.Buffer:
        """The same from value ``first`` of each row on."""
        size = self.tensor.element_size()
        return native.Buffer(self.tensor.data_ptr() + first * size, self.tensor.stride(0) * size)

    def rows(self, count: int) -> torch.Tensor:
        """The first ``count`` rows, [count, width]."""
        return self.tensor[:count, : self.width]


class Builder:
    """Writes the three sections of ``model``'s program.

    Args:
        kv: the cache whose pages attention reads.
        outputs: rows of the tail; at least native.PASS.
        logits: float32 [outputs or fewer, vocabulary], what the head fills.
    """

    def __init__(self, model: Decoder, kv: KVCache, outputs: int, logits: torch.Tensor) -> None:
        self.model, self.kv, self.spec = model, kv, model.spec
        self.body: list[Structure] = []
        self.tail: list[Structure] = []
        self.head: list[Structure] = []
        self._section, self._rows = self.body, outputs
        self.calls: list[tuple[native.Call, Callable[[int], None]]] = []
        self.keep: list[torch.Tensor] = []  # what operations point to
        self._areas: dict[tuple[str, torch.dtype], Area] = {}
        self._prepared: set[str] = set()  # areas that hold their source as it is now, prepared for a product
        hidden = self.spec.hidden_size
        self.stream = self.area("stream", hidden)
        self.attended = self.stream
        self._enter()
        for block in model.layers:
            self._shape(block)
        self.result = self._leave()
        self._section = self.head
        self._logits(Area("logits", logits, logits.shape[1]))

    # ------------------------------------------------------------ buffers and single operations

    def area(self, name: str, width: int, dtype: torch.dtype = torch.float32) -> Area:
        """The buffer ``name``, made at the first call. One name always has one width, so what pads it stays zero."""
        found = self._areas.get((name, dtype))
        if found is None:
            padded = -(-width // GROUP) * GROUP
            if padded * dtype.itemsize % 4096 == 0:  # neighbouring rows would share their places in the cache
                padded += 64 // dtype.itemsize
            found = Area(name, torch.zeros(self._rows, padded, dtype=dtype), width)
            self._areas[name, dtype] = found
        if found.width != width:
            raise ValueError(f"buffer {name} has {found.width} values a row, not {width}")
        return found

    def _add(self, operation: Structure, wrote: Area) -> None:
        self._section.append(operation)
        self._prepared = {name for name in self._prepared if not name.startswith(f"{wrote.name} for ")}

    def _pointer(self, tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        """The address of a parameter, contiguous and in ``dtype``."""
        if tensor is None:
            return None
        kept = tensor.to(dtype).contiguous()
        self.keep.append(kept)
        return kept.data_ptr()

    def _call(self, function: Callable[[int], None], wrote: Area) -> None:
        """``function(rows)`` by torch."""
        operation = native.Call(number=len(self.calls))
        self.calls.append((operation, function))
        self._add(operation, wrote)

    def _norm_struct(self, norm: Norm, size: int) -> native.Norm:
        if isinstance(norm, RMSNorm):
            weight = norm.weight.float() + 1 if norm.plus_one else norm.weight
            return native.Norm(0, size, norm.eps, self._pointer(weight), None)
        if isinstance(norm, LayerNorm):
            return native.Norm(1, size, norm.eps, self._pointer(norm.weight), self._pointer(norm.bias))
        raise TypeError(f"no operation computes {type(norm).__name__}")

    def _norm(self, norm: Norm, source: Area, out: Area) -> Area:
        """``out`` with the norm of ``source``, or ``source`` itself where there is no norm."""
        if isinstance(norm, NoNorm):
            return source
        if isinstance(norm, ResidualFromNorm):
            norm, out = norm.norm, source
        self._add(native.RowNorm(self._norm_struct(norm, source.width), source.buffer, out.buffer), out)
        return out

    def _normed(self, norm: Norm) -> Area:
        """The norm of the residual stream."""
        return self._norm(norm, self.stream, self.area("normed", self.spec.hidden_size))

    def _sum(self, source: Area, out: Area) -> None:
        self._add(native.Sum(out.width, 1.0, source.buffer, out.buffer), out)

    # ------------------------------------------------------------ products

    @staticmethod
    def _input_type(linear: Linear) -> torch.dtype:
        """What an operation had better write where this product is the next to read."""
        packed = linear.packed
        return torch.bfloat16 if packed is not None and packed.struct.type == BF16 else torch.float32

    def _inputs(self, source: Area, weight: Weight) -> Rows:
        """``source`` as a product with ``weight`` reads it; an operation makes it so where it is not."""
        if source.tensor.dtype == torch.float32 and weight.type == F32:
            return Rows(source.tensor.data_ptr(), source.buffer.stride, None, None)
        if source.tensor.dtype == torch.bfloat16 and weight.type == BF16:
            return Rows(source.tensor.data_ptr(), source.buffer.stride, None, None)
        dtype = torch.bfloat16 if weight.type == BF16 else torch.int8
        ready = self.area(f"{source.name} for {weight.type}", source.width, dtype)
        rows = Rows(ready.tensor.data_ptr(), ready.buffer.stride, None, None)
        if dtype == torch.int8:
            groups = -(-source.width // GROUP)
            scales, sums = torch.zeros(self._rows, groups), torch.zeros(self._rows, groups, dtype=torch.int32)
            self.keep += [scales, sums]
            rows.scales, rows.sums = scales.data_ptr(), sums.data_ptr()
        if ready.name not in self._prepared:
            self._add(
                native.Prepare(
                    weight.type, source.width, weight.padded_inputs, source.buffer, ready.buffer, rows.scales, rows.sums
                ),
                ready,
            )
            self._prepared.add(ready.name)
        return rows

    def product(
        self, source: Area, linear: Linear, out: Area, action: int = STORE, kind: str = "silu", scale: float = 1.0
    ) -> None:
        """``linear(source)`` to ``out`` as the epilogue ``action`` says, with the activation ``kind``."""
        if linear.packed is None:
            dtype = self.model.dtype
            self._call(lambda rows: _torch_product(rows, source, linear, out, action, kind, scale, dtype), out)
            return
        rows, to = self._inputs(source, linear.packed.struct), out.buffer
        epilogue = Epilogue(action, TYPES[out.tensor.dtype], ACTIVATIONS.index(kind), scale, to.data, to.stride)
        self._add(native.Linear(addressof(linear.packed.struct), rows, epilogue), out)

    # ------------------------------------------------------------ the ends of the model

    def _enter(self) -> None:
        """Embeddings, and what is done to them before the first layer."""
        model, whole = self.model, self.model.whole
        assert model.embed is not None  # of a model that is in one process
        x = self.stream
        if model.project_in is not None:
            x = self.area("embedded", model.embed.shape[1])
        table = self._table(model.embed)
        self._add(native.Embed(*table, model.embed_scale, x.buffer), x)
        if model.project_in is not None:
            self.product(x, model.project_in, self.stream)
        if model.positions is not None:
            scratch = self.area("normed", self.spec.hidden_size)
            table = self._table(model.positions)
            operation = native.Position(*table, whole.position_offset, scratch.buffer, self.stream.buffer)
            self._add(operation, self.stream)
        self._norm(model.embed_norm, self.stream, self.stream)

    def _table(self, table: torch.Tensor) -> tuple[int, int, int, int]:
        """Address, bytes from row to row, type and width of a table of embeddings."""
        self.keep.append(table)
        return table.data_ptr(), table.stride(0) * table.element_size(), TYPES[table.dtype], table.shape[1]

    def _leave(self) -> Area:
        """The last norm; the hidden states that are the model's result."""
        model, whole = self.model, self.model.whole
        result = self._norm(model.final_norm, self.stream, self.area("result", self.spec.hidden_size))
        if model.project_out is not None:
            projected = self.area("projected", whole.embed_size)
            self.product(result, model.project_out, projected)
            return projected
        return result

    def _logits(self, logits: Area) -> None:
        model, whole = self.model, self.model.whole
        if model.lm_head is None:  # a model that pools
            return
        self.product(self.result, model.lm_head, logits, scale=whole.logit_scale)
        if whole.logit_softcap:
            self._add(native.Softcap(logits.width, whole.logit_softcap, logits.buffer), logits)

    # ------------------------------------------------------------ layers

    def _attend(self, block: Block, source: Area) -> None:
        """``self.attended`` from ``source``: the product, what is done to queries and keys, and the attention.

        Behind the last one only the tokens whose result is wanted go on.
        """
        attention = block.attention
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        qkv = self.area(f"queries and {kv_heads} keys", (heads + 2 * kv_heads) * dim)
        self.product(source, attention.qkv, qkv)
        if attention.clip is not None:
            self._add(native.Clamp(qkv.width, attention.clip, qkv.buffer), qkv)
        for norm, first, count in ((attention.q_norm, 0, heads), (attention.k_norm, heads, kv_heads)):
            if norm is not None:
                self._head_norm(attention, norm, qkv, first, count)
        if attention.growth is not None:
            self._add(native.Grow(heads * dim, self._pointer(attention.growth), qkv.buffer), qkv)
        out = self.area("attended", heads * dim, self._input_type(attention.o))
        self._add(self._attend_struct(block, qkv, out), out)
        self.attended = out
        if block.last:
            self._gather()

    def _head_norm(self, attention: Attention, norm: RMSNorm | LayerNorm, qkv: Area, first: int, heads: int) -> None:
        """A norm of ``heads`` heads from head ``first`` on: of each, or of all together."""
        dim = attention.head_dim
        size, count = (heads * dim, 1) if attention.norm_all else (dim, heads)
        own = norm.weight is not None and norm.weight.dim() == 2
        self._add(native.HeadNorm(self._norm_struct(norm, size), qkv.part(first * dim), count, own), qkv)

    def _attend_struct(self, block: Block, qkv: Area, out: Area) -> native.Attend:
        attention = block.attention
        keys, values = self.kv.k[block.place], self.kv.v[block.place]
        layer = layer_of(attention.heads, keys, values, attention.scores)
        operation = native.Attend(layer, qkv.buffer, out.buffer)
        operation.out_type, operation.interleaved = TYPES[out.tensor.dtype], attention.interleaved
        if attention.tables is not None:
            cos, sin = attention.tables
            operation.cos, operation.sin = self._pointer(cos), self._pointer(sin)
            operation.rotary_dim = 2 * cos.shape[1]
        return operation

    def _gather(self) -> None:
        """To the buffers of the tail."""
        stream = self.area("stream of the tail", self.stream.width)
        attended = self.area("attended of the tail", self.attended.width, self.attended.tensor.dtype)
        gather = native.Gather()
        for at, (source, to) in enumerate(((self.stream, stream), (self.attended, attended))):
            gather.source[at], gather.to[at] = source.buffer, to.buffer
            gather.bytes[at] = source.width * source.tensor.element_size()
        self._add(gather, stream)
        self._section, self.stream, self.attended = self.tail, stream, attended

    def _mlp(self, mlp: MLP | MoEBlock, source: Area, out: Area, action: int) -> None:
        scale = self.spec.residual_scale
        if isinstance(mlp, MoEBlock):
            self._call(lambda rows: _finish(mlp(_read(source, rows, self.model.dtype)), rows, out, action, scale), out)
            return
        wide = self.area("wide", self.spec.intermediate_size, self._input_type(mlp.down))
        self.product(source, mlp.up, wide, GATED if mlp.gated else ACTIVATED, mlp.kind)
        self.product(wide, mlp.down, out, action, scale=scale)

    def _shape(self, block: Block) -> None:
        """The operations of one layer; each of these is a forward of ``blocks.py`` in other words."""
        if isinstance(block, Parallel):
            self._parallel(block)
        else:
            {PreNorm: self._pre_norm, Sandwich: self._sandwich, PostNorm: self._post_norm}[type(block)](block)

    def _pre_norm(self, block: Block) -> None:
        self._attend(block, self._normed(block.attn_norm))
        self.product(self.attended, block.attention.o, self.stream, ADD, scale=block.scale)
        self._mlp(block.mlp, self._normed(block.mlp_norm), self.stream, ADD)

    def _sandwich(self, block: Block) -> None:
        half = self.area("half", self.spec.hidden_size)
        self._attend(block, self._normed(block.attn_norm))
        self.product(self.attended, block.attention.o, half)
        self._sum(self._norm(block.attn_out_norm, half, half), self.stream)
        self._mlp(block.mlp, self._normed(block.mlp_norm), half, STORE)
        self._sum(self._norm(block.mlp_out_norm, half, half), self.stream)

    def _post_norm(self, block: Block) -> None:
        self._attend(block, self.stream)
        self.product(self.attended, block.attention.o, self.stream, ADD)
        self._norm(block.attn_norm, self.stream, self.stream)
        self._mlp(block.mlp, self.stream, self.stream, ADD)
        self._norm(block.mlp_norm, self.stream, self.stream)

    def _parallel(self, block: Parallel) -> None:
        source = self._normed(block.attn_norm)
        self._attend(block, source)
        # The MLP reads the stream as it was before the attention's result is added.
        if not block.shared:
            source = self._normed(block.mlp_norm)
        elif block.last:
            source = self._normed(block.attn_norm)  # again, of the gathered rows
        self._mlp(block.mlp, source, self.stream, ADD)
        self.product(self.attended, block.attention.o, self.stream, ADD, scale=block.scale)


# ---------------------------------------------------------------- what torch computes


def _read(area: Area, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows in the model's dtype."""
    return area.rows(rows).to(dtype)


def _finish(result: torch.Tensor, rows: int, out: Area, action: int, scale: float) -> None:
    """What an epilogue does, with what torch has computed."""
    result = result.float() if scale == 1.0 else result.float() * scale
    if action == ADD:
        out.rows(rows).add_(result)
    else:
        out.rows(rows).copy_(result)


def _torch_product(
    rows: int, source: Area, linear: Linear, out: Area, action: int, kind: str, scale: float, dtype: torch.dtype
) -> None:
    """A linear layer whose weight is in a format of its own, and its epilogue."""
    result = linear(_read(source, rows, dtype))
    if action == GATED:
        result = gated_activation(result, kind)
    elif action == ACTIVATED:
        result = activation(result, kind)
    _finish(result, rows, out, action, scale)
