"""MXFP4, as gpt-oss is released: experts of 4-bit floats with a power of two for each 32 of a row.

    value = FP4[code] * 2^(scale - 127)

``gate_up_proj_blocks`` and ``down_proj_blocks`` are uint8 [experts, rows, columns / 32, 16], the lower half of each
byte first; ``_scales`` are uint8 [experts, rows, columns / 32]. Of gate_up_proj even rows are gates, odd ones what they
are applied to. (openai/gpt-oss: gpt_oss/torch/weights.py and model.py.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....proto.config import ConfigError
from ...kernels.codes import Codes, PerGroup
from .base import Axis, Stored, TensorError, Tensors, Weight
from .coded import Coded
from .packed import part_of
from .registry import Quantization, register

GROUP = 32
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1: bit 3 is the sign."""
_NO_NUMBER = 255
"""The exponent byte that stands for NaN (OCP Microscaling Formats 1.0, 5.4.1)."""
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def _rows(piece: torch.Tensor) -> torch.Tensor:
    """One expert's blocks [rows, groups, 16] or scales [rows, groups], as [rows, places]."""
    return piece.flatten(1) if piece.dim() > 2 else piece


def _gate_then_up(piece: torch.Tensor) -> torch.Tensor:
    rows = _rows(piece)
    return torch.cat((rows[0::2], rows[1::2]))


@dataclass(frozen=True)
class MXFP4(Coded):
    """Codes of 4 bits. Their scales are bfloat16, which has all powers of two that a byte names."""

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        convert = _gate_then_up if weight.gated else _rows
        return (
            Stored("blocks", Axis(), Axis(GROUP, GROUP // 2), torch.uint8, convert=convert),
            Stored("scales", Axis(), Axis(GROUP), torch.uint8, convert=convert),
        )

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        blocks, exponents = tensors["blocks"], tensors["scales"]
        if (odd := (exponents == _NO_NUMBER).any(-1).flatten()).any():
            part = part_of(int(odd.nonzero()[0]), weight.parts)
            raise TensorError("scales", "holds 255, which is no number in MXFP4; download the file again.", part)
        scales = (exponents.to(torch.int16) << 7).view(torch.bfloat16)
        scales[exponents == 0] = 2.0**-127  # below what the exponent of a bfloat16 alone can say
        table = torch.tensor(FP4, device=blocks.device)
        return Codes(
            (blocks.view(torch.int32),), 4, weight.shape[1], GROUP, PerGroup(scales), table=table, floats="e2m1"
        )


@register("mxfp4")
def mxfp4(config: Mapping[str, Any]) -> Quantization:
    """Experts whose weights are one tensor; every other module is a float weight."""
    kept = config.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not all(isinstance(each, str) for each in kept):
        raise ConfigError("config.json: quantization_config's modules_to_not_convert must be a list of names.")
    # A name may have an asterisk, and stands for all that is within it ("model.layers.*.self_attn").
    skipped = re.compile("|".join(re.escape(each).replace(r"\*", r"[^.]*") for each in kept) or "(?!)")

    def format_of(module: str) -> MXFP4 | None:
        found = skipped.match(module)
        within = found is not None and module[found.end() : found.end() + 1] in ("", ".")
        return None if within or not module.endswith(_EXPERTS) else MXFP4()

    return Quantization(format_of, marks=("_blocks",))
