"""One request as the client keeps it, and the stream of events its consumer reads.

    text, tokens:   [0 ........ received) [received ........ finish)
                     authoritative: kept    downstream's; may be thrown away and made again by a higher attempt

``OpenRequest`` belongs to Engine; ``RequestStream`` is the consumer's handle. Engine holds no reference to the handle,
so a handle that is dropped aborts its request.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..proto.codec import from_i32, i32
from ..proto.messages import Accepted, Finish, Resume, Tokenize
from ..proto.params import SamplingParams
from .outputs import RequestMetrics

MAX_LOSSES = 3
"""A request lost this often at one point is at fault itself and fails."""


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


@dataclass(slots=True)
class StreamEvent:
    """What is new of one child since its last event. ``length`` is the output tokens that count, once finished.

    ``logprobs`` has one entry for each of ``tokens`` where the request asked for them, and is empty otherwise.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    stop_reason: int | str | None = None
    length: int = -1
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt as run: its ids, its text (None when ids were given) and the parameters with max_tokens resolved."""

    prompt_ids: list[int]
    prompt: str | None
    params: SamplingParams


@dataclass(slots=True)
class Child:
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


class OpenRequest:
    """Everything needed to send a request again, whatever was lost."""

    def __init__(self, message: Tokenize):
        self.message = message  # as first sent; `again` derives later attempts from it
        self.uid, self.attempt = message.uid, message.attempt
        self.children = [Child() for _ in range(message.params.n)]
        self.live = message.params.n
        self.accepted: Prompt | None = None
        self.started = False  # in this attempt
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.losses = 0
        self.mark = -1  # most output tokens there were at a loss that counted
        self.link: Any = None  # the detokenizer it sticks to
        self.since = time.monotonic()  # when it was last sent, or began to wait for a detokenizer
        self.metrics = RequestMetrics(arrival_time=self.since)
        self.pending: dict[int, StreamEvent] = {}
        self.quiet = False  # the consumer wants the end only
        self.done = False
        self.error: RequestError | None = None
        self._changed = asyncio.Event()

    # -- towards the model

    def again(self) -> Tokenize:
        """The message of the present attempt: the prompt's ids once they are known, and what has been received."""
        message = self.message
        changes: dict[str, Any] = {"attempt": self.attempt, "losses": self.losses}
        if self.accepted is not None:
            resume = [
                Resume(index=index, ids=i32(child.tokens), text_sent=child.chars)
                for index, child in enumerate(self.children)
                if child.finish == Finish.NONE
            ]
            if not any(child.tokens or child.chars or child.finish for child in self.children):
                resume = []  # all from the start, so that they share the prompt again
            changes.update(
                prompt=None, messages=None, template=None, ids=i32(self.accepted.prompt_ids),
                params=self.accepted.params, resume=resume,
            )  # fmt: skip
        return msgspec.structs.replace(message, **changes)

    def lost(self, counts: bool) -> bool:
        """Note a loss on the path and raise the attempt; False when the request has used up its chances.

        A loss counts only where no token has come since the furthest point of the one before, so a long stream
        survives any number of them and a request that kills what serves it is found.
        """
        if counts:
            reached = sum(len(child.tokens) for child in self.children)
            self.losses = 1 if reached > self.mark else self.losses + 1
            self.mark = max(self.mark, reached)
        self.attempt += 1
        self.started = False
        return self.losses < MAX_LOSSES

    # -- from the model

    def accept(self, message: Accepted) -> None:
        """The prompt's ids are known; the first acceptance is kept, later ones repeat it without its text."""
        if self.accepted is None:
            self.accepted = Prompt(from_i32(message.ids), message.prompt, message.params)
            self._changed.set()

    def start(self, now: float, cached: int) -> None:
        """It is in its first step of this attempt."""
        self.started = True
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = now
            self.metrics.time_in_queue = now - self.metrics.arrival_time
            self.cached_tokens = cached

    def take(
        self, index: int, offset: int, tokens: list[int], text: str, finish: int, reason: int | str | None,
        length: int, now: float,
    ) -> bool:  # fmt: skip
        """Take one entry of a TextBatch; False where it does not follow what is here, so that something was lost."""
        if not 0 <= index < len(self.children):
            return False
        child = self.children[index]
        have = len(child.tokens)
        if child.finish != Finish.NONE or (tokens and offset + len(tokens) <= have):
            return True  # a duplicate
        if offset != have:
            return False
        if finish != Finish.NONE and length >= 0:
            del tokens[max(0, length - have) :]
        child.tokens += tokens
        if text:
            child.parts.append(text)
            child.chars += len(text)
        if tokens:
            if not self.started:
                self.start(now, 0)
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
            self.metrics.last_token_time = now
        if finish != Finish.NONE:
            child.finish, child.stop_reason = Finish(finish), reason
            del child.tokens[length if length >= 0 else len(child.tokens) :]
            self.live -= 1
        if not self.quiet:
            self._announce(index, child, tokens, text)
        if self.live == 0:
            self.end()
        return True

    def _announce(self, index: int, child: Child, tokens: list[int], text: str) -> None:
        event = self.pending.get(index)
        if event is None:
            if not tokens and not text and child.finish == Finish.NONE:
                return
            event = self.pending[index] = StreamEvent(index)
        event.tokens += tokens
        event.text += text
        if child.finish != Finish.NONE:
            event.finish, event.stop_reason, event.length = child.finish, child.stop_reason, len(child.tokens)
        self._changed.set()

    def end(self, error: RequestError | None = None) -> None:
        """Nothing more will come."""
        if not self.done:
            self.done, self.error = True, error
            self.metrics.finished_time = time.monotonic()
            self._changed.set()

    async def change(self) -> None:
        """Wait until something has happened since the last look."""
        self._changed.clear()
        await self._changed.wait()


class RequestStream(AsyncIterator[StreamEvent]):
    """The consumer's side of a request: ``async for event in stream``.

    Each event holds everything of one child that came since the last look, so a slow consumer gets fewer, larger
    events. Iteration raises RequestError where the request failed. Dropping the stream aborts the request.
    """

    def __init__(self, request: OpenRequest, abandon: Callable[[int], None], abort: Callable[[int], None]):
        self._request, self._abandon, self._abort = request, abandon, abort

    @property
    def uid(self) -> int:
        """The request's number, unlike any other's."""
        return self._request.uid

    @property
    def accepted(self) -> Prompt | None:
        """The prompt as run; set before the first event."""
        return self._request.accepted

    @property
    def metrics(self) -> RequestMetrics:
        """Times so far, all on ``time.monotonic``."""
        return self._request.metrics

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache when it was first scheduled."""
        return self._request.cached_tokens

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry for each prompt token, the first None; None where not asked for. Complete before the first event."""
        return self._request.prompt_logprobs

    @property
    def children(self) -> list[Child]:
        """All that has come so far, by child."""
        return self._request.children

    @property
    def done(self) -> bool:
        """True once nothing more will come."""
        return self._request.done

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamEvent:
        request = self._request
        while not request.pending:
            if request.error is not None:
                raise request.error
            if request.done:
                raise StopAsyncIteration
            await request.change()
        return request.pending.pop(next(iter(request.pending)))

    def get_ready(self) -> list[StreamEvent]:
        """Every event that waits now, without waiting."""
        ready = list(self._request.pending.values())
        self._request.pending.clear()
        return ready

    async def wait_accepted(self) -> Prompt:
        """The prompt as run, as soon as it is known. Raises RequestError where the request is refused."""
        request = self._request
        while request.accepted is None:
            if request.done:
                raise request.error or RequestError(499, "the request was aborted.")
            await request.change()
        return request.accepted

    async def collect(self) -> list[Child]:
        """Wait for the end with no events on the way; the children as they ended. Raises RequestError."""
        request = self._request
        request.quiet = True
        request.pending.clear()
        while not request.done:
            await request.change()
        if request.error is not None:
            raise request.error
        return request.children

    def abort(self) -> None:
        """End the request now (from the engine's own thread); iteration then stops. Does nothing once it is done."""
        self._abort(self._request.uid)

    async def aclose(self) -> None:
        """Abort, for ``contextlib.aclosing``."""
        self.abort()

    def __del__(self) -> None:
        if not self._request.done:
            self._abandon(self._request.uid)


def pack_ids(ids: list[int]) -> bytes:
    """Token ids as an int32 column. Raises RequestError 400 where one does not fit."""
    try:
        return array("i", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise RequestError(400, f"token ids must be integers of at most 31 bits ({error}).", "prompt") from error
