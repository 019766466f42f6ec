"""Rows of ``gpt.py``'s and ``layernorm.py``'s families; see tiny_models."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

# Without what only Llama's relatives have: a class would keep it, and the checkpoint's config be no real one.
_GPT = {
    key: value for key, value in tiny_models.BASE.items() if key not in ("num_key_value_heads", "intermediate_size")
}
_GPT |= {"num_attention_heads": 4}
del _GPT["tie_word_embeddings"]


def row(prefix: str, **values: Any) -> tuple[Callable[..., Path], dict[str, Any]]:
    """transformers' ``prefix`` with _GPT's sizes and ``values``."""
    return functools.partial(_save, prefix), {**_GPT, **values}


def _save(prefix: str, folder: Path, seed: int, **values: Any) -> Path:
    return tiny_models.save(prefix, folder, seed, **values)


def old(
    prefix: str, config: dict[str, Any], tensors: Callable[[Tensors], Tensors] = lambda all: all, drop: str = "",
    **values: Any,
) -> Any:  # fmt: skip
    """The same model in a folder as the hub has it: ``config`` over config.json's values, and ``tensors`` renamed."""

    def make(folder: Path, seed: int, **values: Any) -> Path:
        plain = _save(prefix, folder / "plain", seed, **values)
        hf = json.loads((plain / "config.json").read_text())
        hf = {key: value for key, value in hf.items() if key not in drop.split()} | config
        (folder / "config.json").write_text(json.dumps(hf))
        found = tensors(load_file(plain / "model.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
        tiny_models.save_tokenizer(folder)
        return folder

    return make, {**_GPT, **values}, lambda folder: tiny_models.reference(folder / "plain")


def _bare_gpt2(tensors: Tensors) -> Tensors:
    """As openai-community's: no prefix, and the masks of its attention."""
    found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return found | {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}


def _old_neox(tensors: Tensors) -> Tensors:
    found = {name.replace("lm_head", "embed_out"): tensor for name, tensor in tensors.items()}
    buffers = {"bias": torch.ones(8, 8), "masked_bias": torch.tensor(-1e4), "rotary_emb.inv_freq": torch.ones(3)}
    return found | {f"gpt_neox.layers.1.attention.{name}": tensor for name, tensor in buffers.items()}


class _Positions(torch.nn.Module):
    """MPT's embedding with learned positions added, which transformers' class leaves out."""

    def __init__(self, tokens: torch.nn.Module, positions: torch.Tensor):
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.positions[: ids.shape[1]]


def _mpt(architecture: str = "MptForCausalLM", learned: bool = False, logit_scale: Any = None, **attn: Any) -> Any:
    """MPT with options that transformers' class has no code for: they are added to it here."""

    def make(folder: Path, seed: int, **values: Any) -> Path:
        plain = _save("Mpt", folder / "plain", seed, **values)
        hf = json.loads((plain / "config.json").read_text())
        hf |= {"architectures": [architecture], "logit_scale": logit_scale}
        hf["attn_config"] |= attn
        (folder / "config.json").write_text(json.dumps(hf))
        found, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(seed)
        if learned:
            found["transformer.wpe.weight"] = torch.randn(512, 48, generator=generator) * 0.2
        if attn.get("qk_ln"):
            for layer in range(3):
                for name in "qk":
                    weight = torch.randn(48, generator=generator) * 0.2 + 1
                    found[f"transformer.blocks.{layer}.attn.{name}_ln.weight"] = weight
        save_file(found, folder / "model.safetensors")
        tiny_models.save_tokenizer(folder)
        return folder

    def reference(folder: Path) -> Any:
        from transformers.models.mpt import modeling_mpt

        model, found = tiny_models.reference(folder / "plain"), load_file(folder / "model.safetensors")
        slopes = functools.partial(modeling_mpt.build_mpt_alibi_tensor, alibi_bias_max=attn.get("alibi_bias_max", 8))
        model.transformer.build_mpt_alibi_tensor = lambda heads, length, device: (
            slopes(heads, length, device=device) * (attn.get("alibi") is not False)
        )
        if learned:
            model.transformer.wte = _Positions(model.transformer.wte, found["transformer.wpe.weight"])

        def norms(layer: int, module: Any, args: Any, qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = qkv.chunk(3, -1)
            name = f"transformer.blocks.{layer}.attn.{{}}_ln.weight"
            q, k = (F.layer_norm(x, (48,), found[name.format(n)]) for n, x in (("q", q), ("k", k)))
            return torch.cat([q, k, v], -1)

        for layer, block in enumerate(model.transformer.blocks if attn.get("qk_ln") else []):
            block.attn.Wqkv.register_forward_hook(functools.partial(norms, layer))
        scale = 48**-0.5 if logit_scale == "inv_sqrt_d_model" else logit_scale or 1.0
        model.lm_head.register_forward_hook(lambda module, args, logits: logits * scale)
        return model

    return make, _GPT, reference


_FALCON_OLD = "num_attention_heads num_hidden_layers num_kv_heads new_decoder_architecture rope_parameters head_dim"

ROWS: dict[str, Any] = {
    "gpt2": row("GPT2"),
    "gpt2-scales": row("GPT2", scale_attn_by_inverse_layer_idx=True, n_inner=80, tie_word_embeddings=False),
    "gpt2-bare": old("GPT2", {}, _bare_gpt2),
    "gpt-bigcode": row("GPTBigCode"),
    "gpt-bigcode-heads": row("GPTBigCode", multi_query=False),
    "gptj": row("GPTJ", rotary_dim=4),
    "gpt-neox": row("GPTNeoX", intermediate_size=96, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                                      "partial_rotary_factor": 0.5}),
    "gpt-neox-sequential": row("GPTNeoX", intermediate_size=96, use_parallel_residual=False, attention_bias=False,
                               hidden_act="gelu_new", num_attention_heads=3),
    "gpt-neox-old": old(
        "GPTNeoX", {"rotary_pct": 0.5, "rotary_emb_base": 1000}, _old_neox, "rope_parameters", intermediate_size=96,
        rotary_pct=0.5, rotary_emb_base=1000,
    ),
    "bloom": row("Bloom", num_attention_heads=6),
    "bloom-normed-residual": row("Bloom", apply_residual_connection_post_layernorm=True),
    "bloom-bare": old("Bloom", {"n_embed": 48}, lambda found: {
        name.removeprefix("transformer."): tensor for name, tensor in found.items()}, "hidden_size"),
    "falcon-7b": row("Falcon"),
    "falcon-40b": row("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": row("Falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
                      tie_word_embeddings=False, ffn_hidden_size=80),
    # transformers' eager attention adds ALiBi twice.
    "falcon-rw": (*row("Falcon", alibi=True, bias=True, parallel_attn=False, multi_query=False),
                  functools.partial(tiny_models.reference, attention="sdpa")),
    "falcon-old-40b": old(
        "Falcon", {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "n_head": 4, "n_layer": 3,
                   "n_head_kv": 2}, drop=_FALCON_OLD, new_decoder_architecture=True, num_kv_heads=2,
    ),
    "mpt": row("Mpt", num_attention_heads=6),
    "mpt-clipped": row("Mpt", attn_config={"clip_qkv": 0.5, "softmax_scale": 0.4}),
    "mpt-old": _mpt("MPTForCausalLM", logit_scale="inv_sqrt_d_model", alibi_bias_max=4),
    "mpt-qk-ln": _mpt(qk_ln=True, logit_scale=0.7),
    "mpt-learned": _mpt(learned=True, alibi=False),
    "opt": row("OPT", ffn_dim=96),
    "opt-no-bias": row("OPT", ffn_dim=96, enable_bias=False, layer_norm_elementwise_affine=False,
                       _remove_final_layer_norm=True, activation_function="gelu"),
    "opt-350m": old(
        "OPT", {}, lambda found: {name.removeprefix("model."): tensor for name, tensor in found.items()}, ffn_dim=96,
        do_layer_norm_before=False, word_embed_proj_dim=32,
    ),
    "phi": ("Phi", {"num_key_value_heads": 6}),
    "phi-qk-norm": ("Phi", {"qk_layernorm": True}),
    "persimmon": row("Persimmon", intermediate_size=96),
    "stablelm": ("StableLm", {}),
    "stablelm-12b": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "stablelm-epoch": old(
        "StableLm", {"architectures": ["StableLMEpochForCausalLM"], "model_type": "stablelm_epoch", "norm_eps": 1e-3,
                     "rope_pct": 0.5, "rope_theta": 1000}, drop="rope_parameters layer_norm_eps", intermediate_size=96,
        num_key_value_heads=4, layer_norm_eps=1e-3, partial_rotary_factor=0.5, rope_theta=1000.0,
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 24, "tie_word_embeddings": True}),
    "starcoder2-no-bias": ("Starcoder2", {"use_bias": False}),
    "olmo": ("Olmo", {}),
    "olmo-clipped": ("Olmo", {"clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "cohere-plus": ("Cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.3}),
}  # fmt: skip
