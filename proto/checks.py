"""What of a request only the model can tell: LLM asks before anything is queued, the detokenizer asks for everyone.

Ids are held to the model's vocabulary (config.json's), which may be larger than the tokenizer's.
"""

from __future__ import annotations

from collections.abc import Sequence

from .checkpoint.model_config import ModelConfig
from .params import ParamError, SamplingParams

MAX_STOP_CHARACTERS = 4096
"""Characters all stop strings of a request may have together."""

MAX_BAD_CHARACTERS = 65536
"""Characters all bad words of a request may have together."""


def check_params(params: SamplingParams, model: ModelConfig, max_model_len: int, max_logprobs: int) -> None:
    """Refuse what the model cannot do. ``max_logprobs`` -1 is no limit. Raises ParamError."""
    for name, remedy in (
        ("max_tokens", "Please request fewer output tokens."),
        ("truncate_prompt_tokens", "Please select a smaller truncation size."),
    ):
        value = getattr(params, name)
        if value is not None and value > max_model_len:
            raise ParamError(f"{name}={value} cannot be greater than max_model_len={max_model_len}. {remedy}", name)
    size = model.vocab_size
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
        ids = getattr(params, name)
        if ids and max(ids) >= size:
            raise ParamError(
                f"{name} contains the token id {max(ids)}, which is out of vocabulary (0 to {size - 1}).", name
            )
    most = size if max_logprobs == -1 else max_logprobs
    for name, what in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
        asked = getattr(params, name)
        if name == "logprobs" and params.logprob_token_ids:
            continue  # bounded by themselves
        if asked is not None and (asked := size if asked == -1 else asked) > most:
            raise ParamError(
                f"Requested {what} logprobs of {asked}, which is greater than max allowed: {most} (--max-logprobs)",
                name,
            )


def check_text(params: SamplingParams, has_tokenizer: bool) -> None:
    """Refuse too much text, and what needs a tokenizer where there is none. Raises ParamError."""
    for name, most in (("stop", MAX_STOP_CHARACTERS), ("bad_words", MAX_BAD_CHARACTERS)):
        if sum(map(len, getattr(params, name) or ())) > most:
            raise ParamError(f"{name} has more than {most} characters in all.", name)
    if has_tokenizer:
        return
    if params.structured_outputs is not None:
        raise ParamError(
            "Structured outputs requires a tokenizer so it can't be used with 'skip_tokenizer_init'",
            "structured_outputs",
        )
    for name in ("stop", "bad_words"):
        if getattr(params, name):
            raise ParamError(f"{name} requires a tokenizer so it can't be used with 'skip_tokenizer_init'.", name)


def tokens_kept(params: SamplingParams, max_model_len: int) -> int | None:
    """Prompt tokens that truncation leaves at most; -1 is what the context holds beside the least output."""
    keep = params.truncate_prompt_tokens
    return max(1, max_model_len - max(1, params.min_tokens)) if keep == -1 else keep


def check_prompt(ids: Sequence[int], model: ModelConfig, max_model_len: int) -> None:
    """Refuse a prompt that is empty, too long, or holds ids that the model does not have. Raises ParamError."""
    check_ids(ids, model)
    if len(ids) >= max_model_len:
        room = "exceeds this limit even without any" if len(ids) > max_model_len else "leaves no room for"
        raise ParamError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{len(ids)} input tokens, which {room} output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )


def check_ids(ids: Sequence[int], model: ModelConfig) -> None:
    """Refuse a prompt that is empty, or holds ids that the model does not have. Raises ParamError."""
    if not ids:
        raise ParamError("prompt must not be empty: it has no tokens.", "prompt")
    low, high = min(ids), max(ids)
    if low < 0 or high >= model.vocab_size:
        bad = low if low < 0 else high
        raise ParamError(f"Token id {bad} is out of vocabulary (0 to {model.vocab_size - 1}).", "prompt")
