"""``--quantization``: which weights become narrower while a float checkpoint is loaded.

The weights of the layers, experts included. Routers and gates of one output stay, as choices hang on them, and so do
embeddings. The lm_head becomes int8 with either method, as its outputs are what is drawn from, and stays as it is with
``--no-quantize-lm-head``: beside narrow layers a float lm_head is much of what a step reads (docs/quantization.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....proto.config import ConfigError
from ...kernels.cpu.library import library
from .base import CHOOSING
from .native import Int4, Int8

METHODS: dict[str, Int8 | Int4] = {"int8": Int8(), "int4": Int4()}


@dataclass(frozen=True)
class AtLoad:
    """``method``: of METHODS, or None for none. ``lm_head``: whether that is made int8 too; None: it is."""

    method: str | None = None
    lm_head: bool | None = None

    def format_of(self, name: str) -> Int8 | Int4 | None:
        """Of a linear's or experts' parameter of the decoder ("layers.3.qkv.weight"); None: as it is."""
        if self.method is None:
            return None
        if name == "lm_head.weight":
            return None if self.lm_head is False else METHODS["int8"]
        return METHODS[self.method] if name.startswith("layers.") and not name.endswith(CHOOSING) else None


NOTHING = AtLoad()


def check_quantization(asked: AtLoad, device: torch.device, transformers: bool) -> None:
    """Refuse what cannot be made at load. ``transformers``: they run the model. Raises ConfigError."""
    if asked.method is None:
        if asked.lm_head:
            raise ConfigError("quantize_lm_head needs a quantization; add --quantization int8.")
        return
    why = None
    if device.type != "cpu":
        why = f"is for CPUs, and the device is {device.type}; leave it out, or use --device cpu"
    elif library() is None:
        why = "needs the native CPU kernels, which are off or were not compiled; install quire where a C compiler is"
    elif transformers:
        why = "is for the architectures that quire knows, and this one is run by transformers; leave it out"
    if why:
        raise ConfigError(f"quantization={asked.method} {why}.")
