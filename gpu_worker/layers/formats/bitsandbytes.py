"""bitsandbytes' weights as it saves them: 4 bits (nf4 or fp4), or int8.

4 bits: the weight's values row after row, two in a byte, the first in its upper half; each ``blocksize`` of them share
an absmax::

    value = quant_map[code] * absmax

With double quantization absmax is itself a code of 8 bits: ``nested_quant_map[absmax] * nested_absmax +
nested_offset``, where 256 share a nested_absmax. What is no tensor lies as JSON in the bytes of a tensor
(``weight.quant_state.bitsandbytes__nf4``). int8: ``value = weight * SCB / 127``, with an SCB for each row.
(bitsandbytes: functional.py, QuantState; nn/modules.py; backends/default/ops.py.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....proto.config import ConfigError
from ...kernels.codes import COLUMN_UNIT, Codes, PerGroup, pack
from .base import Axis, Sources, Stored, Tensors, Weight
from .coded import Coded
from .packed import laid
from .registry import Found, Quantization, register

_STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_NAMES = ("weight", *(f"weight.{part}" for part in _PARTS), *_STATES.values())
_MOST_STATE = 1 << 16
"""Bytes of a quant_state; it has some 200."""
_INT8_UNIT = 7.874015718698502e-3
"""1 / 127, as bitsandbytes writes it."""
_AGAIN = "download the file again"
_STORAGE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float32,
            torch.float64)  # fmt: skip
"""What the bytes of 4-bit weights may be kept as (bnb_4bit_quant_storage)."""


def _need(found: Mapping[str, torch.Tensor], name: str, where: str) -> torch.Tensor:
    tensor = found.get(name)
    if tensor is None:
        raise ConfigError(f"{where}.{name} is not there, and other tensors of bitsandbytes are; {_AGAIN}.")
    return tensor


def _fit(tensor: torch.Tensor, name: str, count: int, dtype: torch.dtype, where: str) -> torch.Tensor:
    """``tensor`` flat, once it is known to be ``count`` values of ``dtype``."""
    if tensor.numel() != count or tensor.dtype != dtype:
        raise ConfigError(
            f"{where}.{name} holds {tensor.numel()} values of {str(tensor.dtype)[6:]} where its quant_state makes it "
            f"{count} of {str(dtype)[6:]}; {_AGAIN}."
        )
    if dtype.is_floating_point and not tensor.isfinite().all():
        raise ConfigError(f"{where}.{name} holds numbers that are not finite; {_AGAIN}.")
    return tensor.flatten()


def _state(found: Mapping[str, torch.Tensor], kind: str, where: str) -> dict[str, Any]:
    """What the JSON says, its numbers known to be numbers."""
    name = _STATES[kind]
    text = _need(found, name, where).flatten()
    try:
        if len(text) > _MOST_STATE:
            raise ValueError(f"{len(text)} bytes")
        state = json.loads(bytes(text.tolist()))
        size = state["blocksize"], state.get("nested_blocksize", 256), float(state.get("nested_offset", 0.0))
        shape = tuple(state["shape"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where}.{name} is no quant_state ({type(error).__name__}: {error}); {_AGAIN}.") from error
    if not all(type(each) is int and each > 0 for each in (*size[:2], *shape)) or not math.isfinite(size[2]):
        raise ConfigError(f"{where}.{name} holds {size} where sizes of blocks and an offset belong; {_AGAIN}.")
    return {"blocksize": size[0], "nested_blocksize": size[1], "nested_offset": size[2], "shape": shape}


def _absmax(found: Mapping[str, torch.Tensor], state: Mapping[str, Any], count: int, where: str) -> torch.Tensor:
    """float32 [count]."""
    absmax = _need(found, "weight.absmax", where)
    if "weight.nested_absmax" not in found:
        return _fit(absmax, "weight.absmax", count, torch.float32, where)
    codes, each = _fit(absmax, "weight.absmax", count, torch.uint8, where), state["nested_blocksize"]
    nested = _fit(
        found["weight.nested_absmax"], "weight.nested_absmax", -(-count // each), torch.float32, where
    ).repeat_interleave(each)[:count]  # fmt: skip
    table = _need(found, "weight.nested_quant_map", where)
    table = _fit(table, "weight.nested_quant_map", 256, torch.float32, where)
    return table[codes.long()] * nested + torch.tensor(state["nested_offset"])


@dataclass(frozen=True)
class Bits4(Coded):
    """nf4 or fp4 (``kind``), with an absmax for each ``block`` values, which go on from row to row.

    ``block`` is what the files make it; where there are none what config.json does, or 64.
    """

    kind: str
    block: int

    def _unit(self, weight: Weight) -> int:
        """Columns that share an absmax in memory: as many as lie in one block wherever their row begins."""
        return math.gcd(self.block, weight.columns.total)

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        unit = self._unit(weight)
        sources = Sources(_NAMES, lambda found, shape, where: self._make(found, shape, where, unit))
        return (
            Stored("codes", Axis(), Axis(8), torch.int32, sources=sources),
            Stored("absmax", Axis(), Axis(unit), torch.float32, sources=sources),
            Stored("quant_map", Axis(0), Axis(0, 16), torch.float32, sources=sources),
        )

    def _make(self, found: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str, unit: int) -> Tensors:
        packed, state = _need(found, "weight", where), _state(found, self.kind, where)
        if state["shape"] != shape:
            raise ConfigError(
                f"{where}.weight has shape {state['shape']} by its quant_state where config.json makes it {shape}; "
                "check that config.json belongs to these weights."
            )
        block, (rows, columns) = state["blocksize"], shape
        if block % unit:
            raise ConfigError(
                f"{where}.weight is in blocks of {block} values by its quant_state where its absmax makes them "
                f"{self.block}; {_AGAIN}."
            )
        if unit % 8:
            raise ConfigError(
                f"{where}.weight has rows of {columns} values in blocks of {block}, and those of a weight of 4 bits "
                "are a multiple of 8; use its float weights."
            )
        if packed.dtype not in _STORAGE:
            raise ConfigError(
                f"{where}.weight is {str(packed.dtype)[6:]}, which bitsandbytes keeps no bytes in; {_AGAIN}."
            )
        bytes = _fit(packed.flatten().view(torch.uint8), "weight", rows * columns // 2, torch.uint8, where)
        codes = ((bytes << 4) | (bytes >> 4)).view(rows, columns // 2).view(torch.int32)
        absmax = _absmax(found, state, -(-rows * columns // block), where)
        if unit != block:
            absmax = absmax[torch.arange(0, rows * columns, unit, device=absmax.device) // block]
        table = _fit(_need(found, "weight.quant_map", where), "weight.quant_map", 16, torch.float32, where)
        return {"codes": codes, "absmax": absmax.view(rows, -1), "quant_map": table[None]}

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        words, tables = tensors["codes"], tensors["quant_map"]
        table = next(iter(tables.flatten(0, -2)), torch.zeros(16))
        if (tables != table).any():  # of modules that are one product here, each has its own
            lengths = [len(part) for part in weight.parts if len(part)]
            table = tables.repeat_interleave(torch.tensor(lengths, device=tables.device), -2)
        missing = -words.shape[-1] % (COLUMN_UNIT // 8)
        planes = (torch.nn.functional.pad(words, (0, missing)),) if missing else (words,)
        return Codes(planes, 4, weight.shape[1], self._unit(weight), PerGroup(tensors["absmax"]), table=table)


@dataclass(frozen=True)
class Int8(Coded):
    """int8 with a scale for each row."""

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        sources = Sources(("weight", "SCB", "weight_format"), self._make)
        return (
            Stored("int8", dtype=torch.int8, sources=sources),
            Stored("SCB", columns=None, dtype=torch.float32, sources=sources),
        )

    @staticmethod
    def _make(found: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str) -> Tensors:
        values, scales = _need(found, "weight", where), _need(found, "SCB", where)
        order = found.get("weight_format")  # files of 2023 have none, and are by rows
        if order is not None and (order.numel() != 1 or order.item() != 0):
            raise ConfigError(f"{where}.weight_format is {order.tolist()}, an order of one kind of GPU; save it again "
                              "with a newer bitsandbytes.")  # fmt: skip
        if values.dtype != torch.int8:
            raise ConfigError(f"{where}.weight is {str(values.dtype)[6:]}, where its SCB makes it int8; {_AGAIN}.")
        return {"int8": values, "SCB": _fit(scales, "SCB", shape[0], torch.float32, where)}

    def dequantize(self, tensors: Tensors, weight: Weight) -> torch.Tensor:
        """As bitsandbytes rounds, which is twice; products make one factor of each SCB."""
        return (tensors["int8"] * tensors["SCB"][..., None] * _INT8_UNIT).to(weight.dtype)

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        scales = tensors["SCB"][..., None] * _INT8_UNIT
        columns, values = weight.shape[1], tensors["int8"]
        planes = pack(values, 8) if columns % COLUMN_UNIT else (laid(values).view(torch.int32),)
        return Codes(planes, 8, columns, columns, PerGroup(scales), signed=True)


def _skips(config: Mapping[str, Any]) -> list[str]:
    skipped = config.get("llm_int8_skip_modules") or []
    if not isinstance(skipped, list) or not all(isinstance(each, str) for each in skipped):
        raise ConfigError("config.json: quantization_config's llm_int8_skip_modules must be a list of names.")
    return [*skipped, "lm_head", "embed_out"]


def _is_skipped(module: str, skipped: Sequence[str]) -> bool:
    """Whether a name of ``skipped`` is the module, holds it, or is a component of its name."""
    return any(f".{each}." in f".{module}." for each in skipped)


def _of_files(said: Bits4 | Int8 | None, module: str, columns: int, found: Found) -> Bits4 | Int8 | None:
    """The format with the block that its absmax shows: config.json seldom names it."""
    weight, absmax = found.get(f"{module}.weight"), found.get(f"{module}.weight.absmax")
    if not isinstance(said, Bits4) or weight is None or absmax is None:
        return said
    values, count = 2 * weight[0].itemsize * math.prod(weight[1]), math.prod(absmax[1])
    block = 1 << (-(-values // max(1, count)) - 1).bit_length()
    return replace(said, block=block) if -(-values // block) == count else said


@register("bitsandbytes")
def bitsandbytes(config: Mapping[str, Any]) -> Quantization:
    """Which modules are quantized is told by the files; llm_int8_skip_modules speaks where there are none."""
    four, eight = config.get("load_in_4bit"), config.get("load_in_8bit")
    if bool(four) == bool(eight):
        raise ConfigError("config.json: quantization_config of bitsandbytes says neither or both of load_in_4bit and "
                          "load_in_8bit; one must be true.")  # fmt: skip
    skipped = _skips(config)
    format: Bits4 | Int8
    marks: tuple[str, ...]
    if eight:
        format, marks = Int8(), (".SCB",)
    else:
        kind, block = config.get("bnb_4bit_quant_type") or "fp4", config.get("bnb_4bit_blocksize") or 64
        if not isinstance(kind, str) or kind not in _STATES:
            raise ConfigError(f"config.json: bnb_4bit_quant_type {kind!r} is not supported; it may be 'nf4' or 'fp4'.")
        if type(block) is not int or block < 32 or block & (block - 1):
            raise ConfigError(f"config.json: bnb_4bit_blocksize {block!r} is not supported; it may be 32, 64, 128, ...")
        format, marks = Bits4(kind, block), tuple(f".{name}" for name in _NAMES[1:])
    return Quantization(lambda module: None if _is_skipped(module, skipped) else format, marks=marks, fit=_of_files)
