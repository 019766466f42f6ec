"""The formats of quantized checkpoints, by the ``quant_method`` of their config.json.

A format is one file of this folder that registers itself::

    @register("gptq")
    def gptq(config: Mapping[str, Any]) -> Quantization: ...
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....proto.checkpoint.quantization import method
from ....proto.config import ConfigError
from ...kernels.card import OLDEST, card_of
from .base import Format

Found = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtypes and shapes of the tensors that files hold, by name."""


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint's quantization_config says.

    ``format_of``: the format of the weight of a module, which is named as in the checkpoint; None: it is a float
    weight. ``skip``: regular expressions of tensors that the checkpoint carries and nobody needs.
    ``marks``: how names of tensors go on after a quantized module's, and after no other's (".qweight"). Where files are
    read, a module without any of these is a float weight, whatever ``format_of`` says; empty: its word is taken.
    ``fit``: of what ``format_of`` said of a module, if only None, its name, the columns of its weight and what files
    hold, the format that these show it to have; None: of a float weight. Asked where files are read.
    ``floats``: how names of the decoder's parameters end that are float weights whatever ``format_of`` says, where no
    files are read ("router.weight"). ``renamed``: what old files call something, and what its format calls it.
    ``zero``: regular expressions of tensors that a checkpoint may hold for nothing, as long as they are all 0.
    ``pickled``: the method's checkpoints are pickles, which are then read without being asked for.
    ``fuse``: makes one format of those of modules that are parts of one weight and differ; None: they must not.
    """

    format_of: Callable[[str], Format | None] = lambda module: None
    skip: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    fit: Callable[[Any, str, int, Found], Format | None] | None = None
    floats: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    zero: tuple[str, ...] = ()
    pickled: bool = False
    fuse: Callable[[Sequence[Format | None]], Format] | None = None


HALVES = (torch.float16, torch.bfloat16)
_HALF_ONLY = ("awq", "gptq", "squeezellm")
"""Methods whose scales are float16: vLLM runs them in 16 bits alone, and so does quire on a GPU."""
Method = Callable[[Mapping[str, Any]], Quantization]
"""Reads a quantization_config. Raises ConfigError for a value that it does not know."""
_METHODS: dict[str, Method] = {}


def register(quant_method: str) -> Callable[[Method], Method]:
    """Decorate the ``Method`` of checkpoints of ``quant_method``. Raises ValueError where another has that name."""

    def add(method: Method) -> Method:
        if _METHODS.setdefault(quant_method, method) is not method:
            raise ValueError(f"{quant_method} is registered already, by {_METHODS[quant_method].__module__}")
        return method

    return add


def quantization(hf: Mapping[str, Any]) -> Quantization:
    """Of the config.json ``hf``. Raises ConfigError for a method that no file of this folder registers."""
    config = hf.get("quantization_config")
    if not config:
        return Quantization()
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    name = config.get("quant_method") if isinstance(config, dict) else config
    if not isinstance(config, dict) or not isinstance(name, str) or name not in _METHODS:
        raise ConfigError(
            f"config.json: Unknown quantization method: {name}. Must be one of {sorted(_METHODS)}, which are "
            "supported; use the model's float weights, or, where they are what the folder has, "
            "--hf-overrides '{\"quantization_config\": null}'."
        )
    return _METHODS[name](config)


def check_device(hf: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError where a checkpoint of the config.json ``hf`` cannot run in ``dtype`` on the GPU ``device``.

    CPUs compute in float32 or bfloat16, whatever the method.
    """
    config = hf.get("quantization_config")
    if device.type != "cuda" or not isinstance(config, dict):
        return
    name, card = str(config.get("quant_method")), card_of(device)
    if card.backend == "cuda" and isinstance(card.arch, int) and card.arch < OLDEST:
        raise ConfigError(
            f"The quantization method {name} is not supported for the current GPU. Minimum capability: {OLDEST}. "
            f"Current capability: {card.arch}. Use a newer card, or --device cpu."
        )
    if method(name) in _HALF_ONLY and dtype not in HALVES:
        raise ConfigError(
            f"{dtype} is not supported for quantization method {name}. Supported dtypes: {list(HALVES)}; use --dtype "
            "auto."
        )
