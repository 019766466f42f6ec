"""AWQ's rows of ``quantized.py``: written value by value from the format's definition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import packed_weights
import quantized
import torch
from quantized import Writer


def _row(name: str, group: int, version: str, models: tuple[str, ...]) -> Writer:
    def write(source: Path, out: Path) -> None:
        def quantize(module: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
            return packed_weights.awq(matrix, group, gemv=version == "gemv")[0]

        config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version}
        quantized.rewritten(source, out, quantize, config)

    return Writer(name, write, dequantized, models, served=version == "gemm")


def dequantized(folder: Path) -> Mapping[str, torch.Tensor]:
    """The values of all quantized weights."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    found, gemv = {}, config["version"] == "gemv"
    for module, tensors in quantized.by_module(quantized.stored(folder), "qweight").items():
        codes, zeros = (packed_weights.values_of(tensors[name].numpy(), 4) for name in ("qweight", "qzeros"))
        scales = tensors["scales"].float().numpy()
        if not gemv:
            order = np.arange(codes.shape[1]).reshape(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].ravel()
            codes, zeros, scales = codes[:, order].T, zeros[:, order].T, scales.T
        groups = np.arange(codes.shape[1]) // config["group_size"]
        values = (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups]
        found[f"{module}.weight"] = torch.from_numpy(values)
    return found


WRITERS = [
    _row("awq", 64, "gemm", ("llama", "qwen2", "mixtral", "grouped")),
    _row("awq-gemv", 32, "gemv", ("grouped",)),
]
