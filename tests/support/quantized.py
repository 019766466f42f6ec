"""Quantized checkpoints of tiny models: who writes them, and what they must compute.

``tests/quantization/test_quantized_models.py`` runs every row against every model it is for. To add rows, write a
module ``tests/support/quantized_NAME.py`` that defines ``WRITERS: list[Writer]``: by the format's own package where
that runs on a CPU, else from the format's definition, without quire's code. Nothing else is edited.

``write`` gets a float checkpoint and makes a whole folder beside it; ``copied`` and ``rewritten`` do what most need.
``dequantized`` reads that folder, and gives the float32 values of its quantized weights under the names of the float
checkpoint. What it leaves out is as in the float checkpoint.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models
import torch
from safetensors.torch import load_file, save_file

SEED = 11
Tensors = dict[str, torch.Tensor]

_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "qwen2": ("Qwen2", _SIZES),  # with biases on q, k and v
    "mixtral": ("Mixtral", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    # Halves of o's and down's columns are whole groups of 128 here.
    "grouped": (
        "Llama",
        {**_SIZES, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "gpt-oss": (
        "GptOss",
        {
            **_SIZES,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}
"""Name -> transformers' class prefix, and config. Columns are multiples of 128, rows of 64; the vocabulary is 320."""
MOST = ("llama", "qwen2", "mixtral", "grouped")
"""The models that any format can be of: experts of gpt-oss are one tensor, which few formats know."""
KEPT = ("lm_head", "embed_tokens", "wte", "wpe", "gate", "norm")
"""Parts of modules' names that ``rewritten`` leaves as floats unless told otherwise; "gate" is a router."""


@dataclass(frozen=True)
class Writer:
    """A format's row. ``models``: of MODELS, those it is tested with. ``served``: whether a server that loses
    its worker is tested too, which takes seconds: for one row of a format.

    ``logits``: the largest difference from the dequantized model's logits, as a share of the largest logit.
    ``rows``: what the inputs of the quantized linears become before they are multiplied; None: they stay as they are.
    ``ties``: how far below the largest logit, as a share of it, a token may be that is drawn. Rounded rows need some: a
    value between two codes goes to either.
    """

    name: str
    write: Callable[[Path, Path], None]
    dequantized: Callable[[Path], Mapping[str, torch.Tensor]]
    models: tuple[str, ...] = MOST
    served: bool = True
    logits: float = 1e-3
    rows: Callable[[torch.Tensor], torch.Tensor] | None = None
    ties: float = 0.0


def writers() -> dict[str, Writer]:
    """All rows of the modules ``quantized_*.py`` beside this one, by name."""
    modules = sorted(file.stem for file in Path(__file__).parent.glob("quantized_*.py"))
    return {row.name: row for module in modules for row in rows_of(module)}


def rows_of(module: str) -> list[Writer]:
    """A module's, if it has any."""
    return getattr(importlib.import_module(module), "WRITERS", [])


def reference(writer: Writer, twin: Path) -> Any:
    """Transformers' model of the float checkpoint that a quantized one stands for."""
    model, rows = tiny_models.reference(twin), writer.rows
    for name, module in model.named_modules():
        if rows is not None and isinstance(module, torch.nn.Linear) and not set(KEPT) & set(name.split(".")):
            module.register_forward_pre_hook(lambda _, inputs: (rows(inputs[0]),))
    return model


def plain(model: str, folder: Path) -> Path:
    """Write the float checkpoint of ``model`` to ``folder``: float32, in one safetensors file."""
    prefix, values = MODELS[model]
    return tiny_models.save(prefix, folder, SEED, **{**tiny_models.BASE, **values})


def copied(source: Path, out: Path) -> Path:
    """All files of ``source`` but its weights, in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("model.safetensors"):
            shutil.copy(file, out)
    return out


def configure(folder: Path, **values: Any) -> None:
    """Put ``values`` into the folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def linears(tensors: Mapping[str, torch.Tensor], kept: tuple[str, ...] = KEPT) -> list[str]:
    """The modules of ``tensors`` whose weight is a matrix and that have no part of their name in ``kept``."""
    found = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight") and tensors[name].dim() == 2]
    return [module for module in found if not set(kept) & set(module.split("."))]


def rewritten(
    source: Path, out: Path, quantize: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]],
    config: Mapping[str, Any], kept: tuple[str, ...] = KEPT,
) -> None:  # fmt: skip
    """``source`` with each linear's weight [out, in] in the tensors that ``quantize(module, weight)`` gives, named by
    what follows the module's name; ``config`` is its quantization_config. Biases and what is ``kept`` stay float32.
    """
    tensors = load_file(source / "model.safetensors")
    for module in linears(tensors, kept):
        made = quantize(module, tensors.pop(f"{module}.weight"))
        tensors |= {f"{module}.{name}": value.contiguous() for name, value in made.items()}
    copied(source, out)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    configure(out, quantization_config=dict(config))


def stored(folder: Path) -> Tensors:
    """All tensors of the folder's safetensors files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def by_module(tensors: Mapping[str, torch.Tensor], suffix: str) -> dict[str, Tensors]:
    """The tensors of each module that has one named ``suffix``: module -> what follows its name -> tensor."""
    modules = [name[: -len(suffix) - 1] for name in tensors if name.endswith(f".{suffix}")]
    found: dict[str, Tensors] = {module: {} for module in modules}
    for name, tensor in tensors.items():
        module, _, tail = name.rpartition(".")
        if module in found:
            found[module][tail] = tensor
    return found


def float_twin(writer: Writer, source: Path, quantized: Path, out: Path) -> Path:
    """The float32 checkpoint that ``quantized`` stands for: ``source`` with the values that the writer says."""
    tensors = load_file(source / "model.safetensors")
    for name, value in writer.dequantized(quantized).items():
        if name not in tensors or tensors[name].shape != value.shape or value.dtype != torch.float32:
            raise ValueError(f"{writer.name}: {name} {tuple(value.shape)} {value.dtype} is not in the float checkpoint")
        tensors[name] = value
    copied(source, out)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    return out
