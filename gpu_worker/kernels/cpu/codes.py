"""Weights of codes (``kernels/codes.py``) in the native kernels' panels: codes become numbers in registers, activations
stay float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from ctypes import POINTER, addressof, byref, c_int32, c_int64, c_void_p, sizeof

import torch
import torch.nn.functional as F

from ....proto.config import ConfigError
from ..codes import Codes, PerGroup, has_nan, plane_widths
from .library import BF16, CODES, F16, F32, Library
from .linear import PANEL, PackedWeight, native, team
from .structs import Codes as CodesStruct
from .structs import Numbers, Planes, Weight, Words

UNIT, RUN = 32, 16
"""kernels.h's Q_UNIT and Q_RUN."""
NUMBER, SMALL_TABLE, TABLE, OWN_TABLE, E4M3, STEPS = range(6)
"""How a code becomes a number: kernels.h's Q_NUMBER and those after it."""
_TYPES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}


def can_pack(codes: Codes) -> bool:
    """Whether ``pack_codes`` takes ``codes``, or each expert's of them."""
    zeros = codes.zeros
    if codes.signed and (codes.bits != 8 or codes.table is not None or not isinstance(zeros, int)):
        return False
    if codes.order is not None and codes.order.dim() > 1:
        return False  # each expert's inputs in an order of its own: rows are prepared once for all experts
    return 2 <= codes.bits <= 8 and (_one_group(codes) or codes.group % RUN == 0)


def _one_group(codes: Codes) -> bool:
    """Whether all columns have the same scale, zero and minimum."""
    numbers = [codes.scales] if codes.mins is None else [codes.scales, codes.mins]
    tensors = [tensor for each in numbers for tensor in (each.base, each.fine) if tensor is not None]
    if not isinstance(codes.zeros, int):
        tensors.append(codes.zeros)
    return all(tensor.shape[-1] == 1 for tensor in tensors)


class PackedCodes(PackedWeight):
    """Codes [outputs, inputs] in the native kernels' panels."""

    def __init__(self, codes: Codes, gated: bool) -> None:
        """Of one weight for which ``can_pack`` holds. The caller may drop ``codes``."""
        padded = codes.planes[0].shape[-1] * 32 // plane_widths(codes.bits)[0]
        super().__init__(CODES, codes.rows, codes.columns, gated, codes.bits, padded)
        self._keep: list[torch.Tensor] = []
        group = padded if _one_group(codes) else codes.group
        groups = -(-padded // group)
        self._places = _places(self.struct)
        self.codes = CodesStruct(codes.bits, NUMBER, group, groups, step=1.0)
        self.struct.codes, self.struct.groups = addressof(self.codes), groups
        flip = 128 if codes.signed else 0
        self.codes.kind = self._kind(codes)
        if isinstance(codes.zeros, int):
            self.codes.zero += codes.zeros + flip
        else:
            zeros = codes.zeros if codes.zeros.shape[-1] > 1 else codes.zeros.expand(-1, groups)
            self.codes.zeros = self._keep_panels(zeros.expand(codes.rows, -1), groups)
        self.codes.scales = self._numbers(codes.scales)
        if codes.mins is not None:
            self.codes.minima = self._numbers(codes.mins)
        if codes.order is not None:
            order = torch.where(codes.order < codes.columns, codes.order, -1)
            self.codes.order = self._keep_it(order.int())
        self._pack(codes, flip)

    @property
    def layout(self) -> object:
        codes = self.codes
        factors = (codes.kind, codes.bits, codes.step) if codes.kind in (NUMBER, STEPS, E4M3) else None
        return CODES, self.struct.padded_inputs, codes.group, factors, codes.order

    @property
    def nbytes(self) -> int:
        """Of the panels and all that belongs to them, without the bias."""
        return self._data.nbytes + sum(tensor.nbytes for tensor in self._keep)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.struct.outputs, self.struct.inputs

    def values_of(self, outputs: torch.Tensor) -> torch.Tensor:
        """float32 [T, inputs]: ``outputs`` [T] of the weight, which is not gated. Raises IndexError."""
        ids = outputs.long().contiguous()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.struct.outputs:
            raise IndexError(f"a row is looked up beyond the {self.struct.outputs} that the weight has")
        out = torch.empty(len(ids), self.struct.inputs)
        _native().c.q_code_rows(team(), byref(self.struct), ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def _keep_it(self, tensor: torch.Tensor) -> int:
        kept = tensor.contiguous()
        self._keep.append(kept)
        return kept.data_ptr()

    def _keep_panels(self, values: torch.Tensor, columns: int) -> int:
        """[outputs, columns or fewer] as [panels, columns, PANEL], zeros where nothing is; its address."""
        rows = torch.cat([values, values.new_zeros(1, values.shape[1])])[self._places]
        return self._keep_it(F.pad(rows.view(-1, PANEL, rows.shape[1]), (0, columns - rows.shape[1])).transpose(1, 2))

    def _kind(self, codes: Codes) -> int:
        """How the codes become numbers; keeps the table of that."""
        table = codes.table
        if table is None:
            return NUMBER
        if table.dim() > 1:
            self._table = self._keep_panels(table.float().expand(codes.rows, -1), 1 << codes.bits)
            return OWN_TABLE
        if codes.bits > 4:
            self._table = self._keep_it(table.float())
            return E4M3 if _is_e4m3(codes) else TABLE
        if codes.bits == 4 and (step := _step(table.float())):
            counts = table.double() / step
            self.codes.step, self.codes.zero = step, -counts.min().item() * step
            self._table = self._keep_it((counts - counts.min()).byte().repeat(4))
            return STEPS
        self._table = self._keep_it(table.float().repeat(16 >> codes.bits))
        return SMALL_TABLE

    def _numbers(self, numbers: PerGroup) -> Numbers:
        base, fine, ratio = numbers.base, numbers.fine, numbers.ratio
        if base.dtype not in _TYPES or ratio & (ratio - 1):
            base, fine, ratio = numbers.values(), None, 1
        found = Numbers(base_type=_TYPES[base.dtype], base_shift=ratio.bit_length() - 1)
        found.base, found.base_stride, found.base_shift = self._per_group(base, found.base_shift)
        if fine is not None:
            found.fine, found.fine_stride, found.fine_shift = self._per_group(fine, 0)
            found.fine_signed = fine.dtype == torch.int8
        return found

    def _per_group(self, values: torch.Tensor, shift: int) -> tuple[int, int, int]:
        """Address, stride from panel to panel, and shift of values that each are of 2^shift groups."""
        shift = shift if values.shape[-1] > 1 else 31
        columns = ((self.codes.groups - 1) >> shift) + 1
        if values.shape[0] == 1 and self.struct.outputs > 1:
            one = F.pad(values, (0, columns - values.shape[1])).T.expand(-1, PANEL)
            return self._keep_it(one), 0, shift
        return self._keep_panels(values, columns), columns * PANEL, shift

    def _pack(self, codes: Codes, flip: int) -> None:
        self.codes.table = getattr(self, "_table", None)
        planes = [plane.contiguous() for plane in codes.planes]
        source = Planes(flip=flip, units=self.struct.padded_inputs // UNIT)
        for at, (plane, width) in enumerate(zip(planes, plane_widths(codes.bits), strict=True)):
            source.planes[at], source.strides[at], source.widths[at] = plane.data_ptr(), plane.stride(0), width
        _native().c.q_pack_codes(team(), byref(source), byref(self.struct))


def pack_codes(codes: Codes, gated: bool = False) -> PackedCodes:
    """``codes`` of one weight for products with float32 rows. ``gated``: as of ``linear.pack``. Raises ConfigError
    where there are no native kernels.
    """
    return PackedCodes(codes, gated)


def word_planes(
    words: torch.Tensor, bits: int, columns: int, order: torch.Tensor | None, planes: Sequence[torch.Tensor],
    shifts: Sequence[int] = (),
) -> None:  # fmt: skip
    """Fill ``planes`` [rows, words of a row] with the codes of int32 ``words`` [rows, at least those of ``columns``].

    A row of words is a stream of one output's codes of 2, 3, 4 or 8 bits; or, with ``shifts``, a word has those of
    eight outputs of 4 bits, each in the bits from its shift on. ``order``: int32 [columns of the planes], the code that
    goes to each place, ``columns`` for 0; None: as they are, and zeros behind. Raises ConfigError where there are no
    native kernels.
    """
    words, order = words.contiguous(), None if order is None else order.int().contiguous()
    job = Words(
        words=words.data_ptr(), order=None if order is None else order.data_ptr(), stride=words.shape[1],
        rows=len(words), columns=columns, width=planes[0].shape[1] * 32 // plane_widths(bits)[0], bits=bits,
        outputs=len(shifts) or 1,
    )  # fmt: skip
    job.shifts[: len(shifts)] = shifts
    for at, plane in enumerate(planes):
        job.planes[at] = plane.data_ptr()
    if _native().c.q_word_planes(team(), byref(job)):
        raise MemoryError(f"no memory to read codes of {columns} columns")


def _places(weight: Weight) -> torch.Tensor:
    """int64 [panels * PANEL]: the row that each column of the panels is; ``outputs`` where none."""
    at = torch.arange(weight.panels * PANEL)
    if not weight.gated:
        return at.clamp(max=weight.outputs)
    half, column = weight.outputs // 2, at % PANEL
    row = at // PANEL * (PANEL // 2) + column % (PANEL // 2)
    return torch.where(row < half, row + (column >= PANEL // 2) * half, weight.outputs)


def _step(table: torch.Tensor) -> float | None:
    """A power of two of which all entries are whole multiples, 255 of them apart at most; None where there is none."""
    span = (table.max() - table.min()).item()
    if not 0.0 < span < math.inf:
        return None
    step = 2.0 ** math.frexp(span / 255)[1]  # the smallest: multiples of larger ones are its multiples, too
    counts = table.double() / step
    return step if torch.equal(counts, counts.round()) else None


def _is_e4m3(codes: Codes) -> bool:
    """Whether the table is float8_e4m3fn's, and no code is one of its two that are no numbers."""
    table = codes.table
    if codes.bits != 8 or table is None:
        return False
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = numbers.isfinite()
    if not torch.equal(table.float()[finite], numbers[finite]):
        return False
    return not has_nan(codes.planes[0])


@functools.cache
def _native() -> Library:
    """The library with the functions of ``pack_codes.c`` and ``word_planes.c`` declared. Raises ConfigError, as
    ``linear.native``.
    """
    found = native()
    found.c.q_planes_size.restype = found.c.q_words_size.restype = c_int64
    if (found.c.q_planes_size(), found.c.q_words_size()) != (sizeof(Planes), sizeof(Words)):
        raise ConfigError("the native CPU kernels are of another version of quire; install it again.")
    found.c.q_pack_codes.argtypes = (c_void_p, POINTER(Planes), POINTER(Weight))
    found.c.q_pack_codes.restype = None
    found.c.q_word_planes.argtypes = (c_void_p, POINTER(Words))
    found.c.q_code_rows.argtypes = (c_void_p, POINTER(Weight), c_void_p, c_int32, c_void_p)
    found.c.q_code_rows.restype = None
    return found
