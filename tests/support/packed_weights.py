"""Checkpoints in GPTQ and AWQ, written value by value from what the formats are, and the floats that they stand for.

Nothing here is the loader's: bits are laid one behind another by numpy, and values are made by a loop over inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import tiny_moe
import torch
from safetensors.torch import load_file, save_file

Made = tuple[dict[str, torch.Tensor], torch.Tensor]
"""What a module has in a checkpoint, and its weight in float32, [out, in]."""

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "qwen2": ("Qwen2", {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    "mixtral": ("Mixtral", {**tiny_moe.ROWS["mixtral"][1], **SIZES, "intermediate_size": 96}),
    **{
        name: (tiny_moe.ROWS[name][0], {**tiny_moe.ROWS[name][1], **SIZES, "head_dim": 8, "moe_intermediate_size": 32,
                                        "shared_expert_intermediate_size": 64, "num_key_value_heads": 4})
        for name in ("qwen2-moe", "deepseek-moe")
    },
}  # fmt: skip
KEPT = ("lm_head", "gate", "shared_expert_gate", "embed_tokens", "norm", "input_layernorm", "post_attention_layernorm")
"""Last parts of the names of modules that stay floats."""


def bits_of(rows: np.ndarray, bits: int) -> np.ndarray:
    """Whole numbers [rows, count] -> int32 [rows, count * bits / 32], one's bits behind another's, the lowest first."""
    each = (rows[..., None].astype(np.int64) >> np.arange(bits)) & 1
    return np.packbits(each.reshape(len(rows), -1).astype(np.uint8), axis=1, bitorder="little").view(np.int32)


def values_of(words: np.ndarray, bits: int) -> np.ndarray:
    """``bits_of`` backwards: int32 [rows, words] -> int64 [rows, count]."""
    each = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    return each.reshape(len(words), -1, bits).astype(np.int64) @ (1 << np.arange(bits))


def quantized(matrix: np.ndarray, groups: np.ndarray, bits: int, sym: bool) -> tuple[np.ndarray, ...]:
    """Codes [out, in], scales float16 [groups, out] and zeros [groups, out] of ``matrix`` [out, in], where input k is
    in group ``groups[k]``; and the float32 weight that these are."""
    most, count = (1 << bits) - 1, int(groups.max()) + 1
    scales, zeros = np.zeros((count, len(matrix)), np.float16), np.zeros((count, len(matrix)), np.int64)
    codes, values = np.zeros(matrix.shape, np.int64), np.zeros(matrix.shape, np.float32)
    for group in range(count):
        part = matrix[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if sym:
            scales[group], zeros[group] = np.abs(part).max(1) * 2 / most, 1 << (bits - 1)
        else:
            scales[group] = (high - low) / most
            zeros[group] = np.clip(np.round(-low / scales[group].astype(np.float32)), 0, most)
    for k, group in enumerate(groups):
        scale = scales[group].astype(np.float32)
        codes[:, k] = np.clip(np.round(matrix[:, k] / scale) + zeros[group], 0, most)
        values[:, k] = (codes[:, k] - zeros[group]).astype(np.float32) * scale
    return codes, scales, zeros, values


def gptq(matrix: torch.Tensor, groups: np.ndarray, bits: int = 4, sym: bool = False, v2: bool = False) -> Made:
    """Of a matrix [out, in] whose input k is in group ``groups[k]``."""
    codes, scales, zeros, values = quantized(matrix.float().numpy(), groups, bits, sym)
    stored = zeros if v2 else (zeros - 1) % (1 << bits)
    tensors = {
        "qweight": torch.from_numpy(bits_of(codes, bits).T.copy()), "qzeros": torch.from_numpy(bits_of(stored, bits)),
        "scales": torch.from_numpy(scales), "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }  # fmt: skip
    return tensors, torch.from_numpy(values)


def awq(matrix: torch.Tensor, group: int, sym: bool = False, gemv: bool = False) -> Made:
    """Of a matrix [out, in] in groups of ``group`` inputs, a divisor of their number."""
    groups = np.arange(matrix.shape[1]) // group
    codes, scales, zeros, values = quantized(matrix.float().numpy(), groups, 4, sym)
    if gemv:
        several = 1 if group >= 128 else {64: 2, 32: 4}[group]
        width = -(-len(scales) // (8 * several)) * several
        filled = np.zeros((2, len(matrix), width * 8))
        filled[:, :, : len(scales)] = scales.T, zeros.T
        tensors = {
            "qweight": bits_of(codes, 4),
            "scales": filled[0].astype(np.float16),
            "qzeros": bits_of(filled[1], 4),
        }
    else:
        order = np.arange(len(matrix)).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
        tensors = {"qweight": bits_of(codes.T[:, order], 4), "scales": scales, "qzeros": bits_of(zeros[:, order], 4)}
    return {name: torch.from_numpy(each) for name, each in tensors.items()}, torch.from_numpy(values)


def act_order(columns: int, group: int, seed: int = 0) -> np.ndarray:
    """The group of each input where the quantizer went through them in another order."""
    order, found = np.random.default_rng(seed).permutation(columns), np.zeros(columns, np.int64)
    found[order] = np.arange(columns) // group
    return found


def checkpoints(
    folder: Path, model: str, quantize: Callable[[str, torch.Tensor], Made | None], config: dict[str, Any],
    **values: Any,
) -> tuple[Path, Path]:  # fmt: skip
    """A quantized checkpoint of ``MODELS[model]`` and one of the floats that it stands for.

    ``quantize`` gets a module's name and weight; None: it stays a float. ``values`` are further ones of config.json.
    """
    plain, folder = folder / "plain", folder / "quantized"
    kind, own = MODELS[model]
    for each in (plain, folder):
        tiny_models.write(kind, each, 5, {**own, **values})
    stored: dict[str, torch.Tensor] = {}
    floats: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        made = quantize(module, tensor) if kind == "weight" and module.rpartition(".")[2] not in KEPT else None
        if made is None:
            stored[name] = floats[name] = tensor
        else:
            floats[name] = made[1]
            stored |= {f"{module}.{key}": value.contiguous() for key, value in made[0].items()}
    save_file(stored, folder / "model.safetensors")
    save_file({name: tensor.float().contiguous() for name, tensor in floats.items()}, plain / "model.safetensors")
    edit(folder, quantization_config=config)
    return folder, plain


def edit(folder: Path, **values: Any) -> None:
    """Change values of the folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
