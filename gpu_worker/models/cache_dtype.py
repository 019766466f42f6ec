"""The dtype of the KV cache: --kv-cache-dtype, and what the checkpoint asks for."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.config import ConfigError, EngineArgs

log = logging.getLogger(__name__)

_NARROW = {
    "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8, "int8_per_token_head": torch.int8,
}  # fmt: skip
_MOST_JSON = 1 << 24
"""Bytes of hf_quant_config.json that are read at most."""


def resolve_cache_dtype(args: EngineArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the cache of a model that runs in ``dtype``.

    "auto" is ``dtype``, or fp8 where the checkpoint asks for it. Raises ConfigError, one line.
    """
    name = args.kv_cache_dtype
    if name == "auto":
        if not asks_for_fp8(config):
            return dtype
        log.info("the checkpoint asks for an fp8 KV cache; --kv-cache-dtype %s would keep it as wide as the model",
                 str(dtype)[6:])  # fmt: skip
        name = "fp8"
    if name not in _NARROW:
        if name != str(dtype)[6:]:
            raise ConfigError(
                f"kv_cache_dtype={name} is not the model's dtype, {str(dtype)[6:]}; use --dtype {name}, or a cache of "
                "auto, fp8 or fp8_e5m2."
            )
        return dtype
    if name.startswith("int8") and device.type != "cpu":
        raise ConfigError(f"kv_cache_dtype={name} is for CPUs, and the device is {device.type}; use fp8.")
    if args.attention_backend == "flash":
        raise ConfigError(
            f"attention_backend=flash does not read a KV cache of {name} beside queries of 16 bits; use "
            "--attention-backend=triton, or --kv-cache-dtype=auto."
        )
    if name == "fp8_e5m2" and asks_for_fp8(config):
        raise ConfigError(
            "fp8_e5m2 kv-cache is not supported with fp8 checkpoints, whose scales are made for e4m3; use "
            "--kv-cache-dtype=fp8."
        )
    return _NARROW[name]


def asks_for_fp8(config: ModelConfig) -> bool:
    """Whether the checkpoint was quantized for an fp8 cache: compressed-tensors' ``kv_cache_scheme``, ModelOpt's
    ``kv_cache_quant_algo``. Raises ConfigError for a compressed-tensors scheme that is not fp8 by layer."""
    found = config.hf.get("quantization_config") or config.hf.get("compression_config")
    if not isinstance(found, dict):
        found = _side_file(Path(config.path))
    inner = found.get("quantization")
    inner = inner if isinstance(inner, dict) else found
    scheme = found.get("kv_cache_scheme") or inner.get("kv_cache_scheme")
    if found.get("quant_method") == "compressed-tensors" and isinstance(scheme, dict):
        _check_scheme(scheme)
        return True
    if isinstance(scheme, dict):  # ModelOpt's newer files
        return scheme.get("type") == "float" and scheme.get("num_bits") == 8 and not scheme.get("dynamic")
    algo = inner.get("kv_cache_quant_algo") or found.get("kv_cache_quant_algo")
    if isinstance(algo, str) and algo.upper() not in ("FP8", "NONE"):
        log.warning(
            "kv_cache_quant_algo %r of the checkpoint is not known (FP8 is): the KV cache has the model's dtype", algo
        )
    return isinstance(algo, str) and algo.upper() == "FP8"


def _check_scheme(scheme: Mapping[str, Any]) -> None:
    told = "config.json: kv_cache_scheme"
    remedy = "; use --kv-cache-dtype bfloat16 (the model's dtype) or fp8."
    kind, bits = scheme.get("type"), scheme.get("num_bits")
    if kind != "float" or bits != 8:
        raise ConfigError(
            f"{told}: Currently supported kv cache quantization is num_bits=8, type=float, however received "
            f"num_bits={bits}, type={kind}{remedy}"
        )
    if scheme.get("strategy") not in (None, "tensor"):
        raise ConfigError(
            f"{told}: only one scale for all heads of a layer is supported (strategy tensor), not "
            f"{scheme.get('strategy')!r}{remedy}"
        )
    if scheme.get("symmetric") is False:
        raise ConfigError(
            f"{told}: Only support symmetric scaling factor for compressed-tensors KV cache. However found symmetric: "
            f"False{remedy}"
        )


def _side_file(folder: Path) -> dict[str, Any]:
    """ModelOpt's older files keep it beside config.json."""
    file = folder / "hf_quant_config.json"
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_JSON + 1)
    except OSError:
        return {}
    try:
        if len(text) > _MOST_JSON:
            raise ValueError(f"more than {_MOST_JSON} bytes")
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON ({error}); download it again.") from error
    return found if isinstance(found, dict) else {}
