"""What LLM's methods return. Names and printed form are vLLM's."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..results import RequestMetrics, TokenLogprobs

if TYPE_CHECKING:
    import numpy

Out = TypeVar("Out")


@dataclass(slots=True)
class Logprob:
    """A token's log-probability, its rank (1: none is likelier) and its text (None where nothing is detokenized)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def to_dict(found: TokenLogprobs, k: int) -> dict[int, Logprob]:
    """vLLM's form: the token itself, then the ``k`` most likely (-1: all there are). Equal values share a rank."""
    texts: list[Any] = found.texts or [None] * len(found.ids)
    result = {found.ids[0]: Logprob(found.values[0], found.rank, texts[0])}
    end = len(found.ids) if k < 0 else min(k + 1, len(found.ids))
    likeliest = [-value for value in found.values[1:end]]  # rising
    for place in range(1, end):
        if found.ids[place] != found.ids[0]:
            rank = 1 + bisect_left(likeliest, -found.values[place])
            result[found.ids[place]] = Logprob(found.values[place], rank, texts[place])
    return result


@dataclass(slots=True, repr=False)
class CompletionOutput:
    """One of a request's n continuations.

    ``finish_reason`` is "stop", "length", "abort" or None; ``stop_reason`` the stop string or stop token id that ended
    it, None for the end-of-sequence token. ``logprobs`` has an entry a token, ``cumulative_logprob`` sums their own.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        """True once it has ended."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        reason = "" if self.stop_reason is None else f", stop_reason={self.stop_reason}"
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids={self.token_ids}, "
            f"cumulative_logprob={self.cumulative_logprob}, logprobs={self.logprobs}, "
            f"finish_reason={self.finish_reason}{reason})"
        )


@dataclass(slots=True, repr=False)
class RequestOutput:
    """A request's prompt and continuations. ``prompt`` is None where ids were given without text."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    num_cached_tokens: int | None = None

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, prompt_logprobs={self.prompt_logprobs}, "
            f"outputs={self.outputs}, finished={self.finished}, metrics={self.metrics}, "
            f"lora_request={self.lora_request})"
        )


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """What a model pools of a prompt: float32 [dim], or [tokens, dim] where every token has its own."""

    data: numpy.ndarray

    @property
    def embedding(self) -> list[float]:
        """The same as a list, under the name that ``LLM.encode`` once had for it."""
        return self.data.tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PoolingOutput):
            return NotImplemented
        return self.data.shape == other.data.shape and bool((self.data == other.data).all())


@dataclass(slots=True, repr=False)
class EmbeddingOutput:
    """An embedding: one vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass(slots=True, repr=False)
class ClassificationOutput:
    """A probability, or with ``use_activation=False`` a logit, for each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts belong together."""

    score: float


@dataclass(slots=True, repr=False)
class PoolingRequestOutput(Generic[Out]):
    """A prompt and what was pooled of it. A pair's ids are those of both texts."""

    request_id: str
    outputs: Out
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(request_id={self.request_id!r}, outputs={self.outputs!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, num_cached_tokens={self.num_cached_tokens}, "
            f"finished={self.finished})"
        )


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """What ``LLM.embed`` returns for a prompt."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """What ``LLM.classify`` returns for a prompt."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """What ``LLM.score`` returns for a pair."""

    __slots__ = ()
