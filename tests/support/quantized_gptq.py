"""GPTQ's rows of ``quantized.py``: written value by value from the format's definition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import packed_weights
import quantized
import torch
from quantized import Writer

MODELS = ("llama", "qwen2", "mixtral", "grouped")


def _row(
    name: str, bits: int, group: int, sym: bool = False, v2: bool = False, act_order: bool = False,
    models: tuple[str, ...] = MODELS, served: bool = False,
) -> Writer:  # fmt: skip
    def write(source: Path, out: Path) -> None:
        def quantize(module: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
            columns = matrix.shape[1]
            size, seed = columns if group < 0 else group, sum(int(n) for n in module.split(".") if n.isdigit())
            groups = packed_weights.act_order(columns, size, seed) if act_order else np.arange(columns) // size
            return packed_weights.gptq(matrix, groups, bits, sym, v2)[0]

        config = {
            "quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order,
            "checkpoint_format": "gptq_v2" if v2 else "gptq",
        }  # fmt: skip
        quantized.rewritten(source, out, quantize, config)

    return Writer(name, write, dequantized, models, served)


def dequantized(folder: Path) -> Mapping[str, torch.Tensor]:
    """The values of all quantized weights."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    found, bits = {}, config["bits"]
    for module, tensors in quantized.by_module(quantized.stored(folder), "qweight").items():
        codes = packed_weights.values_of(tensors["qweight"].numpy().T, bits)
        zeros = packed_weights.values_of(tensors["qzeros"].numpy(), bits)
        if config["checkpoint_format"] == "gptq":
            zeros = (zeros + 1) % (1 << bits)
        groups = tensors["g_idx"].numpy()
        scales = tensors["scales"].float().numpy()
        values = (codes - zeros[groups].T).astype(np.float32) * scales[groups].T
        found[f"{module}.weight"] = torch.from_numpy(values)
    return found


WRITERS = [
    _row("gptq-4", 4, 64, sym=True, models=("llama",), served=True),
    _row("gptq-4-act-order", 4, 32, act_order=True),
    _row("gptq-3-v2", 3, 64, v2=True, models=("grouped",)),
    _row("gptq-2", 2, 32, models=("grouped",)),
    _row("gptq-8", 8, -1, sym=True, models=("grouped",)),
]
