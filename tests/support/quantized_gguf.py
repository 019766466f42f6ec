"""Rows of GGUF files; see quantized."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf_files
import torch
from gguf import GGMLQuantizationType as T
from quantized import Writer

_LLAMA = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """What the gguf package says of the matrices, by their names and in their order in the float checkpoint."""
    heads = json.loads((folder / "heads.json").read_text())
    found = {}
    for name, tensor in gguf_files.values(folder / "model.gguf").items():
        _, _, rest = name.partition("blk.")
        layer, _, stem = rest.removesuffix(".weight").partition(".")
        if name in _OUTER:
            found[_OUTER[name]] = tensor
        elif stem in _EXPERTS:
            for expert, one in enumerate(tensor):
                found[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{_EXPERTS[stem]}.weight"] = one
        elif stem in _LLAMA:
            if stem in heads:
                tensor = torch.from_numpy(gguf_files.unpermuted(tensor.numpy(), heads[stem]))
            found[f"model.layers.{layer}.{_LLAMA[stem]}.weight"] = tensor
    return found


def _write(kind_of: Callable[[str, tuple[int, ...]], T]) -> Callable[[Path, Path], None]:
    def write(source: Path, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        gguf_files.export(source, out / "model.gguf", kind_of)
        config = json.loads((source / "config.json").read_text())
        llama = gguf_files.ARCHITECTURES[config["model_type"]] == "llama"
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if llama else {}
        (out / "heads.json").write_text(json.dumps(heads))

    return write


def _medium(wide: T, wider: T, narrow: T) -> Callable[[str, tuple[int, ...]], T]:
    """As llama.cpp's mixtures: ``wider`` for values, what goes down, embeddings and outputs; ``narrow`` where rows, or
    a rank's half of them, are no multiple of 256."""

    def kind_of(name: str, shape: tuple[int, ...]) -> T:
        if shape[-1] % 256 or "attn_output" in name:
            return T.Q8_0 if "attn_v" in name else narrow
        return wider if any(part in name for part in ("attn_v", "ffn_down", "token_embd", "output.")) else wide

    return kind_of


WRITERS = [
    Writer("gguf-q8_0", _write(lambda name, shape: T.Q8_0), dequantized),
    Writer("gguf-q4_0", _write(lambda name, shape: T.Q4_0), dequantized, served=False),
    Writer("gguf-q4_k_m", _write(_medium(T.Q4_K, T.Q6_K, T.Q5_0)), dequantized, served=False),
    Writer("gguf-q5_k", _write(_medium(T.Q5_K, T.Q4_K, T.Q4_1)), dequantized, ("grouped",), served=False),
]
