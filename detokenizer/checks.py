"""What of a request's parameters only the tokenizer can resolve; ``proto/checks.py`` has the checks before it."""

from __future__ import annotations

from collections.abc import Iterable

from ..proto.codec import i32
from ..proto.params import SamplingParams
from .errors import Refused
from .tokenizer import TextTokenizer


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
    does not (V1's rule). A word of blanks and line breaks alone has one form, as it is. Raises Refused for a word
    without tokens, or with one the model lacks.
    """
    forms = []
    for word in words:
        bare = word.lstrip()
        try:
            plain, spaced = tokenizer.encode(bare or word, False), tokenizer.encode(" " + bare, False) if bare else []
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
