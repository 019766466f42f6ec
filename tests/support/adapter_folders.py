"""PEFT folders: with nothing in their tensors, which is enough for all that does not compute, or of the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from quire.proto.checkpoint.model_config import demo_model_path

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}


def adapter_folder(folder: Path, weights: bytes = b"weights", **config: Any) -> Path:
    """Write one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def demo_adapter(folder: Path, seed: int, rank: int = 4, size: float = 0.3) -> Path:
    """One of the demo model that changes all of its linear layers, so that its answers are its own."""
    rng = np.random.default_rng(seed)
    tensors = {}
    with safe_open(Path(demo_model_path()) / "model.safetensors", "numpy") as model:
        for name in model.keys():  # noqa: SIM118 - no dict
            if name.endswith("_proj.weight"):
                rows, columns = model.get_slice(name).get_shape()
                module = "base_model.model." + name.removesuffix(".weight")
                tensors[f"{module}.lora_A.weight"] = (rng.standard_normal((rank, columns)) * size).astype(np.float32)
                tensors[f"{module}.lora_B.weight"] = (rng.standard_normal((rows, rank)) * size).astype(np.float32)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter_folder(folder, r=rank, lora_alpha=rank, target_modules=names)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
