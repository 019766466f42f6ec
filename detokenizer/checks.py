"""What of a request's parameters only the model and its tokenizer can check or resolve.

Ids are held to the model's vocabulary (config.json's), which may be larger than the tokenizer's.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..proto.codec import i32
from ..proto.model_config import ModelConfig
from ..proto.params import SamplingParams
from .errors import Refused
from .tokenizer import TextTokenizer

MAX_STOP_CHARACTERS = 4096
"""Characters all stop strings of a request may have together."""

MAX_BAD_CHARACTERS = 65536
"""Characters all bad words of a request may have together."""


def check_params(params: SamplingParams, model: ModelConfig, max_model_len: int, max_logprobs: int) -> None:
    """Refuse what the model cannot do; -1 logprobs become the size of the vocabulary. Raises Refused."""
    if params.max_tokens is not None and params.max_tokens > max_model_len:
        raise Refused(
            f"max_tokens={params.max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
        )
    keep = params.truncate_prompt_tokens
    if keep is not None and keep > max_model_len:
        raise Refused(
            f"truncate_prompt_tokens={keep} cannot be greater than max_model_len={max_model_len}. "
            "Please select a smaller truncation size.",
            "truncate_prompt_tokens",
        )
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        ids: Iterable[int] | None = getattr(params, name)
        if ids and max(ids) >= model.vocab_size:
            raise Refused(
                f"{name} contains the token id {max(ids)}, which is out of vocabulary (0 to {model.vocab_size - 1}).",
                name,
            )
    most = model.vocab_size if max_logprobs == -1 else max_logprobs
    for name, what in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
        asked = getattr(params, name)
        if asked is None:
            continue
        asked = model.vocab_size if asked == -1 else asked
        if asked > most:
            raise Refused(
                f"Requested {what} logprobs of {asked}, which is greater than max allowed: {most} (--max-logprobs)",
                name,
            )
        setattr(params, name, min(asked, model.vocab_size))


def check_text(params: SamplingParams, tokenizer: TextTokenizer | None) -> None:
    """Refuse too much text, and what needs a tokenizer where there is none. Raises Refused."""
    if sum(len(string) for string in params.stop or ()) > MAX_STOP_CHARACTERS:
        raise Refused(f"stop strings have more than {MAX_STOP_CHARACTERS} characters together.", "stop")
    if sum(len(word) for word in params.bad_words or ()) > MAX_BAD_CHARACTERS:
        raise Refused(f"bad_words have more than {MAX_BAD_CHARACTERS} characters together.", "bad_words")
    if tokenizer is not None:
        return
    if params.structured_outputs is not None:
        raise Refused(
            "Structured outputs requires a tokenizer so it can't be used with 'skip_tokenizer_init'",
            "structured_outputs",
        )
    for name in ("stop", "bad_words"):
        if getattr(params, name):
            raise Refused(f"{name} requires a tokenizer so it can't be used with 'skip_tokenizer_init'.", name)


def masked_ids(params: SamplingParams, eos: Iterable[int]) -> bytes:
    """Ids (int32) that must not be drawn before ``min_tokens``: every EOS id, ignored or not, and every stop id.

    Raises Refused where ``allowed_token_ids`` leave nothing else.
    """
    if not params.min_tokens:
        return b""
    masked = dict.fromkeys([*eos, *(params.stop_token_ids or ())])
    if params.allowed_token_ids and all(token in masked for token in params.allowed_token_ids):
        raise Refused(
            f"allowed_token_ids holds nothing but EOS and stop_token_ids, which min_tokens={params.min_tokens} forbids "
            "at first.",
            "allowed_token_ids",
        )
    return i32(masked)


def bad_word_ids(words: Iterable[str], tokenizer: TextTokenizer, vocab_size: int) -> list[list[int]]:
    """Token ids of each form of each word, without special tokens: as it is, and as it is after a space.

    The second is kept only where it is another word of the same length: its first token differs, its number of tokens
    does not (V1's rule). Raises Refused for a word without tokens, or with one the model lacks.
    """
    forms = []
    for word in words:
        bare = word.lstrip()
        try:
            plain, spaced = tokenizer.encode(bare, False), tokenizer.encode(" " + bare, False)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise Refused(f"bad_words: {word!r:.80} cannot be encoded: {error}"[:300], "bad_words") from error
        if not plain:
            raise Refused(f"bad_words: {word!r:.80} encodes to no tokens.", "bad_words")
        found = [plain]
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
        if (most := max(map(max, found))) >= vocab_size:
            raise Refused(
                f"bad_words: {word!r:.80} has the token id {most}, which is out of vocabulary (0 to {vocab_size - 1}).",
                "bad_words",
            )
        forms += found
    return forms
