"""What ``--speculative-config`` may say, and the flags that said it before; vLLM's names, checks and texts."""

from __future__ import annotations

import json
from typing import Any, Protocol

import msgspec

from .config_error import ConfigError

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp")
"""How tokens may be drafted."""
LOOKUPS = ("ngram", "suffix")
"""Those of the methods that need no model."""
MAX_DRAFTS = 64
"""Tokens that may be drafted for a sequence in one step."""


class Flags(Protocol):
    """What is read of EngineArgs, beside the flags of ``_FLAGS``."""

    speculative_config: str | None
    spec_decoding_acceptance_method: str
    tensor_parallel_size: int
    pipeline_parallel_size: int


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker drafts. ``prompt_lookup_*`` are of method ngram, ``suffix_decoding_*`` of suffix."""

    method: str | None = None
    num_speculative_tokens: int | None = None
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    draft_tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    quantization: str | None = None
    revision: str | None = None
    draft_sample_method: str = "probabilistic"
    rejection_sample_method: str = "standard"
    disable_by_batch_size: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    adapt: bool = True  # quire's own: drafts are shorter where they are often wrong, or many sequences run

    @property
    def drafts(self) -> int:
        """Tokens drafted for a sequence in one step, at most."""
        return self.num_speculative_tokens or 0

    def draft_rows(self, default: int) -> int:
        """Sequences that speculate in one step, at most; ``default`` where nothing is said."""
        return default if self.disable_by_batch_size is None else self.disable_by_batch_size - 1


def speculative_config(args: Flags) -> SpeculativeConfig | None:
    """What the flags say, with all defaults filled in; None without speculation. Raises ConfigError."""
    text = args.speculative_config
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=SpeculativeConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"speculative_config {text!r} cannot be read: {error}.") from error
    return _checked(config, args)


def _checked(config: SpeculativeConfig, args: Flags) -> SpeculativeConfig:
    method = config.method
    if method is None:
        method = "ngram" if config.model in ("ngram", "[ngram]") else "draft_model" if config.model else None
    if method == "[ngram]":
        method = "ngram"
    if method is None:
        raise ConfigError("num_speculative_tokens was provided but without speculative model.")
    if method not in METHODS:
        raise ConfigError(f"speculative_config: unknown method {method!r}. Must be one of {list(METHODS)}.")
    drafts = config.num_speculative_tokens
    if drafts is None and method == "suffix":
        drafts = config.suffix_decoding_max_tree_depth
    if drafts is None:
        raise ConfigError(
            "num_speculative_tokens must be provided with speculative model unless the draft model config contains an "
            "n_predict parameter."
        )
    if not 0 < drafts <= MAX_DRAFTS:
        raise ConfigError(
            f"Expected num_speculative_tokens to be greater than zero ({drafts}), and {MAX_DRAFTS} at most."
        )
    if method not in LOOKUPS and config.model is None and method != "mtp":
        raise ConfigError(f"speculative_config: method {method!r} needs a model; name its folder as `model`.")
    if (rows := config.disable_by_batch_size) is not None and rows < 2:
        raise ConfigError(
            "Expect the batch size threshold of disabling speculative decoding is > 1, but got "
            f"speculative_disable_by_batch_size={rows}"
        )
    if config.draft_tensor_parallel_size not in (None, 1, args.tensor_parallel_size):
        raise ConfigError(
            f"draft_tensor_parallel_size={config.draft_tensor_parallel_size} cannot be other than 1 or target model "
            f"tensor_parallel_size"
        )
    if args.pipeline_parallel_size > 1:
        raise ConfigError(
            f"speculative_config with pipeline_parallel_size {args.pipeline_parallel_size}: a model in stages does not "
            "speculate; use tensor_parallel_size, or leave speculative_config out."
        )
    if config.rejection_sample_method != "standard":
        raise ConfigError(
            f"rejection_sample_method={config.rejection_sample_method!r} would change outputs; only 'standard' is kept."
        )
    if config.draft_sample_method not in ("greedy", "probabilistic"):
        raise ConfigError(f"draft_sample_method must be greedy or probabilistic, got {config.draft_sample_method!r}.")
    lowest, highest = _lookup(config)
    return msgspec.structs.replace(
        config, method=method, num_speculative_tokens=drafts, prompt_lookup_min=lowest, prompt_lookup_max=highest
    )


def _lookup(config: SpeculativeConfig) -> tuple[int, int]:
    lowest, highest = config.prompt_lookup_min, config.prompt_lookup_max
    if lowest is None and highest is None:
        lowest = highest = 5
    lowest = highest if lowest is None else lowest
    highest = lowest if highest is None else highest
    if lowest is None or highest is None:  # for the type checker
        raise ConfigError("prompt_lookup_min and prompt_lookup_max must be numbers.")
    if lowest < 1:
        raise ConfigError(f"prompt_lookup_min={lowest} must be > 0")
    if highest < 1:
        raise ConfigError(f"prompt_lookup_max={highest} must be > 0")
    if lowest > highest:
        raise ConfigError(f"prompt_lookup_min={lowest} must be <= prompt_lookup_max={highest}")
    if not 0 < config.suffix_decoding_max_tree_depth <= 1024:
        raise ConfigError(
            f"suffix_decoding_max_tree_depth={config.suffix_decoding_max_tree_depth} must be in [1, 1024]"
        )
    if not config.suffix_decoding_max_spec_factor >= 0:
        raise ConfigError(f"suffix_decoding_max_spec_factor={config.suffix_decoding_max_spec_factor} must be >= 0")
    if not 0 <= config.suffix_decoding_min_token_prob <= 1:
        raise ConfigError(f"suffix_decoding_min_token_prob={config.suffix_decoding_min_token_prob} must be in [0, 1]")
    return lowest, highest


_FLAGS = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_model_quantization": "quantization",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
"""vLLM's flags of its first engine, and the key that each is."""


def resolve_speculation(args: Flags) -> None:
    """Make one JSON text of the flags, checked. Raises ConfigError."""
    given: Any = args.speculative_config
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"speculative_config {args.speculative_config!r} is no JSON: {error}.") from error
    if given is not None and not isinstance(given, dict):
        raise ConfigError(f"speculative_config must be a JSON object, got {given!r}.")
    flags = {key: getattr(args, flag) for flag, key in _FLAGS.items() if getattr(args, flag) is not None}
    if flags and given is not None:
        names = [flag for flag, key in _FLAGS.items() if key in flags]
        raise ConfigError(f"speculative_config and {', '.join(names)} say the same; keep the first alone.")
    if flags and "model" not in flags:
        names = [flag for flag, key in _FLAGS.items() if key in flags]
        raise ConfigError(
            "num_speculative_tokens was provided but without speculative model."
            if "num_speculative_tokens" in flags
            else f"{names[0]} says nothing without speculative_model; give that, or leave {names[0]} out."
        )
    if args.spec_decoding_acceptance_method != "rejection_sampler":
        raise ConfigError(
            f"spec_decoding_acceptance_method={args.spec_decoding_acceptance_method} would change outputs, which "
            "speculation never does here; leave it out."
        )
    found = flags or given
    args.speculative_config = None if not found else json.dumps(found)
    for flag in _FLAGS:
        setattr(args, flag, None)
    if args.speculative_config is not None:
        speculative_config(args)
