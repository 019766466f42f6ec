"""Which dtype a model runs in: the flag, what config.json asks for, and what the device can do."""

from __future__ import annotations

import logging

import torch

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.config import ConfigError
from ..layers.formats.dense import cpu_backend, cpu_has_bf16
from .fallback import uses_fallback

log = logging.getLogger(__name__)

_NAMES = {
    "half": torch.float16, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float": torch.float32, "float32": torch.float32,
}  # fmt: skip
# Models whose activations overflow float16, as in vLLM.
_NO_HALF = {"gemma2", "gemma3", "gemma3_text", "glm4"}


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype for --dtype ``name`` on ``device``.

    "auto" on a GPU is the dtype of config.json (float32 where it names none), except that float32 becomes 16 bits
    wide: float16, or bfloat16 for the models whose activations overflow float16, which never run in it. On a CPU "auto"
    is bfloat16 for a checkpoint in it, where the CPU has its instructions and the native kernels run the model: a token
    must not depend on how many others share its step, and only they keep that in bfloat16. Else it is float32. bfloat16
    can be asked for where the CPU has its instructions; float16 is never computed in there. On a GPU without bfloat16
    "auto" is float16 instead, for those models float32. Raises ConfigError.
    """
    if name != "auto" and name not in _NAMES:
        raise ConfigError(f"Unknown dtype: {name}. Must be one of {['auto', *_NAMES]}.")
    if _NAMES.get(name) == torch.float16 and (kind := config.hf.get("model_type")) in _NO_HALF:
        raise ConfigError(
            f"The model type {kind!r} does not support float16. Reason: Numerical instability. Please use bfloat16 or "
            "float32 instead."
        )
    stored = stored_dtype(config, name)
    dtype = _choose(name, stored, config, device)
    if dtype == stored:
        return dtype
    if dtype == torch.float32:
        log.debug("Upcasting %s to %s.", stored, dtype)
    elif stored == torch.float32:
        log.info("Downcasting %s to %s.", stored, dtype)
    else:
        log.warning("Casting %s to %s.", stored, dtype)
    return dtype


def _choose(name: str, stored: torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    wanted = stored if name == "auto" else _NAMES[name]
    if device.type != "cpu":
        kind = str(config.hf.get("model_type"))
        large = kind in _NO_HALF or kind.startswith("gemma")
        if name == "auto" and (wanted == torch.float32 or (wanted == torch.float16 and kind in _NO_HALF)):
            wanted = torch.bfloat16 if large else torch.float16
        if wanted != torch.bfloat16 or (found := gpu_capability(device)) >= (8, 0):
            return wanted
        said = "Bfloat16 is only supported on GPUs with compute capability of at least 8.0; this one's is "
        said += ".".join(map(str, found))
        if name != "auto":
            raise ConfigError(f"{said}. Use --dtype {'float32' if kind in _NO_HALF else 'half'}.")
        used = torch.float32 if large else torch.float16
        log.warning("%s. Using %s.", said, str(used)[6:])
        return used
    if wanted == torch.float32 or (name == "auto" and (wanted == torch.float16 or not _exact(config))):
        return torch.float32
    if wanted == torch.bfloat16 and cpu_has_bf16():
        return wanted
    used = torch.bfloat16 if cpu_has_bf16() else torch.float32
    log.warning("this CPU does not compute in %s; using %s", str(wanted)[6:], str(used)[6:])
    return used


def _exact(config: ModelConfig) -> bool:
    """Whether a token of this model has the same bits in any batch on this CPU, in bfloat16 too."""
    return cpu_has_bf16() and cpu_backend(torch.bfloat16) == "native" and not uses_fallback(config)


def gpu_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU: its major and minor number."""
    return torch.cuda.get_device_capability(device)


def stored_dtype(config: ModelConfig, asked: str = "") -> torch.dtype:
    """What config.json says the weights are. Only with ``asked`` auto must it be a dtype that can be computed in."""
    name = str(config.hf.get("dtype") or config.hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _NAMES and asked == "auto":
        raise ConfigError(f"Unknown dtype: {name} in {config.path}/config.json; choose one with --dtype bfloat16.")
    return _NAMES.get(name, torch.float32)
