"""What a model of transformers' asks of attention, found by running it on a few tokens, and which models are refused.

In the trial the attention function writes down what each layer passes and returns zeros, so no token can see another:
where a token's hidden state still depends on its neighbours, the model keeps a state that is not in the paged cache.
Masks are not built either. The function that would build them is told which keys a query may see, as a function of
two positions; that must be all keys up to the query, or the last so many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.config import ConfigError
from ..spec import DecoderSpec

PROBE = "quire_probe"
_TOKENS = 4
# Tensors that may come along with a layer's query, key and value, and mean nothing more for attention.
_HARMLESS = {"position_ids", "cache_position", "input_ids"}


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's use of attention."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None


@dataclass(slots=True)
class _Trial:
    """What is written down while a model runs on ``_TOKENS`` tokens; sequences may have ``length`` tokens."""

    length: int
    calls: list[_Call] = field(default_factory=list)


class _Refused(Exception):
    """Why a model cannot run here."""


_trial: ContextVar[_Trial] = ContextVar("trial")


def register() -> None:
    """Make PROBE known to transformers as an attention implementation."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _mask)


def run(base: Any, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, hidden] of the layers ``base`` of a model of transformers', all tokens as one sequence."""
    return base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]


@torch.inference_mode()
def probe(model: Any, config: ModelConfig) -> DecoderSpec:
    """The spec of ``model``, which has PROBE for its attention. Raises ConfigError where it cannot be paged."""
    with _refusing(type(model), config):
        if model.base_model is model or model.get_output_embeddings() is None:
            raise _Refused("it is no language head on a base model")
        _pin_rope(model, config.max_model_len)
        calls, hidden = _try(model, config)
    widest = max(each.out_features for each in model.base_model.modules() if isinstance(each, torch.nn.Linear))
    return DecoderSpec(
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        hidden_size=hidden.shape[-1],
        num_layers=len(calls),
        heads=max(call.heads for call in calls),
        kv_heads=tuple(call.kv_heads for call in calls),
        head_dim=max(call.head_dim for call in calls),
        intermediate_size=widest,
        ropes=(None,) * len(calls),
        attn_scales=tuple(call.scale for call in calls),
        windows=tuple(call.window for call in calls),
    )


def check_class(kind: type, hf: Any, config: ModelConfig) -> None:
    """Raises ConfigError for a class of transformers' that says itself, or whose config ``hf`` says, that it cannot be
    paged."""
    with _refusing(kind, config):
        if hf.is_encoder_decoder:
            raise _Refused("it has an encoder and a decoder")
        if getattr(kind, "_is_stateful", False):
            raise _Refused("it keeps a recurrent state")
        if not getattr(kind, "_supports_attention_backend", False):
            raise _Refused("its attention cannot be replaced (its class does not say _supports_attention_backend)")
        if getattr(hf, "num_kv_shared_layers", 0):
            raise _Refused("its layers share keys and values")


@contextmanager
def _refusing(kind: type, config: ModelConfig) -> Iterator[None]:
    try:
        yield
    except _Refused as why:
        raise ConfigError(
            f"{config.path}: transformers' {kind.__name__} cannot be served with paged attention: {why}."
        ) from why


def _pin_rope(model: Any, max_model_len: int) -> None:
    """Let no rotation depend on the longest sequence of a step: a cached key keeps the one it was written with.

    longrope has the long factors throughout where max_model_len is past the original length, as in quire's own.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        changing = [kind for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]) if kind in CHANGING]
        if not changing:
            continue
        rope = getattr(module.config, "rope_parameters", None) or {}
        original = rope.get("original_max_position_embeddings") or module.config.max_position_embeddings
        if max_model_len <= original:
            continue
        if changing != ["longrope"]:
            raise _Refused(
                f"its rope type {changing[0]!r} turns positions by the longest sequence of a step; --max-model-len "
                f"{original} is short enough not to"
            )
        speeds, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=original + 1)
        module.inv_freq.copy_(speeds)
        module.original_inv_freq = module.inv_freq.clone()


CHANGING = ("longrope", "dynamic")


def _try(model: Any, config: ModelConfig) -> tuple[list[_Call], torch.Tensor]:
    """The calls of attention by layer, and the hidden states of the trial."""
    positions = torch.arange(_TOKENS, device=model.device)
    ids = positions % config.vocab_size
    trial = _Trial(config.max_model_len)
    token = _trial.set(trial)
    try:
        hidden = run(model.base_model, ids, positions)
        calls = sorted(trial.calls, key=lambda call: call.layer)
        swapped = run(model.base_model, torch.cat((ids[-1:], ids[1:-1], ids[:1])), positions)
    finally:
        _trial.reset(token)
    layers = model.config.num_hidden_layers
    if [call.layer for call in calls] != list(range(layers)):
        raise _Refused(f"attention runs {len(calls)} times in its {layers} layers, where each must have its own")
    if (hidden - swapped)[1:-1].abs().max() > 0.02 * hidden.abs().max():
        raise _Refused("its layers look at neighbouring tokens outside attention")
    return calls, hidden


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """In place of attention [1, heads, T, head_dim]: write the call down; zeros [1, T, heads, head_dim]."""
    layer, trial = getattr(module, "layer_idx", None), _trial.get()
    more = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name not in _HARMLESS]
    if not isinstance(layer, int):
        raise _Refused("its attention does not say of which layer it is")
    if query.shape[2] != _TOKENS or key.shape[2] != _TOKENS or value.shape[1] != key.shape[1]:
        raise _Refused(
            f"its queries are {list(query.shape)}, its keys {list(key.shape)}, its values {list(value.shape)}"
        )
    if more:
        raise _Refused(f"its attention takes {', '.join(more)} besides queries, keys and values")
    window = _window_of(attention_mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    head_dim = max(query.shape[-1], value.shape[-1])
    trial.calls.append(_Call(layer, query.shape[1], key.shape[1], head_dim, scale, window))
    return query.new_zeros(1, _TOKENS, query.shape[1], value.shape[-1]), None


def _mask(mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> torch.Tensor:
    """In place of a mask [1, 1, T, T]: the window that it would show in every entry, 0 for none."""
    length = _trial.get().length
    keys, window = torch.arange(length), 0
    for query in sorted({length - 1, length // 2, length // 3, 0}, reverse=True):
        zero = torch.tensor(0)
        seen = mask_function(zero, zero, torch.tensor(query), keys).expand(length)
        count = int(seen.sum())
        if query == length - 1:
            window = 0 if count == length else count
        wanted = min(query + 1, window or length)
        if count != wanted or not bool(seen[query + 1 - count : query + 1].all()):
            raise _Refused("a token may see keys other than all, or the last so many, of those up to its own")
    return torch.full((1, 1, _TOKENS, _TOKENS), window)


def _window_of(mask: Any) -> int | None:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.int64 or int(mask.min()) != int(mask.max()):
        raise _Refused("it builds attention masks of its own")
    return int(mask.max()) or None
