"""compressed-tensors, by its own compressors: 4 bits with zero points, FP8, and int8 times int8 rows."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import quantized
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

IGNORE = ["lm_head", "re:.*gate$"]
INT8, FP8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
ROWS: dict[str, Any] = {"strategy": "token", "dynamic": True}
SCHEMES = {
    "w4a16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}, None),
    "fp8": ("float-quantized", {**FP8, "strategy": "channel"}, {**FP8, **ROWS}),
    "w8a8": ("int-quantized", {**INT8, "strategy": "channel"}, {**INT8, **ROWS}),
}


def scheme_of(name: str) -> QuantizationScheme:
    packing, weights, rows = SCHEMES[name]
    return QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights), format=packing,
        input_activations=None if rows is None else QuantizationArgs(**rows),
    )  # fmt: skip


def quantize(scheme: QuantizationScheme, module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    cut = weight.unflatten(1, (-1, scheme.weights.group_size or weight.shape[1]))
    scales, zeros = calculate_qparams(cut.amin(-1), cut.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    return BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)


def write(name: str, source: Path, out: Path) -> None:
    scheme = scheme_of(name)
    config = {
        "quant_method": "compressed-tensors", "format": scheme.format, "ignore": IGNORE, "version": "0.20.0",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())}, "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }  # fmt: skip
    quantized.rewritten(source, out, functools.partial(quantize, scheme), config)


def dequantized(name: str, folder: Path) -> dict[str, torch.Tensor]:
    scheme = scheme_of(name)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    found = quantized.by_module(quantized.stored(folder), "weight_scale")
    return {f"{module}.weight": compressor.decompress(each, scheme)["weight"] for module, each in found.items()}


def writer(name: str, **settings: Any) -> quantized.Writer:
    called = f"compressed-tensors-{name}"
    return quantized.Writer(
        called, functools.partial(write, name), functools.partial(dequantized, name), **settings
    )  # fmt: skip


def int8_rows(x: torch.Tensor) -> torch.Tensor:
    """By a scale for each row, of its largest magnitude / 127."""
    largest = x.abs().amax(-1, keepdim=True)
    return (x * (127 / largest)).round() * (largest / 127)


# Transformers' experts are no linears, and of two ranks each has rows of its own.
WRITERS = [
    writer("w4a16"),
    writer("fp8", served=False, models=("llama", "grouped")),
    writer("w8a8", served=False, models=("llama", "qwen2"), logits=0.05, ties=0.05, rows=int8_rows),
]
