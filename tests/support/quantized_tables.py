"""SqueezeLLM, bitsandbytes and MXFP4: the tensors of their checkpoints, and the values that they stand for.

bitsandbytes' are by its package, MXFP4's values by transformers, SqueezeLLM's by the format's definition.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import quantized
import torch
from bitsandbytes.nn import Linear8bitLt
from quantized import Tensors, Writer
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# --- bitsandbytes ---

FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": FOUR, "nf4-double": {**FOUR, "bnb_4bit_use_double_quant": True},
    "fp4": {**FOUR, "bnb_4bit_quant_type": "fp4"}, "int8": {"load_in_8bit": True},
}  # fmt: skip


def bitsandbytes(matrix: torch.Tensor, config: dict[str, Any], block: int = 64) -> tuple[dict[str, Any], torch.Tensor]:
    """The tensors that bitsandbytes saves of a layer's weight, and the float32 weight that it makes of them."""
    if config.get("load_in_8bit"):
        layer = Linear8bitLt(matrix.shape[1], matrix.shape[0], bias=False, has_fp16_weights=False)
        layer.load_state_dict({"weight": matrix})
        layer = layer.to("cpu")
        saved = layer.state_dict()
        return saved, bnb.int8_vectorwise_dequant(saved["weight"], saved["SCB"])
    codes, state = bnb.quantize_4bit(
        matrix, blocksize=block, quant_type=config["bnb_4bit_quant_type"],
        compress_statistics=config.get("bnb_4bit_use_double_quant", False),
    )  # fmt: skip
    saved = {"weight": codes, **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
    return saved, floats_of(codes, state)


def floats_of(codes: torch.Tensor, state: bnb.QuantState) -> torch.Tensor:
    """What 4-bit codes stand for, made as one row: with AVX-512 bitsandbytes 0.50 takes each row of a matrix to begin a
    block of its own, though blocks go on from row to row."""
    shape, state.shape = state.shape, torch.Size([math.prod(state.shape)])
    return bnb.dequantize_4bit(codes, state).view(shape)


def bitsandbytes_values(folder: Path) -> Tensors:
    """The float32 weights of a checkpoint of bitsandbytes, by its package."""
    found: Tensors = {}
    tensors = quantized.stored(folder)
    for name, tensor in tensors.items():
        if name.endswith(".SCB"):
            weight = name.removesuffix("SCB") + "weight"
            found[weight] = bnb.int8_vectorwise_dequant(tensors[weight], tensor)
        elif ".quant_state." in name:
            weight = name.split(".quant_state.")[0]
            parts = {key.removeprefix(f"{weight}."): value for key, value in tensors.items() if key.startswith(weight)}
            codes = parts.pop("weight" if "weight" in parts else weight)
            found[weight] = floats_of(codes, bnb.QuantState.from_dict(parts, torch.device("cpu")))
    return found


def write_bitsandbytes(method: str, source: Path, out: Path) -> None:
    config = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": None, **CONFIGS[method]}
    quantized.rewritten(source, out, lambda _, weight: bitsandbytes(weight, CONFIGS[method])[0], config)


# --- SqueezeLLM ---

VARIANTS = {"3": (3, 0.0, 0), "4": (4, 0.0, 0), "4-sparse": (4, 0.01, 0), "3-hybrid": (3, 0.01, 2)}
"""Bits, the share of sparse values, and full rows."""


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K] as qweight [K * bits / 32, N]: each row's bits one after the other, from the lowest on."""
    places = torch.arange(bits)
    stream = (codes[..., None] >> places & 1).flatten(1).unflatten(1, (-1, 32)).long()
    words = (stream << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int().t().contiguous()


def squeezellm(
    matrix: torch.Tensor, bits: int, share: float, full: int, random: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a module, and the float32 weight that they stand for."""
    rows, columns = matrix.shape
    table = matrix.abs().amax(1, keepdim=True) * torch.linspace(-1, 1, 1 << bits) ** 3
    codes = (matrix[..., None] - table[:, None]).abs().argmin(-1)
    values = table.gather(1, codes)
    saved = {"qweight": packed(codes, bits), "lookup_table": table}
    added = torch.zeros_like(matrix)
    if share:
        mask = torch.rand(matrix.shape, generator=random) < share
        mask[rows // 2] = False  # a row without any
        added[mask] = (matrix - values)[mask] + 0.1
        row, column = mask.nonzero().t()
        ends = torch.cat((torch.zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)))
        saved |= {"rows": ends.int(), "cols": column.int(), "vals": added[row, column]}
        saved["startrows"] = torch.zeros(8, dtype=torch.int32)
    if full:
        indices = torch.randperm(rows, generator=random)[:full]
        dense = torch.randn(columns, full, generator=random) * 0.05
        saved |= {"full_rows": dense, "full_row_indices": indices.int()}
        added[indices] += dense.t()
    return saved, values + added


def write_squeezellm(variant: str, source: Path, out: Path) -> None:
    bits, share, full = VARIANTS[variant]
    random = torch.Generator().manual_seed(4)
    config = {"quant_method": "squeezellm", "wbits": bits}
    values: Tensors = {}

    def quantize(module: str, weight: torch.Tensor) -> Tensors:
        saved, values[f"{module}.weight"] = squeezellm(weight, bits, share, full, random)
        return saved

    quantized.rewritten(source, out, quantize, config)
    tensors: dict[str, Any] = load_file(out / "model.safetensors")
    counts = {f"sparse_threshold.{name[:-5]}": len(each) for name, each in tensors.items() if name.endswith(".vals")}
    torch.save(tensors | counts, out / "sq-tiny.pt")
    (out / "model.safetensors").unlink()
    torch.save(values, out / "values")


def squeezellm_values(folder: Path) -> Tensors:
    """What the writer knows: to unpack them again would be the format's own work."""
    return torch.load(folder / "values", weights_only=True)


# --- MXFP4 ---


def blocks(experts: int, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of any codes, and values of some 0.1."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
    return codes, torch.randint(121, 125, codes.shape[:3], generator=random, dtype=torch.uint8)


_UNCONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_mxfp4(source: Path, out: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    for seed, name in enumerate(sorted(name for name in tensors if name.endswith(("gate_up_proj", "down_proj")))):
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks(experts, rows, columns, seed)
    quantized.copied(source, out)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = {"quant_method": "mxfp4", "modules_to_not_convert": _UNCONVERTED}
    quantized.configure(out, quantization_config=config)


def mxfp4_values(folder: Path) -> Tensors:
    """The float32 weights, as transformers lays them: [experts, columns, rows]."""
    tensors = quantized.stored(folder)
    names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    return {
        name: convert_moe_packed_tensors(
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32
        ).contiguous()
        for name in names
    }  # fmt: skip


WRITERS = [
    Writer("bitsandbytes-nf4-double", partial(write_bitsandbytes, "nf4-double"), bitsandbytes_values),
    Writer("bitsandbytes-int8", partial(write_bitsandbytes, "int8"), bitsandbytes_values, served=False),
    Writer("squeezellm-4-sparse", partial(write_squeezellm, "4-sparse"), squeezellm_values),
    Writer("squeezellm-3-hybrid", partial(write_squeezellm, "3-hybrid"), squeezellm_values, ("grouped",)),
    Writer("mxfp4", write_mxfp4, mxfp4_values, ("gpt-oss",)),
]
