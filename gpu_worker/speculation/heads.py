"""From the folder of an EAGLE or EAGLE-3 head, or the MTP layer of a target, to a ``Head``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.config import ConfigError
from ..layers.formats.table import Table, embedding
from ..layers.linear import Linear
from ..lora.linear import AdaptedLinear
from ..models.decoder import Decoder
from ..models.families.common import LLAMA_LAYER, Config, integer, with_aliases
from ..models.families.llama import llama, qwen2
from ..models.files import weight_files
from ..models.weights import Weights
from ..spec import DecoderSpec, WeightNames
from .head_files import HeadFiles, Taker, head_config, head_files, one_layer, without_prefix
from .head_model import Head, HeadParts

_EAGLE_NAMES = WeightNames(LLAMA_LAYER, layer_prefix="layers.{}.")
_EAGLE3_NAMES = WeightNames(LLAMA_LAYER, layer_prefix="midlayer.")
_MTP_NAMES = WeightNames(LLAMA_LAYER, layer_prefix="model.mtp_layers.{}.")
_MTP_FAMILIES = ("MiMoForCausalLM",)


_SLICE = 512
"""Rows of a table that are exchanged at a time."""


class Whole(NamedTuple):
    """The target's embedding and output layer, of its whole vocabulary: heads share them."""

    embed: Table
    output: Linear


def whole_of(target: Decoder) -> Whole | None:
    """What a head of ``target`` shares with it. In a group all processes call this, and only the leader, which alone
    drafts, gets anything: tables of its own, made of all shares. Raises ConfigError."""
    group, output = target.group, _base(target.lm_head)
    if target.embed is None or output is None:
        raise ConfigError("the target has no embedding or no output layer that a head could share.")
    if group.shard.size == 1:
        return Whole(target.embed, output)
    if output.bias is not None:
        raise ConfigError("a head cannot share an output layer with a bias among processes; use tensor_parallel_size 1")
    ids = torch.arange(len(target.vocabulary), device=target.device)
    unit = torch.eye(target.whole.hidden_size, dtype=target.dtype, device=target.device)
    embed = _joined(target, embedding(ids, target.embed).T)
    matrix = _joined(target, output(unit))
    return None if embed is None or matrix is None else Whole(embed, Linear.of(matrix))


def _joined(target: Decoder, share: torch.Tensor) -> torch.Tensor | None:
    """Of all processes' [N, share of the vocabulary] the whole [vocabulary, N], on the leader."""
    group, vocab = target.group, target.whole.vocab_size
    parts = [group.gather_logits(part.contiguous(), vocab) for part in share.to(target.dtype).split(_SLICE)]
    return torch.cat([part for part in parts if part is not None]).T.contiguous() if group.leader else None


def load_head(
    method: str, folder: str | None, config: ModelConfig, target: Decoder, shared: Whole | None = None
) -> Head:
    """The head of ``method`` (eagle, eagle3 or mtp) in ``folder``, or for mtp in the target's own files.

    ``shared``: by default what ``target`` itself has. Raises ConfigError, one line that names the file and what is
    wrong.
    """
    shared = shared or whole_of(target)
    if shared is None:
        raise ConfigError("only the leader of a replica has a head")
    if method == "mtp":
        return _mtp(config, target, shared)
    if folder is None:
        raise ConfigError(f"speculative_config: method {method!r} needs a model: the folder of its head.")
    try:
        return (_eagle if method == "eagle" else _eagle3)(folder, config, target, shared)
    except ConfigError as error:
        if (text := str(error)).startswith("config.json"):
            raise ConfigError(f"{folder}/{text}") from error
        raise


def taps_of(method: str, layers: int) -> tuple[int, ...]:
    """Before which of the target's ``layers`` layers the hidden states are taken that EAGLE-3 reads."""
    return (2, layers // 2, layers - 3) if method == "eagle3" else ()


def _spec(hf: Config, target: Decoder) -> DecoderSpec:
    """The spec of a head's layer, which is Llama's. Raises ConfigError where it does not belong to the target."""
    hf = with_aliases({**hf, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "layer_types": None})
    spec = replace(llama(hf), final_norm=False, tied=False)
    if spec.hidden_size != target.whole.hidden_size:
        raise ConfigError(
            f"config.json: hidden_size {spec.hidden_size} is not the target's {target.whole.hidden_size}; use a head "
            "that was trained for this model."
        )
    return spec


def _eagle(folder: str, config: ModelConfig, target: Decoder, shared: Whole) -> Head:
    hf = head_config(folder)
    one_layer(hf)
    # The first layer has no norm before its attention; the last hidden state has none at all.
    spec = replace(_spec(hf, target), norms=("mlp",))
    files = HeadFiles(Path(folder), head_files(folder), renamed=without_prefix(r"model\."))
    take, hidden = Taker(files, target.dtype, target.device), spec.hidden_size
    join = take.linear("fc", hidden, 2 * hidden)
    weights = take.layer(spec, _EAGLE_NAMES)
    parts = HeadParts(_own_embed(take, target, shared), target.embed_scale, shared.output, join)
    files.finish()
    return _head(replace(spec, vocab_size=target.whole.vocab_size), weights, parts, config, target, shared)


def _eagle3(folder: str, config: ModelConfig, target: Decoder, shared: Whole) -> Head:
    hf = head_config(folder)
    one_layer(hf)
    if target.whole.num_layers < 4:
        raise ConfigError(
            f"eagle3 reads three of the target's layers, and {config.path} has {target.whole.num_layers}."
        )
    spec = replace(
        _spec(hf, target), norms=("mlp",), vocab_size=integer(hf, "draft_vocab_size", integer(hf, "vocab_size"))
    )
    files = HeadFiles(Path(folder), head_files(folder), renamed=_eagle3_name)
    take, hidden, eps = Taker(files, target.dtype, target.device), spec.hidden_size, spec.norm_eps
    embed_norm, hidden_norm = (
        take.norm("midlayer.input_layernorm", hidden, eps),
        take.norm("midlayer.hidden_norm", hidden, eps),
    )
    weights = take.layer(spec, _EAGLE3_NAMES, 2 * hidden)
    parts = HeadParts(
        _own_embed(take, target, shared), target.embed_scale, take.linear("lm_head", spec.vocab_size, hidden),
        combine=take.linear("fc", hidden, 3 * hidden), embed_norm=embed_norm, hidden_norm=hidden_norm,
        out_norm=take.norm("norm", hidden, eps), vocabulary=_vocabulary(files, folder, spec.vocab_size, target),
    )  # fmt: skip
    files.finish()
    return _head(spec, weights, parts, config, target, shared)


def _eagle3_name(name: str) -> str:
    """Some trainers begin at "model.", or number the layer."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _vocabulary(files: HeadFiles, folder: str, size: int, target: Decoder) -> torch.Tensor | None:
    """The target's id of each of the head's tokens: d2t holds how much each is more than its own number."""
    files.drop("t2d")  # says the same the other way round
    total = target.whole.vocab_size
    if "d2t" not in files:
        if size != total:
            raise ConfigError(
                f"{folder}: the weights lack d2t, which says which {size} of the target's {total} tokens the head has."
            )
        return None
    ids = torch.arange(size) + files.take("d2t", (size,), torch.int64, torch.device("cpu"))
    if int(ids.min()) < 0 or int(ids.max()) >= total or len(ids.unique()) < size:
        raise ConfigError(
            f"{folder}: d2t holds ids from {int(ids.min())} to {int(ids.max())}, where each must be another of the "
            f"target's {total} tokens; use a head that was trained for this model."
        )
    return ids.to(target.device)


def _mtp(config: ModelConfig, target: Decoder, shared: Whole) -> Head:
    """MiMo's: ``input_proj`` of the two norms, a layer of Qwen2's, a norm; embedding and output are the target's."""
    if config.architecture not in _MTP_FAMILIES:
        raise ConfigError(
            f"speculative_config: method 'mtp' is for {', '.join(_MTP_FAMILIES)}, and {config.path} is "
            f"{config.architecture}; use another method."
        )
    hf = with_aliases(
        {**config.hf, "num_hidden_layers": 1, "layer_types": None, "architectures": [config.architecture]}
    )
    if integer(config.hf, "num_nextn_predict_layers", 1) != 1:
        raise ConfigError(f"{config.path}/config.json: num_nextn_predict_layers may be 1 for method 'mtp'.")
    spec = replace(qwen2(hf), final_norm=False, tied=False)
    prefix = _MTP_NAMES.layer_prefix.format(0)
    files = HeadFiles(Path(config.path), weight_files(Path(config.path)), lambda name: name.startswith(prefix))
    take, hidden, eps = Taker(files, target.dtype, target.device), spec.hidden_size, spec.norm_eps
    parts = HeadParts(
        shared.embed, target.embed_scale, shared.output, take.linear(f"{prefix}input_proj", hidden, 2 * hidden),
        embed_norm=take.norm(f"{prefix}token_layernorm", hidden, eps),
        hidden_norm=take.norm(f"{prefix}hidden_layernorm", hidden, eps),
        out_norm=take.norm(f"{prefix}final_layernorm", hidden, eps), norm_is_fed_back=True,
        embed_first=False, zero_first=True,
    )  # fmt: skip
    weights = take.layer(spec, _MTP_NAMES)
    files.finish()
    return _head(spec, weights, parts, config, target, shared)


def _head(
    spec: DecoderSpec, weights: Weights, parts: HeadParts, config: ModelConfig, target: Decoder, shared: Whole
) -> Head:
    # Scales of logits and caps are the target's where its output layer is; a head's positions may go as far as its do.
    if parts.vocabulary is None and parts.lm_head is shared.output:
        spec = replace(spec, logit_scale=target.whole.logit_scale, logit_softcap=target.whole.logit_softcap)
    return Head(spec, weights, parts, config.max_model_len, target.whole.vocab_size)


def _base(linear: Linear | None) -> Linear | None:
    """Without adapters, which are those of the rows of the target's step: a head drafts for other rows."""
    return linear.base if isinstance(linear, AdaptedLinear) else linear


def _own_embed(take: Taker, target: Decoder, shared: Whole) -> Table:
    """The head's embedding where its folder has one that differs, else the target's."""
    embed = shared.embed
    if "embed_tokens.weight" not in take.files:
        return embed
    own = take.tensor("embed_tokens.weight", target.whole.vocab_size, target.whole.hidden_size)
    return embed if isinstance(embed, torch.Tensor) and torch.equal(own, embed) else own
