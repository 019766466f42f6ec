"""The parts that a step's program is written with: buffers of rows, operations, products (``kernels/cpu/program.py``).

Hidden states are float32 throughout; what a product reads is rounded to its weight's type by the operation that makes
it. What C cannot do is a *call*: torch does it on views of the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, addressof, c_void_p
from dataclasses import dataclass

import torch

from ..kernels.cpu import program as native
from ..kernels.cpu.library import BF16, F32
from ..kernels.cpu.linear import ACTIVATED, ADD, GATED, GROUP, STORE, PackedWeight, row_dtype
from ..kernels.cpu.structs import Epilogue, Rows, Weight
from ..layers.activation import activation, gated_activation
from ..layers.linear import ExpertLinear, Linear

TYPES = {torch.float32: F32, torch.bfloat16: BF16}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "swiglu_oai")
"""In the order of kernels.h's Q_SILU and those after it."""


@dataclass(frozen=True)
class Area:
    """A buffer of rows: ``width`` values of each are used, and zeros follow up to the next multiple of GROUP.

    ``each``: its rows for each row of the step.
    """

    name: str
    tensor: torch.Tensor
    width: int
    each: int = 1

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


class Writer:
    """Writes operations one after another to the ``section`` that is being written.

    Args:
        dtype: what torch's operations take.
        rows: rows of every buffer.
    """

    def __init__(self, dtype: torch.dtype, rows: int) -> None:
        self.dtype, self._row_count = dtype, rows
        self.section: list[Structure] = []
        self.calls: list[tuple[native.Call, Callable[[int], None]]] = []
        self.keep: list[object] = []  # what operations point to
        self._areas: dict[tuple[str, torch.dtype], Area] = {}
        self._rows: dict[str, Rows] = {}
        self._prepared: dict[str, object] = {}  # areas that hold their source as it is now, prepared: for which layout

    # ------------------------------------------------------------ buffers and single operations

    def area(self, name: str, width: int, dtype: torch.dtype = torch.float32, each: int = 1) -> Area:
        """The buffer ``name``, made at the first call. One name always has one width, so what pads it stays zero."""
        found = self._areas.get((name, dtype))
        if found is None:
            padded = -(-width // GROUP) * GROUP
            if padded * dtype.itemsize % 4096 == 0:  # neighbouring rows would share their places in the cache
                padded += 64 // dtype.itemsize
            found = Area(name, self.zeros(padded, dtype, each), width, each)
            self._areas[name, dtype] = found
        if found.width != width:
            raise ValueError(f"buffer {name} has {found.width} values a row, not {width}")
        return found

    def zeros(self, width: int, dtype: torch.dtype, each: int = 1) -> torch.Tensor:
        """Memory of ``width`` values for each row, or ``each`` times as much, that lives as long as the writer."""
        made = torch.zeros(self._row_count * each, width, dtype=dtype)
        self.keep.append(made)
        return made

    def add(self, operation: Structure, wrote: Area) -> None:
        """Append an operation, which changes ``wrote``."""
        self.section.append(operation)
        for name in [name for name in self._prepared if name.startswith(f"{wrote.name} for ")]:
            del self._prepared[name]

    def pointer(self, tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        """The address of a parameter, contiguous and in ``dtype``."""
        if tensor is None:
            return None
        kept = tensor.to(dtype).contiguous()
        self.keep.append(kept)
        return kept.data_ptr()

    def call(
        self, function: Callable[[torch.Tensor], torch.Tensor], source: Area, out: Area, action: int, scale: float
    ) -> None:
        """``function(source)`` by torch to ``out``, as the epilogue ``action`` says (STORE or ADD)."""

        def run(rows: int) -> None:
            result = function(source.rows(rows).to(self.dtype)).float()
            if scale != 1.0:
                result = result * scale
            if action == ADD:
                out.rows(rows).add_(result)
            else:
                out.rows(rows).copy_(result)

        operation = native.Call(number=len(self.calls))
        self.calls.append((operation, run))
        self.add(operation, out)

    # ------------------------------------------------------------ products

    @staticmethod
    def input_type(packed: PackedWeight | None) -> torch.dtype:
        """What an operation had better write where a product with this weight is the next to read."""
        return torch.bfloat16 if packed is not None and packed.struct.type == BF16 else torch.float32

    def rows(self, name: str, weight: Weight, each: int = 1) -> tuple[Area, Rows]:
        """The buffer ``name`` of rows as a product with ``weight`` reads them, and where their parts are."""
        name = f"{name} for {weight.type}: {weight.padded_inputs} in {weight.groups}"
        dtype = row_dtype(weight)
        area = self.area(name, weight.padded_inputs, dtype, each)
        found = self._rows.get(name)
        if found is None:
            found = self._rows[name] = Rows(area.tensor.data_ptr(), area.buffer.stride, None, None)
            if weight.groups:
                found.scales = self.zeros(weight.groups, torch.float32, each).data_ptr()
                found.sums = self.zeros(weight.groups, torch.int32, each).data_ptr()
        return area, found

    def inputs(self, source: Area, packed: PackedWeight) -> Rows:
        """``source`` as a product with ``packed`` reads it; an operation makes it so where it is not."""
        weight = packed.struct
        if TYPES[source.tensor.dtype] == weight.type:
            return Rows(source.tensor.data_ptr(), source.buffer.stride, None, None)
        ready, rows = self.rows(source.name, weight, source.each)
        if self._prepared.get(ready.name) != packed.layout:
            operation = native.Prepare(addressof(weight), source.each, source.buffer)
            operation.out, operation.scales, operation.sums = ready.buffer, rows.scales, rows.sums
            self.add(operation, ready)
            self._prepared[ready.name] = packed.layout
        return rows

    def product(
        self, source: Area, linear: Linear, out: Area, action: int = STORE, kind: str = "silu", scale: float = 1.0
    ) -> None:
        """``linear(source)`` to ``out`` as the epilogue ``action`` says, with the activation ``kind``."""
        if linear.packed is None:
            self.call(_torch_product(linear, action, kind), source, out, action, scale)
            return
        rows, to = self.inputs(source, linear.packed), out.buffer
        epilogue = Epilogue(action, TYPES[out.tensor.dtype], ACTIVATIONS.index(kind), scale, to.data, to.stride)
        self.add(native.Linear(addressof(linear.packed.struct), rows, epilogue), out)

    def experts(
        self, routing: native.Routing, of: ExpertLinear, source: Area, rows: Rows, out: Area, action: int,
        kind: str = "silu",
    ) -> None:  # fmt: skip
        """Each expert's rows times its own weight, to ``out``. ``rows`` were made of ``source``."""
        assert of.packed is not None  # experts_run_in_c
        listed = (c_void_p * len(of.packed))(*(addressof(weight.struct) for weight in of.packed))
        self.keep.append(listed)
        buffer = out.buffer
        epilogue = Epilogue(action, TYPES[out.tensor.dtype], ACTIVATIONS.index(kind), 1.0, buffer.data, buffer.stride)
        self.add(native.Experts(addressof(routing), addressof(listed), rows, epilogue), out)


def _torch_product(linear: Linear, action: int, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear layer whose weight is in a format of its own, and the activation of its epilogue."""
    if action == GATED:
        return lambda x: gated_activation(linear(x), kind)
    if action == ACTIVATED:
        return lambda x: activation(linear(x), kind)
    return linear
