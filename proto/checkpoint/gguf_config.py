"""What a GGUF file says of its model, as a config.json says it, and what its tensors are called in such a folder.

Keys and names are llama.cpp's (gguf-py's constants.py and tensor_mapping.py), and so is what its converter does to the
weights and is undone here: Llama's queries and keys have the two halves of a head interleaved row by row, and Gemma's
norms have 1 added.
"""

from __future__ import annotations

import math
import re
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ConfigError
from .gguf import GGUF, GGUFTensor, gguf_file, gguf_files, read_gguf

FLOATS = ("F32", "F16", "BF16", "F64")
"""Types of tensors that are no quantized ones."""
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM", "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
}  # fmt: skip
_MODEL_TYPES = {"llama": "llama", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj", "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3", "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
}  # fmt: skip
_OWN_LAYER: dict[str, dict[str, str]] = {
    "gemma2": _FOUR_NORMS, "gemma3": _FOUR_NORMS, "phi3": {"ffn_up": "mlp.gate_up_proj"}, "mixtral": _MIXTRAL,
}  # fmt: skip
_KEYS = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window", "rope_theta": "rope.freq_base",
    "partial_rotary_factor": "rope.dimension_count", "factor": "rope.scaling.factor",
    "attention_factor": "rope.scaling.attn_factor", "attn_logit_softcapping": "attn_logit_softcapping",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
"""The key that a value of ``gguf_config`` is read from, without the architecture's name."""
_FIELD = re.compile(rf"\b({'|'.join(_KEYS)})\b")
_OTHER_WORDS = {
    "/config.json": "", "correct it, or download it again": "convert the model anew, or download it again",
    "where config.json makes it": "where the metadata makes it", "with this config.json": "with this metadata",
    "check that config.json belongs to these weights": "download it again",
    "download the folder again, or correct config.json": "download it again",
}  # fmt: skip
_UNNEEDED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?\.(weight|bias)")
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>", "_<EOT>")
"""Control tokens that end a reply by their names alone, as in llama.cpp."""
CONTROL = 3
"""The token_type of control tokens."""


@dataclass(frozen=True)
class Held:
    """A tensor under the name that a folder of safetensors gives it, or one expert's piece of it.

    ``rows``: which rows of the tensor, seen as [rows, values of a row]. ``heads``: in each of so many equal runs of
    rows the two halves are interleaved; 0: in none. ``added``: what was added to its values.
    """

    name: str
    tensor: GGUFTensor
    shape: tuple[int, ...]
    rows: range
    heads: int = 0
    added: float = 0.0


class Keys:
    """The metadata of a model's first file by key, without the architecture's name. Raises ConfigError."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf = gguf
        self.architecture = self.text("general.architecture")

    def _fault(self, key: str, wanted: str, value: Any) -> ConfigError:
        shown = repr(value)
        shown = shown if len(shown) < 60 else shown[:60] + "…"
        return ConfigError(f"{self.gguf.file}: key {key!r} must be {wanted}, got {shown}; convert the model anew.")

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self.gguf.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._fault(key, "a text", value)
        return value

    def find(self, key: str) -> Any:
        """A value of the architecture, or None."""
        return self.gguf.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; a list of one for each layer must be all the same."""
        value = self.find(key)
        if isinstance(value, array | list) and len(value) and all(each == value[0] for each in value):
            value = value[0]
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self._fault(f"{self.architecture}.{key}", "a positive integer, the same for every layer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number."""
        value = self.find(key)
        value = default if value is None else value
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise self._fault(f"{self.architecture}.{key}", "a number", value)
        return None if value is None else float(value)

    def token(self, name: str) -> int | None:
        """The id of a token that the tokenizer names (``bos`` is tokenizer.ggml.bos_token_id), or None."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.gguf.metadata.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self._fault(key, "a token's id", value)
        return None if value is None or value >= len(self.tokens) else value

    @property
    def tokens(self) -> list[str]:
        """The vocabulary's texts; empty where the file has none."""
        return self.texts("tokenizer.ggml.tokens")

    def texts(self, key: str) -> list[str]:
        """A list of texts; empty where there is none."""
        value = self.gguf.metadata.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._fault(key, "a list of texts", value)
        return value

    def numbers(self, key: str, count: int, kind: type) -> Any:
        """``count`` numbers of ``kind``, or None where there are none."""
        value = self.gguf.metadata.get(key)
        if value is not None and (
            not isinstance(value, array) or len(value) != count or type(next(iter(value), None)) is not kind
        ):
            what = "float" if kind is float else "integer"
            raise self._fault(key, f"a list of {count} {what}s, one for each token", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """One of the tokenizer's settings (tokenizer.ggml.``name``) that is true or false."""
        value = self.gguf.metadata.get(f"tokenizer.ggml.{name}", default)
        if type(value) is not bool:
            raise self._fault(f"tokenizer.ggml.{name}", "true or false", value)
        return value

    def ends(self) -> list[int]:
        """Ids of the tokens that end a reply: the ones that are named so, and control tokens with such a text."""
        named = [i for name in ("eos", "eot", "eom") if (i := self.token(name)) is not None]
        tokens = self.tokens
        types = self.numbers("tokenizer.ggml.token_type", len(tokens), int)
        if types is not None:
            named += [i for i, kind in enumerate(types) if kind == CONTROL and tokens[i] in _ENDS]
        return list(dict.fromkeys(named))


def gguf_config(file: Path) -> dict[str, Any]:
    """The config.json of the model whose (first) file is ``file``. Raises ConfigError."""
    gguf = read_gguf(file)
    keys = Keys(gguf)
    tensors = {name: t for each in gguf_files(file)[1:] for name, t in read_gguf(each).tensors.items()}
    tensors |= gguf.tensors
    name = keys.architecture
    if name not in _ARCHITECTURES:
        raise ConfigError(
            f"{file}: general.architecture {name!r} is not supported in GGUF files; it may be one of "
            f"{', '.join(sorted(_ARCHITECTURES))}. Use the model's Hugging Face folder."
        )
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ConfigError(f"{file} has no tensor 'token_embd.weight' with a row for each token; download it again.")
    if len(keys.tokens) > table.shape[0]:
        raise ConfigError(
            f"{file}: key 'tokenizer.ggml.tokens' has {len(keys.tokens)} tokens, and tensor 'token_embd.weight' rows "
            f"for {table.shape[0]}; download it again."
        )
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{file}: keys and values of different lengths are not supported.")
    config: dict[str, Any] = {
        "architectures": [_architecture(keys)],
        "model_type": _MODEL_TYPES.get(name, name),
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        "hidden_act": "gelu_pytorch_tanh" if name.startswith("gemma") else "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": keys.token("bos"),
        "eos_token_id": keys.ends(),
        "dtype": "float16" if any(t.type.name == "F16" for t in tensors.values()) else "bfloat16",
        **_rope(keys, head_dim),
        **_own_values(keys, tensors, head_dim),
    }
    if types := _types(keys, tensors):
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config


def in_keys(path: str, said: str, overridden: Mapping[str, Any] = {}) -> str:
    """What is said of the config.json in ``path``, of a GGUF file in its own words: its keys stand for the fields,
    but for those that the user has ``overridden``. Of a folder the same.
    """
    file = gguf_file(path)
    if file is None:
        return said
    name = Keys(read_gguf(file)).architecture

    def key(found: re.Match[str]) -> str:
        return found[0] if found[0] in overridden else f"{name}.{_KEYS[found[0]]}"

    pieces = said.split(path)  # whose folders may be called anything
    for old, new in _OTHER_WORDS.items():
        pieces = [piece.replace(old, new) for piece in pieces]
    return path.join(_FIELD.sub(key, piece) for piece in pieces)


def _architecture(keys: Keys) -> str:
    return "MixtralForCausalLM" if _kind(keys) == "mixtral" else _ARCHITECTURES[keys.architecture]


def _kind(keys: Keys) -> str:
    """The architecture's name; "mixtral" for a llama with experts."""
    return "mixtral" if keys.architecture == "llama" and keys.find("expert_count") else keys.architecture


def _own_values(keys: Keys, tensors: Mapping[str, GGUFTensor], head_dim: int) -> dict[str, Any]:
    """What only some architectures have."""
    kind, found = _kind(keys), dict[str, Any]()
    if keys.find("feed_forward_length") is not None or not kind.endswith("moe"):
        found["intermediate_size"] = keys.integer("feed_forward_length")
    if kind in ("mixtral", "qwen2moe", "qwen3moe"):
        found["num_experts"] = keys.integer("expert_count")
        found["num_experts_per_tok"] = keys.integer("expert_used_count")
    if kind in ("qwen2moe", "qwen3moe"):
        width = keys.find("expert_feed_forward_length")
        found["moe_intermediate_size"] = (
            keys.integer("expert_feed_forward_length") if width is not None
            else _rows(keys, tensors, "blk.0.ffn_gate_exps.weight")
        )  # fmt: skip
        found["norm_topk_prob"] = kind == "qwen3moe"
    if kind == "qwen2moe":
        found["shared_expert_intermediate_size"] = _rows(keys, tensors, "blk.0.ffn_gate_shexp.weight")
    if kind in ("phi3", "gemma2", "gemma3") and keys.find("attention.sliding_window"):
        found["sliding_window"] = keys.integer("attention.sliding_window")
    if kind in ("gemma2", "gemma3"):
        large = keys.integer("block_count") == (46 if kind == "gemma2" else 62)  # 27B, of which llama.cpp knows so
        by_width = keys.integer("embedding_length") // keys.integer("attention.head_count")
        found["query_pre_attn_scalar"] = by_width if large else head_dim
        found["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0 if kind == "gemma2" else None)
        found["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0 if kind == "gemma2" else None)
    return found


def _rows(keys: Keys, tensors: Mapping[str, GGUFTensor], name: str) -> int:
    tensor = tensors.get(name)
    if tensor is None or len(tensor.shape) < 2:
        raise ConfigError(f"{keys.gguf.file} has no tensor {name!r} with rows; download it again.")
    return tensor.shape[-2]


# ---------------------------------------------------------------- rotation


def _rope(keys: Keys, head_dim: int) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    dims = keys.integer("rope.dimension_count", head_dim)
    kind = keys.find("rope.scaling.type") or "none"
    factors = {name: _factors(keys, f"rope_factors_{name}.weight", dims // 2) for name in ("short", "long")}
    original = keys.find("rope.scaling.original_context_length")
    if (freqs := _factors(keys, "rope_freqs.weight", dims // 2)) is not None:
        # Llama 3's scaling, made into a factor for each speed: longrope with one list for every length.
        rope |= {"rope_type": "longrope", "short_factor": freqs, "long_factor": freqs, "attention_factor": 1.0}
    elif factors["long"] is not None and factors["short"] is not None:
        rope |= {"rope_type": "longrope", "short_factor": factors["short"], "long_factor": factors["long"]}
        if (attention := keys.number("rope.scaling.attn_factor")) is not None:
            rope["attention_factor"] = attention
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": keys.number("rope.scaling.factor", 1.0)}
    elif kind != "none":
        raise ConfigError(f"{keys.gguf.file}: rope.scaling.type {kind!r} is not supported.")
    found: dict[str, Any] = {}
    if original is not None and rope["rope_type"] != "default":
        length = keys.integer("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = length
        if keys.architecture == "phi3":
            found["original_max_position_embeddings"] = length
    if dims != head_dim:
        found["partial_rotary_factor"] = dims / head_dim
    if keys.architecture == "gemma3":  # the length counts the scaling in
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        local = keys.number("rope.freq_base_swa", 10000.0)
        scaled = scaling if rope["rope_type"] != "default" else None
        return found | {"rope_theta": theta, "rope_local_base_freq": local, "rope_scaling": scaled}
    return found | {"rope_parameters": rope}


def _factors(keys: Keys, name: str, count: int) -> list[float] | None:
    """A small tensor of float32, read whole."""
    tensor = keys.gguf.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or tensor.shape != (count,):
        raise ConfigError(
            f"{keys.gguf.file}: tensor {name!r} must have {count} float32 values, and has shape {tensor.shape} of "
            f"{tensor.type.name}; download it again."
        )
    with keys.gguf.file.open("rb") as data:
        data.seek(tensor.start)
        found = list(struct.unpack(f"<{count}f", data.read(4 * count)))
    if not all(math.isfinite(factor) and factor > 0 for factor in found):
        raise ConfigError(f"{keys.gguf.file}: tensor {name!r} must hold positive numbers; download it again.")
    return found


# ---------------------------------------------------------------- tensors


def held_tensors(gguf: GGUF, keys: Keys) -> Iterator[Held]:
    """The tensors of one of a model's files by the names of its Hugging Face folder, in the order they lie in the file.

    ``keys``: of the model's first file. What has no such name keeps its own.
    """
    kind = _kind(keys)
    own = {**_LAYER, **_OWN_LAYER.get(kind, {})}
    heads = {"attn_q": keys.integer("attention.head_count")} if kind in ("llama", "mixtral") else {}
    if heads:
        heads["attn_k"] = keys.integer("attention.head_count_kv", heads["attn_q"])
    for tensor in sorted(gguf.tensors.values(), key=lambda tensor: tensor.start):
        if _UNNEEDED.fullmatch(tensor.name):
            continue
        name, stem = _name(tensor.name, own)
        added = 1.0 if kind.startswith("gemma") and stem.endswith("norm") else 0.0
        rows = math.prod(tensor.shape[:-1])
        if "{e}" in name and len(tensor.shape) == 3:
            each = tensor.shape[1]
            for expert in range(tensor.shape[0]):
                held = range(expert * each, (expert + 1) * each)
                yield Held(name.replace("{e}", str(expert)), tensor, tensor.shape[1:], held)
            continue
        count = heads.get(stem, 0)
        size = tensor.shape[0]
        if count and size % (2 * count):
            raise ConfigError(f"{gguf.file}: tensor {tensor.name!r} has {size} rows, not pairs of {count} heads.")
        yield Held(name, tensor, tensor.shape, range(rows), count, added)


def _name(name: str, layer: Mapping[str, str]) -> tuple[str, str]:
    """A tensor's name in a Hugging Face folder, and its kind in GGUF (attn_q)."""
    found = _IN_LAYER.fullmatch(name)
    if found is None:
        stem, _, suffix = name.rpartition(".")
        return (f"{_OUTER[stem]}.{suffix}" if stem in _OUTER else name), stem
    number, stem, expert, suffix = found.groups()
    module = layer.get(f"{stem}_exps" if expert else stem)
    if module is None:
        return name, stem
    return f"model.layers.{number}.{module.replace('{e}', expert) if expert else module}.{suffix}", stem


def _types(keys: Keys, tensors: Mapping[str, GGUFTensor]) -> dict[str, str]:
    """The types of the quantized weights by module; {e} stands for the number of any expert."""
    own = {**_LAYER, **_OWN_LAYER.get(_kind(keys), {})}
    return {
        _name(tensor.name, own)[0].removesuffix(".weight"): tensor.type.name
        for tensor in tensors.values()
        if tensor.type.name not in FLOATS and not _UNNEEDED.fullmatch(tensor.name)
    }  # fmt: skip
