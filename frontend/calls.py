"""One HTTP request that generates: its prompts' streams joined, answered as one body or as a stream of events.

Choice ``prompt * n + child`` belongs to (prompt, child), as OpenAI numbers them. Whatever ends a call, its requests
are aborted on the way out; that does nothing to those that ended by themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from ..client.results import RequestError, StreamEvent, TokenLogprobs
from ..client.stream import RequestStream
from ..proto.messages import Finish
from ..proto.params import SamplingParams
from .errors import NOTE, ApiError, error_body, internal_error
from .extras import ChatLogprobs, CompletionLogprobs
from .metrics import Metrics
from .schema import GenerateRequest
from .sse import DONE, HEADERS, Chunks, Outlet, Sink, to_json, usage_of

T = TypeVar("T")

WAITING_S = 1.0
"""Seconds after which an accepted request that waits in line is answered with the headers of its stream, for a proxy
gives up on what answers nothing. What refuses a request comes before that, and so is told by the status."""

LARGE = 5000
"""Logprobs of an answer that take tens of milliseconds to write."""

REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}


@dataclass(slots=True)
class Choice:
    """One of the answers of a call, while it is streamed."""

    index: int
    prompt: int
    tokens: int = 0
    last: float | None = None  # when its last token came
    opened: bool = False
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    first: dict[str, Any] = field(default_factory=dict)  # what its next chunk alone carries


@dataclass(slots=True)
class Ended:
    """One of the answers of a call, complete."""

    index: int
    echo: str | None  # the text that goes before it; None: none was asked for
    text: str
    reason: str
    stop: int | str | None
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    stream: RequestStream


class Call:
    """The streams of one HTTP request. ``prefix`` gives the text that ``echo`` puts before a prompt's choices,
    ``headers`` are those of a stream."""

    headers: Mapping[str, str] = HEADERS

    failure: RequestError | None = None
    _request: web.Request | None = None  # whose stream it is
    _released = _streamed = False
    tells_cached = True  # usage says how many tokens of the prompt were cached

    def __init__(
        self, streams: list[RequestStream], body: GenerateRequest, params: SamplingParams, metrics: Metrics,
        prefix: Any = None,
    ):  # fmt: skip
        self._streams, self._body, self._params, self._metrics = streams, body, params, metrics
        self._prefix = prefix
        self._extras = body.extras()
        self._render = self._plain if self._extras is None and not body.prompt_only else self._rich
        self._n = n = params.n
        self._choices = [
            [Choice(prompt * n + child, prompt) for child in range(n)] for prompt in range(len(streams))
        ]  # fmt: skip

    def abort(self) -> None:
        """End every request of this call that has not ended."""
        for stream in self._streams:
            stream.abort()

    def release(self) -> None:
        """The same for what is not used again, however it came to its end: it is counted now, and only once."""
        if not self._released:
            self._released = True
            self._count()
        self.abort()

    # -- one body

    async def complete(self) -> tuple[list[Ended], dict[str, object]]:
        """All choices in order, and the usage. Raises RequestError; the first failure ends the whole call."""
        try:
            await together([stream.collect() for stream in self._streams])
            choices = [self._ended(prompt, child) for prompt in range(len(self._streams)) for child in range(self._n)]
            return choices, self._usage()
        except RequestError as error:
            raise self._body.own_words(error) from error
        finally:
            self.release()

    def _ended(self, prompt: int, index: int) -> Ended:
        child = self._streams[prompt].children[index]
        stream = self._streams[prompt]
        echo = self._prefix(stream) if self._prefix is not None else None
        place = prompt * self._n + index
        reason = _reason(child.finish)
        if self._body.prompt_only:
            return Ended(place, echo, "", "length", None, [], [], stream)
        text = "".join(child.parts)
        return Ended(place, echo, text, reason, child.stop_reason, child.tokens, child.logprobs, stream)

    # -- a stream of events

    async def stream(self, request: web.Request, chunks: Chunks, stall_s: float) -> web.StreamResponse:
        """Answer with events. What fails before the first of them is an HTTP error, later an error event."""
        self._chunks, self._request = chunks, request
        outlet = Outlet(request, stall_s, self.headers)
        await self.tell(outlet)
        if (failure := self.failure) is not None:
            request.app[NOTE](request, failure.status, f"{failure.message} (told in its stream)")
        return await outlet.close()

    async def tell(self, outlet: Sink) -> None:
        """Write the events, the last of them included, as they come; ``failure`` is one that was told so."""
        include_usage, self._continuous = self._body.usage_options()
        self._streamed = True
        early = _EarlyOpening(outlet, self._streams)
        try:
            await together([self._follow(prompt, outlet) for prompt in range(len(self._streams))])
            if not outlet.opened:
                raise ApiError(500, "the request ended without an answer.")
            if ending := self._ending(include_usage):  # a chunk of nothing would be the end of the body
                outlet.write(ending)
        except ConnectionError:
            raise
        except Exception as error:
            known = self._body.own_words(error) if isinstance(error, RequestError) else None
            if not outlet.opened:
                if known is None:
                    raise
                raise known from error
            known = known or internal_error(error, self._request)
            self._metrics.failed(known.status)
            self.failure = known
            outlet.write(self._failure(known))
        finally:
            self.release()
            await early.close()

    def _ending(self, include_usage: bool) -> bytes:
        """What comes after the last choice's end."""
        return (self._chunks.usage(self._usage()) if include_usage else b"") + DONE

    def _failure(self, error: RequestError) -> bytes:
        """The end of a stream that failed."""
        return b"data: " + error_body(error) + b"\n\n" + DONE

    async def _follow(self, prompt: int, outlet: Sink) -> None:
        """Write the events of one prompt's choices as they come; all that is ready goes out in one write."""
        render, choices = self._render, self._choices[prompt]
        gather = Gathered(interval) if (interval := self._body.stream_interval or 1) > 1 else None

        def give(events: list[StreamEvent]) -> bool:
            if gather is not None:
                events = gather.ready(events)
            if data := b"".join([render(choices[event.index], event) for event in events]):
                outlet.write(data)
            return outlet.opened and not outlet.behind

        while not await self._streams[prompt].forward(give):
            # A refusal is better told by the status, so nothing is sent until every prompt has been accepted.
            if not outlet.opened and all(stream.accepted for stream in self._streams):
                await outlet.open()
            elif outlet.behind:
                await outlet.catch_up()

    def _plain(self, choice: Choice, event: StreamEvent) -> bytes:
        """The chunks of one event; empty while text is held back."""
        chunks = self._chunks
        data = b"" if choice.opened else self._opening(choice)
        if count := len(event.tokens):
            self._note(choice, count)
        usage = self._usage_of(choice) if self._continuous else None
        if event.finish:
            reason = _reason(event.finish)
            return data + chunks.final(choice.index, event.text, reason, event.stop_reason, usage)
        if event.text:
            return data + chunks.text(choice.index, event.text, usage)
        return data

    def _opening(self, choice: Choice) -> bytes:
        choice.opened = True
        usage = self._usage_of(choice) if self._continuous else None
        opening = self._chunks.opening(choice.index, None, usage)
        if self._prefix is not None and (echo := self._prefix(self._streams[choice.prompt])):
            opening += self._chunks.text(choice.index, echo, usage)
        return opening

    def _rich(self, choice: Choice, event: StreamEvent) -> bytes:
        """The same with logprobs and token ids: a chunk has those of its event, and comes even while text is held."""
        data = b"" if choice.opened else self._rich_opening(choice)
        if self._body.prompt_only:
            if not event.finish:
                return data
            event = StreamEvent(event.index, finish=event.finish)
        reason, more, usage = self._taken(choice, event)
        reason = "length" if self._body.prompt_only else reason
        return data + self._chunks.rich(choice.index, event.text, more, reason, event.stop_reason, usage)

    def _taken(self, choice: Choice, event: StreamEvent) -> tuple[str | None, dict[str, Any], dict[str, object] | None]:
        """Count an event; why its choice ended (None: it has not), what its chunk carries beside text, and usage."""
        reason = None
        if event.finish:
            reason = _reason(event.finish)
        if count := len(event.tokens):
            self._note(choice, count)
        usage = self._usage_of(choice) if self._continuous else None
        more, choice.first = choice.first, {}
        if choice.logprobs is not None:
            more["logprobs"] = choice.logprobs.of(event.logprobs)
        if self._extras is not None and self._extras.token_ids:
            more["token_ids"] = event.tokens
        return reason, more, usage

    def _rich_opening(self, choice: Choice) -> bytes:
        choice.opened = True
        extras, stream = self._extras, self._streams[choice.prompt]
        prompt_ids = stream.accepted.prompt_ids if stream.accepted else []
        usage = self._usage_of(choice) if self._continuous else None
        wanted = prompt_ids if extras is not None and extras.token_ids else None
        opening = self._chunks.opening(choice.index, wanted, usage)
        choice.first = {} if wanted is None else self._chunks.of_prompt(wanted)
        if extras is not None and extras.logprobs is not None:
            choice.logprobs = self._chunks.logprobs(extras)
        if self._prefix is None:
            return opening
        echo = self._prefix(stream)
        if not echo and not isinstance(choice.logprobs, CompletionLogprobs):
            return opening
        more, choice.first = choice.first, {}
        if wanted is not None:
            more["token_ids"] = []
        if isinstance(choice.logprobs, CompletionLogprobs):
            more["logprobs"] = choice.logprobs.echo(echo, prompt_ids, stream.prompt_logprobs)
        return opening + self._chunks.rich(choice.index, echo, more, usage=usage)

    def _note(self, choice: Choice, count: int) -> None:
        """New tokens of a choice have come."""
        now = time.monotonic()
        if choice.last is not None:
            self._metrics.inter_token.observe((now - choice.last) / count, count)
        choice.last = now
        choice.tokens += count

    # -- counts

    def _usage_of(self, choice: Choice) -> dict[str, object]:
        accepted = self._streams[choice.prompt].accepted
        return usage_of(len(accepted.prompt_ids) if accepted else 0, choice.tokens)

    def _usage(self) -> dict[str, object]:
        prompt = sum(len(stream.accepted.prompt_ids) for stream in self._streams if stream.accepted)
        output = sum(len(child.tokens) for stream in self._streams for child in stream.children)
        output = 0 if self._body.prompt_only else output
        cached = sum(stream.cached_tokens for stream in self._streams) if self.tells_cached else None
        return usage_of(prompt, output, cached)

    def _count(self) -> None:
        for stream in self._streams:
            failed = stream.work.error is not None
            for child in stream.children:
                if (reason := REASONS.get(child.finish)) is not None:
                    self._metrics.finished(reason)
                elif child.finish is Finish.NONE and not failed:
                    self._metrics.finished("abort")  # whoever asked is gone, or somebody else withdrew it
            if failed:
                continue
            prompt = len(stream.accepted.prompt_ids) if stream.accepted else 0
            outputs = [len(child.tokens) for child in stream.children]
            self._metrics.request(stream.metrics, prompt, outputs, self._streamed, min(stream.cached_tokens, prompt))
            self._metrics.parameters(self._params.n, self._params.width, stream.params.max_tokens or 0)


class _EarlyOpening:
    """Opens a stream whose requests have all been accepted and have said nothing for ``WAITING_S`` seconds."""

    def __init__(self, outlet: Sink, streams: Sequence[RequestStream]):
        self._outlet, self._streams = outlet, streams
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WAITING_S, self._look)

    def _look(self) -> None:
        if self._outlet.opened:
            return
        if all(stream.accepted for stream in self._streams):
            self._task = asyncio.create_task(self._outlet.open())
        else:
            self._timer = asyncio.get_running_loop().call_later(WAITING_S, self._look)

    async def close(self) -> None:
        """Wait until the headers have gone out, where that has begun; where it has not, they do not. Raises
        ConnectionError."""
        self._timer.cancel()
        if self._task is not None and not self._outlet.opened:
            self._task.cancel()
        elif self._task is not None:
            await self._task


class Gathered:
    """Events held back until one has ``interval`` tokens. The first and the last of each choice go at once."""

    def __init__(self, interval: int):
        self._interval = interval
        self._held: dict[int, list[StreamEvent]] = {}
        self._tokens: dict[int, int] = {}  # in what is held of each choice that has begun

    def ready(self, events: list[StreamEvent]) -> list[StreamEvent]:
        """Those that may go now, with what was held back of their choices."""
        out: list[StreamEvent] = []
        for event in events:
            index = event.index
            count = self._tokens.get(index, self._interval) + len(event.tokens)
            held = self._held.setdefault(index, [])
            held.append(event)
            if event.finish or count >= self._interval:
                out.append(_joined(self._held.pop(index)))
                count = 0
            self._tokens[index] = count
        return out


def _joined(events: list[StreamEvent]) -> StreamEvent:
    """Events of one choice as one; the last says whether and why it ended."""
    last = events[-1]
    return StreamEvent(
        last.index, "".join([each.text for each in events]), [token for each in events for token in each.tokens],
        last.finish, last.stop_reason, last.length, [entry for each in events for entry in each.logprobs],
    )  # fmt: skip


async def together(work: Sequence[Awaitable[T]]) -> list[T]:
    """Wait for all, and give what they return; the first failure cancels the others and is raised."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reason(finish: Finish) -> str:
    """finish_reason of a sequence that ended. Raises ApiError where it ended by a fault of ours."""
    reason = REASONS.get(finish)
    if reason is None:
        raise ApiError(500, "the model failed on this request.")
    return reason


def json_body(fields: dict[str, Any] | list[Any]) -> web.Response:
    """A 200 with JSON."""
    return web.Response(body=to_json(fields), content_type="application/json", charset="utf-8")


async def answer(choices: list[Ended], make: Callable[[], dict[str, Any]]) -> web.Response:
    """A 200 with what ``make`` makes of the choices: in a thread where they have so many logprobs that it takes long,
    for the loop has others to answer meanwhile."""
    streams = {id(choice.stream): choice.stream for choice in choices}.values()
    told = [each for choice in choices for each in choice.logprobs]
    told += [each for stream in streams for each in stream.prompt_logprobs or () if each is not None]
    if sum(len(each.ids) for each in told) < LARGE:
        return json_body(make())
    return await asyncio.to_thread(lambda: json_body(make()))
