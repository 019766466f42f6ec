"""compressed-tensors, which llm-compressor writes: groups of modules, each with its own bits, scales and packing.

    value = (q - zero point) * scale

``pack-quantized`` has whole numbers of 2 to 8 bits in ``weight_packed`` int32, in order along the columns, with
2^(bits - 1) added; zero points likewise, along the rows. ``int-quantized`` has int8 in ``weight``, ``float-quantized``
e4m3fn; ``naive-quantized`` is one of these two. ``weight_scale`` is of the tensor, of each row (channel), of groups of
columns, or of blocks. Which modules a group is for: ``targets``, by the class "Linear", by name, or by a regular
expression ("re:.*q_proj"); what is named so in ``ignore`` is a float weight. (compressed-tensors 0.20: compressors/,
quantization/quant_args.py, utils/match.py.)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ....proto.config import ConfigError
from ...kernels.codes import COLUMN_UNIT, Activations, Codes, pack, plane_widths
from .base import CHOOSING, Axis, Format, Stored, Tensors, Weight
from .coded import Coded
from .fp8 import FP8, KV_CACHE, bytes_of, where_fp8
from .patterns import bounded
from .registry import Found, Quantization, register
from .scales import INPUT_SCALE, check, cut_groups, per_group, spread, stored_scales

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_UNUSED = r".*\.(weight_shape|weight_zero_point|input_zero_point|input_scale|output_scale|output_zero_point)"
"""Tensors without a place: shapes are known, and zero points of symmetric weights are 0."""
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|embed_in|wte|tok_embeddings|word_embeddings|embedding)")


@dataclass(frozen=True)
class Scales:
    """What scales are of: ``strategy`` with ``block`` (rows, columns), of which a group has the columns alone."""

    strategy: str
    block: tuple[int, int] = (0, 0)
    symmetric: bool = True


@dataclass(frozen=True)
class Rows:
    """How activations become narrower; see ``kernels.codes.Activations``."""

    kind: str = ""
    group: int = 0
    static: bool = False
    symmetric: bool = True

    def tensors(self) -> tuple[Stored, ...]:
        """What files have of it."""
        if not self.static:
            return ()
        scale = INPUT_SCALE
        return (scale,) if self.symmetric else (scale, Stored("input_zero_point", Axis(0), None, torch.int8))

    def of(self, tensors: Tensors, weight: Weight) -> Activations | None:
        """With the file's numbers. Raises ConfigError where parts that are multiplied together have different ones."""
        if not self.kind:
            return None
        scale = zero = None
        if self.static:
            scales = tensors["input_scale"]
            check(scales, INPUT_SCALE, weight)
            scale = scales.amax(-1, keepdim=True)
            if not self.symmetric:
                zeros = tensors["input_zero_point"]
                if (scales != scale).any() or (zeros != zeros[..., :1]).any():
                    raise ConfigError(
                        "input_scale and input_zero_point differ among modules that are multiplied at once, and rows "
                        "have one of each; quantize with symmetric or dynamic activations."
                    )
                zero = zeros[..., :1].to(torch.int32)
        kind = "int8" if self.kind == "int8" else "fp8"
        return Activations(kind, self.group, scale, zero, self.symmetric)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Integers(Coded):
    """int8 in ``weight``, whatever the bits that are used of it."""

    scales: Scales
    rows: Rows = Rows()

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        found = [
            Stored("weight", dtype=torch.int8),
            stored_scales(self.scales.strategy, self.scales.block, "weight_scale"),
        ]
        if not self.scales.symmetric:
            zeros = stored_scales(self.scales.strategy, self.scales.block, "weight_zero_point")
            found.append(replace(zeros, dtype=torch.int8))
        return *found, *self.rows.tensors()

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        check(tensors["weight_scale"], stored_scales(self.scales.strategy, self.scales.block, "weight_scale"), weight)
        scales, group = spread(tensors["weight_scale"], self.scales.strategy, self.scales.block, weight)
        whole, rows = tensors["weight"], self.rows.of(tensors, weight)
        if self.scales.symmetric:
            return Codes(
                bytes_of(whole), 8, weight.shape[1], group, per_group(scales), signed=True, activations=rows
            )  # fmt: skip
        zeros, _ = spread(tensors["weight_zero_point"], self.scales.strategy, self.scales.block, weight)
        shifted = bytes_of(whole.view(torch.uint8) ^ 128)  # 128 more than int8 says
        zeros = (zeros.contiguous().view(torch.uint8) ^ 128).expand(*whole.shape[:-1], zeros.shape[-1])
        return Codes(shifted, 8, weight.shape[1], group, per_group(scales), zeros.contiguous(), activations=rows)


@dataclass(frozen=True)
class Packed(Coded):
    """Whole numbers of ``bits`` bits in words of 32.

    ``dense``: words are filled to the last bit, so that numbers of 3, 5, 6 or 7 bits lie across two; else each word has
    as many as fit whole. Of 2, 4 and 8 bits the two are the same.
    """

    bits: int
    scales: Scales
    rows: Rows = Rows()
    dense: bool = True

    @property
    def axis(self) -> Axis:
        """Of the packed dim."""
        return Axis(32, self.bits, dense=True) if self.dense and 32 % self.bits else Axis(32 // self.bits)

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        scales = stored_scales(self.scales.strategy, self.scales.block, "weight_scale")
        found = [Stored("weight_packed", Axis(), self.axis, torch.int32), scales]
        if not self.scales.symmetric:
            found.append(Stored("weight_zero_point", replace(self.axis, uncut=True), scales.columns, torch.int32))
        return *found, *self.rows.tensors()

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        check(tensors["weight_scale"], stored_scales(self.scales.strategy, self.scales.block, "weight_scale"), weight)
        scales, group = spread(tensors["weight_scale"], self.scales.strategy, self.scales.block, weight)
        zeros: torch.Tensor | int = 1 << (self.bits - 1)
        if not self.scales.symmetric:
            zeros = self._zeros(tensors["weight_zero_point"], weight)
        return Codes(
            self._planes(tensors["weight_packed"], weight.shape[1]), self.bits, weight.shape[1], group,
            per_group(scales), zeros, activations=self.rows.of(tensors, weight),
        )  # fmt: skip

    def _planes(self, words: torch.Tensor, columns: int) -> tuple[torch.Tensor, ...]:
        if len(plane_widths(self.bits)) > 1:
            return pack(unpacked(words, self.bits, self.dense)[..., :columns], self.bits)
        missing = -(-columns // COLUMN_UNIT) * COLUMN_UNIT * self.bits // 32 - words.shape[-1]
        return (F.pad(words, (0, missing)) if missing else words,)  # as codes have them

    def _zeros(self, words: torch.Tensor, weight: Weight) -> torch.Tensor:
        """uint8 [..., rows, groups] of all the rows of each part's module, which begin in a word of their own."""
        found, at = [], 0
        for part in weight.parts:
            count = len(replace(self.axis, uncut=True).cut(part, "weight_zero_point"))
            own = words[..., at : at + count, :].mT.contiguous()
            found.append(unpacked(own, self.bits, self.dense)[..., part.start : part.stop].mT)
            at += count
        zeros = torch.cat(found, -2)
        if self.scales.strategy == "group":
            zeros, _ = cut_groups(zeros, weight.columns, self.scales.block[1])
        return zeros.contiguous()


def unpacked(words: torch.Tensor, bits: int, dense: bool) -> torch.Tensor:
    """uint8 [..., at least as many values as there are]: those of ``bits`` bits in int32 ``words`` [..., words]."""
    mask = (1 << bits) - 1
    if not dense or 32 % bits == 0:
        parts = [((words >> at) & mask).to(torch.uint8) for at in range(0, 32 - bits + 1, bits)]
        return torch.stack(parts, -1).flatten(-2)
    words = F.pad(words, (0, -words.shape[-1] % bits)).unflatten(-1, (-1, bits))  # 32 values in ``bits`` words
    out = torch.empty(*words.shape[:-1], 32, dtype=torch.uint8, device=words.device)
    for value in range(32):
        word, at = divmod(value * bits, 32)
        found = words[..., word] >> at
        if at + bits > 32:
            found = (found & ((1 << (32 - at)) - 1)) | (words[..., word + 1] << (32 - at))
        out[..., value] = (found & mask).to(torch.uint8)
    return out.flatten(-2)


# --- the config ---


@register("compressed-tensors")
def compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    """Raises ConfigError for what is not understood, with the group's name."""
    for key in ("sparsity_config", "transform_config"):
        found = config.get(key)
        if isinstance(found, dict) and found and found.get("format") != "dense":
            raise ConfigError(
                f"config.json: quantization_config's {key} is not supported; use a checkpoint that is quantized alone."
            )
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ConfigError("config.json: quantization_config's config_groups must be a table of groups.")
    found = [
        (_matcher(group, "targets", f"config_groups.{name}."), _format(group, config.get("format"), name))
        for name, group in groups.items()
    ]
    ignored = _matcher(config, "ignore", "")

    def format_of(module: str) -> Format | None:
        if ignored(module):
            return None
        ranks = [match(module) for match, _ in found]
        best = max(ranks, default=0)
        return found[ranks.index(best)][1] if best else None

    return Quantization(format_of, skip=(KV_CACHE, _UNUSED), floats=CHOOSING, fit=_fit)


def _matcher(table: Mapping[str, Any], key: str, where: str) -> Callable[[str], int]:
    """How closely the names under ``key`` are a module's: 3 by name, 2 by a regular expression, 1 by class, 0 not."""
    names = table.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: quantization_config's {where}{key} must be a list of names.")
    try:
        expressions = [bounded(name.removeprefix("re:")) for name in names if name.startswith("re:")]
    except re.error as error:
        raise ConfigError(
            f"config.json: quantization_config's {where}{key} holds a regular expression that cannot be read ({error})."
        ) from error
    whole = frozenset(names)

    def rank(module: str) -> int:
        if module in whole:
            return 3
        if any(expression.match(module) for expression in expressions):
            return 2
        return int(("Embedding" if _EMBEDDING.fullmatch(module) else "Linear") in whole)

    return functools.cache(rank)


def _refused(name: str, what: str) -> ConfigError:
    return ConfigError(f"config.json: quantization_config's config_groups.{name}{what}.")


def _format(group: Mapping[str, Any], default: Any, name: str) -> Format | None:
    """Of one group; None: its weights are floats."""
    weights, rows = group.get("weights"), group.get("input_activations")
    packing = group.get("format") or default
    if weights is None or packing == "dense":
        return None
    if not isinstance(weights, dict) or not (rows is None or isinstance(rows, dict)):
        raise _refused(name, ": weights and input_activations must be tables")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if packing in (None, "mixed-precision"):
        packing = "float-quantized" if kind == "float" else "pack-quantized" if rows is None else "int-quantized"
    if packing not in _FORMATS:
        raise _refused(name, f" has the format {packing}; it must be one of {', '.join(_FORMATS)}")
    if weights.get("actorder") in (True, "group", "dynamic"):
        raise _refused(
            name, f".weights has actorder {weights['actorder']}, which compressed-tensors no longer has; quantize with "
            "actorder weight"
        )  # fmt: skip
    scales, narrow = _scales(weights, f"{name}.weights"), _rows(rows, f"{name}.input_activations")
    if kind == "float":
        if bits != 8 or packing == "pack-quantized" or not scales.symmetric:
            raise _refused(name, f".weights are floats of {bits} bits in {packing}; they must be symmetric and have 8")
        if not (narrow.symmetric or narrow.kind == "int8"):
            raise _refused(name, ".input_activations are floats with zero points; they must be symmetric")
        return FP8(
            scales.strategy, "weight_scale", scales.block, narrow.kind == "fp8", narrow.kind == "fp8" and narrow.static,
            narrow.group,
        )  # fmt: skip
    if kind != "int" or type(bits) is not int or not 2 <= bits <= 8 or packing == "float-quantized":
        raise _refused(
            name, f".weights are {kind} of {bits} bits in {packing}; they must be int of 2 to 8, or float of 8"
        )
    if packing != "pack-quantized":
        return Integers(scales, narrow)
    if scales.strategy not in ("channel", "group") and not scales.symmetric:
        raise _refused(name, f".weights have zero points by {scales.strategy}; packed ones must be by channel or group")
    return Packed(bits, scales, narrow)


def _scales(weights: Mapping[str, Any], name: str) -> Scales:
    strategy, group, block = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    symmetric = weights.get("symmetric", True)
    if type(symmetric) is not bool:
        raise _refused(name, f".symmetric is {symmetric}; it must be true or false")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy not in _STRATEGIES:
        raise _refused(name, f".strategy is {strategy}; it must be one of {', '.join(_STRATEGIES)}")
    if strategy == "group" and not (type(group) is int and group > 0):
        raise _refused(name, f".group_size is {group}; it must be a number of columns above 0")
    if strategy == "block":
        sizes = block.split("x") if isinstance(block, str) else block
        if (
            not isinstance(sizes, list)
            or len(sizes) != 2
            or not all(str(size).isdecimal() and int(size) for size in sizes)
        ):
            raise _refused(name, f".block_structure is {block}; it must be two sizes above 0, of rows and of columns")
        return Scales("block", (int(sizes[0]), int(sizes[1])), symmetric)
    return Scales(strategy, (1, group) if strategy == "group" else (0, 0), symmetric)  # type: ignore[arg-type]


def _rows(rows: Mapping[str, Any] | None, name: str) -> Rows:
    """Rows of other than 8 bits stay as they are, which loses nothing. A scale of all rows of a step, which would make
    a row depend on the others, is one of each row here."""
    if rows is None or rows.get("num_bits", 8) != 8:
        return Rows()
    kind, strategy, dynamic = rows.get("type", "int"), rows.get("strategy") or "tensor", rows.get("dynamic", False)
    group, symmetric = rows.get("group_size"), rows.get("symmetric", True)
    if kind not in ("int", "float") or type(dynamic) is not bool or type(symmetric) is not bool:
        raise _refused(name, f" has type {kind}, dynamic {dynamic}, symmetric {symmetric}; it must be int or float, "
                       "and true or false")  # fmt: skip
    if strategy not in (("token", "tensor", "group") if dynamic else ("tensor",)):
        raise _refused(name, f".strategy is {strategy}; it must be tensor, or with dynamic also token or group")
    if strategy == "group" and not (type(group) is int and group > 0):
        raise _refused(name, f".group_size is {group}; it must be a number of columns above 0")
    columns = group if strategy == "group" and group is not None else 0
    return Rows("int8" if kind == "int" else "fp8", columns, not dynamic, symmetric)


def _fit(format: Format, module: str, columns: int, found: Found) -> Format | None:
    """What the files show: a float weight, or whether words are filled to the last bit, which their number tells."""
    if isinstance(format, FP8):
        return where_fp8(format, module, columns, found)
    weight, packed = found.get(f"{module}.weight"), found.get(f"{module}.weight_packed")
    if weight is not None and packed is None and weight[0].is_floating_point and weight[0] != torch.float8_e4m3fn:
        return None
    if isinstance(format, Packed) and packed is not None and 32 % format.bits:
        return replace(format, dense=packed[1][-1:] == (-(-columns * format.bits // 32),))
    return format
