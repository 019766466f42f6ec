"""One HTTP request that generates: its prompts' streams joined, answered as one body or as a stream of events.

Choice ``prompt * n + child`` belongs to (prompt, child), as OpenAI numbers them. Whatever ends a call, its requests
are aborted on the way out; that does nothing to those that ended by themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ..client.stream import RequestError, RequestStream, StreamEvent
from ..proto.messages import Finish
from .errors import ApiError, error_body, internal_error
from .metrics import Metrics
from .sse import DONE, Chunks, Outlet, to_json, usage_of

REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}


@dataclass(slots=True)
class Choice:
    """One of the answers of a call, while it is streamed."""

    index: int
    prompt: int
    tokens: int = 0
    last: float | None = None  # when its last token came
    opened: bool = False


@dataclass(slots=True)
class Ended:
    """One of the answers of a call, complete."""

    index: int
    text: str
    reason: str
    stop: int | str | None


Batch = list[tuple[Choice, StreamEvent]]


class Call:
    """The streams of one HTTP request. ``prefix`` gives the text that ``echo`` puts before a prompt's choices."""

    def __init__(self, streams: list[RequestStream], n: int, metrics: Metrics, prefix: Any = None):
        self._streams, self._n, self._metrics = streams, n, metrics
        self._prefix = prefix
        self._choices = [
            [Choice(prompt * n + child, prompt) for child in range(n)] for prompt in range(len(streams))
        ]  # fmt: skip

    def abort(self) -> None:
        """End every request of this call that has not ended."""
        for stream in self._streams:
            stream.abort()

    # -- one body

    async def complete(self) -> tuple[list[Ended], dict[str, object]]:
        """All choices in order, and the usage. Raises RequestError; the first failure ends the whole call."""
        try:
            if len(self._streams) == 1:
                await self._streams[0].collect()
            else:
                await self._collect_all()
            choices = [self._ended(prompt, child) for prompt in range(len(self._streams)) for child in range(self._n)]
            self._count(streamed=False)
            return choices, self._usage()
        finally:
            self.abort()

    async def _collect_all(self) -> None:
        tasks = [asyncio.ensure_future(stream.collect()) for stream in self._streams]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, prompt: int, index: int) -> Ended:
        child = self._streams[prompt].children[index]
        text = "".join(child.parts)
        if self._prefix is not None:
            text = self._prefix(self._streams[prompt]) + text
        reason = _reason(child.finish)
        self._metrics.finished(reason)
        return Ended(prompt * self._n + index, text, reason, child.stop_reason)

    # -- a stream of events

    async def stream(
        self, request: web.Request, chunks: Chunks, include_usage: bool, continuous: bool, stall_s: float
    ) -> web.StreamResponse:
        """Answer with events. What fails before the first of them is an HTTP error, later an error event."""
        outlet: Outlet | None = None
        held: list[bytes] = []
        try:
            async with aclosing(self._batches()) as batches:
                async for batch in batches:
                    data = self._render(batch, chunks, continuous)
                    if outlet is None:
                        # A refusal is better told by the status: wait until every prompt has been accepted.
                        if any(stream.accepted is None for stream in self._streams):
                            held.append(data)
                            continue
                        outlet = await Outlet.open(request, stall_s)
                        data = b"".join([*held, data])
                    if data:
                        await outlet.send(data)
            if outlet is None:
                raise ApiError(500, "the request ended without an answer.")
            self._count(streamed=True)
            await outlet.send((chunks.usage(self._usage()) if include_usage else b"") + DONE)
        except ConnectionError:
            raise
        except Exception as error:
            if outlet is None:
                raise
            known = error if isinstance(error, RequestError) else internal_error(error)
            self._metrics.failed(known.status)
            await outlet.send(b"data: " + error_body(known) + b"\n\n" + DONE)
        finally:
            self.abort()
        return await outlet.close()

    def _render(self, batch: Batch, chunks: Chunks, continuous: bool) -> bytes:
        """The chunks of what has come, in order."""
        now = time.monotonic()
        parts: list[bytes] = []
        for choice, event in batch:
            if not choice.opened:
                choice.opened = True
                parts.append(chunks.opening(choice.index))
                if self._prefix is not None and (echo := self._prefix(self._streams[choice.prompt])):
                    parts.append(chunks.text(choice.index, echo))
            if count := len(event.tokens):
                if choice.last is not None:
                    self._metrics.inter_token.observe((now - choice.last) / count, count)
                choice.last = now
                choice.tokens += count
            usage = self._usage_of(choice) if continuous else None
            if event.finish:
                reason = _reason(event.finish)
                self._metrics.finished(reason)
                parts.append(chunks.final(choice.index, event.text, reason, event.stop_reason, usage))
            elif event.text:
                parts.append(chunks.text(choice.index, event.text, usage))
        return b"".join(parts)

    async def _batches(self) -> AsyncGenerator[Batch]:
        """All that is ready, each time something is. Raises RequestError of the first stream that fails."""
        if len(self._streams) == 1:
            stream, choices = self._streams[0], self._choices[0]
            async for event in stream:
                yield [(choices[event.index], event), *((choices[e.index], e) for e in stream.get_ready())]
            return
        inbox: Batch = []
        wake = asyncio.Event()
        tasks = [
            asyncio.ensure_future(self._pump(stream, self._choices[prompt], inbox, wake))
            for prompt, stream in enumerate(self._streams)
        ]
        try:
            left = set(tasks)
            while left or inbox:
                if not inbox:
                    await wake.wait()
                wake.clear()
                for task in [task for task in left if task.done()]:
                    left.discard(task)
                    task.result()
                if inbox:
                    batch = inbox[:]
                    inbox.clear()
                    yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    async def _pump(stream: RequestStream, choices: list[Choice], inbox: Batch, wake: asyncio.Event) -> None:
        task = asyncio.current_task()
        if task is not None:
            task.add_done_callback(lambda _: wake.set())
        async for event in stream:
            inbox.append((choices[event.index], event))
            inbox.extend((choices[e.index], e) for e in stream.get_ready())
            wake.set()

    # -- counts

    def _usage_of(self, choice: Choice) -> dict[str, object]:
        accepted = self._streams[choice.prompt].accepted
        return usage_of(len(accepted.prompt_ids) if accepted else 0, choice.tokens)

    def _usage(self) -> dict[str, object]:
        prompt = sum(len(stream.accepted.prompt_ids) for stream in self._streams if stream.accepted)
        output = sum(len(child.tokens) for stream in self._streams for child in stream.children)
        return usage_of(prompt, output, sum(stream.cached_tokens for stream in self._streams))

    def _count(self, streamed: bool) -> None:
        for stream in self._streams:
            prompt = len(stream.accepted.prompt_ids) if stream.accepted else 0
            self._metrics.request(stream.metrics, prompt, [len(c.tokens) for c in stream.children], streamed)


def _reason(finish: Finish) -> str:
    """finish_reason of a sequence that ended. Raises ApiError where it ended by a fault of ours."""
    reason = REASONS.get(finish)
    if reason is None:
        raise ApiError(500, "the model failed on this request.")
    return reason


def json_body(fields: dict[str, Any]) -> web.Response:
    """A 200 with JSON."""
    return web.Response(body=to_json(fields), content_type="application/json", charset="utf-8")
