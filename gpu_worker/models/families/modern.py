"""Dense families since 2024: norms behind the halves of a layer, windows on some layers, scales in odd places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....proto.config import ConfigError
from ...spec import DecoderSpec, RopeSpec, WeightNames
from .common import LLAMA_LAYER, Config, Family, activation, decoder, integer, positive, rope, windows
from .llama import QWEN3_NAMES, gemma, mistral

ALL_NORMS = ("attn", "attn_out", "mlp", "mlp_out")
_GEMMA2_NAMES = WeightNames(
    {
        **LLAMA_LAYER,
        "attn_out_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_out_norm": ("post_feedforward_layernorm",),
    }
)
_GEMMA3_NAMES = replace(
    _GEMMA2_NAMES,
    layer={**_GEMMA2_NAMES.layer, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)},
)
_OLMO2_NAMES = WeightNames(
    {
        **QWEN3_NAMES.layer,
        "attn_out_norm": ("post_attention_layernorm",),
        "mlp_out_norm": ("post_feedforward_layernorm",),
    }
)
_GLM_NAMES = WeightNames({**LLAMA_LAYER, "gate_up": ("mlp.gate_up_proj",)})
_GLM4_NAMES = replace(
    _GLM_NAMES,
    layer={
        **_GLM_NAMES.layer,
        "attn_out_norm": ("post_self_attn_layernorm",),
        "mlp_out_norm": ("post_mlp_layernorm",),
    },
)
_COHERE2_NAMES = WeightNames({key: value for key, value in LLAMA_LAYER.items() if key != "mlp_norm"})


def of_language(names: WeightNames) -> WeightNames:
    """``names`` as a checkpoint of text and images has them; the part that sees is left where it is."""
    return replace(
        names, layer_prefix="language_model." + names.layer_prefix, embed="language_model." + names.embed,
        final_norm="language_model." + names.final_norm, lm_head="language_model." + names.lm_head,
        skip=(*names.skip, r"(vision_tower|multi_modal_projector)\..*"),
    )  # fmt: skip


def pattern(hf: Config, every: int) -> Config:
    """``hf`` with layer_types written out: full attention on each layer of which the number is ``every`` times one."""
    layers = integer(hf, "num_hidden_layers")
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    return hf if hf.get("layer_types") else {**hf, "layer_types": kinds}


def _refuse_both_ways(hf: Config) -> None:
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("config.json: use_bidirectional_attention is not supported; quire decodes causally.")


def _cap(hf: Config, key: str, default: float) -> float:
    """A soft cap; null is none, which is 0 here."""
    return positive(hf, key, default) if hf.get(key, default) else 0.0


def gemma2(hf: Config, **changes: Any) -> DecoderSpec:
    """Gemma 2: four norms a layer, a window on every other layer, soft caps."""
    _refuse_both_ways(hf)
    layers, hf = integer(hf, "num_hidden_layers"), pattern(hf, 2)
    return replace(
        gemma(hf),
        norms=ALL_NORMS,
        activation=activation({"hidden_act": hf.get("hidden_activation")}, default="gelu_pytorch_tanh"),
        attn_scales=(positive(hf, "query_pre_attn_scalar", 256.0) ** -0.5,) * layers,
        windows=windows(hf, layers, hf.get("sliding_window", 4096)),
        attn_softcap=_cap(hf, "attn_logit_softcapping", 50.0),
        logit_softcap=_cap(hf, "final_logit_softcapping", 30.0),
        **changes,
    )


def gemma3(hf: Config) -> DecoderSpec:
    """Gemma 3, text: Gemma 2 with normed queries and keys, and slower rotation where there is no window."""
    hf = {"final_logit_softcapping": None, **pattern(hf, hf.get("sliding_window_pattern") or 6)}
    hf["attn_logit_softcapping"] = None  # whatever config.json says: transformers' class has no such cap
    ropes = gemma3_ropes(hf, integer(hf, "head_dim", 256))
    windows(hf, len(kinds := hf["layer_types"]), None)  # which knows all the kinds there are
    return gemma2(
        {**hf, "rope_parameters": None, "rope_scaling": None},
        qk_norm="head", ropes=tuple(ropes[kind] for kind in kinds),
    )  # fmt: skip


def gemma3_ropes(hf: Config, head_dim: int) -> dict[str, RopeSpec]:
    """Rotation by kind of layer: transformers 5 nests it, older files have two thetas."""
    given = hf.get("rope_parameters") or {}
    length = integer(hf, "max_position_embeddings", 131072)
    thetas = {"full_attention": hf.get("rope_theta") or 1e6, "sliding_attention": hf.get("rope_local_base_freq") or 1e4}
    scaling = {"full_attention": hf.get("rope_scaling") or {}, "sliding_attention": {}}
    return {
        kind: rope({"rope_parameters": {"rope_theta": theta, **scaling[kind], **given.get(kind, {})}}, head_dim, length)
        for kind, theta in thetas.items()
    }


def olmo2(hf: Config) -> DecoderSpec:
    """OLMo 2: norms behind the halves alone; queries and keys normed over all heads together."""
    return decoder(hf, norms=("attn_out", "mlp_out"), qk_norm="full", norm_eps=positive(hf, "rms_norm_eps", 1e-5))


def glm(hf: Config, **changes: Any) -> DecoderSpec:
    """GLM-4 of 2024: half of each head is rotary, in pairs; a bias on queries, keys and values."""
    hf = {**hf, "head_dim": integer(hf, "head_dim", 128)}
    hf.setdefault("partial_rotary_factor", 0.5)
    rotary = rope(hf, hf["head_dim"], integer(hf, "max_position_embeddings", 131072), interleaved=True)
    return decoder(
        hf, rope=rotary, qkv_bias=hf.get("attention_bias") is not False, o_bias=False,
        norm_eps=positive(hf, "rms_norm_eps", 1.5625e-07), **changes,
    )  # fmt: skip


def glm4(hf: Config) -> DecoderSpec:
    """GLM-4 of 2025: four norms a layer."""
    return glm(hf, norms=ALL_NORMS)


def granite(hf: Config) -> DecoderSpec:
    """Granite: Llama with a factor on embeddings, scores, residuals and logits."""
    return decoder(
        hf,
        embed_scale=positive(hf, "embedding_multiplier", 1.0),
        attn_scale=positive(hf, "attention_multiplier", 1.0),
        residual_scale=positive(hf, "residual_multiplier", 1.0),
        logit_scale=1 / positive(hf, "logits_scaling", 1.0),
    )


def cohere2(hf: Config) -> DecoderSpec:
    """Command-R7B, Command-A: both halves from one norm; three layers with a window and rope, one with neither."""
    hf = pattern(hf, hf.get("sliding_window_pattern") or 4)
    layers, head_dim = integer(hf, "num_hidden_layers"), hf.get("head_dim")
    head_dim = head_dim or integer(hf, "hidden_size") // integer(hf, "num_attention_heads")
    rotary = rope(hf, head_dim, integer(hf, "max_position_embeddings", 8192), interleaved=True)
    spans = windows(hf, layers, integer(hf, "sliding_window", 4096))
    return decoder(
        hf, norm="ln", norm_eps=positive(hf, "layer_norm_eps", 1e-5), norms=("attn",), parallel_residual=True,
        windows=spans, ropes=tuple(rotary if span else None for span in spans),
        logit_scale=positive(hf, "logit_scale", 0.0625), tied=hf.get("tie_word_embeddings") is not False,
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": (gemma2, _GEMMA2_NAMES),
    "Gemma3ForCausalLM": (gemma3, _GEMMA3_NAMES),
    "Gemma3ForConditionalGeneration": (gemma3, of_language(_GEMMA3_NAMES)),
    "Olmo2ForCausalLM": (olmo2, _OLMO2_NAMES),
    "GlmForCausalLM": (glm, _GLM_NAMES),
    "Glm4ForCausalLM": (glm4, _GLM4_NAMES),
    "GraniteForCausalLM": (granite, WeightNames(LLAMA_LAYER)),
    "Cohere2ForCausalLM": (cohere2, _COHERE2_NAMES),
    "Mistral3ForConditionalGeneration": (mistral, of_language(WeightNames(LLAMA_LAYER))),
}
