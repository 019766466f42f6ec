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
from typing import TYPE_CHECKING, Any

import msgspec

from ..proto.codec import from_i32, i32
from ..proto.losses import Losses
from ..proto.messages import Accepted, Finish, Resume, Tokenize
from ..proto.params import SamplingParams
from .best import choose, from_wire, is_held
from .offline.outputs import RequestMetrics

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
    """The prompt as run: its ids, its text (None when ids were given) and the parameters with max_tokens resolved.

    The parameters are in the user's terms; what was sent may differ (``best_of``).
    """

    prompt_ids: list[int]
    prompt: str | None
    params: SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """What came of one prompt that was pooled: its ids as run (a pair's are those of both texts), and float32 [dim], or
    [tokens, dim] where every token has its own.

    ``num_cached_tokens`` of the prompt were found in the prefix cache.
    """

    prompt_ids: list[int]
    data: numpy.ndarray
    num_cached_tokens: int = 0


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
    """Everything needed to send a request again, whatever was lost.

    ``message`` has the parameters as sent, ``asked`` are the user's. A held request (best_of, beam search) shows
    nothing before its end: which children are returned, and as which, is not known earlier.
    """

    def __init__(self, message: Tokenize, asked: SamplingParams):
        self.message = message  # as first sent; `again` derives later attempts from it
        self.asked, self.held = asked, is_held(asked)
        self.uid, self.attempt = message.uid, message.attempt
        self.summed = message.params.logprobs is not None  # every token comes with its logprobs
        self._begin()
        self.accepted: Prompt | None = None
        self._resolved = message.params
        self.started = False  # in this attempt
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if asked.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token has none
        self.losses = Losses()  # at points counted in output tokens
        self.link: Any = None  # the detokenizer it sticks to
        self.since = time.monotonic()  # when it was last sent, or began to wait for a detokenizer
        self.metrics = RequestMetrics(arrival_time=self.since)
        self.pending: dict[int, StreamEvent] = {}
        self.quiet = False  # the consumer wants the end only
        self.done = False
        self.error: RequestError | None = None
        self._changed = asyncio.Event()

    def _begin(self) -> None:
        """Nothing has come."""
        self.live = self.message.params.n
        self.children = [Child(cumulative=0.0 if self.summed else None) for _ in range(self.live)]

    # -- towards the model

    @property
    def on_trial(self) -> bool:
        """One more loss before it is accepted, and it is taken for the cause of them all."""
        return self.accepted is None and self.losses.in_quarantine()

    def again(self) -> Tokenize:
        """The message of the present attempt: the prompt's ids once they are known, and what has been received."""
        message = self.message
        changes: dict[str, Any] = {"attempt": self.attempt, "losses": self.losses.count}
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
                params=self._resolved, resume=resume,
            )  # fmt: skip
            if self.prompt_logprobs is not None and len(self.prompt_logprobs) > 1:
                changes["prompt_logprobs_from"] = len(self.prompt_logprobs)
        return msgspec.structs.replace(message, **changes)

    def lost(self, counts: bool) -> bool:
        """Note a loss on the path and raise the attempt; False when the request has used up its chances."""
        if counts:
            self.losses.lost(sum(len(child.tokens) for child in self.children))
        self.attempt += 1
        self.started = False
        if self.asked.use_beam_search:  # a group is made again whole: parts of two searches do not mix
            self._begin()
        return not self.losses.exhausted

    # -- from the model

    def accept(self, message: Accepted) -> None:
        """The prompt's ids are known; the first acceptance is kept, later ones repeat it without its text."""
        if self.accepted is None:
            self.losses = Losses()  # those before were of reading it, which is done
            self._resolved = message.params
            self.accepted = Prompt(from_i32(message.ids), message.prompt, from_wire(message.params, self.asked))
            self._changed.set()

    def start(self, now: float, cached: int) -> None:
        """It is in its first step of this attempt."""
        self.started = True
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = now
            self.metrics.time_in_queue = now - self.metrics.arrival_time
            self.cached_tokens = cached

    def take_prompt(self, start: int, found: list[TokenLogprobs]) -> bool:
        """Take logprobs of prompt tokens ``start``, ...; False where they do not follow what is here.

        The first copy of each is kept.
        """
        have = self.prompt_logprobs
        if have is None:
            return True
        if self.accepted is None or not 1 <= start <= len(have):
            return False
        new = found[len(have) - start :]
        if [each.ids[0] for each in new] != self.accepted.prompt_ids[len(have) : len(have) + len(new)]:
            return False
        have += new
        return True

    def take(
        self, index: int, offset: int, tokens: list[int], text: str, finish: int, reason: int | str | None,
        length: int, now: float, logprobs: list[TokenLogprobs],
    ) -> bool:  # fmt: skip
        """Take one entry of a TextBatch; False where it does not follow what is here, so that something was lost."""
        if not 0 <= index < len(self.children):
            return False
        child = self.children[index]
        have = len(child.tokens)
        if child.finish != Finish.NONE or (tokens and offset + len(tokens) <= have):
            return True  # a duplicate
        if offset != have or (tokens and not self._complete(tokens, logprobs)):
            return False
        if not self.summed:
            logprobs = []
        if finish != Finish.NONE and length >= 0:
            del tokens[max(0, length - have) :]
            del logprobs[len(tokens) :]
        child.tokens += tokens
        if logprobs:
            child.logprobs += logprobs
            child.cumulative = _sum(child.cumulative, logprobs)
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
            if 0 <= length < len(child.tokens):
                del child.tokens[length:], child.logprobs[length:]
                child.cumulative = _sum(0.0, child.logprobs) if self.summed else None
            self.live -= 1
        if not (self.quiet or self.held):
            self._announce(index, child, tokens, text, logprobs)
        if self.live == 0:
            self.end()
        return True

    def _complete(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Whether new tokens come with all that was asked for with them, and after all that comes before them."""
        if self.summed and [each.ids[0] for each in logprobs] != tokens:
            return False
        prompt = self.prompt_logprobs
        return prompt is None or (self.accepted is not None and len(prompt) == len(self.accepted.prompt_ids))

    def _announce(self, index: int, child: Child, tokens: list[int], text: str, logprobs: list[TokenLogprobs]) -> None:
        event = self.pending.get(index)
        if event is None:
            if not tokens and not text and child.finish == Finish.NONE:
                return
            event = self.pending[index] = StreamEvent(index)
        event.tokens += tokens
        event.text += text
        event.logprobs += logprobs
        if child.finish != Finish.NONE:
            event.finish, event.stop_reason, event.length = child.finish, child.stop_reason, len(child.tokens)
        self._changed.set()

    def end(self, error: RequestError | None = None) -> None:
        """Nothing more will come."""
        if not self.done:
            self.done, self.error = True, error
            self.metrics.finished_time = time.monotonic()
            if self.held:
                self._settle()
            self._changed.set()

    def _settle(self) -> None:
        """Only now are the children those of the user: the best, with what was asked for."""
        if not self.asked.use_beam_search:
            scores = [child.cumulative for child in self.children]
            self.children = choose(self.children, scores, self.asked.n)
        if self.asked.logprobs is None:
            for child in self.children:
                child.logprobs = []
        if self.live == 0 and not self.quiet:
            for index, child in enumerate(self.children):
                self._announce(index, child, child.tokens, "".join(child.parts), child.logprobs)

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
        """One entry a prompt token, the first None; None where not asked for. Complete before the first event."""
        return self._request.prompt_logprobs

    @property
    def children(self) -> list[Child]:
        """All that has come so far, by child. With best_of and beam search nothing has before the end."""
        request = self._request
        return request.children if request.done or not request.held else [Child() for _ in range(request.asked.n)]

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


def _sum(start: float | None, logprobs: list[TokenLogprobs]) -> float:
    """``start`` and the tokens' own logprobs in double precision, term by term: the same however they came."""
    total = start or 0.0
    for each in logprobs:
        total += each.values[0]
    return total


def pack_ids(ids: list[int]) -> bytes:
    """Token ids as an int32 column. Raises RequestError 400 where one does not fit."""
    try:
        return array("i", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise RequestError(400, f"token ids must be integers of at most 31 bits ({error}).", "prompt") from error
