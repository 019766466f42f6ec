"""Float weights as codes, made at load: fp8 by tensor, row or block, int8 by row, int4 by groups of 128.

    fp8: scale = largest magnitude / 448, by ``fp8`` of each module's tensor, as a checkpoint in FP8 has it
    int8: scale = largest magnitude of a row / 127
    int4: bfloat16 scale = value of the largest magnitude of 128 columns / -8, so that this value is a code

Values are rounded to the nearest. A scale of a tensor, or of a row, is the same in any number of tensor ranks: they
tell each other the largest magnitude that they hold. A block, or a group, is one rank's. On a CPU int8 and int4 are the
native kernels' own, made by them (``native.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...kernels.codes import Activations, Codes, PerGroup, pack
from .base import ExpertProducts, Run, Stored, Tensors, Weight
from .coded import Coded
from .fp8 import bytes_of, e4m3
from .native import Int4, Int8
from .scales import by_tensor, per_group

Largest = Callable[[torch.Tensor], torch.Tensor]
"""The largest of each number among the tensor ranks."""
GROUP, BLOCK = 128, 128
_PIECE = 1 << 24
"""Values that are in float32 at a time."""
_NATIVE = {"int8": Int8(), "int4": Int4()}
_BITS = {"int8": 8.0, "int4": 4 + 16 / GROUP}


@dataclass(frozen=True)
class Online(Coded):
    """``method``: int8, int4, fp8_per_tensor, fp8_per_channel or fp8_per_block."""

    method: str
    largest: Largest = lambda numbers: numbers

    @property
    def bits(self) -> float:
        """Of a value, with its share of a scale."""
        return _BITS.get(self.method, 8.0)

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        return (Stored("weight"),)

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        if weight.device.type == "cpu" and self.method in _NATIVE:
            return _NATIVE[self.method].linear(tensors, weight)
        return super().linear(tensors, weight)

    def experts(self, tensors: Tensors, weight: Weight) -> ExpertProducts:
        if weight.device.type == "cpu" and self.method in _NATIVE:
            return _NATIVE[self.method].experts(tensors, weight)
        return super().experts(tensors, weight)

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        matrix = tensors["weight"]
        if self.method == "int4":
            return _int4(matrix)
        rows = Activations("int8" if self.method == "int8" else "fp8", BLOCK if self.method == "fp8_per_block" else 0)
        scales, group = self._scales(matrix, weight)
        made = torch.empty(matrix.shape, dtype=torch.uint8, device=matrix.device)
        if self.method == "fp8_per_block":
            scales = scales.repeat_interleave(BLOCK, -2)[..., : matrix.shape[-2], :]
        wide = scales.expand(*matrix.shape[:-1], scales.shape[-1])
        for piece, out, own in _pieces(matrix, made, wide):
            own = own if own.shape[-1] == 1 else own.repeat_interleave(group, -1)[..., : matrix.shape[-1]]
            q = piece.float() / own.where(own > 0, 1)
            if self.method == "int8":
                out.copy_(q.round().clamp(-127, 127).to(torch.int8).view(torch.uint8))
            else:
                out.copy_(q.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
        signed = self.method == "int8"
        table = None if signed else e4m3(matrix.device)
        return Codes(
            bytes_of(made), 8, weight.shape[1], group, per_group(wide), table=table, signed=signed, activations=rows,
            floats="" if signed else "e4m3",
        )  # fmt: skip

    def _scales(self, matrix: torch.Tensor, weight: Weight) -> tuple[torch.Tensor, int]:
        """float32 [..., rows or blocks or 1, groups], and the columns of a group."""
        columns = weight.shape[1]
        if self.method == "fp8_per_block":
            return _largest_of_blocks(matrix) / 448, BLOCK
        rows = torch.cat([piece.abs().amax(-1, keepdim=True).float() for (piece,) in _pieces(matrix)], -2)
        cut = len(weight.columns) < weight.columns.total
        if self.method != "fp8_per_tensor":
            return (self.largest(rows) if cut else rows) / (127 if self.method == "int8" else 448), columns
        parts = rows[..., 0].split([len(part) for part in weight.parts], -1)
        found = torch.stack([part.amax(-1) for part in parts], -1)
        cut = cut or any(len(part) < part.total for part in weight.parts)
        return by_tensor((self.largest(found) if cut else found) / 448, weight), columns


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Rows of all, of _PIECE values at most; of experts' [E, rows, ...] a few of each."""
    rows = tensors[0].shape[-2]
    step = max(1, _PIECE // max(1, tensors[0].numel() // max(1, rows)))
    for at in range(0, rows, step):
        yield tuple(tensor[..., at : at + step, :] for tensor in tensors)


def _largest_of_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block of [..., rows, columns], float32 [..., blocks of rows, blocks of columns]."""
    rows, columns = matrix.shape[-2:]
    whole = F.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return whole.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).abs().amax((-3, -1)).float()


INT4_SHARES = (1.0, 0.95, 0.9, 0.85)
"""What becomes -8 at int4: so much of a group's value of the largest magnitude, whichever loses least."""


def _int4(matrix: torch.Tensor) -> Codes:
    columns = matrix.shape[-1]
    groups = -(-columns // GROUP)
    codes = torch.empty(matrix.shape, dtype=torch.uint8, device=matrix.device)
    scales = torch.empty(*matrix.shape[:-1], groups, dtype=torch.bfloat16, device=matrix.device)
    for piece, out, own in _pieces(matrix, codes, scales):
        cut = F.pad(piece.float(), (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
        largest = cut.gather(-1, cut.abs().argmax(-1, keepdim=True))
        scale, values, least = _int4_by(cut, largest)
        for share in INT4_SHARES[1:]:
            other, others, lost = _int4_by(cut, largest * share)
            better = lost < least
            scale, values = torch.where(better, other, scale), torch.where(better, others, values)
            least = torch.where(better, lost, least)
        out.copy_((values + 8).to(torch.uint8).flatten(-2)[..., :columns])
        own.copy_(scale[..., 0])
    return Codes(pack(codes, 4), 4, columns, GROUP, PerGroup(scales), 8)


def _int4_by(groups: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups [..., GROUP] as -8 to 7, ``whole`` [..., 1] being -8: bfloat16 scales, values, what is lost squared."""
    scale = (whole / -8).to(torch.bfloat16)
    inverse = torch.where(scale != 0, 1 / scale.float(), 0)
    values = (groups * inverse).clamp_(-8, 7).round_()
    return scale, values, (values * scale.float()).sub_(groups).square_().sum(-1, keepdim=True)
