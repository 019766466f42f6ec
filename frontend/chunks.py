"""Embeddings of texts that are longer than the model's context: of chunks of it, averaged by their lengths.

Only with ``enable_chunked_processing`` in --pooler-config, whose names and arithmetic are vLLM's.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from ..client.offline.prompts import Input
from ..client.results import Pooled
from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.pooling import PoolingParams
from ..proto.work import Text
from .errors import ApiError
from .front import Front

if TYPE_CHECKING:
    import numpy

_AROUND = 8
"""Tokens that a tokenizer puts around a text, at most; in the text a token is a byte or more."""


def may_chunk(pooler: PoolerConfig, params: PoolingParams) -> bool:
    """Whether long inputs are cut into chunks: embeddings of prompts whole, and none that is to be cut short."""
    return pooler.enable_chunked_processing and params.task == "embed" and params.truncate_prompt_tokens is None


async def chunks_of(front: Front, pooler: PoolerConfig, given: Input, place: str) -> list[Input]:
    """An input, or the chunks of it where it is too long. Raises ApiError where it is longer than may be."""
    size = front.engine.max_model_len
    if given.messages is not None or (given.text is not None and len(given.text.encode()) < size - _AROUND):
        return [given]
    ids = given.ids
    if ids is None:
        text = (given.text or "").lower() if pooler.lower else given.text
        told = await front.engine.text(Text(), prompt=text, add_special_tokens=given.special)
        ids = told.ids
    if len(ids) <= size:
        return [given]
    if pooler.max_embed_len is not None and len(ids) > pooler.max_embed_len:
        said = f"{place} has {len(ids)} tokens, over the limit of {pooler.max_embed_len} (max_embed_len); shorten it."
        raise ApiError(400, said, place.split("[")[0])
    return [Input(ids=ids[at : at + size]) for at in range(0, len(ids), size)]


def averaged(pooled: list[Pooled], counts: list[int]) -> list[Pooled]:
    """One vector for each input, which had so many chunks: their mean, by tokens."""
    rest = iter(pooled)
    return [_mean(list(islice(rest, count))) for count in counts]


def _mean(chunks: list[Pooled]) -> Pooled:
    if len(chunks) == 1:
        return chunks[0]
    ids = [token for each in chunks for token in each.prompt_ids]
    total: numpy.ndarray = sum(each.data.astype("float64") * len(each.prompt_ids) for each in chunks)  # type: ignore[assignment]
    return Pooled(ids, (total / len(ids)).astype("float32"), sum(each.num_cached_tokens for each in chunks))
