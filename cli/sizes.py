"""How large a model is, from its config.json alone: parameters, bytes of weights in every format, bytes of a token.

The shapes are the worker's own (``gpu_worker/models``), which needs no torch for them. An architecture that
transformers runs is not in its table; of such a model the sizes follow from the usual values of a config, and are
``about`` right.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..gpu_worker.layers.formats.base import CHOOSING
from ..gpu_worker.models.families import FAMILIES, find_family
from ..gpu_worker.models.families.common import decoder, integer, with_aliases
from ..gpu_worker.models.parameters import parameters
from ..gpu_worker.spec import WHOLE, DecoderSpec, MoESpec, Shard
from ..proto.checkpoint.model_config import ModelConfig
from ..proto.config import ConfigError

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of a number, by what ``--dtype`` and ``--kv-cache-dtype`` call it."""


@dataclass(frozen=True)
class Format:
    """Bits of a weight: of the layers', of the lm_head's, of everything else's. ``how`` is what to start it with."""

    name: str
    layers: float
    head: float
    rest: int
    how: str
    experts_only: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a number that is not narrower: an activation's, and a key's without ``--kv-cache-dtype``."""
        return self.rest // 8


_FLOATS = (
    Format("bfloat16", 16, 16, 16, "--dtype bfloat16"),
    Format("fp8", 8, 16, 16, "--quantization fp8"),
    Format("int8", 8, 8, 16, "--quantization int8"),
    Format("awq, gptq", 4 + 20 / 128, 16, 16, "a checkpoint of 4 bits"),
    Format("int4", 4 + 16 / 128, 4 + 16 / 128, 16, "--quantization int4"),
    Format("float32", 32, 32, 32, "--dtype float32"),
)
"""What float weights may become. Scales are 16 bits for each group of 128, and AWQ and GPTQ have zeros beside them."""


def formats_of(config: ModelConfig) -> tuple[Format, ...]:
    """Those that a checkpoint may run in: a quantized one in its own alone."""
    found = config.hf.get("quantization_config")
    if not isinstance(found, dict):
        return _FLOATS
    method, bits = str(found.get("quant_method")), _stored_bits(found)
    return (Format(method, bits, 16, 16, "as it is", experts_only=method == "mxfp4"),)


def _stored_bits(found: Mapping[str, Any]) -> float:
    """Bits of a weight of a quantized checkpoint, its share of the scales included."""
    method, bits, group = found.get("quant_method"), found.get("bits") or found.get("w_bit"), found.get("group_size")
    zeros = True
    if method == "compressed-tensors":
        groups = found.get("config_groups")
        listed = groups.values() if isinstance(groups, dict) else ()
        weights = next((each.get("weights") for each in listed if isinstance(each, dict)), None)
        weights = weights if isinstance(weights, dict) else {}
        bits, group, zeros = weights.get("num_bits"), weights.get("group_size"), not weights.get("symmetric", True)
    if method == "mxfp4":
        return 4.25
    if method == "bitsandbytes":
        return (4.127 if found.get("bnb_4bit_use_double_quant") else 4.5) if found.get("load_in_4bit") else 8
    if method in ("fp8", "fbgemm_fp8"):
        return 8
    stored = next(
        (each for each in (bits, found.get("wbits")) if type(each) is int), 4 if method == "squeezellm" else 8
    )
    shared = (16 + (stored if zeros else 0)) / group if isinstance(group, int) and group > 0 else 0
    return stored + shared


# ---------------------------------------------------------------- shapes


@dataclass(frozen=True)
class Sizes:
    """A model, or what one process of it holds. Numbers of parameters by what they are: ``embed``, ``head``,
    ``linear`` and ``experts`` (of the layers), ``kept`` (what stays as wide as the model)."""

    spec: DecoderSpec
    counts: Mapping[str, int]
    about: bool = False

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(self.counts.values())

    @property
    def active(self) -> int:
        """Those that one token uses: of experts the chosen ones alone."""
        return self.parameters - round(self.counts["experts"] * (1 - self.hit(1)))

    def hit(self, rows: int) -> float:
        """The share of the experts that so many tokens use between them, if each chooses evenly."""
        moe = self.spec.moe
        return 1.0 if moe is None else 1 - (1 - moe.top_k / moe.experts) ** rows

    def weight_bytes(self, fmt: Format) -> int:
        """Bytes of the weights."""
        return self._bytes(fmt, 1.0, self.counts["embed"], self.counts["head"])

    def read_bytes(self, fmt: Format, rows: int) -> int:
        """Bytes of the weights that a decode step of so many rows reads: of the embedding nothing, but as the head."""
        tied = not self.counts["head"]
        return self._bytes(fmt, self.hit(rows), self.counts["embed"] if tied else 0, self.counts["head"])

    def _bytes(self, fmt: Format, hit: float, embed: int, head: int) -> int:
        linear = fmt.rest if fmt.experts_only else fmt.layers
        bits = linear * self.counts["linear"] + fmt.layers * self.counts["experts"] * hit
        return round((bits + fmt.head * head + fmt.rest * (embed + self.counts["kept"])) / 8)

    @property
    def multiplied(self) -> int:
        """Weights that each token is multiplied with in the layers."""
        return self.counts["linear"] + round(self.counts["experts"] * self.hit(1))

    @property
    def outputs(self) -> int:
        """Weights that a sampled token is multiplied with for its logits."""
        return self.counts["head"] or self.counts["embed"]

    def token_bytes(self, itemsize: int, int8: bool = False, context: int | None = None) -> int:
        """Bytes of one token's keys and values over all layers. ``int8``: with a float32 scale for each.
        ``context``: what attention reads for one row of so many tokens, in place of one; a window reads no more."""
        each = self.spec.head_dim * (1 if int8 else itemsize) + (4 if int8 else 0)
        spans = zip(self.spec.kv_heads, self.spec.windows, strict=True)
        return (
            2 * each * sum(heads * (1 if context is None else min(context, span or context)) for heads, span in spans)
        )


def sizes_of(config: ModelConfig, shard: Shard = WHOLE) -> Sizes:
    """What ``shard`` of a model holds. Raises ConfigError for a config.json without the sizes of a decoder."""
    about = not any(name in FAMILIES for name in config.hf.get("architectures") or [])
    try:
        return _counted(config, shard, about)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:  # a list for a number, a negative width
        raise ConfigError(f"{config.path}/config.json has a value that is no size: {error}.") from error


def _counted(config: ModelConfig, shard: Shard, about: bool) -> Sizes:
    spec = _other(config) if about else find_family(config.hf)[0]
    counts = Counter(dict.fromkeys(("embed", "head", "linear", "experts", "kept"), 0))
    for each in parameters(spec, shard):
        counts[_group(each.name, each.kind)] += math.prod(each.shape)
    if about:
        counts["linear"] += _latent(config.hf, spec)
    return Sizes(spec.local(shard), counts, about)


def _group(name: str, kind: str) -> str:
    if name in ("embed.weight", "lm_head.weight"):
        return "embed" if name == "embed.weight" else "head"
    if kind == "experts":
        return "experts"
    return "linear" if kind == "linear" and name.startswith("layers.") and not name.endswith(CHOOSING) else "kept"


def _other(config: ModelConfig) -> DecoderSpec:
    """A decoder of the usual shape with the values of a config that no family of ours reads."""
    try:
        hf = with_aliases(config.hf)
        changes: dict[str, Any] = {"activation": "silu", "rope": None, "norm_eps": 1e-6}
        if isinstance(hf.get("kv_lora_rank"), int):  # keys and values are kept as wide as if it were none
            changes["head_dim"] = integer(hf, "qk_nope_head_dim") + integer(hf, "qk_rope_head_dim")
            hf = {**hf, "num_key_value_heads": hf.get("num_attention_heads")}
        spec = decoder(hf, **changes)
        if not isinstance(hf.get("num_experts"), int):
            return spec
        width = integer(hf, "moe_intermediate_size", spec.intermediate_size)
        shared = hf.get("n_shared_experts")
        first = hf.get("first_k_dense_replace") or 0
        moe = MoESpec(
            integer(hf, "num_experts"), integer(hf, "num_experts_per_tok"), width,
            shared_width=shared * width if isinstance(shared, int) else 0,
        )  # fmt: skip
        return replace(spec, moe=moe, moe_layers=tuple(layer >= first for layer in range(spec.num_layers)))
    except ConfigError as error:
        raise ConfigError(
            f"{config.path}: {config.architecture or 'a model'} has no decoder's sizes: {error}"
        ) from error


def _latent(hf: Mapping[str, Any], spec: DecoderSpec) -> int:
    """Parameters of latent attention (DeepSeek's), less those of usual attention with as many heads."""
    rank = hf.get("kv_lora_rank")
    if not isinstance(rank, int):
        return 0
    hidden, queries = spec.hidden_size, spec.heads * spec.head_dim
    rope, value = int(hf["qk_rope_head_dim"]), int(hf.get("v_head_dim") or spec.head_dim)
    narrow = hf.get("q_lora_rank")
    ask = hidden * queries if not isinstance(narrow, int) else narrow * (hidden + queries + 1)
    keys = rank * spec.heads * (spec.head_dim - rope + value) + hidden * (rank + rope) + rank
    each = ask + keys + spec.heads * value * hidden
    return spec.num_layers * (each - 4 * hidden * queries)
