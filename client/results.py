"""What a request comes to, as its owner is given it: events, outputs, times, errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ..proto.messages import Finish
from ..proto.work import Text

if TYPE_CHECKING:
    import numpy


class RequestError(Exception):
    """A request failed: ``status`` is an HTTP status, ``param`` the field at fault, ``retry_after`` seconds."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one place: entry 0 of each list is the token itself, the rest the most likely, best first.

    ``rank`` is the token's own: 1 + the number of tokens strictly more likely. ``texts`` is empty where nothing is
    detokenized; ``raw`` has the bytes of those entries that are no whole characters.
    """

    ids: list[int]
    values: list[float]
    rank: int
    texts: list[str]
    raw: dict[int, bytes]


class StreamEvent(msgspec.Struct, gc=False):
    """What is new of one child since its last event. ``length`` is the output tokens that count, once finished.

    ``logprobs`` has one entry for each of ``tokens`` where the request asked for them, and is empty otherwise.
    """

    index: int
    text: str = ""
    tokens: list[int] = []
    finish: Finish = Finish.NONE
    stop_reason: int | str | None = None
    length: int = -1
    logprobs: list[TokenLogprobs] = []


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt as run: its ids, and its text (None when ids were given)."""

    prompt_ids: list[int]
    prompt: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """What came of one prompt that was pooled: its ids as run (a pair's are those of both texts), and float32 [dim], or
    [tokens, dim] where every token has its own.

    ``num_cached_tokens`` of the prompt were found in the prefix cache.
    """

    prompt_ids: list[int]
    data: numpy.ndarray
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What a detokenizer made of texts or ids: the ids, the text where it is known, and ``work`` with what else was
    asked for."""

    ids: list[int]
    text: str | None
    work: Text


@dataclass(slots=True)
class ChildOutput:
    """What has come of one of the n children. ``parts`` join to its text; ``chars`` is that text's length.

    ``logprobs`` has one entry a token where the request asked for them; ``cumulative`` is the sum of the tokens' own,
    None where none were computed.
    """

    tokens: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    chars: int = 0
    finish: Finish = Finish.NONE
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative: float | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, all in seconds of one clock, ``time.monotonic``.

    arrival_time <= first_scheduled_time <= first_token_time <= last_token_time <= finished_time, and
    time_in_queue is first_scheduled_time - arrival_time. What has not happened is None. The last three are vLLM's,
    and always None: a step is shared by many requests.
    """

    arrival_time: float
    last_token_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    time_in_queue: float | None = None
    finished_time: float | None = None
    scheduler_time: float | None = field(default=None, repr=False)
    model_forward_time: float | None = field(default=None, repr=False)
    model_execute_time: float | None = field(default=None, repr=False)
