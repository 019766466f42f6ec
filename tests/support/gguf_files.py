"""GGUF files of checkpoints, written by the gguf package with the conventions of llama.cpp's converter.

Types that the package cannot quantize to get random blocks: any bytes are values, and which ones is the package's to
say (``values``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
}  # fmt: skip
# Where scales lie in a block (float16 numbers), for blocks of random bytes: type -> {byte: scale}.
_SCALES = {
    T.Q2_K: {80: 0.018, 82: 0.027}, T.Q3_K: {108: 0.0036}, T.Q4_K: {0: 0.001, 2: 0.0075},
    T.Q5_K: {0: 0.0005, 2: 0.0077}, T.Q6_K: {208: 0.00011}, T.IQ4_NL: {0: 0.002}, T.IQ4_XS: {0: 0.0001},
}  # fmt: skip


def quantized(values: np.ndarray, kind: T, seed: int = 0) -> np.ndarray:
    """float32 [..., columns] -> the bytes of ``kind``."""
    if kind not in _SCALES and kind != T.MXFP4:
        return gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), dtype=np.uint8)
    if kind == T.MXFP4:
        blocks[..., 0] = rng.integers(121, 124, blocks.shape[:-1])
    for at, scale in _SCALES.get(kind, {}).items():
        spread = rng.uniform(0.5, 1.5, blocks.shape[:-1]).astype(np.float32) * scale
        blocks[..., at : at + 2] = spread.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order of Llama's queries and keys: the halves of each head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """``permuted`` backwards."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _floats(name: str, shape: tuple[int, ...]) -> T:
    return T.F32


def export(
    source: Path, out: Path, kind_of: Callable[[str, tuple[int, ...]], T] = _floats, pre: str = "gpt-2",
    split: int = 0, change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:  # fmt: skip
    """Write the checkpoint in ``source`` to the file ``out``; ``kind_of(name, shape)`` is the type of a matrix, by its
    name in GGUF and with the experts in the first dim. ``split``: tensors in each of several files."""
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(out, architecture, split_max_tensors=split)
    _describe(writer, config, architecture)
    _vocabulary(writer, source, config, pre)
    change(writer)
    out.parent.mkdir(parents=True, exist_ok=True)
    for index, (name, array) in enumerate(_converted(source, config, architecture).items()):
        if array.ndim == 1 or "norm" in name or "gate_inp" in name:
            writer.add_tensor(name, array)
            continue
        kind = kind_of(name, array.shape)
        data = quantized(array, kind, index)
        writer.add_tensor(name, data, raw_dtype=None if kind in (T.F32, T.F16) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _converted(source: Path, config: dict[str, Any], architecture: str) -> dict[str, np.ndarray]:
    """The tensors by GGUF's names, as float32 in its order."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in weights.items():
        array = tensor.float().numpy()
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            number, _, kind = tail.partition(".")
            stacked = f"{head}.experts.{kind}".replace(".weight", "")
            experts.setdefault(stacked, {})[int(number)] = array
            continue
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            array = permuted(array, config[key])
        stem, _, suffix = name.rpartition(".")
        mapped = names.get_name(stem)
        if mapped is None:
            raise ValueError(f"{name} has no name in GGUF")
        found[f"{mapped}.{suffix}"] = array[0] if "shared_expert_gate" in name else array
    for stem, each in experts.items():
        layer, kind = stem.split(".")[2], stem.rsplit(".", 1)[1]
        part = {"w1": "gate", "w3": "up", "w2": "down"}.get(kind, kind.removesuffix("_proj"))
        found[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack([each[n] for n in range(len(each))])
    return found


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config.get("intermediate_size") or 1)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _rotation(writer, config, architecture, head_dim)
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("sliding_window") and architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _rotation(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str, head_dim: int) -> None:
    rope = config.get("rope_parameters") or {}
    if architecture == "gemma3":
        full, local = rope["full_attention"], rope["sliding_attention"]
        writer.add_rope_freq_base(full["rope_theta"])
        writer.add_rope_freq_base_swa(local["rope_theta"])
        if full["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(full["factor"])
        return
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    dims = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(dims)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "longrope":
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3(rope, dims, original))


def _llama3(rope: dict[str, Any], dims: int, original: int) -> np.ndarray:
    """The converter's factors: what each speed is divided by."""
    speeds = 1.0 / rope["rope_theta"] ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
    waves, low, high = 2 * np.pi / speeds, rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    found = np.where(waves < original / high, 1.0, np.where(waves > original / low, rope["factor"], between))
    return found.astype(np.float32)


def _vocabulary(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any], pre: str) -> None:
    data = json.loads((source / "tokenizer.json").read_text())
    model, added = data["model"], {token["id"]: token for token in data["added_tokens"]}
    texts = {i: text for text, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    size = config["vocab_size"]
    kinds = [
        (gguf.TokenType.CONTROL if added[i]["special"] else gguf.TokenType.USER_DEFINED) if i in added
        else gguf.TokenType.NORMAL if i in texts else gguf.TokenType.UNUSED
        for i in range(size)
    ]  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(each) if isinstance(each, list) else each for each in model["merges"]])
    for name, add in (
        ("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):  # fmt: skip
        value = config.get(name)
        value = value[0] if isinstance(value, list) else value
        if value is not None:
            add(value)
    template = source / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())


def values(file: Path) -> dict[str, torch.Tensor]:
    """The float32 values of the file's tensors by the gguf package, under GGUF's names, in GGUF's order."""
    return {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32))
        for tensor in gguf.GGUFReader(file).tensors
    }  # fmt: skip
