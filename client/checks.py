"""What LLM refuses before anything is queued. The messages are those with which a server would answer."""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.model_config import ModelConfig
from ..proto.params import RequestOutputKind, SamplingParams
from .prompts import Input
from .sendable import bad_field

_NO_TEXT = "You cannot pass text prompts when `skip_tokenizer_init=True`; give token ids."


@dataclass(slots=True)
class Limits:
    """What the running stack can do, as far as that is known here."""

    config: ModelConfig
    max_logprobs: int  # -1: no limit
    processors: list[str]  # names of the registered logits processors
    has_tokenizer: bool
    no_structure: str | None = None  # why structured outputs are refused


def check_params(params: list[SamplingParams], limits: Limits) -> None:
    """Refuse parameters that could not be run, or be sent (changed after their checks). Raises ValueError."""
    for each in {id(each): each for each in params}.values():
        if (bad := bad_field(each)) is not None:
            raise ValueError(f"{bad[0]} of sampling_params cannot be sent: {bad[1]}.")
        _check_lengths(each, limits.config.max_model_len)
        _check_ids(each, limits.config.vocab_size)
        _check_logprobs(each, limits)
        _check_text(each, limits)
        _check_processors(each, limits.processors)
        if each.output_kind == RequestOutputKind.DELTA and each.best_of is not None:
            raise ValueError("best_of must equal n to use output_kind=DELTA: the best are known at the end only.")


def _check_lengths(params: SamplingParams, limit: int) -> None:
    if params.max_tokens is not None and params.max_tokens > limit:
        raise ValueError(
            f"max_tokens={params.max_tokens} cannot be greater than max_model_len={limit}. "
            "Please request fewer output tokens."
        )
    keep = params.truncate_prompt_tokens
    if keep is not None and keep > limit:
        raise ValueError(
            f"truncate_prompt_tokens={keep} cannot be greater than max_model_len={limit}. "
            "Please select a smaller truncation size."
        )


def _check_ids(params: SamplingParams, size: int) -> None:
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        ids = getattr(params, name)
        if ids and max(ids) >= size:
            raise ValueError(f"{name} contains the token id {max(ids)}, which is out of vocabulary (0 to {size - 1}).")


def _check_logprobs(params: SamplingParams, limits: Limits) -> None:
    size = limits.config.vocab_size
    most = size if limits.max_logprobs == -1 else limits.max_logprobs
    for asked, what in ((params.logprobs, "sample"), (params.prompt_logprobs, "prompt")):
        if asked is not None and (size if asked == -1 else asked) > most:
            raise ValueError(
                f"Requested {what} logprobs of {size if asked == -1 else asked}, which is greater than max allowed: "
                f"{most} (--max-logprobs)"
            )


def _check_text(params: SamplingParams, limits: Limits) -> None:
    if params.structured_outputs is not None and limits.no_structure is not None:
        raise ValueError(limits.no_structure)
    if limits.has_tokenizer:
        return
    if params.structured_outputs is not None:
        raise ValueError("Structured outputs requires a tokenizer so it can't be used with 'skip_tokenizer_init'")
    for name in ("stop", "bad_words"):
        if getattr(params, name):
            raise ValueError(f"{name} requires a tokenizer so it can't be used with 'skip_tokenizer_init'.")


def _check_processors(params: SamplingParams, registered: list[str]) -> None:
    for name in params.logits_processors or ():
        if name not in registered:
            raise ValueError(
                f"logits_processors names {name!r}, which is not registered (registered: "
                f"{', '.join(registered) or 'none'}); start with LLM(logits_processors=[...])."
            )


def check_input(given: Input, params: SamplingParams, limits: Limits) -> None:
    """Refuse what could not run: empty, too long, ids the model does not have. Raises ValueError."""
    config = limits.config
    if given.ids is None:
        if not limits.has_tokenizer:
            raise ValueError(_NO_TEXT)
        return
    if not given.ids:
        raise ValueError("prompt must not be empty: give at least one token id.")
    keep = params.truncate_prompt_tokens
    if keep == -1:  # what the context holds beside the least output
        keep = max(1, config.max_model_len - max(1, params.min_tokens))
    ids = given.ids if keep is None else given.ids[-keep:]
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"Token id {token} is out of vocabulary (0 to {config.vocab_size - 1}).")
    if len(ids) >= config.max_model_len:
        room = "exceeds this limit even without any" if len(ids) > config.max_model_len else "leaves no room for"
        raise ValueError(
            f"This model's maximum context length is {config.max_model_len} tokens. However, your prompt contains "
            f"{len(ids)} input tokens, which {room} output tokens. Please reduce the length of the input prompt."
        )
