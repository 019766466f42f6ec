"""From a decoder to the list of operations that C runs as its step (``kernels/cpu/program.py``)."""

from __future__ import annotations

from ctypes import Structure, addressof

import torch

from ..kernels.cpu import program as native
from ..kernels.cpu.attention import layer_of
from ..kernels.cpu.linear import ACTIVATED, ADD, GATED, STORE
from ..kv_cache import KVCache
from ..layers.attention import Attention
from ..layers.formats.table import Table
from ..layers.mlp import MLP, MoEBlock
from ..layers.norm import LayerNorm, NoNorm, Norm, ResidualFromNorm, RMSNorm
from .blocks import Block, Parallel, PostNorm, PreNorm, Sandwich
from .decoder import Decoder
from .program_experts import experts_run_in_c, new_routing, write_experts
from .program_writer import TYPES, Area, Writer


class Builder(Writer):
    """Writes the three sections of ``model``'s program.

    Args:
        kv: the cache whose pages attention reads.
        outputs: rows of the tail; at least native.PASS.
        logits: float32 [outputs or fewer, vocabulary], what the head fills.
        taps: layers, before each of which the hidden states are taken (``tapped``).
    """

    def __init__(
        self, model: Decoder, kv: KVCache, outputs: int, logits: torch.Tensor, taps: tuple[int, ...] = ()
    ) -> None:
        super().__init__(model.dtype, outputs)
        self.model, self.kv, self.spec = model, kv, model.spec
        self.body: list[Structure] = []
        self.tail: list[Structure] = []
        self.head: list[Structure] = []
        self.section = self.body
        self.routing = None if self.spec.moe is None else new_routing(self, self.spec.moe)
        hidden = self.spec.hidden_size
        self.stream = self.area("stream", hidden)
        self.attended = self.stream
        self._enter()
        self.tapped: list[list[torch.Tensor]] = [[] for _ in taps]
        """Of each of ``taps`` the hidden states float32 [rows, hidden] of each pass. The caller empties it."""
        for number, block in enumerate(model.layers):
            self._tap(tuple(place for place, layer in enumerate(taps) if layer == number))
            self._shape(block)
        self.result = self._leave()
        self.section = self.head
        self._logits(Area("logits", logits, logits.shape[1]))

    def _norm_struct(self, norm: Norm, size: int) -> native.Norm:
        if isinstance(norm, RMSNorm):
            weight = norm.weight.float() + 1 if norm.plus_one else norm.weight
            return native.Norm(0, size, norm.eps, self.pointer(weight), None)
        if isinstance(norm, LayerNorm):
            return native.Norm(1, size, norm.eps, self.pointer(norm.weight), self.pointer(norm.bias))
        raise TypeError(f"no operation computes {type(norm).__name__}")

    def _norm(self, norm: Norm, source: Area, out: Area) -> Area:
        """``out`` with the norm of ``source``, or ``source`` itself where there is no norm."""
        if isinstance(norm, NoNorm):
            return source
        if isinstance(norm, ResidualFromNorm):
            norm, out = norm.norm, source
        self.add(native.RowNorm(self._norm_struct(norm, source.width), source.buffer, out.buffer), out)
        return out

    def _normed(self, norm: Norm) -> Area:
        """The norm of the residual stream."""
        return self._norm(norm, self.stream, self.area("normed", self.spec.hidden_size))

    def _sum(self, source: Area, out: Area) -> None:
        self.add(native.Sum(out.width, 1.0, source.buffer, out.buffer), out)

    # ------------------------------------------------------------ the ends of the model

    def _enter(self) -> None:
        """Embeddings, and what is done to them before the first layer."""
        model, whole = self.model, self.model.whole
        assert model.embed is not None  # of a model that is in one process
        x = self.stream
        if model.project_in is not None:
            x = self.area("embedded", model.embed.shape[1])
        self.add(native.Embed(*self._rows_of(model.embed), model.embed_scale, x.buffer), x)
        self.embedded(x)
        if model.project_in is not None:
            self.product(x, model.project_in, self.stream)
        if model.positions is not None:
            scratch = self.area("normed", self.spec.hidden_size)
            table = self._table(model.positions)
            operation = native.Position(*table, whole.position_offset, scratch.buffer, self.stream.buffer)
            self.add(operation, self.stream)
        self._norm(model.embed_norm, self.stream, self.stream)

    def embedded(self, out: Area) -> None:
        """``out`` has the embeddings of the ids; those that prompts have brought take their places."""
        if (given := self.model.given) is not None:
            operation = native.Call(number=len(self.calls))
            self.calls.append((operation, lambda rows: given.fill(out.rows(rows))))
            self.add(operation, out)

    def _rows_of(self, table: Table) -> tuple[int | None, int | None, int, int, int]:
        """What an Embed says of a table: its address or that of its codes, and as ``_table``."""
        if isinstance(table, torch.Tensor):
            address, stride, kind, width = self._table(table)
            return address, None, stride, kind, width
        assert table.packed is not None  # beside the native kernels codes are packed
        self.keep.append(table)
        return None, addressof(table.packed.struct), 0, TYPES[table.dtype], table.shape[1]

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
            self.add(native.Softcap(logits.width, whole.logit_softcap, logits.buffer), logits)

    # ------------------------------------------------------------ layers

    def _tap(self, places: tuple[int, ...]) -> None:
        """Copy the residual stream as it is here, for ``places`` of ``tapped``."""
        if not places:
            return
        stream = self.stream

        def copy(rows: int) -> None:
            for place in places:
                self.tapped[place].append(stream.rows(rows).clone())

        operation = native.Call(number=len(self.calls))
        self.calls.append((operation, copy))
        self.section.append(operation)

    def _attend(self, block: Block, source: Area) -> None:
        """``self.attended`` from ``source``: the product, what is done to queries and keys, and the attention.

        Behind the last one only the tokens whose result is wanted go on.
        """
        attention = block.attention
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        qkv = self.area(f"queries and {kv_heads} keys", (heads + 2 * kv_heads) * dim)
        self.product(source, attention.qkv, qkv)
        if attention.clip is not None:
            self.add(native.Clamp(qkv.width, attention.clip, qkv.buffer), qkv)
        for norm, first, count in ((attention.q_norm, 0, heads), (attention.k_norm, heads, kv_heads)):
            if norm is not None:
                self._head_norm(attention, norm, qkv, first, count)
        if attention.growth is not None:
            self.add(native.Grow(heads * dim, self.pointer(attention.growth), qkv.buffer), qkv)
        out = self.area("attended", heads * dim, self.input_type(attention.o.packed))
        self.add(self._attend_struct(block, qkv, out), out)
        self.attended = out
        if block.last:
            self._gather()

    def _head_norm(self, attention: Attention, norm: RMSNorm | LayerNorm, qkv: Area, first: int, heads: int) -> None:
        """A norm of ``heads`` heads from head ``first`` on: of each, or of all together."""
        dim = attention.head_dim
        size, count = (heads * dim, 1) if attention.norm_all else (dim, heads)
        own = norm.weight is not None and norm.weight.dim() == 2
        self.add(native.HeadNorm(self._norm_struct(norm, size), qkv.part(first * dim), count, own), qkv)

    def _attend_struct(self, block: Block, qkv: Area, out: Area) -> native.Attend:
        attention = block.attention
        keys, values = self.kv.k[block.place], self.kv.v[block.place]
        layer = layer_of(attention.heads, keys, values, attention.scores)
        operation = native.Attend(layer, qkv.buffer, out.buffer)
        operation.out_type, operation.interleaved = TYPES[out.tensor.dtype], attention.interleaved
        operation.wanted_only = block.last
        if attention.tables is not None:
            cos, sin = attention.tables
            operation.cos, operation.sin = self.pointer(cos), self.pointer(sin)
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
        self.add(gather, stream)
        self.section, self.stream, self.attended = self.tail, stream, attended

    def _mlp(self, mlp: MLP | MoEBlock, source: Area, out: Area, action: int) -> None:
        scale = self.spec.residual_scale
        if isinstance(mlp, MLP):
            wide = self.area("wide", self.spec.intermediate_size, self.input_type(mlp.down.packed))
            self.product(source, mlp.up, wide, GATED if mlp.gated else ACTIVATED, mlp.kind)
            self.product(wide, mlp.down, out, action, scale=scale)
        elif self.routing is not None and experts_run_in_c(mlp):
            write_experts(self, self.routing, mlp, source, out, action, scale)
        else:
            self.call(mlp, source, out, action, scale)

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
