"""AWQ: codes of 4 bits, a scale and a zero for each group of inputs: ``weight[n, k] = (code - zero) * scale``.

``version`` gemm packs eight outputs in an int32, in the order 0 2 4 6 1 3 5 7; gemv packs eight inputs, in order, and
fills up the groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....proto.config import ConfigError
from ...kernels.codes import COLUMN_UNIT, Codes, PerGroup
from .base import Axis, Stored, Tensors, Weight
from .coded import Coded
from .gptq import floats_of, group_size, scales_of
from .packed import check_scales, grouping, outputs_of, planes_of, unpacked, whole_number
from .registry import Found, Quantization, register

_EACH = 8
_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where the eight outputs of a word are in it."""
_MARKS = (".qweight", ".qzeros", ".scales")
_MIDDLE = 8


@dataclass(frozen=True)
class AWQ(Coded):
    """Attributes:
    group: inputs of a group; -1: all of them.
    gemv: whether the words are those of version gemv.
    zeros: whether there are qzeros; else every zero is 8.
    scales: the dtype of the file's scales.
    """

    group: int
    gemv: bool = False
    zeros: bool = True
    scales: torch.dtype = torch.float16

    def _group(self, weight: Weight) -> int:
        return self.group if self.group > 0 else max(1, weight.columns.total)

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        words, i32, swapped = Axis(_EACH), torch.int32, not self.gemv
        # A rank's columns may begin within a group, so each has the numbers of all.
        groups = zeros = Axis(self._group(weight), uncut=True)
        if self.gemv:
            total = max(1, weight.columns.total)
            width = _gemv_width(total, self._group(weight))
            groups, zeros = Axis(total, width * _EACH, uncut=True), Axis(total, width, uncut=True)
        found = (
            Stored("qweight", Axis() if self.gemv else words, words if self.gemv else Axis(), i32, transposed=swapped),
            Stored("scales", Axis(), groups, self.scales, transposed=swapped),
        )
        if not self.zeros:
            return found
        return (*found, Stored("qzeros", Axis() if self.gemv else words, zeros, i32, transposed=swapped))

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        columns, group, part = len(weight.columns), self._group(weight), weight.columns
        groups = grouping(torch.arange(part.start, part.stop, device=weight.device) // group, group)
        words, count = tensors["qweight"], -(-part.total // group)
        scales, zeros = tensors["scales"][..., :count], torch.tensor(_MIDDLE)
        check_scales(scales, weight)
        if not self.gemv:
            planes = planes_of(words, 4, columns, groups.order, _SHIFTS)
        elif groups.order is not None or columns % COLUMN_UNIT:
            planes = planes_of(words, 4, columns, groups.order)
        else:
            planes = (words,)
        if self.zeros:
            zeros = unpacked(tensors["qzeros"], 4)[..., :count] if self.gemv else outputs_of(tensors["qzeros"], _SHIFTS)
            zeros = groups.spread(zeros)
        scales = groups.spread(scales)
        return Codes(planes, 4, columns, groups.size, PerGroup(scales), whole_number(zeros), order=groups.order)


def _gemv_width(columns: int, group: int) -> int:
    """Words of the zeros of one output, as AutoAWQ's gemv fills them up."""
    words = -(-(columns // group) // _EACH)
    several = 1 if group >= 128 else 2 if group == 64 else 4
    return -(-words // several) * several


@register("awq")
@register("auto_awq")
@register("awq_marlin")
def awq(config: Mapping[str, Any]) -> Quantization:
    """Of a checkpoint of AutoAWQ and its like; w_bit and q_group_size are names of its own files."""
    bits, size = config.get("bits", config.get("w_bit", 4)), config.get("group_size", config.get("q_group_size", 128))
    if bits != 4:
        raise ConfigError(f"config.json: quantization_config's bits={bits!r} is not supported; AWQ has 4.")
    version = str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()
    if version not in ("gemm", "gemv", "exllama", "ipex"):  # the last two read what gemm writes
        raise ConfigError(f"config.json: quantization_config's version {version} is not supported; quantize the model "
                          "with version gemm.")  # fmt: skip
    base, kept = AWQ(group_size(size), version == "gemv"), config.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise ConfigError(
            "config.json: quantization_config's modules_to_not_convert must be a list of names of modules."
        )

    def format_of(module: str) -> AWQ | None:
        return None if any(each in module for each in kept) else base

    def fit(said: AWQ | None, module: str, columns: int, found: Found) -> AWQ | None:
        if not any(module + mark in found for mark in _MARKS):
            return None
        zeros = bool(config.get("zero_point", True)) or module + ".qzeros" in found
        return replace(base, zeros=zeros, scales=scales_of(found, module))

    return Quantization(format_of, fit=fit, floats=floats_of(config))
