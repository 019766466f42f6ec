"""Weights as small whole numbers, *codes*, and what makes values of them: the form that all products read, whatever
file a weight came from.

The value of row n and column k, in float32::

    value = (table[code] - zero[group]) * scale[group] - minimum[group]

where ``group`` counts columns in runs of ``Codes.group``, and table, zero and minimum are often not there. A code times
an fp16 scale is exact in float32, and so is a difference of two of the former: so a format's own formula, which rounds
once, gives the same bits.

Codes of ``bits`` bits lie in *planes*: of 3 bits the lower two in one tensor and the upper one in another. A plane is
int32 [rows, columns / (32 / width)], and its value number i is in the bits from i % (32 / width) * width on of word
i // (32 / width). So no code lies across two words, and 2, 4 and 8 bits are as compressed-tensors and a transposed GPTQ
have them. Columns are filled up to a multiple of COLUMN_UNIT, with codes 0; nothing reads these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

COLUMN_UNIT = 32
"""Columns of the planes are a multiple of this, so that each plane has whole words."""
_PIECE = 1 << 22
"""Values that are made at a time, each of which takes several times its float32 meanwhile."""


def float_table(kind: str, device: torch.device | None = None) -> torch.Tensor:
    """float32 [256] or [16]: what the bytes of "e4m3" (float8_e4m3fn), or the 4 bits of "e2m1", stand for."""
    if kind == "e4m3":
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)
    if kind == "e2m1":
        half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        return torch.cat((half, -half)).to(device)
    raise ValueError(f"{kind} is no small float of codes: e4m3 or e2m1")


def has_nan(e4m3: torch.Tensor) -> bool:
    """Whether bytes of e4m3, of any dtype, are its NaN: the largest as int8 is 0x7F then, or as uint8 0xFF."""
    bytes = e4m3.view(torch.uint8)
    return bool(bytes.numel()) and bool(bytes.amax() == 0xFF or bytes.view(torch.int8).amax() == 0x7F)


def plane_widths(bits: int) -> tuple[int, ...]:
    """Bits of each plane of codes of 2 to 8 ``bits``, from the lowest on: of 7 they are 4, 2 and 1."""
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


@dataclass(frozen=True)
class PerGroup:
    """A number for each row and group: ``base[n, g // ratio] * fine[n, g]``, or ``base[n, g]`` alone.

    ``base``: float16, bfloat16 or float32 [rows, groups / ratio]. ``fine``: uint8 or int8 [rows, groups], or None.
    One row of either stands for all rows, one column for all groups.
    """

    base: torch.Tensor
    fine: torch.Tensor | None = None
    ratio: int = 1

    def values(self) -> torch.Tensor:
        """float32 [rows, groups]; of size 1 where one stands for all."""
        base = self.base.float()
        if self.ratio > 1:
            base = base.repeat_interleave(self.ratio, -1)
        return base if self.fine is None else base[..., : self.fine.shape[-1]] * self.fine

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PerGroup:
        """With ``change`` of its tensors."""
        return replace(self, base=change(self.base), fine=None if self.fine is None else change(self.fine))


@dataclass(frozen=True)
class Activations:
    """How a weight's file says that rows are made narrower before they are multiplied: by ``kind``, on cards and CPUs
    that multiply it; elsewhere rows stay as they are. int8 rows do on every CPU, fp8 rows on none.

    A row's number is ``(q - zero) * scale``. Dynamic: a scale for each row and each ``group`` of its columns, of its
    largest magnitude (/ 127, / 448); static: one scale that the file has measured.

    Attributes:
        kind: "int8", from -128 to 127; or "fp8", e4m3fn, from -448 to 448.
        group: columns that share a dynamic scale; 0: a whole row.
        scale: of static ones, float32 [1], or [E, 1] of experts; None: dynamic.
        zero: of static int8, int32 of the scale's shape; None: 0.
        symmetric: whether dynamic int8 rows have no zero of their own.
    """

    kind: Literal["int8", "fp8"]
    group: int = 0
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    symmetric: bool = True

    def expert(self, expert: int) -> Activations:
        """Of one of several experts."""
        scale, zero = (None if each is None else each[expert] for each in (self.scale, self.zero))
        return replace(self, scale=scale, zero=zero)

    def narrowed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """float32 ``x`` [T, columns] as (q in float32 [T, columns], scales and zeros that q's shape can be used with).

        The definition that products follow, of one expert's. Zeros are None where there are none.
        """
        most = 127.0 if self.kind == "int8" else 448.0
        group = self.group or x.shape[-1]
        zeros = None if self.zero is None else self.zero.float()
        if self.scale is not None:
            scales = self.scale
        else:
            cut = torch.nn.functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
            if self.symmetric:
                scales = cut.abs().amax(-1) / most
            else:
                low, high = cut.amin(-1).clamp(max=0), cut.amax(-1).clamp(min=0)
                scales = (high - low) / 255
                zeros = (-128 - low / scales.where(scales > 0, 1)).round()
                zeros = zeros.repeat_interleave(group, -1)[..., : x.shape[-1]]
            scales = scales.repeat_interleave(group, -1)[..., : x.shape[-1]]
        q = x / scales.where(scales > 0, 1)
        if self.kind == "fp8":
            return q.clamp(-most, most).to(torch.float8_e4m3fn).float(), scales, None
        return (q.round() if zeros is None else q.round() + zeros).clamp(-128, 127), scales, zeros

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """float32 ``x`` [T, columns] as the narrower rows have it."""
        q, scales, zeros = self.narrowed(x)
        return (q if zeros is None else q - zeros) * scales


@dataclass(frozen=True)
class Codes:
    """A weight [rows, columns], or with a first dim of experts in every tensor but a table shared by all.

    Attributes:
        planes: int32 [rows, padded columns * width / 32] each, of the widths ``plane_widths(bits)``.
        bits: of a code, 2 to 8.
        columns: of the weight, without what fills it up.
        group: columns of a group; the last may be shorter. ``columns`` where there is one.
        scales: of each group.
        zeros: uint8 [rows, groups] or a whole number for all; what is taken off a code.
        mins: of each group, what is taken off at last; or None.
        table: float32 [2^bits] or, of each row, [rows, 2^bits]: what a code stands for; None: for itself.
        order: int32 [columns of the planes]: column i of the planes multiplies input ``order[i]``, and an entry of
            ``columns`` multiplies nothing; None: input i.
        signed: whether codes of 8 bits are int8.
        activations: how rows are made narrower for a product, where the file says so. ``values`` knows nothing of it.
        floats: "e4m3" or "e2m1" where the table is ``float_table`` of that small float, which a GPU makes of the
            codes' bits without reading the table; "" otherwise.
    """

    planes: tuple[torch.Tensor, ...]
    bits: int
    columns: int
    group: int
    scales: PerGroup
    zeros: torch.Tensor | int = 0
    mins: PerGroup | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    signed: bool = False
    activations: Activations | None = None
    floats: str = ""

    @property
    def rows(self) -> int:
        """Of the weight, or of one expert's."""
        return self.planes[0].shape[-2]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the weight, or of one expert's."""
        return self.rows, self.columns

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        self.each(count)
        return total

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Codes:
        """With ``change`` of every tensor that has rows; the order of columns and a table of all rows stay."""
        own_table = self.table is not None and self.table.dim() > 1
        return replace(
            self, planes=tuple(map(change, self.planes)), scales=self.scales.each(change),
            zeros=self.zeros if isinstance(self.zeros, int) else change(self.zeros),
            mins=None if self.mins is None else self.mins.each(change),
            table=change(self.table) if own_table and self.table is not None else self.table,
        )  # fmt: skip

    def expert(self, expert: int) -> Codes:
        """Of codes with a first dim of experts."""
        one = self.each(lambda tensor: tensor[expert])
        if self.activations is not None:
            one = replace(one, activations=self.activations.expert(expert))
        return one if one.order is None or one.order.dim() == 1 else replace(one, order=one.order[expert])

    def codes(self) -> torch.Tensor:
        """[..., rows, columns of the planes], uint8, or int8 where they are ``signed``."""
        return unpack(self.planes, self.bits).view(torch.int8 if self.signed else torch.uint8)

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight itself [..., rows, columns]: computed in float32, then rounded to ``dtype``."""
        if self.planes[0].dim() > 2:
            return torch.stack([self.expert(each).values(dtype) for each in range(len(self.planes[0]))])
        out = torch.empty(self.rows, self.columns, dtype=dtype, device=self.planes[0].device)
        step = max(1, _PIECE // max(1, self.columns))
        for at in range(0, self.rows, step):
            out[at : at + step] = self._piece(at, at + step)._values()
        return out

    def _piece(self, start: int, stop: int) -> Codes:
        """Rows ``start`` to ``stop``."""
        return self.each(lambda tensor: tensor[start:stop] if len(tensor) > 1 else tensor)

    def of_rows(self, rows: torch.Tensor) -> Codes:
        """The codes of ``rows`` [T], of a weight without experts."""
        found = self.each(lambda tensor: tensor.index_select(0, rows) if len(tensor) > 1 else tensor)
        return replace(found, planes=tuple(plane.index_select(0, rows) for plane in self.planes))

    def _values(self) -> torch.Tensor:
        codes = self.codes()
        if self.order is None:  # groups need not reach over what fills up the last columns
            codes = codes[..., : self.columns]
        width = codes.shape[-1]

        def spread(numbers: torch.Tensor) -> torch.Tensor:
            if numbers.shape[-1] == 1:
                return numbers
            wide = numbers.repeat_interleave(self.group, -1)[..., :width]
            return torch.nn.functional.pad(wide, (0, width - wide.shape[-1]))  # what fills up may have no group

        if self.table is None:
            out = codes.float()
        elif self.table.dim() == 1:
            out = self.table[codes.long()]
        else:
            out = self.table.gather(-1, codes.long())
        out -= self.zeros if isinstance(self.zeros, int) else spread(self.zeros.float())
        out *= spread(self.scales.values())
        if self.mins is not None:
            out -= spread(self.mins.values())
        if self.order is None:
            return out[..., : self.columns]
        found = torch.zeros(*out.shape[:-1], self.columns + 1, dtype=out.dtype, device=out.device)
        return found.index_copy_(-1, self.order.long(), out)[..., : self.columns].contiguous()


def pack(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """``codes`` [..., columns], integers (int8 are taken by their lower ``bits``), as planes."""
    codes = codes.view(torch.uint8) if codes.dtype == torch.int8 else codes.to(torch.uint8)
    if missing := -codes.shape[-1] % COLUMN_UNIT:
        codes = torch.nn.functional.pad(codes, (0, missing))
    codes = codes.contiguous()
    planes, shift = [], 0
    for width in plane_widths(bits):
        part = codes if width == 8 else ((codes >> shift) if shift else codes) & ((1 << width) - 1)
        planes.append(_words(part, width))
        shift += width
    return tuple(planes)


_TOGETHER = {4: torch.int16, 2: torch.int32, 1: torch.int64}
"""The integer of as many bytes as a byte of a plane has values, by their bits."""


def _words(values: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 [..., columns] of ``width`` bits -> int32 [..., columns * width / 32], the first in the lowest bits."""
    if width == 8:
        return values.view(torch.int32)
    wide = values.view(_TOGETHER[width])  # a value in each byte: moved down, they meet in the lowest
    out = wide.clone()
    for at in range(1, 8 // width):
        out |= wide >> (at * (8 - width))
    return out.to(torch.uint8).view(torch.int32)


def unpack(planes: tuple[torch.Tensor, ...], bits: int) -> torch.Tensor:
    """The codes of ``planes``, uint8 [..., columns of the planes]: ``pack`` backwards."""
    out, shift = None, 0
    for width, plane in zip(plane_widths(bits), planes, strict=True):
        bytes = plane.contiguous().view(torch.uint8)
        mask = (1 << width) - 1
        parts = [((bytes >> at) & mask) << shift for at in range(0, 8, width)]
        part = parts[0] if width == 8 else torch.stack(parts, -1).flatten(-2)
        out = part if out is None else out | part
        shift += width
    if out is None:
        raise ValueError("codes have 2 to 8 bits")
    return out
