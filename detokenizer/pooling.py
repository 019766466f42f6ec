"""Prompts that are pooled: encoded so that what is cut off is their end, and never a special token.

A pair of texts goes through the tokenizer's own template for pairs, which says where the tokens of type 1 begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..proto.checkpoint.model_config import ModelConfig
from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.checks import check_ids
from ..proto.codec import MAX_FRAME
from ..proto.errors import Refused
from ..proto.params import ParamError
from ..proto.pooling import PoolingParams
from .tokenizer import TextTokenizer

ROOM = MAX_FRAME // 8 * 3
"""Bytes that one answer may take."""


class Encoded(NamedTuple):
    """A prompt's ids; its tokens from ``token_type_start`` on are of type 1 (-1: none is)."""

    ids: list[int]
    token_type_start: int


def tokens_kept(params: PoolingParams, max_model_len: int) -> int | None:
    """Prompt tokens that truncation leaves at most. Raises ParamError."""
    keep = params.truncate_prompt_tokens
    if keep is not None and keep > max_model_len:
        raise ParamError(
            f"truncate_prompt_tokens={keep} cannot be greater than max_model_len={max_model_len}. Please select a "
            "smaller truncation size.",
            "truncate_prompt_tokens",
        )
    return max_model_len if keep == -1 else keep


def encode(
    tokenizer: TextTokenizer, texts: Sequence[str], special: bool, keep: int | None, side: str = "right",
    most: int | None = None,
) -> Encoded:  # fmt: skip
    """A text, or both of a pair, cut to ``keep`` tokens with the special ones; ``side`` is where it is cut. The last
    text has ``most`` tokens of its own before that. Raises Refused."""
    backend, pair = tokenizer.backend, len(texts) == 2
    if backend is None and pair:
        raise Refused("pairs of texts need a model with a tokenizer.json; add one to its folder.", "pair")
    added = backend.num_special_tokens_to_add(pair) if special and backend is not None else 0
    if keep is not None and keep < added:
        raise Refused(
            f"truncate_prompt_tokens={keep} leaves no room: the tokenizer adds {added} tokens of its own.",
            "truncate_prompt_tokens",
        )
    try:
        if backend is None:
            return Encoded(cut(tokenizer.encode(texts[0], special), keep, side), -1)
        parts = backend.encode_batch_fast(list(texts), add_special_tokens=False)  # see ids_of
        if most is not None:
            parts[-1].truncate(most)
        if keep is not None:
            for part, length in zip(parts, cut_to([len(part.ids) for part in parts], keep - added), strict=True):
                part.truncate(length, direction=side)
        whole = backend.post_process(parts[0], parts[1] if pair else None, special)
    except Exception as error:  # `tokenizers` raises plain Exception
        raise Refused(f"the prompt cannot be encoded: {error}"[:300], "prompt") from error
    return Encoded(whole.ids, whole.type_ids.index(1) if 1 in whole.type_ids else -1)


def cut(ids: list[int], keep: int | None, side: str) -> list[int]:
    """``keep`` of the ids at most; ``side`` is where they are cut."""
    return ids[-keep:] if keep is not None and side == "left" else ids[:keep]


def cut_to(lengths: list[int], room: int) -> list[int]:
    """Tokens that are left of each of one or two texts: the longer one is cut to the other's length, then both."""
    if sum(lengths) <= room or len(lengths) == 1:
        return [min(length, room) for length in lengths]
    first, second = lengths
    short = min(first, second, room // 2)
    return [short, room - short] if first <= second else [room - short, short]


def check(encoded: Encoded, params: PoolingParams, pooler: PoolerConfig, model: ModelConfig, longest: int) -> None:
    """Refuse a prompt that is empty, too long (``longest`` tokens fit), or whose answer would be. Raises ParamError."""
    ids = encoded.ids
    check_ids(ids, model)
    if len(ids) > longest:
        raise ParamError(
            f"This model's maximum context length is {longest} tokens. However, your prompt contains {len(ids)} input "
            "tokens. Please reduce the length of the input prompt, or set truncate_prompt_tokens.",
            "input_tokens",
        )
    width = (params.dimensions or pooler.size) if params.embeds else len(pooler.labels)
    if params.per_token and len(ids) * width * 4 > ROOM:
        raise ParamError(
            f"{len(ids)} tokens with {width} values each are more than one answer holds, which is "
            f"{ROOM // (4 * width)} of them; shorten the prompt.",
            "input_tokens",
        )
