"""PoolingParams: what one pooling request asks for, with vLLM's names.

What is left None is the model's own (``pooler_config.py``); ``PoolerConfig.resolve`` fills it in where a prompt is
tokenized, so a worker sees no None but of ``dimensions``.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import msgspec

from .params import MAX_INT, SIDES, ParamError

TASKS = ("embed", "classify", "score", "token_embed", "token_classify")
"""One vector a prompt: an embedding, the classes' probabilities, a single score; or one of either for each token."""

POOLINGS = ("CLS", "LAST", "MEAN", "ALL")
"""Which of the last layer's hidden states make the result: the first, the last, their mean, or each for itself."""


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to pool. None: as the model does; ``task`` is then what the model was made for.

    ``dimensions`` keeps so many leading values of an embedding (Matryoshka), which is then normalised again where
    embeddings are normalised. ``normalize`` is an embedding's, ``use_activation`` a classifier's (softmax, or sigmoid
    where there is one class; False: the bare logits). ``truncate_prompt_tokens`` keeps so many tokens at the prompt's
    beginning, special ones included; -1 is what the model can hold. ``truncation_side`` "left" cuts the beginning and
    keeps the end. ``max_tokens_per_doc`` keeps so many tokens of a pair's second text, or of a text, special ones not
    counted.

    Raises:
        ParamError (a ValueError): a value is of the wrong type, out of range, or not this task's.
    """

    task: str | None = None
    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None
    truncation_side: str | None = None
    max_tokens_per_doc: int | None = None

    def __post_init__(self) -> None:
        if self.task is not None:
            _choice("task", self.task, TASKS)
        if self.pooling is not None:
            _choice("pooling", self.pooling, POOLINGS)
            if self.task is not None and self.per_token != (self.pooling == "ALL"):
                remedy = "task 'token_embed' or 'token_classify'" if self.pooling == "ALL" else "pooling 'ALL'"
                raise ParamError(
                    f"pooling {self.pooling!r} does not go with task {self.task!r}; use {remedy}.", "pooling"
                )
        if self.dimensions is not None:
            _at_least_one("dimensions", self.dimensions)
            self._only("dimensions", self.embeds, "embed")
        for name in ("normalize", "use_activation", "skip_reading_prefix_cache"):
            value: Any = getattr(self, name)
            if not isinstance(value, (bool, NoneType)):
                raise ParamError(f"{name} must be true or false, got {value!r}.", name)
        if self.normalize is not None:
            self._only("normalize", self.embeds, "embed")
        if self.use_activation is not None:
            self._only("use_activation", not self.embeds, "classify")
        if self.truncation_side is not None:
            _choice("truncation_side", self.truncation_side, SIDES)
        if self.max_tokens_per_doc is not None:
            _at_least_one("max_tokens_per_doc", self.max_tokens_per_doc)
        keep = self.truncate_prompt_tokens
        if keep is not None and not (type(keep) is int and keep == -1):
            _at_least_one("truncate_prompt_tokens", keep, " (-1 keeps what the model can hold)")

    @property
    def embeds(self) -> bool:
        """The result is embeddings, not what a classifier says."""
        return self.task in ("embed", "token_embed")

    @property
    def per_token(self) -> bool:
        """The result has a row for each token."""
        return self.task in ("token_embed", "token_classify")

    def _only(self, name: str, fits: bool, kind: str) -> None:
        if self.task is not None and not fits:
            raise ParamError(f"{name} means nothing for task {self.task!r}; leave it out (it is {kind}'s).", name)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ParamError(f"{name} must be one of {list(choices)}, got {value!r}.", name)


def _at_least_one(name: str, value: Any, hint: str = "") -> None:
    if type(value) is not int:
        raise ParamError(f"{name} must be an integer, got {value!r}.", name)
    if value < 1:
        raise ParamError(f"{name} must be at least 1, got {value}{hint}.", name)
    if value > MAX_INT:
        raise ParamError(f"{name} must be at most {MAX_INT}, got {value}.", name)
