"""Linear layers by the native kernels: weights packed into panels, and their products with torch's tensors."""

from __future__ import annotations

import functools
from ctypes import POINTER, byref, c_int32, c_int64, c_void_p, sizeof

import torch
import torch.nn.functional as F

from ....proto.config import ConfigError
from .library import BF16, CODES, F32, I4, I8, Library, library
from .structs import Codes, Epilogue, Matrix, Rows, Weight

PANEL, ROW_UNIT, GROUP = 32, 64, 128
"""kernels.h's Q_PANEL, Q_ROW_UNIT and Q_GROUP."""
STORE, ADD, GATED, ACTIVATED = range(4)
"""What becomes of the sums: kernels.h's Q_STORE, Q_ADD, Q_GATED and Q_ACTIVATED."""
TYPES = {torch.float32: F32, torch.bfloat16: BF16}
_BITS = {F32: 32, BF16: 16, I8: 8, I4: 4}
_STRUCTS = (Weight, Rows, Epilogue, Matrix, Codes)


def row_dtype(weight: Weight) -> torch.dtype:
    """Of rows as products with ``weight`` read them."""
    return {F32: torch.float32, BF16: torch.bfloat16, CODES: torch.float32}.get(weight.type, torch.int8)


class PackedWeight:
    """A weight [outputs, inputs] in the native kernels' panels.

    ``struct`` is kernels.h's q_weight. It stays at its address, and what it points to lives as long as this object.
    ``dtype`` is what its products take: float32 where they quantize activations themselves.
    """

    def __init__(
        self, kind: int, outputs: int, inputs: int, gated: bool, bits: int | None = None, padded: int | None = None
    ) -> None:
        """``bits`` of a value and ``padded`` inputs are known of each kind but CODES."""
        panels = -(-(outputs // 2) // (PANEL // 2)) if gated else -(-outputs // PANEL)
        unit = GROUP if kind == I4 else ROW_UNIT
        padded = padded or -(-inputs // unit) * unit
        self.struct = Weight(kind, outputs, inputs, padded, panels, int(gated))
        self.struct.groups = {I8: 1, I4: padded // GROUP}.get(kind, 0)
        self.dtype = torch.bfloat16 if kind == BF16 else torch.float32
        self.bias: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        columns = panels * PANEL
        self._data = aligned(columns * padded * (bits or _BITS[kind]) // 8)
        self.struct.data = self._data.data_ptr()
        if kind == I8:
            self._scales, self._offsets = torch.zeros(columns), torch.zeros(columns, dtype=torch.int32)
            self.struct.scales, self.struct.offsets = self._scales.data_ptr(), self._offsets.data_ptr()
        elif kind == I4:
            self._scales = torch.zeros(columns * padded // GROUP, dtype=torch.bfloat16)
            self.struct.group_scales = self._scales.data_ptr()

    @property
    def layout(self) -> object:
        """Of the rows that its products read: rows that were prepared for one weight do for all of an equal layout."""
        return self.struct.type, self.struct.padded_inputs

    @property
    def nbytes(self) -> int:
        """Of the panels and their scales."""
        kept = (getattr(self, name, None) for name in ("_data", "_scales", "_offsets"))
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def set_bias(self, bias: torch.Tensor | None) -> None:
        """Let products add ``bias`` [outputs] from now on; None: nothing."""
        self.bias, self._bias = bias, None if bias is None else self._in_panels(bias.float())
        self.struct.bias = None if self._bias is None else self._bias.data_ptr()

    def _in_panels(self, values: torch.Tensor) -> torch.Tensor:
        """[outputs] -> [panels * PANEL], each at its column."""
        size = self.struct.panels * PANEL
        if not self.struct.gated:
            return F.pad(values, (0, size - len(values)))
        halves = F.pad(values.view(2, -1), (0, (size - len(values)) // 2))
        return halves.view(2, -1, PANEL // 2).transpose(0, 1).reshape(-1)


def aligned(size: int) -> torch.Tensor:
    """uint8 [size], aligned for the kernels, on large pages where the system has them."""
    memory = torch.empty(size + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    native().c.q_use_huge_pages(memory.data_ptr(), size + 64)
    return memory[start : start + size]


@functools.cache
def native() -> Library:
    """The library with the functions of ``linear_run.c`` and ``pack.c`` declared.

    Raises ConfigError where there is none, or where it is of another version.
    """
    found = library()
    if found is None:
        raise ConfigError("there are no native CPU kernels; install quire where a C compiler is.")
    sizes = (c_int64 * len(_STRUCTS))()
    found.c.q_linear_sizes(sizes)
    if list(sizes) != [sizeof(struct) for struct in _STRUCTS]:
        raise ConfigError("the native CPU kernels are of another version of quire; install it again.")
    weight, rows, epilogue, matrix = map(POINTER, _STRUCTS[:4])
    found.c.q_linear.argtypes = (c_void_p, weight, rows, c_int32, epilogue)
    found.c.q_linear.restype = None
    found.c.q_prepare.argtypes = (c_void_p, weight, c_int32, c_void_p, c_int64, rows)
    found.c.q_prepare.restype = None
    found.c.q_pack.argtypes = (c_void_p, matrix, weight)
    found.c.q_use_huge_pages.argtypes = (c_void_p, c_int64)
    found.c.q_use_huge_pages.restype = None
    return found


def team() -> int:
    """The team of as many threads as torch computes with."""
    return native().team(torch.get_num_threads())


def pack(matrix: torch.Tensor, kind: int | None = None, gated: bool = False) -> PackedWeight:
    """``matrix`` [outputs, inputs], float32 or bfloat16, as a weight of ``kind`` (default: its own type).

    ``gated``: its first half are gates, its second half what they are applied to; both of one output lie together, so
    that a product can end with the activation. Raises ConfigError where there are no native kernels.
    """
    found, own = native(), TYPES[matrix.dtype]
    matrix = matrix.contiguous()
    packed = PackedWeight(own if kind is None else kind, matrix.shape[0], matrix.shape[1], gated)
    source = Matrix(own, matrix.stride(0), matrix.data_ptr())
    if found.c.q_pack(team(), byref(source), byref(packed.struct)):
        raise MemoryError(f"no memory to pack a weight of {tuple(matrix.shape)}")
    return packed


def pack_int8(values: torch.Tensor, scales: torch.Tensor, gated: bool = False) -> PackedWeight:
    """``values`` int8 [outputs, inputs] times ``scales`` float32 [outputs], as a weight of kind I8 of these numbers."""
    packed = PackedWeight(I8, values.shape[0], values.shape[1], gated)
    padded = packed.struct.padded_inputs
    places = packed._in_panels(torch.arange(1, len(values) + 1))  # 0: of no output
    rows = F.pad(values, (0, padded - values.shape[1]))
    panels = packed._data.view(torch.int32).view(packed.struct.panels, padded // 4, PANEL)
    for panel, place in zip(panels, places.view(-1, PANEL), strict=True):
        own = rows[(place - 1).clamp(min=0)] * (place > 0)[:, None]
        panel.copy_(own.contiguous().view(torch.int32).t())
    packed._scales.copy_(packed._in_panels(scales.float()))
    packed._offsets.copy_(packed._in_panels(values.sum(1, dtype=torch.int32)) * -128)
    return packed


def multiply(
    x: torch.Tensor, packed: PackedWeight, out: torch.Tensor | None = None, action: int = STORE, activation: int = 0,
    scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """scale * (x [T, inputs] @ weight.T + bias), to ``out`` [T, outputs] as ``action`` says, or a new one of x's dtype.

    ``action`` GATED gives [T, outputs / 2]: ``activation`` of the first half times the second. ADD adds to ``out``,
    which is float32. A row has the same bits whatever the other rows, and whatever torch's number of threads.
    """
    weight = packed.struct
    width = weight.outputs // 2 if action == GATED else weight.outputs
    if out is None and x.dtype not in TYPES:
        return multiply(x.float(), packed, None, action, activation, scale).to(x.dtype)
    if out is None:
        out = torch.empty(x.shape[0], width, dtype=x.dtype)
    if not len(x):
        return out
    rows, keep = _rows(x, packed)
    to = Epilogue(action, TYPES[out.dtype], activation, scale, out.data_ptr(), out.stride(0) * out.element_size())
    native().c.q_linear(team(), byref(weight), byref(rows), len(x), byref(to))
    del keep
    return out


def _rows(x: torch.Tensor, packed: PackedWeight) -> tuple[Rows, tuple[torch.Tensor, ...]]:
    """``x`` as the kernels read it for ``packed``, and the memory that this points to."""
    weight = packed.struct
    x = x.to(packed.dtype)
    if weight.groups:
        return _prepared(x, weight)
    missing = weight.padded_inputs - x.shape[1]
    x = F.pad(x, (0, missing)) if missing else x if x.stride(1) == 1 else x.contiguous()
    return Rows(x.data_ptr(), x.stride(0) * x.element_size(), None, None), (x,)


def _prepared(x: torch.Tensor, weight: Weight) -> tuple[Rows, tuple[torch.Tensor, ...]]:
    """float32 rows as int8, by a scale for each row or for each group, or in the order and with the sums of codes."""
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty(len(x), weight.padded_inputs, dtype=row_dtype(weight))
    scales, sums = torch.empty(len(x), weight.groups), torch.empty(len(x), weight.groups, dtype=torch.int32)
    rows = Rows(values.data_ptr(), values.stride(0) * values.element_size(), scales.data_ptr(), sums.data_ptr())
    native().c.q_prepare(team(), byref(weight), len(x), x.data_ptr(), x.stride(0), byref(rows))
    return rows, (values, scales, sums)
