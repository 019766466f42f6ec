"""What of a request's parameters only the tokenizer can resolve; ``proto/checks.py`` has the checks before it."""

from __future__ import annotations

from collections.abc import Iterable

from ..proto.codec import i32
from ..proto.errors import Refused
from ..proto.params import SamplingParams


def suppressed_ids(params: SamplingParams, eos: Iterable[int]) -> bytes:
    """Ids (int32) that must not be drawn before ``min_tokens``: every EOS id, ignored or not, and every stop id.

    Raises Refused where ``allowed_token_ids`` leave nothing else.
    """
    if not params.min_tokens:
        return b""
    suppressed = dict.fromkeys([*eos, *(params.stop_token_ids or ())])
    if params.allowed_token_ids and all(token in suppressed for token in params.allowed_token_ids):
        raise Refused(
            f"allowed_token_ids holds nothing but EOS and stop_token_ids, which min_tokens={params.min_tokens} forbids "
            "at first.",
            "allowed_token_ids",
        )
    return i32(suppressed)
