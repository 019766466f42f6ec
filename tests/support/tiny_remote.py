"""Rows of ``remote.py``'s families, which transformers has no class for.

Where another class computes the same, its checkpoint is written in the family's names and layout and it is the
reference; for ALiBi over RMS norms or gated MLPs a plain model is (``Plain``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny_models
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def renamed(
    prefix: str, native: dict[str, Any], architecture: str, change: Callable[[Tensors, dict[str, Any]], Tensors],
    config: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config,
) -> Any:  # fmt: skip
    """A row: transformers' ``prefix`` with ``native`` values, its tensors changed to the family's own."""

    def make(folder: Path, seed: int, **_: Any) -> Path:
        plain = tiny_models.save(prefix, folder / "plain", seed, **{**tiny_models.BASE, **native})
        values = json.loads((plain / "config.json").read_text())
        weights = change(load_file(plain / "model.safetensors"), values)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
        kept = {
            key: value for key, value in values.items() if key not in ("rope_parameters", "head_dim", "layer_types")
        }
        (folder / "config.json").write_text(json.dumps({**config(kept), "architectures": [architecture]}))
        tiny_models.save_tokenizer(folder)
        return folder

    return make, {}, lambda folder: tiny_models.reference(folder / "plain")


def names(*pairs: tuple[str, str]) -> Callable[[Tensors, dict[str, Any]], Tensors]:
    """Only the names differ."""

    def change(weights: Tensors, _: dict[str, Any]) -> Tensors:
        found = {}
        for name, tensor in weights.items():
            for old, new in pairs:
                name = name.replace(old, new)
            found[name] = tensor
        return found

    return change


def fuse(weights: Tensors, parts: list[str], into: str) -> None:
    """Stack modules that end alike, of each layer and of weights and biases apart."""
    for name in [name for name in weights if f".{parts[0]}." in name]:
        stacked = [weights.pop(name.replace(f".{parts[0]}.", f".{part}.")) for part in parts]
        weights[name.replace(f".{parts[0]}.", f".{into}.")] = torch.cat(stacked)


QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]


def packed(weights: Tensors, _: dict[str, Any]) -> Tensors:
    """Baichuan."""
    fuse(weights, QKV, "self_attn.W_pack")
    return weights


def chatglm(weights: Tensors, _: dict[str, Any]) -> Tensors:
    fuse(weights, QKV, "self_attention.query_key_value")
    weights = names(
        ("self_attn.o_proj", "self_attention.dense"), ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"), ("model.layers", "transformer.encoder.layers"),
        ("model.norm", "transformer.encoder.final_layernorm"), ("lm_head", "transformer.output_layer"),
        ("model.embed_tokens", "transformer.embedding.word_embeddings"),
    )(weights, {})  # fmt: skip
    weights["transformer.rotary_pos_emb.inv_freq"] = torch.ones(2)
    return weights


def chatglm_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": 48, "num_layers": 3, "num_attention_heads": 6, "padded_vocab_size": tiny_models.VOCAB,
        "ffn_hidden_size": 96, "kv_channels": 8, "seq_length": 512, "layernorm_epsilon": config["rms_norm_eps"],
        "rmsnorm": True, "apply_residual_connection_post_layernorm": False, "post_layer_norm": True,
        "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True, "add_bias_linear": False,
        "original_rope": True, "rope_ratio": 2.0, "model_type": "chatglm", "eos_token_id": 256,
    }  # fmt: skip


def unrepeated(weights: Tensors, _: dict[str, Any]) -> Tensors:
    """DeciLM: layers 0, 1, 2 with 1, 3 and 6 key heads. The reference gets each repeated up to 6."""
    for layer, kv in enumerate(DECI):
        for part in ("k", "v"):
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            weights[name] = weights[name][: kv * 8]
    return weights


DECI = (1, 3, 6)


def decilm(folder: Path, seed: int, **values: Any) -> Path:
    make = renamed(
        "Llama", {"num_key_value_heads": 6}, "DeciLMForCausalLM", unrepeated,
        lambda config: {**config, "num_key_value_heads_per_layer": list(DECI), "num_key_value_heads": 6},
    )[0]  # fmt: skip
    make(folder, seed)
    plain = folder / "plain" / "model.safetensors"
    weights = load_file(plain)
    for layer, kv in enumerate(DECI):
        for part in ("k", "v"):
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            one = weights[name][: kv * 8].view(kv, 8, -1)
            weights[name] = one.repeat_interleave(6 // kv, 0).reshape(48, -1)
    save_file(weights, plain, {"format": "pt"})
    return folder


def internlm2(weights: Tensors, _: dict[str, Any]) -> Tensors:
    for layer in range(3):
        q, k, v = (weights.pop(f"model.layers.{layer}.{name}.weight") for name in QKV)
        groups = torch.cat([q.view(2, 3, 8, -1), k.view(2, 1, 8, -1), v.view(2, 1, 8, -1)], dim=1)
        weights[f"model.layers.{layer}.attention.wqkv.weight"] = groups.reshape(-1, q.shape[1])
    return names(
        ("self_attn.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm"), ("lm_head", "output"),
        ("post_attention_layernorm", "ffn_norm"), ("embed_tokens", "tok_embeddings"),
    )(weights, {})  # fmt: skip


def qwen(weights: Tensors, _: dict[str, Any]) -> Tensors:
    fuse(weights, QKV, "attn.c_attn")
    return names(
        ("self_attn.o_proj", "attn.c_proj"), ("mlp.gate_proj", "mlp.w2"), ("mlp.up_proj", "mlp.w1"),
        ("mlp.down_proj", "mlp.c_proj"), ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"),
        ("model.layers", "transformer.h"), ("model.embed_tokens", "transformer.wte"),
        ("model.norm", "transformer.ln_f"),
    )(weights, {})  # fmt: skip


def qwen_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": tiny_models.VOCAB,
        "intermediate_size": 192, "layer_norm_epsilon": config["rms_norm_eps"], "rotary_emb_base": 10000,
        "rotary_pct": 1.0, "seq_length": 512, "kv_channels": 8, "no_bias": True, "model_type": "qwen",
        "use_dynamic_ntk": True, "use_logn_attn": True, "tie_word_embeddings": False, "eos_token_id": 256,
    }  # fmt: skip


def olmo(weights: Tensors, _: dict[str, Any]) -> Tensors:
    fuse(weights, QKV, "att_proj")
    fuse(weights, ["mlp.up_proj", "mlp.gate_proj"], "ff_proj")
    weights = names(
        ("self_attn.o_proj", "attn_out"), ("mlp.down_proj", "ff_out"), ("lm_head", "model.transformer.ff_out"),
        ("model.layers", "model.transformer.blocks"), ("model.embed_tokens", "model.transformer.wte"),
    )(weights, {})  # fmt: skip
    for name in ("model.transformer.wte.weight", "model.transformer.ff_out.weight"):
        weights[name] = F.pad(weights[name], (0, 0, 0, 16))  # rows that round the vocabulary up
    return weights


def olmo_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "d_model": 48, "n_layers": 3, "n_heads": 6, "vocab_size": tiny_models.VOCAB, "mlp_hidden_size": 192,
        "embedding_size": tiny_models.VOCAB + 16, "max_sequence_length": 512, "activation_type": "swiglu",
        "layer_norm_type": "default", "layer_norm_with_affine": False, "include_bias": False, "rope": True,
        "weight_tying": False, "clip_qkv": config["clip_qkv"], "model_type": "hf_olmo", "eos_token_id": 256,
    }  # fmt: skip


# ---------------------------------------------------------------- plain models


class Plain:
    """A decoder with ALiBi, as the papers have it: ``layer(x, n, attend)`` is one layer of the family."""

    def __init__(self, folder: Path, layer: Callable[..., torch.Tensor], ends: Callable[..., Any]):
        self.weights = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        self.layer, self.ends = layer, ends

    def __call__(self, ids: torch.Tensor) -> Any:
        before, after = self.ends(self)
        x = before(ids)
        for number in range(3):
            x = self.layer(self, x, number)
        return SimpleNamespace(logits=after(x))

    def attend(self, qkv: torch.Tensor, scale: float) -> torch.Tensor:
        batch, length, _ = qkv.shape
        q, k, v = (part.view(batch, length, 6, 8).transpose(1, 2) for part in qkv.chunk(3, -1))
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        # The slopes of 4 heads, then every other of those of 8.
        slopes = torch.tensor([2.0 ** (-2 * (i + 1)) for i in range(4)] + [2.0**-1, 2.0**-3])
        scores = q @ k.transpose(2, 3) * scale + slopes[:, None, None] * distance
        weights = scores.masked_fill(distance > 0, -math.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, 48)


def baichuan_layer(model: Plain, x: torch.Tensor, number: int) -> torch.Tensor:
    def w(name: str) -> torch.Tensor:
        return model.weights[f"model.layers.{number}.{name}.weight"]

    normed = F.rms_norm(x, (48,), w("input_layernorm"), 1e-6)
    x = x + model.attend(normed @ w("self_attn.W_pack").t(), 8**-0.5) @ w("self_attn.o_proj").t()
    normed = F.rms_norm(x, (48,), w("post_attention_layernorm"), 1e-6)
    wide = F.silu(normed @ w("mlp.gate_proj").t()) * (normed @ w("mlp.up_proj").t())
    return x + wide @ w("mlp.down_proj").t()


def baichuan_ends(model: Plain) -> Any:
    w = model.weights
    head = w["lm_head.weight"]
    return (
        lambda ids: F.embedding(ids, w["model.embed_tokens.weight"]),
        lambda x: F.rms_norm(x, (48,), w["model.norm.weight"], 1e-6) @ head.t(),
    )


def jais_layer(model: Plain, x: torch.Tensor, number: int) -> torch.Tensor:
    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        at = f"transformer.h.{number}.{name}"
        return x @ model.weights[at + ".weight"] + model.weights[at + ".bias"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        at = f"transformer.h.{number}.{name}"
        return F.layer_norm(x, (48,), model.weights[at + ".weight"], model.weights[at + ".bias"], 1e-5)

    x = x + product("attn.c_proj", model.attend(product("attn.c_attn", norm("ln_1", x)), 8**-1.0))
    normed = norm("ln_2", x)
    return x + product("mlp.c_proj", product("mlp.c_fc", normed) * F.silu(product("mlp.c_fc2", normed)))


def jais_ends(model: Plain) -> Any:
    w = model.weights
    table = w["transformer.wte.weight"]
    final = w["transformer.ln_f.weight"], w["transformer.ln_f.bias"]
    return (
        lambda ids: F.embedding(ids, table) * 3.0,
        lambda x: F.layer_norm(x, (48,), *final, 1e-5) @ table.t() * (2.0 * 0.4),
    )


def drawn(folder: Path, seed: int, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> Path:
    """A checkpoint of random tensors."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
        tensor = torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 0.15)
        weights[name] = tensor + 1.0 if norm else tensor
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": tiny_models.VOCAB, "eos_token_id": 256, **config}))
    tiny_models.save_tokenizer(folder)
    return folder


def baichuan_13b(folder: Path, seed: int, **values: Any) -> Path:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (320, 48), "model.norm.weight": (48,), "lm_head.weight": (320, 48),
    }  # fmt: skip
    for layer in range(3):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.W_pack": (144, 48), "self_attn.o_proj": (48, 48), "mlp.gate_proj": (96, 48),
                "mlp.up_proj": (96, 48), "mlp.down_proj": (48, 96), "input_layernorm": (48,),
                "post_attention_layernorm": (48,),
            }.items()
        }  # fmt: skip
    config = {
        "architectures": ["BaichuanForCausalLM"], "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
        "intermediate_size": 96, "rms_norm_eps": 1e-6, "model_max_length": 512, "hidden_act": "silu",
    }  # fmt: skip
    return drawn(folder, seed, shapes, config)


def jais(folder: Path, seed: int, **values: Any) -> Path:
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (320, 48), "transformer.ln_f.weight": (48,), "transformer.ln_f.bias": (48,),
    }  # fmt: skip
    for layer in range(3):
        at = f"transformer.h.{layer}."
        for name, shape in {
            "attn.c_attn": (48, 144), "attn.c_proj": (48, 48), "mlp.c_fc": (48, 96), "mlp.c_fc2": (48, 96),
            "mlp.c_proj": (96, 48),
        }.items():  # fmt: skip
            shapes |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{at}{name}.weight": (48,), f"{at}{name}.bias": (48,)}
    config = {
        "architectures": ["JAISLMHeadModel"], "n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 96,
        "n_positions": 512, "activation_function": "swiglu", "position_embedding_type": "alibi",
        "layer_norm_epsilon": 1e-5, "mup_embeddings_scale": 3.0, "mup_output_alpha": 2.0, "mup_width_scale": 0.4,
        "mup_scale_qk_dot_by_d": True,
    }  # fmt: skip
    return drawn(folder, seed, shapes, config)


SAME = names()
ROWS: dict[str, Any] = {
    "aquila": renamed("Llama", {}, "AquilaForCausalLM", SAME),
    "xverse": renamed("Llama", {"num_key_value_heads": 6}, "XverseForCausalLM", SAME),
    "baichuan-7b": renamed("Llama", {"num_key_value_heads": 6}, "BaiChuanForCausalLM", packed),
    "baichuan-13b": (baichuan_13b, {}, lambda folder: Plain(folder, baichuan_layer, baichuan_ends)),
    "chatglm": renamed(
        "Glm", {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        "ChatGLMModel", chatglm, chatglm_config,
    ),
    "decilm": (decilm, {}, lambda folder: tiny_models.reference(folder / "plain")),
    "internlm": renamed(
        "Llama", {"attention_bias": True, "num_key_value_heads": 6}, "InternLMForCausalLM", SAME,
        lambda config: {**config, "attention_bias": None, "bias": True},
    ),
    "internlm2": renamed("Llama", {}, "InternLM2ForCausalLM", internlm2),
    "jais": (jais, {}, lambda folder: Plain(folder, jais_layer, jais_ends)),
    "mimo": renamed("Qwen2", {}, "MiMoForCausalLM", SAME),
    "orion": renamed(
        "StableLm", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        "OrionForCausalLM", SAME, lambda config: {**config, "rms_norm_eps": config["layer_norm_eps"]},
    ),
    "qwen": renamed("Qwen2", {"num_key_value_heads": 6}, "QWenLMHeadModel", qwen, qwen_config),
    "olmo-first": renamed(
        "Olmo", {"num_key_value_heads": 6, "clip_qkv": 0.5}, "OLMoForCausalLM", olmo, olmo_config
    ),
    "olmo-first-name": renamed(
        "Olmo", {"num_key_value_heads": 6, "clip_qkv": None}, "OLMoModelForCausalLM", olmo, olmo_config
    ),
}  # fmt: skip
