"""The step's program for steps in which some row has a LoRA adapter: products, and what adapters add to them.

Rows without an adapter get the bits that the program without adapters gives: products, activations and sums are the
same numbers in the same order. What is one operation there (a product with its activation) is two here, with the
adapters' between them, so steps without any adapter are left to the other program.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof

import numpy as np
import torch

from ..device import LongSteps
from ..kernels.cpu import program as native
from ..kernels.cpu.linear import ACTIVATED, GATED, STORE
from ..kernels.cpu.structs import Rows
from ..kv_cache import KVCache
from ..layers.linear import ExpertLinear, Linear
from ..lora.linear import AdaptedExperts, AdaptedLinear
from ..lora.slots import Slots
from .decoder import Decoder
from .program import Program
from .program_builder import Builder
from .program_writer import ACTIVATIONS, TYPES, Area


class AdaptedProgram(Program):
    """The program of a model with the adapters of ``slots``, for steps in which some row has one.

    ``plain``: the model's program without, whose threads this one uses. ``adapters`` int32 [rows]: the slot of each
    row's, -1: none; it stays where it is. The other arguments are those of ``plain``.
    """

    def __init__(
        self, plain: Program, slots: Slots, adapters: np.ndarray, model: Decoder, kv: KVCache, tokens: torch.Tensor,
        tables: torch.Tensor, outputs: int, long: LongSteps | None = None, taps: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self._slots, self._adapters = slots, adapters
        super().__init__(model, kv, tokens, tables, outputs, long, plain, taps)

    def _write(self, model: Decoder, kv: KVCache, outputs: int) -> AdaptedBuilder:
        self._adapting = AdaptedBuilder(model, kv, outputs, self._logits, self._slots, self._taps)
        return self._adapting

    def _add_to(self, parts: native.Parts) -> None:
        builder = self._adapting
        parts.adapters, parts.slots = self._adapters.ctypes.data, self._slots.count
        parts.body_slots, parts.tail_slots = builder.body_slots.ctypes.data, builder.tail_slots.ctypes.data

    def adapted_head(self, hidden: torch.Tensor, adapters: np.ndarray) -> torch.Tensor:
        """``head`` of rows with the ``adapters`` int32 [S]."""
        self._adapting.tail_slots[: len(adapters)] = adapters
        return self.head(hidden)


class AdaptedBuilder(Builder):
    """Writes the program of ``model`` with the adapters of ``slots``.

    ``body_slots`` [PASS] and ``tail_slots`` [outputs]: where C says which adapter each row of a section has.
    """

    def __init__(
        self, model: Decoder, kv: KVCache, outputs: int, logits: torch.Tensor, slots: Slots,
        taps: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.slots = slots
        self.body_slots = np.full(native.PASS, -1, np.int32)
        self.tail_slots = np.full(outputs, -1, np.int32)
        pieces = max((target.each for target in slots.targets.targets.values()), default=1)
        each = 1 if model.spec.moe is None else model.spec.moe.top_k
        self._shrunk = np.empty(outputs * each * pieces * slots.max_rank, np.float32)
        super().__init__(model, kv, outputs, logits, taps)

    def call(
        self, function: Callable[[torch.Tensor], torch.Tensor], source: Area, out: Area, action: int, scale: float
    ) -> None:
        slots, rows = self.slots, self.body_slots if self.section is self.body else self.tail_slots

        def within(x: torch.Tensor) -> torch.Tensor:
            slots.use(rows[: len(x)])
            return function(x)

        super().call(within, source, out, action, scale)

    def product(
        self, source: Area, linear: Linear, out: Area, action: int = STORE, kind: str = "silu", scale: float = 1.0
    ) -> None:
        if not isinstance(linear, AdaptedLinear) or linear.packed is None:  # which torch adapts
            super().product(source, linear, out, action, kind, scale)
        elif action in (GATED, ACTIVATED):
            wide = self.area(f"{out.name} before its activation", linear.packed.struct.outputs)
            super().product(source, linear, wide, STORE)
            self._adapt(linear.target, source, wide)
            self._activate(wide, out, action, kind)
        else:
            super().product(source, linear, out, action, kind, scale)
            self._adapt(linear.target, source, out, scale)

    def experts(
        self, routing: native.Routing, of: ExpertLinear, source: Area, rows: Rows, out: Area, action: int,
        kind: str = "silu",
    ) -> None:  # fmt: skip
        if not isinstance(of, AdaptedExperts) or of.packed is None:
            super().experts(routing, of, source, rows, out, action, kind)
            return
        to = out
        if action == GATED:
            to = self.area(f"{out.name} before its activation", of.packed[0].struct.outputs, each=out.each)
        super().experts(routing, of, source, rows, to, STORE)
        self._adapt(of.target, source, to, routing=routing, dense=action == GATED)
        if action == GATED:
            self._activate(to, out, action, kind)

    def embedded(self, out: Area) -> None:
        if "embed" in self.slots.targets.targets:
            self._adapt("embed", None, out, self.model.embed_scale)
        super().embedded(out)

    def _adapt(
        self, target: str, source: Area | None, out: Area, scale: float = 1.0, routing: native.Routing | None = None,
        dense: bool = False,
    ) -> None:  # fmt: skip
        """``dense``: ``source`` has a row for each token, and ``out`` for each of its experts."""
        operation = native.Adapt(self.slots.product(target).address, None if routing is None else addressof(routing))
        if source is not None:
            operation.source, operation.source_type = source.buffer, TYPES[source.tensor.dtype]
        operation.dense = dense
        operation.out, operation.shrunk, operation.scale = out.buffer, self._shrunk.ctypes.data, scale
        operation.tail = self.section is not self.body
        self.add(operation, out)

    def _activate(self, source: Area, out: Area, action: int, kind: str) -> None:
        operation = native.Activate(ACTIVATIONS.index(kind), action == GATED, out.width, out.each)
        operation.out_type, operation.source, operation.out = TYPES[out.tensor.dtype], source.buffer, out.buffer
        self.add(operation, out)
