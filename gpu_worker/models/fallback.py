"""Models of architectures that the table does not know: transformers' own, with quire's paged attention inside.

Their attention layers call a function by name, and ours is registered under one. All tokens of a step go through the
model as one sequence [1, T] with their own positions; only attention knows that they are of several requests, so
nothing else may look from one token to another. Whether a model is like that is tried once, when it is loaded
(``fallback_probe.py``), and one that is not is refused.

Code that comes with a model runs only with ``--trust-remote-code``, and only where transformers lacks the class.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.config import ConfigError
from ..batch import StepBatch
from ..kernels.attention import Scores, paged_attention
from ..kernels.narrow import is_narrow
from ..kv_cache import KVCache
from ..layers import dispatch
from ..layers.attention import StepContext
from ..parallel.parallel import Group
from ..spec import DecoderSpec, Shard
from .fallback_probe import PROBE, check_class, probe, register, run
from .families import FAMILIES
from .files import Tensors, some, weight_files
from .model import Model

log = logging.getLogger(__name__)

NAME = "quire"
_NO_CODE = (
    "Failed to load the model config. If the model is a custom model not yet available in the HuggingFace "
    "transformers library, consider setting `trust_remote_code=True` in LLM or using the `--trust-remote-code` flag in "
    "the CLI."
)


def uses_fallback(config: ModelConfig) -> bool:
    """Whether ``config``'s model is to be transformers'. Raises ConfigError where that is not possible.

    An architecture that neither the table nor transformers knows, and that comes with no code, is nobody's: False.
    """
    names = config.hf.get("architectures") or []
    if config.model_impl == "quire" or (config.model_impl == "auto" and any(name in FAMILIES for name in names)):
        return False
    if native_name(names) is not None:
        return True
    if isinstance(config.hf.get("auto_map"), dict):
        if not config.trust_remote_code:
            raise ConfigError(f"{_NO_CODE} ({config.path}/config.json: architectures {names})")
        return True
    if config.model_impl == "transformers":
        raise ConfigError(
            f"{config.path}/config.json: transformers has no decoder for architectures {names}; leave out "
            "--model-impl transformers."
        )
    return False


def native_name(architectures: list[str]) -> str | None:
    """The first of ``architectures`` that is a decoder class of transformers'."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = {name for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _names(each)}
    return next((name for name in architectures if name in known), None)


def _names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


@dataclass(slots=True)
class _Step:
    """What the attention of every layer needs of the step that runs. ``context`` is None on a GPU."""

    batch: StepBatch
    kv: KVCache
    windows: tuple[int | None, ...]
    context: StepContext | None
    scales: Sequence[tuple[float, float]]


_step: ContextVar[_Step] = ContextVar("step")


class TransformersModel(Model):
    """A model of transformers', in one process. ``model`` has a language head."""

    capturable = False  # its code may look at the values of tensors, which a CUDA graph cannot

    def __init__(self, model: Any, spec: DecoderSpec) -> None:
        super().__init__(spec, model.device, model.dtype)
        self._base = model.base_model
        # The head's own forward does what the family does between hidden states and logits; in place of the layers
        # it finds a module that hands on the hidden states it is given.
        setattr(model, model.base_model_prefix, _PassOn())
        self._head = model

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: KVCache, hidden: torch.Tensor | None = None) -> torch.Tensor:
        context = None if dispatch.use_kernels(batch.token_ids) else StepContext(batch)
        token = _step.set(_Step(batch, kv, self.spec.windows, context, self.kv_scales))
        try:
            hidden = run(self._base, batch.token_ids, batch.positions)
        finally:
            _step.reset(token)
        return hidden if batch.outputs is None else hidden.index_select(0, batch.outputs)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        logits = logits[:, : self.spec.vocab_size]
        return logits if dispatch.use_kernels(logits) else logits.float()


class _PassOn(torch.nn.Module):
    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """What a head may take its layers' output for: the hidden states alone, None for whatever else it looks for."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def attend(
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
    """What transformers calls for [1, heads, T, head_dim]: paged attention of the step that runs; [1, T, heads, D]."""
    step = _step.get()
    layer: int = module.layer_idx  # type: ignore[assignment]
    k_cache, v_cache, window = step.kv.k[layer], step.kv.v[layer], step.windows[layer]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (_tokens(x, k_cache) for x in (query, key, value))
    k_scale, v_scale = step.scales[layer]
    sinks = None if s_aux is None else s_aux.float()
    scores = Scores(scale, window, softcap or 0.0, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
    if step.context is None:
        from ..kernels.rope import rope_write

        at = step.batch.positions, step.batch.slots
        rope_write(q, k, v, None, None, *at, k_cache, v_cache, False, k_scale, v_scale)
        out = paged_attention(q, k_cache, v_cache, step.batch, scores)
    else:
        step.context.write(k_cache, v_cache, k, v, scores)
        out = step.context.attend(q, k_cache, v_cache, scores)
    return out[None, ..., : value.shape[-1]], None


def _tokens(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, D] as [T, heads, D of the cache]; zeros beyond the layer's own D change no score."""
    x, missing = x[0].transpose(0, 1), cache.shape[-1] - x.shape[-1]
    x = x if is_narrow(cache.dtype) else x.to(cache.dtype)
    return F.pad(x, (0, missing)) if missing else x.contiguous()


@torch.inference_mode()
def load_fallback(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    group: Group | None = None,
) -> TransformersModel:
    """transformers' model of ``config`` on ``device`` in ``dtype``. Raises ConfigError, one line."""
    if group is not None and group.shard != Shard():
        raise ConfigError(
            f"{config.path}: transformers' model of {config.architecture} runs in one process; leave out "
            "--tensor-parallel-size and --pipeline-parallel-size."
        )
    import transformers
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    AttentionInterface.register(NAME, attend)
    register()
    name = native_name(config.hf.get("architectures") or [])
    code: dict[str, Any] = {"trust_remote_code": name is None and config.trust_remote_code}
    if code["trust_remote_code"]:
        code["code_revision"] = config.code_revision
        log.warning("running the code that comes with %s", config.path)
    log.info("%s is transformers' own model with quire's attention", name or config.architecture)
    _check_files(config, load_format)
    with _told(config):
        hf = AutoConfig.from_pretrained(config.path, **code)
        if config.overrides:
            hf = type(hf).from_dict(config.hf)
        if name is not None:  # known before anything is read
            check_class(getattr(transformers, name), hf, config)
        settings: dict[str, Any] = {"config": hf, "dtype": dtype, "attn_implementation": PROBE, **code}
        if load_format == "dummy":
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(**settings)
        else:
            model = _from_files(config, load_format, settings)
        check_class(type(model), model.config, config)
        model = model.eval().requires_grad_(False).to(device)
        spec = probe(model, config)
        model.set_attn_implementation(NAME)
        made = TransformersModel(model, spec)
        width = made.logits(torch.zeros(1, spec.hidden_size, dtype=dtype, device=device)).shape[-1]
    if width != config.vocab_size:
        raise ConfigError(
            f"{config.path}: {spec.architecture} has {width} logits, where config.json has a vocab_size of "
            f"{config.vocab_size}; check that config.json belongs to these weights."
        )
    return made


def _check_files(config: ModelConfig, load_format: str) -> None:
    """Raises ConfigError, as the loader of quire's own models does, for files that cannot be read."""
    if load_format != "dummy":
        for file in weight_files(Path(config.path), load_format):
            with Tensors.open(file):
                pass


def _from_files(config: ModelConfig, load_format: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        config.path, use_safetensors=load_format != "pt", output_loading_info=True, local_files_only=True, **settings
    )
    model, found = loaded
    # transformers would go on with random weights in their place.
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"{config.path}: the weights lack {some(missing)}, which {type(model).__name__} with this config.json "
            "needs; download the folder again, or correct config.json."
        )
    return model


@contextmanager
def _told(config: ModelConfig) -> Iterator[None]:
    """Whatever transformers, or a model's own code, raises ends as one line that names the folder."""
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise ConfigError(
            f"{config.path}: transformers cannot load {config.architecture} ({type(error).__name__}: {first}); check "
            "that config.json belongs to these weights."
        ) from error
