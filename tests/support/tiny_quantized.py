"""A tiny checkpoint whose linear layers are quantized by a function, and one of the float32 values that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tiny_models
import tiny_moe
import torch
from safetensors.torch import load_file, save_file

MODELS = {
    "llama": tiny_models.ROWS["llama-bias-tied"], "phi3": tiny_models.ROWS["phi3"],
    "mixtral": tiny_moe.ROWS["mixtral"], "qwen2-moe": tiny_moe.ROWS["qwen2-moe"],
    "deepseek": tiny_moe.ROWS["deepseek-moe"],
}  # fmt: skip
FLOATS = ("lm_head", "gate", "shared_expert_gate", "embed_tokens", "norm")
Quantize = Callable[[str, torch.Tensor], tuple[Mapping[str, torch.Tensor], torch.Tensor]]
"""(module, matrix [out, in]) -> its tensors by what follows the module's name, and the float32 values they mean."""


def write(
    folder: Path, model: str, quantize: Quantize, config: Mapping[str, Any], values: Mapping[str, Any] = {}
) -> tuple[Path, Path]:  # fmt: skip
    """The quantized folder, and the plain one. ``values`` change the model's config.json."""
    plain, quantized = folder / "plain", folder / "quantized"
    for each in (plain, quantized):
        each.mkdir(exist_ok=True)
        tiny_models.write(MODELS[model][0], each, 5, {**MODELS[model][1], **values})
    stored: dict[str, torch.Tensor] = {}
    floats: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module == name or module.split(".")[-1] in FLOATS or "norm" in module or tensor.dim() != 2:
            stored[name] = floats[name] = tensor
            continue
        tensors, floats[name] = quantize(module, tensor.float())
        stored |= {f"{module}.{key}": value.contiguous() for key, value in tensors.items()}
    save_file(stored, quantized / "model.safetensors")
    save_file({name: tensor.float().contiguous() for name, tensor in floats.items()}, plain / "model.safetensors")
    edit(quantized, quantization_config=dict(config))
    return quantized, plain


def edit(folder: Path, **changes: Any) -> None:
    """Change the folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let ``change`` have the folder's tensors by name, and keep what it leaves."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
