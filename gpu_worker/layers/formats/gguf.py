"""GGUF's types of weights: blocks of 32 or 256 values of a row, each with the scales of its values.

How the bytes of a block are laid out is ggml's (ggml-common.h and ggml-quants.c); the values are those of gguf-py's
``quants.dequantize`` to the bit. Parts that are one weight here may have types of their own, as a file with Q4_K has
Q6_K for half of its values: they are brought to the wider codes of the two, which changes no value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....proto.config import ConfigError
from ...kernels.codes import Codes, PerGroup, pack, plane_widths
from .base import Axis, ExpertProducts, Format, Run, Stored, TensorError, Tensors, Weight
from .coded import Coded, experts_of, product_of
from .dense import PLAIN, Dequantized, dense
from .packed import part_of
from .registry import Quantization, register

_PIECE = 1 << 18
"""Values whose codes are unpacked at a time: so few that all steps find them in a cache, and in memory in use."""
_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values; the scale is half of its power

Fields = dict[str, torch.Tensor]
"""The numbers of rows of blocks: "codes" uint8 [rows, columns], and as ``_Type`` says."""


@dataclass(frozen=True)
class _Type:
    """A type: ``block`` values in ``nbytes`` bytes, codes of ``bits``, a scale for each ``group`` of them.

    ``unpack`` makes of uint8 [rows, blocks, nbytes] "codes", "base" (float16 or float32 [rows, blocks]) and, where
    there are such, "fine" [rows, groups], "min_base" and "min_fine".
    """

    block: int
    nbytes: int
    bits: int
    group: int
    unpack: Callable[[torch.Tensor], Fields]
    zero: int = 0
    table: tuple[int, ...] | None = None


# ---------------------------------------------------------------- blocks


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte ``at`` of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _shifted(bytes: torch.Tensor, run: int, width: int) -> torch.Tensor:
    """Numbers of ``width`` bits, [..., values]: of each ``run`` bytes first all the lowest ones, then the next."""
    runs = bytes.unflatten(-1, (-1, run))
    parts = [(runs >> shift) & ((1 << width) - 1) for shift in range(0, 8, width)]
    return torch.stack(parts, -2).flatten(-3)


def _row(values: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, values] -> [rows, columns]."""
    return values.flatten(-2)


def _nibbles(blocks: torch.Tensor, head: int) -> torch.Tensor:
    return _shifted(blocks[..., head : head + 16], 16, 4)


def _fifth(blocks: torch.Tensor, head: int) -> torch.Tensor:
    """Codes of 5 bits: the upper one of value i is bit i of four bytes, which the lower ones follow."""
    upper = blocks[..., head : head + 4]
    high = torch.stack([(upper >> bit) & 1 for bit in range(8)], -1).flatten(-2)
    return _nibbles(blocks, head + 4) | (high << 4)


def _q4_0(blocks: torch.Tensor) -> Fields:
    return {"codes": _row(_nibbles(blocks, 2)), "base": _half(blocks, 0)}


def _q4_1(blocks: torch.Tensor) -> Fields:
    return {"codes": _row(_nibbles(blocks, 4)), "base": _half(blocks, 0), "min_base": -_half(blocks, 2)}


def _q5_0(blocks: torch.Tensor) -> Fields:
    return {"codes": _row(_fifth(blocks, 2)), "base": _half(blocks, 0)}


def _q5_1(blocks: torch.Tensor) -> Fields:
    return {"codes": _row(_fifth(blocks, 4)), "base": _half(blocks, 0), "min_base": -_half(blocks, 2)}


def _q8_0(blocks: torch.Tensor) -> Fields:
    return {"codes": _row(blocks[..., 2:]) ^ 128, "base": _half(blocks, 0)}  # int8 as uint8 from -128 on


def _q2_k(blocks: torch.Tensor) -> Fields:
    scales = blocks[..., :16]
    return {
        "codes": _row(_shifted(blocks[..., 16:80], 32, 2)), "base": _half(blocks, 80), "fine": _row(scales & 15),
        "min_base": _half(blocks, 82), "min_fine": _row(scales >> 4),
    }  # fmt: skip


def _q3_k(blocks: torch.Tensor) -> Fields:
    upper = torch.stack([(blocks[..., :32] >> bit) & 1 for bit in range(8)], -2).flatten(-2)
    codes = _shifted(blocks[..., 32:96], 32, 2) | (upper << 2)
    scales = _shifted(blocks[..., 96:104], 8, 4) | (_shifted(blocks[..., 104:108], 4, 2) << 4)
    return {"codes": _row(codes), "base": _half(blocks, 108), "fine": _row(scales.to(torch.int8) - 32)}


def _scales_k(blocks: torch.Tensor) -> Fields:
    """Scales and minima of Q4_K and Q5_K, of 6 bits each in 12 bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    fine = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], -1)
    least = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], -1)
    return {"base": _half(blocks, 0), "fine": _row(fine), "min_base": _half(blocks, 2), "min_fine": _row(least)}


def _q4_k(blocks: torch.Tensor) -> Fields:
    return {"codes": _row(_shifted(blocks[..., 16:], 32, 4)), **_scales_k(blocks)}


def _q5_k(blocks: torch.Tensor) -> Fields:
    upper = torch.stack([(blocks[..., 16:48] >> bit) & 1 for bit in range(8)], -2).flatten(-2)
    return {"codes": _row(_shifted(blocks[..., 48:], 32, 4) | (upper << 4)), **_scales_k(blocks)}


def _q6_k(blocks: torch.Tensor) -> Fields:
    codes = _shifted(blocks[..., :128], 64, 4) | (_shifted(blocks[..., 128:192], 32, 2) << 4)
    return {"codes": _row(codes), "base": _half(blocks, 208), "fine": _row(blocks[..., 192:208].view(torch.int8))}


def _iq4_xs(blocks: torch.Tensor) -> Fields:
    upper = torch.stack([(blocks[..., 2:4] >> bit) & 3 for bit in range(0, 8, 2)], -1).flatten(-2)
    lower = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    fine = (lower | (upper << 4)).to(torch.int8) - 32
    return {"codes": _row(_shifted(blocks[..., 8:], 16, 4)), "base": _half(blocks, 0), "fine": _row(fine)}


def _mxfp4(blocks: torch.Tensor) -> Fields:
    power = blocks[..., 0].to(torch.int32)
    bits = torch.where(power < 2, 0x00200000 << power.clamp(max=1), (power - 1) << 23)
    return {"codes": _row(_nibbles(blocks, 1)), "base": bits.view(torch.float32)}


_TYPES = {
    "Q4_0": _Type(32, 18, 4, 32, _q4_0, zero=8),
    "Q4_1": _Type(32, 20, 4, 32, _q4_1),
    "Q5_0": _Type(32, 22, 5, 32, _q5_0, zero=16),
    "Q5_1": _Type(32, 24, 5, 32, _q5_1),
    "Q8_0": _Type(32, 34, 8, 32, _q8_0, zero=128),
    "Q2_K": _Type(256, 84, 2, 16, _q2_k),
    "Q3_K": _Type(256, 110, 3, 16, _q3_k, zero=4),
    "Q4_K": _Type(256, 144, 4, 32, _q4_k),
    "Q5_K": _Type(256, 176, 5, 32, _q5_k),
    "Q6_K": _Type(256, 210, 6, 16, _q6_k, zero=32),
    "IQ4_NL": _Type(32, 18, 4, 32, _q4_0, table=_NL),
    "IQ4_XS": _Type(256, 136, 4, 32, _iq4_xs, table=_NL),
    "MXFP4": _Type(32, 17, 4, 32, _mxfp4, table=_E2M1),
}


# ---------------------------------------------------------------- codes


@dataclass(frozen=True)
class _Form:
    """What codes of one weight are alike in: that of one type, or the narrowest that holds those of several."""

    bits: int
    group: int
    block: int
    fine: torch.dtype | None
    base: torch.dtype
    mins: bool
    min_fine: bool
    signed: bool


def _form(types: Sequence[_Type], fields: Sequence[Fields]) -> _Form:
    fines = {each["fine"].dtype for each in fields if "fine" in each}
    bases = {each["base"].dtype for each in fields}
    return _Form(
        max(type.bits for type in types), min(type.group for type in types), min(type.block for type in types),
        None if not fines else fines.pop() if len(fines) == 1 else torch.int8,
        bases.pop() if len(bases) == 1 else torch.float32,
        any("min_base" in each for each in fields), any("min_fine" in each for each in fields),
        len(types) == 1 and types[0] is _TYPES["Q8_0"],
    )  # fmt: skip


def _fit(fields: Fields, type: _Type, form: _Form) -> Fields:
    """``fields`` of some rows in ``form``."""
    codes = fields["codes"]
    rows, columns = codes.shape

    def numbers(name: str, dtype: torch.dtype, each: int, own: int, other: int) -> torch.Tensor:
        if name not in fields:
            return torch.full((rows, columns // each), other, dtype=dtype, device=codes.device)
        return fields[name].to(dtype).repeat_interleave(own // each, -1)

    found = {"base": numbers("base", form.base, form.block, type.block, 1)}
    if form.fine is not None:
        found["fine"] = numbers("fine", form.fine, form.group, type.group, 1)
    if form.mins:
        found["min_base"] = numbers("min_base", form.base, form.block, type.block, 0)
    if form.min_fine:
        found["min_fine"] = numbers("min_fine", torch.uint8, form.group, type.group, 1)
    planes = pack(codes ^ 128 if form.signed else codes, form.bits)
    return found | {f"plane{index}": plane for index, plane in enumerate(planes)}


def _unpacked(type: _Type, tensor: torch.Tensor) -> Fields:
    """Of uint8 [rows, bytes]."""
    return type.unpack(tensor.unflatten(-1, (-1, type.nbytes)))


def _rows_in(form: _Form, type: _Type, tensor: torch.Tensor) -> Fields:
    """Of uint8 [..., rows, bytes], a piece of the rows at a time."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    step = max(1, _PIECE // max(1, flat.shape[-1] // type.nbytes * type.block))
    out: Fields = {}
    for at in range(0, max(1, len(flat)), step):
        for name, piece in _fit(_unpacked(type, flat[at : at + step]), type, form).items():
            if name not in out:
                out[name] = piece.new_empty(len(flat), piece.shape[-1])
            out[name][at : at + step] = piece
    return {name: found.view(*tensor.shape[:-1], found.shape[-1]) for name, found in out.items()}


def _joined(types: Sequence[_Type], tensors: Sequence[torch.Tensor]) -> Codes:
    """The codes of a weight whose parts lie in ``tensors``, uint8 [rows, bytes] or [E, rows, bytes] each.

    Tables, where there are any, are the same for all.
    """
    samples = [
        _unpacked(type, tensor.new_zeros(1, tensor.shape[-1])) for type, tensor in zip(types, tensors, strict=True)
    ]
    form = _form(types, samples)
    found = [_rows_in(form, type, tensor) for type, tensor in zip(types, tensors, strict=True)]
    all_rows = (
        found[0] if len(found) == 1 else {name: torch.cat([each[name] for each in found], -2) for name in found[0]}
    )
    ratio, columns = form.block // form.group, tensors[0].shape[-1] // types[0].nbytes * types[0].block
    zeros: torch.Tensor | int = 0 if form.signed else types[0].zero
    if any(type.zero != zeros for type in types) and not form.signed:
        shapes = [(*tensor.shape[:-1], columns // form.group) for tensor in tensors]
        each = [
            torch.full(shape, type.zero, dtype=torch.uint8, device=tensor.device)
            for shape, type, tensor in zip(shapes, types, tensors, strict=True)
        ]
        zeros = torch.cat(each, -2)
    table = types[0].table
    return Codes(
        tuple(all_rows[f"plane{index}"] for index in range(len(plane_widths(form.bits)))), form.bits, columns,
        form.group, PerGroup(all_rows["base"], all_rows.get("fine"), ratio), zeros,
        PerGroup(all_rows["min_base"], all_rows.get("min_fine"), ratio) if form.mins else None,
        None if table is None else torch.tensor(table, dtype=torch.float32, device=tensors[0].device),
        signed=form.signed,
    )  # fmt: skip


def _check(codes: Codes, weight: Weight, apart: bool) -> None:
    """Raises TensorError where a block's scale is no number. ``apart``: parts have tensors of their own."""
    for numbers in (codes.scales, codes.mins):
        if numbers is None or (finite := numbers.base.isfinite()).all():
            continue
        part = part_of(int((~finite).any(-1).flatten().nonzero()[0]), weight.parts)
        held = [index for index, each in enumerate(weight.parts) if len(each)]
        expert, part = divmod(part, len(held)) if apart else (part, 0)
        said = "has a block whose scale is NaN or infinity; download the file again."
        raise TensorError(f"weight.{held[part]}" if apart else "weight", said, expert)


# ---------------------------------------------------------------- formats


@dataclass(frozen=True)
class Blocks(Coded):
    """Blocks of one type, which ggml calls ``name``."""

    name: str

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        type = _TYPES[self.name]
        return (Stored("weight", columns=Axis(type.block, type.nbytes), dtype=torch.uint8),)

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        found = _joined([_TYPES[self.name]], [tensors["weight"]])
        _check(found, weight, apart=False)
        return found


@dataclass(frozen=True)
class Mixed(Dequantized):
    """Parts with types of their own; None is a float part."""

    parts: tuple[Blocks | None, ...]

    def _apart(self, weight: Weight) -> list[tuple[Format, Weight]]:
        return [
            (part or PLAIN, replace(weight, parts=(rows,)))
            for part, rows in zip(self.parts, weight.parts, strict=True)
        ]  # fmt: skip

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        apart = enumerate(self._apart(weight))
        return [replace(one, part=index) for index, (each, own) in apart for one in each.tensors(own)]

    def dequantize(self, tensors: Tensors, weight: Weight) -> torch.Tensor:
        made = []
        for index, (format, own) in enumerate(self._apart(weight)):
            try:
                made.append(format.dequantize({"weight": tensors[f"weight.{index}"]}, own))
            except TensorError as error:
                raise TensorError(f"weight.{index}", error.said, error.part) from error
        return torch.cat(made, -2)

    def _codes(self, tensors: Tensors, weight: Weight) -> Codes | None:
        """Codes of all parts, or None where no form holds them all."""
        types = [_TYPES[part.name] for part in self.parts if part is not None]
        if len(types) < len(self.parts) or len({type.table for type in types}) > 1:
            return None
        found = _joined(types, [tensors[f"weight.{index}"] for index in range(len(types))])
        _check(found, weight, apart=True)
        return found

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        codes = self._codes(tensors, weight)
        if codes is None:
            return dense(weight).linear({"weight": self.dequantize(tensors, weight)}, weight)
        return product_of(codes, weight)

    def experts(self, tensors: Tensors, weight: Weight) -> ExpertProducts:
        codes = self._codes(tensors, weight) if weight.experts else None  # a rank may have none of the few there are
        if codes is None:
            return dense(weight).experts({"weight": self.dequantize(tensors, weight)}, weight)
        return experts_of(codes, weight)


def _fuse(parts: Sequence[Format | None]) -> Format:
    return Mixed(tuple(part if isinstance(part, Blocks) else None for part in parts))


_EXPERT = re.compile(r"\.experts\.\d+\.")


@register("gguf")
def gguf(config: Mapping[str, Any]) -> Quantization:
    """``types`` names the type of each quantized module (``proto/checkpoint/gguf_config.py`` makes it)."""
    types: Mapping[str, str] = config.get("types") or {}
    for module, name in types.items():
        if name not in _TYPES:
            raise ConfigError(
                f"config.json: the weight of {module} has GGUF's type {name}, which is not supported; use a file with "
                f"{', '.join(_TYPES)}, F16, BF16 or F32."
            )

    def format_of(module: str) -> Format | None:
        name = types.get(module) or types.get(_EXPERT.sub(".experts.{e}.", module))
        return None if name is None else Blocks(name)

    return Quantization(format_of, fuse=_fuse)
