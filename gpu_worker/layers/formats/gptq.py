"""GPTQ: codes of 2, 3, 4 or 8 bits along the inputs, a scale and a zero for each group of inputs.

``weight[n, k] = (code[k, n] - zero[g, n]) * scale[g, n]`` with ``g = g_idx[k]``, which is ``k // group_size`` but for
act-order. Files of ``checkpoint_format`` gptq hold zeros less one, those of gptq_v2 hold them as they are.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....proto.config import ConfigError
from ...kernels.codes import COLUMN_UNIT, Codes, PerGroup
from .base import CHOOSING, Axis, Stored, TensorError, Tensors, Weight
from .coded import Coded
from .packed import Grouping, check_scales, grouping, planes_of, unpacked, whole_number
from .patterns import bounded
from .registry import Found, Quantization, register

_BITS = (2, 3, 4, 8)
_MARKS = (".qweight", ".qzeros", ".scales", ".g_idx")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GPTQ(Coded):
    """Attributes:
    bits: of a code: 2, 3, 4 or 8.
    group: inputs of a group; -1: all of them.
    sym: whether every zero is the middle of the codes, as the config says.
    v2: whether zeros are stored as they are.
    ordered: whether there is a g_idx.
    scales: the dtype of the file's scales.
    """

    bits: int
    group: int
    sym: bool
    v2: bool = False
    ordered: bool = True
    scales: torch.dtype = torch.float16

    def _group(self, weight: Weight) -> int:
        return self.group if self.group > 0 else max(1, weight.columns.total)

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        # Codes of 3 bits lie across words: 32 of them are 3 words.
        words = Axis(32, 3) if self.bits == 3 else Axis(32 // self.bits)
        # Which groups a rank's columns are in is in g_idx, so each has the numbers of all.
        groups = Axis(self._group(weight), uncut=True)
        found = (
            Stored("qweight", Axis(), words, torch.int32, transposed=True),
            Stored("qzeros", words, groups, torch.int32, transposed=True),
            Stored("scales", Axis(), groups, self.scales, transposed=True),
        )
        return (*found, Stored("g_idx", Axis(0), Axis(uncut=True), torch.int32)) if self.ordered else found

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        check_scales(tensors["scales"], weight)
        columns, groups = len(weight.columns), self._grouping(tensors, weight)
        words, zeros = tensors["qweight"], unpacked(tensors["qzeros"].mT, self.bits).mT
        if not self.v2:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        if self.bits == 3 or groups.order is not None or columns % COLUMN_UNIT:
            planes = planes_of(words, self.bits, columns, groups.order)
        else:
            planes = (words,)
        scales = PerGroup(groups.spread(tensors["scales"]))
        zero = self._checked(whole_number(groups.spread(zeros)))
        return Codes(planes, self.bits, columns, groups.size, scales, zero, order=groups.order)

    def _grouping(self, tensors: Tensors, weight: Weight) -> Grouping:
        group, part = self._group(weight), weight.columns
        plain = torch.arange(part.start, part.stop, device=weight.device) // group
        if "g_idx" not in tensors:
            return grouping(plain, group)
        found, count = tensors["g_idx"], -(-part.total // group)
        odd = (found < 0) | (found >= count)
        if odd.any():
            raise TensorError(
                "g_idx", f"sends an input to group {found[odd][0].item()}, where the groups are 0 to {count - 1}; "
                "correct config.json's group_size, or download the file again.", _first(odd),
            )  # fmt: skip
        first = found[..., :1, :]
        if (found != first).any():
            raise TensorError(
                "g_idx", "orders inputs otherwise than that of the modules it is multiplied with at once (q, k and v; "
                "gate and up); quantize the model so that these share one order.", _first(found != first),
            )  # fmt: skip
        groups = first.squeeze(-2).long()
        mine = groups[..., part.start : part.stop]
        # All 0 are placeholders: a quantizer uses all of the groups.
        return grouping(torch.where(groups.any(-1, keepdim=True), mine, plain), group)

    def _checked(self, zeros: torch.Tensor | int) -> torch.Tensor | int:
        """``zeros``; where they can only be those of the other checkpoint_format, as that means them."""
        middle = 1 << (self.bits - 1)
        if self.sym and isinstance(zeros, int) and zeros == middle + (-1 if self.v2 else 1):
            _mislabelled("gptq" if self.v2 else "gptq_v2")
            return middle
        return zeros


def _first(odd: torch.Tensor) -> int:
    """The first of the rows [..., parts, columns] with an entry, counted over all."""
    return int(odd.any(-1).flatten().nonzero()[0].item())


@functools.cache
def _mislabelled(name: str) -> None:
    log.warning("the zeros of these symmetric weights are those of checkpoint_format %s, and are read so, whatever "
                "the checkpoint's config says", name)  # fmt: skip


# --- the config ---


@register("gptq")
@register("auto_gptq")
@register("gptq_marlin")
def gptq(config: Mapping[str, Any]) -> Quantization:
    """Of a checkpoint of AutoGPTQ, GPTQModel, auto-round and their like, as their config says."""
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        name = "marlin" if config.get("is_marlin_format") else layout
        raise ConfigError(f"config.json: quantization_config's checkpoint_format {name} is not supported; quantize the "
                          "model with checkpoint_format gptq or gptq_v2.")  # fmt: skip
    base = GPTQ(_bits(config, config), _group(config, config), bool(config.get("sym")), layout == "gptq_v2")
    rules = _rules(config, base)
    inside = _flat(config.get("modules_in_block_to_quantize"))

    def format_of(module: str) -> GPTQ | None:
        listed = not inside or module == "lm_head" or any(each in module for each in inside)
        return _ruled(rules, module, base) if listed else None

    def fit(said: GPTQ | None, module: str, columns: int, found: Found) -> GPTQ | None:
        if not any(module + mark in found for mark in _MARKS):
            return None
        format = said or base
        ordered = module + ".g_idx" in found or (bool(config.get("desc_act")) and format.group > 0)
        return replace(format, ordered=ordered, scales=scales_of(found, module))

    # Old packers write a bias for every layer.
    return Quantization(format_of, fit=fit, floats=floats_of(config), zero=(r".*\.\d+\..*\.bias",))


def floats_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """``Quantization.floats`` of formats for the linear layers, and the lm_head where the config says so."""
    return (*CHOOSING, "embed.weight", "project_in.weight", "project_out.weight",
            *(() if config.get("lm_head") else ("lm_head.weight",)))  # fmt: skip


def scales_of(found: Found, module: str) -> torch.dtype:
    """The dtype of its scales in the files; float16, which is usual, where that is none that scales are in."""
    dtype = found[module + ".scales"][0] if module + ".scales" in found else None
    return dtype if dtype in (torch.bfloat16, torch.float32) else torch.float16


def _bits(config: Mapping[str, Any], default: Mapping[str, Any]) -> int:
    bits = config.get("bits", default.get("bits"))
    if bits not in _BITS or isinstance(bits, bool):
        raise ConfigError(f"config.json: quantization_config's bits={bits!r} is not supported; GPTQ has 2, 3, 4 or 8.")
    return int(bits)


def _group(config: Mapping[str, Any], default: Mapping[str, Any]) -> int:
    return group_size(config.get("group_size", default.get("group_size")))


def group_size(size: object) -> int:
    """A config's group_size. Raises ConfigError."""
    if type(size) is not int or (size < 1 and size != -1):
        raise ConfigError(
            f"config.json: quantization_config's group_size={size!r} is no number of inputs; it is 1 or more, or "
            "-1 for all of a layer."
        )
    return size


Rules = list[tuple[re.Pattern[str], GPTQ | None]]


def _rules(config: Mapping[str, Any], base: GPTQ) -> Rules:
    """The config's ``dynamic``: patterns of modules, and what the first that matches makes of them; None: a float."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise ConfigError(f"config.json: quantization_config's dynamic={dynamic!r} is no object of patterns.")
    found: Rules = []
    for pattern, said in dynamic.items():
        try:
            compiled = bounded(pattern.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise ConfigError(
                f"config.json: quantization_config's dynamic has {pattern!r}, which is no regular expression ({error})."
            ) from error
        if pattern.startswith("-:"):
            found.append((compiled, None))
            continue
        if not isinstance(said, Mapping):
            raise ConfigError(f"config.json: quantization_config's dynamic says {said!r} of {pattern!r}.")
        sym = bool(said.get("sym", base.sym))
        found.append((compiled, replace(base, bits=_bits(said, config), group=_group(said, config), sym=sym)))
    return found


def _ruled(rules: Rules, module: str, base: GPTQ) -> GPTQ | None:
    return next((format for pattern, format in rules if pattern.match(module)), base)


def _flat(names: object) -> list[str]:
    """The names in a list, or in lists in it."""
    if isinstance(names, list | tuple):
        return [name for each in names for name in _flat(each)]
    return [] if names is None else [str(names)]
