"""Scores of pairs of texts: what is to be pooled for them, and what comes of it.

A cross-encoder pools each pair at once, put together by its tokenizer or by a chat template. A model that embeds pools
every text once, and a pair's score is the cosine of the angle between its two vectors. So does one of late interaction,
whose texts have a vector for each token: a pair's score is then ColBERT's MaxSim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...proto.checkpoint.pooler_config import PoolerConfig
from ..results import Pooled
from .prompts import Input

if TYPE_CHECKING:
    import numpy

EPSILON = 1e-8
"""Lengths are taken for at least so much, as torch's cosine does; nothing is like a vector of zeros."""


def pooled_for_score(pooler: PoolerConfig) -> str:
    """The task by which texts, or pairs of them, are pooled for scores; one that ``pooler`` has not: it has none."""
    if "score" in pooler.tasks:
        return "score"
    return "token_embed" if pooler.late_interaction else "embed"


@dataclass(frozen=True, slots=True)
class Scored:
    """A pair's score; its ids are those of both texts, ``cached`` counts those found in the prefix cache."""

    score: float
    prompt_ids: list[int]
    cached: int


class Pairs:
    """Texts scored pair by pair, or one text with each of several. ``cross``: the model takes pairs; ``template`` then
    says how they are put together, as a chat of a query and a document: "" by the server's template, else by this one.

    Raises ValueError where the two sides do not match.
    """

    def __init__(self, first: Sequence[str], second: Sequence[str], cross: bool, template: str | None = None):
        check_pairs(first, second)
        self._cross, self._first, self._count = cross, len(first), len(second)
        if cross:
            lefts = list(first) * (self._count if len(first) == 1 else 1)
            self.inputs = [_pair(left, right, template) for left, right in zip(lefts, second, strict=True)]
        else:
            self.inputs = [Input(text=text) for text in (*first, *second)]

    def scores(self, pooled: Sequence[Pooled]) -> list[Scored]:
        """The pairs' scores in order, of what came for ``inputs``. Raises ValueError where that is no scalar."""
        if self._cross:
            return [Scored(_scalar(each.data), each.prompt_ids, each.num_cached_tokens) for each in pooled]
        lefts, rights = pooled[: self._first], pooled[self._first :]
        return [_of_vectors(lefts[place % self._first], rights[place]) for place in range(self._count)]


def _pair(query: str, document: str, template: str | None) -> Input:
    if template is None:
        return Input(text=query, pair=document)
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": False}
    if template:
        options["chat_template"] = template
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return Input(messages=messages, template=options)


def check_pairs(first: Sequence[str], second: Sequence[str]) -> None:
    """One with one, one with several, or as many with as many. Raises ValueError."""
    if len(first) > 1 and len(first) != len(second):
        raise ValueError("Input lengths must be either 1:1, 1:N or N:N")
    if not first:
        raise ValueError("At least one text element must be given")
    if not second:
        raise ValueError("At least one text_pair element must be given")


def cosine(first: numpy.ndarray, second: numpy.ndarray) -> float:
    """The cosine of the angle between two vectors, computed in double precision."""
    a, b = first.astype("float64"), second.astype("float64")
    return float(a @ b) / (max(math.sqrt(a @ a), EPSILON) * max(math.sqrt(b @ b), EPSILON))


def maxsim(query: numpy.ndarray, document: numpy.ndarray) -> float:
    """The sum over the tokens of ``query`` [n, size] of the greatest product with a token of ``document`` [m, size]."""
    return float((query @ document.T).max(axis=1).sum(dtype="float64"))


def _scalar(data: numpy.ndarray) -> float:
    if data.size != 1:
        raise ValueError("Scoring API is only enabled for num_labels == 1.")
    return float(data.reshape(-1)[0])


def _of_vectors(left: Pooled, right: Pooled) -> Scored:
    alike = maxsim if left.data.ndim == 2 else cosine
    return Scored(
        alike(left.data, right.data), left.prompt_ids + right.prompt_ids,
        left.num_cached_tokens + right.num_cached_tokens,
    )  # fmt: skip
