"""``--quantization``: which weights become narrower while a float checkpoint is loaded.

The weights of the layers, experts included. Routers and gates of one output stay, as choices hang on them, and so do
embeddings. With int8 and int4 the lm_head becomes narrower too, and stays as it is with ``--no-quantize-lm-head``:
beside narrow layers a float lm_head is much of what a step reads (docs/quantization.md).
With fp8 it stays, as in vLLM, but for ``--quantize-lm-head``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....proto.config import ConfigError
from ...kernels.cpu.library import library
from .base import CHOOSING
from .online import Largest, Online

METHODS = {
    "int8": "int8", "int4": "int4", "fp8": "fp8_per_tensor", "fp8_per_tensor": "fp8_per_tensor",
    "fp8_per_channel": "fp8_per_channel", "fp8_per_block": "fp8_per_block",
}  # fmt: skip
"""What ``--quantization`` makes of float weights, and how ``Online`` calls it."""


@dataclass(frozen=True)
class AtLoad:
    """``method``: of METHODS, or None for none. ``lm_head``: whether that is made narrower too; None: with int8 and
    int4. ``largest``: of a number on each tensor rank.
    """

    method: str | None = None
    lm_head: bool | None = None
    largest: Largest = lambda numbers: numbers

    def format_of(self, name: str) -> Online | None:
        """Of a linear's or experts' parameter of the decoder ("layers.3.qkv.weight"); None: as it is."""
        if self.method is None:
            return None
        made = METHODS[self.method]
        if name == "lm_head.weight":
            kept = made not in ("int8", "int4") if self.lm_head is None else not self.lm_head
            return None if kept else Online(made, self.largest)
        return Online(made, self.largest) if name.startswith("layers.") and not name.endswith(CHOOSING) else None


NOTHING = AtLoad()


def check_quantization(asked: AtLoad, device: torch.device, transformers: bool) -> None:
    """Refuse what cannot be made at load. ``transformers``: they run the model. Raises ConfigError."""
    if asked.method is None:
        if asked.lm_head:
            raise ConfigError("quantize_lm_head needs a quantization; add --quantization int8.")
        return
    why = None
    if device.type not in ("cpu", "cuda"):
        why = f"is for CPUs and GPUs, and the device is {device.type}; leave it out, or use --device cpu"
    elif device.type == "cpu" and library() is None:
        why = "needs the native CPU kernels, which are off or were not compiled; install quire where a C compiler is"
    elif transformers:
        why = "is for the architectures that quire knows, and this one is run by transformers; leave it out"
    if why:
        raise ConfigError(f"quantization={asked.method} {why}.")
