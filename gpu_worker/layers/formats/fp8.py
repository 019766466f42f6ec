"""FP8 weights: e4m3fn [out, in], and scales of the whole tensor, of each row, or of blocks of rows and columns.

    value = e4m3fn(byte) * scale

``quant_method`` "fp8" has a scale of the tensor (``weight_scale``) or, with ``weight_block_size``, of blocks
(``weight_scale_inv``, which multiplies despite its name; float32, or a power of two in a byte where ``scale_fmt`` is
ue8m0). "fbgemm_fp8" has one for each row. Activations become fp8 too where the device multiplies it, by a scale that is
measured (dynamic), or by the file's ``input_scale`` (static; old files call it ``act_scale``). Sources: vLLM's
quantization/fp8.py, transformers' integrations/finegrained_fp8.py.

e4m3fn has no infinity, and NaN at 0x7F and 0xFF. What AMD's MI300 calls e4m3fnuz is another type, where every byte is
worth half and NaN is 0x80; checkpoints never hold it.

A weight with NaN is refused: GPUs make values of bytes without a table, and 480 of these two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....proto.config import ConfigError
from ...kernels.codes import Activations, Codes, has_nan, pack
from .base import CHOOSING, Stored, TensorError, Tensors, Weight
from .coded import Coded
from .packed import part_of
from .registry import Found, Quantization, register
from .scales import INPUT_SCALE, check, per_group, spread, stored_scales

KV_CACHE = r".*\.(q|k|v|kv|prob|q_proj\.output|k_proj\.output|v_proj\.output)_(scale|zero_point)"
"""Tensors of a checkpoint that are for an FP8 KV cache."""


@functools.cache
def e4m3(device: torch.device) -> torch.Tensor:
    """float32 [256]: the value of each byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def bytes_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The planes of a tensor of one byte each; itself, where its rows are whole words."""
    tensor = tensor.contiguous().view(torch.uint8)
    return (tensor.view(torch.int32),) if tensor.shape[-1] % 32 == 0 else pack(tensor, 8)


def check_numbers(found: torch.Tensor, weight: Weight) -> None:
    """Raises TensorError where ``found`` [..., rows, columns] has NaN."""
    if has_nan(found):
        row = next(index for index, row in enumerate(found.flatten(0, -2)) if has_nan(row))
        said = "holds NaN (0x7F or 0xFF in e4m3), and no weight is that; download the file again."
        raise TensorError("weight", said, part_of(row, weight.parts))


@dataclass(frozen=True)
class FP8(Coded):
    """``strategy``: what a scale is of, tensor, channel (a row), or block; ``scale``: the name of the scales' tensor.

    ``static``: whether the file has measured the activations' scale. ``group``: columns of a row that share a dynamic
    one, 0 for all; ``narrow``: whether there are narrower activations at all.
    """

    strategy: str
    scale: str = "weight_scale"
    block: tuple[int, int] = (0, 0)
    narrow: bool = True
    static: bool = False
    group: int = 0

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        found = (
            Stored("weight", dtype=torch.float8_e4m3fn),
            stored_scales(self.strategy, self.block, self.scale),
        )
        return (*found, INPUT_SCALE) if self.static else found

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        found, scales = tensors["weight"], tensors[self.scale]
        check_numbers(found, weight)
        check(scales, stored_scales(self.strategy, self.block, self.scale), weight)
        scales, group = spread(scales, self.strategy, self.block, weight)
        activations = Activations("fp8", self.group, self._input(tensors, weight)) if self.narrow else None
        return Codes(
            bytes_of(found), 8, weight.shape[1], group, per_group(scales), table=e4m3(found.device),
            activations=activations, floats="e4m3",
        )  # fmt: skip

    def _input(self, tensors: Tensors, weight: Weight) -> torch.Tensor | None:
        """Of fused tensors the largest: no value that one of them would keep is clamped."""
        if not self.static:
            return None
        check(tensors["input_scale"], INPUT_SCALE, weight)
        return tensors["input_scale"].amax(-1, keepdim=True)


def where_fp8(format: FP8, module: str, columns: int, found: Found) -> FP8 | None:
    """None where the files have a float weight for ``module``."""
    entry = found.get(f"{module}.weight") or found.get(module)
    return format if entry is None or entry[0] == torch.float8_e4m3fn else None


def skipped(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether the config keeps a module's weight as a float: it names the module, or what the module is in."""
    names = []
    for key in ("ignored_layers", "modules_to_not_convert"):
        found = config.get(key) or []
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise ConfigError(f"config.json: quantization_config's {key} must be a list of names of modules.")
        names += found
    whole = set(names)

    def skip(module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[:end]) in whole for end in range(1, len(parts) + 1)) or parts[-1] in whole

    return skip


@register("fp8")
def fp8(config: Mapping[str, Any]) -> Quantization:
    """Tensors or blocks. Raises ConfigError for settings that are not understood."""
    scheme, block = config.get("activation_scheme", "dynamic"), config.get("weight_block_size")
    if scheme not in ("static", "dynamic"):
        raise ConfigError(
            f"config.json: quantization_config's activation_scheme is {scheme}; it must be static or dynamic."
        )
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"config.json: quantization_config's fmt is {config['fmt']}; weights must be e4m3.")
    static = scheme == "static"
    if block is None:
        format = FP8("tensor", static=static)
    else:
        whole = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        if not whole:
            raise ConfigError(
                f"config.json: quantization_config's weight_block_size is {block}; it must be two sizes above 0, "
                "of rows and of columns ([128, 128])."
            )
        if static:
            raise ConfigError(
                "config.json: quantization_config has weight_block_size and static activations, which do not go "
                "together; set activation_scheme to dynamic."
            )
        format = FP8("block", "weight_scale_inv", (block[0], block[1]), group=block[1])
    return _quantization(format, config)


@register("fbgemm_fp8")
def fbgemm(config: Mapping[str, Any]) -> Quantization:
    """A scale for each row; ``activation_scale_ub`` bounds activations' scales, and no product here needs that."""
    return _quantization(FP8("channel"), config)


def _quantization(format: FP8, config: Mapping[str, Any]) -> Quantization:
    skip = skipped(config)
    unused = () if format.static else (r".*\.(input|act)_scale(_ub)?",)
    return Quantization(
        lambda module: None if skip(module) else format,
        skip=(KV_CACHE, *unused), floats=("embed.weight", "lm_head.weight", *CHOOSING), fit=where_fp8,
        renamed=((".act_scale", ".input_scale"),),
    )  # fmt: skip
