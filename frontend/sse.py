"""Server-sent events: chunks made from byte templates, and a connection that is cut when its client stops reading.

A chunk is the same for every token but for the text, so it is assembled from bytes made once for each choice and the
JSON of the text. All that is ready for a connection goes out in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from aiohttp import HttpVersion11, web

from .extras import ChatLogprobs, CompletionLogprobs

DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

KEEP_ALIVE = web.AppKey("keep_alive", float)
"""Seconds after which a silent stream is sent ``COMMENT``."""
COMMENT = b": keep-alive\n\n"

to_json = msgspec.json.Encoder().encode


def usage_of(prompt: int, completion: int, cached: int | None = None) -> dict[str, object]:
    """OpenAI's usage object; counts are tokens."""
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


class Chunks:
    """The chunks of one streamed answer. Text arrives as it is; everything else is ready-made bytes.

    ``rich`` makes the chunks of requests that asked for more than text, from objects. ``usage_null`` puts
    ``"usage": null`` into each chunk, as OpenAI does where a usage chunk will follow.
    """

    kind = ""
    logprobs: type[ChatLogprobs] | type[CompletionLogprobs]
    before_text = b""  # of a choice: what stands before its text, after it, and after that while the choice goes on
    after_text = b""
    going_on = b""

    def __init__(self, id: str, created: int, model: str, usage_null: bool):
        self._start = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            to_json(id), self.kind.encode(), created, to_json(model),
        )  # fmt: skip
        self._end = b'],"usage":null}\n\n' if usage_null else b"]}\n\n"
        self._going_on = self.after_text + self.going_on
        self._tail = self._going_on + self._end
        self._heads: dict[int, bytes] = {}

    def _head(self, index: int) -> bytes:
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._start + b'{"index":%d,' % index + self.before_text
        return head

    def text(self, index: int, text: str, usage: dict[str, object] | None = None) -> bytes:
        """New text of a choice that goes on."""
        head = self._heads.get(index) or self._head(index)
        if usage is None:
            return head + to_json(text) + self._tail
        return head + to_json(text) + self._going_on + self._with_usage(usage)

    def opening(self, index: int, prompt_ids: list[int] | None = None, usage: dict[str, object] | None = None) -> bytes:
        """What comes before a choice's first text; ``prompt_ids`` where they are wanted."""
        return b""

    def of_prompt(self, ids: list[int]) -> dict[str, Any]:
        """What a choice's first text tells of the prompt, where ``opening`` has not told its ids."""
        return {}

    def final(
        self, index: int, text: str, reason: str, stop: int | str | None, usage: dict[str, object] | None = None
    ) -> bytes:
        """The end of a choice, with the last of its text."""
        end = b',"logprobs":null,"finish_reason":"%b","stop_reason":%b}' % (reason.encode(), to_json(stop))
        return self._head(index) + to_json(text) + self.after_text + end + self._with_usage(usage)

    def rich(
        self, index: int, text: str, more: dict[str, Any], reason: str | None = None, stop: int | str | None = None,
        usage: dict[str, object] | None = None,
    ) -> bytes:  # fmt: skip
        """Text with ``more`` fields of the choice (logprobs, token ids); with a reason, the choice's end."""
        raise NotImplementedError

    def _choice(self, choice: dict[str, Any], usage: dict[str, object] | None = None) -> bytes:
        return self._start + to_json(choice) + self._with_usage(usage)

    def usage(self, usage: dict[str, object]) -> bytes:
        """The chunk with no choices that carries the usage of the whole request."""
        return self._start + self._with_usage(usage)

    def _with_usage(self, usage: dict[str, object] | None) -> bytes:
        return self._end if usage is None else b'],"usage":%b}\n\n' % to_json(usage)


class CompletionChunks(Chunks):
    """Chunks of POST /v1/completions."""

    kind = "text_completion"
    logprobs = CompletionLogprobs
    before_text = b'"text":'
    going_on = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def of_prompt(self, ids: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": ids}

    def rich(
        self, index: int, text: str, more: dict[str, Any], reason: str | None = None, stop: int | str | None = None,
        usage: dict[str, object] | None = None,
    ) -> bytes:  # fmt: skip
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": stop, **more}
        return self._choice(choice, usage)


class ChatChunks(Chunks):
    """Chunks of POST /v1/chat/completions."""

    kind = "chat.completion.chunk"
    logprobs = ChatLogprobs
    role = "assistant"
    _prompt_told = False
    before_text = b'"delta":{"content":'
    after_text = b"}"
    going_on = b',"logprobs":null,"finish_reason":null}'

    def opening(self, index: int, prompt_ids: list[int] | None = None, usage: dict[str, object] | None = None) -> bytes:
        end = self._with_usage(usage)
        delta = b'{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}' % (
            index, to_json(self.role),
        )  # fmt: skip
        if prompt_ids is None or self._prompt_told:
            return self._start + delta + end
        self._prompt_told = True
        return self._start + delta + b'],"prompt_token_ids":' + to_json(prompt_ids) + end[1:]

    def rich(
        self, index: int, text: str, more: dict[str, Any], reason: str | None = None, stop: int | str | None = None,
        usage: dict[str, object] | None = None,
    ) -> bytes:  # fmt: skip
        return self.delta(index, {"content": text}, more, reason, stop, usage)

    def delta(
        self, index: int, delta: dict[str, Any], more: dict[str, Any], reason: str | None = None,
        stop: int | str | None = None, usage: dict[str, object] | None = None,
    ) -> bytes:  # fmt: skip
        """A chunk of any delta, as ``rich`` makes it of text."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return self._choice(choice if reason is None else {**choice, "stop_reason": stop}, usage)


class Sink(Protocol):
    """Where the events of a call go: to a client, or where they are kept for one."""

    opened: bool

    @property
    def behind(self) -> bool:
        """True while it would hold too much."""

    def write(self, data: bytes) -> None:
        """Take events."""

    async def open(self) -> None:
        """Every prompt has been accepted."""

    async def catch_up(self) -> None:
        """Wait until it is no longer behind."""


class Outlet:
    """A stream to one client. What is written before ``open`` is held; ``behind`` says that the client is slow.

    A client that reads nothing for ``stall_s`` seconds is cut off, so what waits for it stays bounded.
    """

    def __init__(self, request: web.Request, stall_s: float, headers: Mapping[str, str] = HEADERS):
        self._request, self._stall_s = request, stall_s
        self._protocol = request.protocol
        self._chunked = request.version >= HttpVersion11
        self._response = web.StreamResponse(headers=headers)
        self._held: list[bytes] = []
        self.opened = False
        self._prepared = self._closed = False

    async def open(self) -> None:
        """Send status 200, the headers and what is held; nothing where that has begun."""
        if self.opened:
            return
        self.opened = True
        if self._chunked:
            self._response.enable_chunked_encoding()
        await self._response.prepare(self._request)
        self._prepared = True
        held, self._held = b"".join(self._held), []
        if held:
            self.write(held)
        if (period := self._request.app.get(KEEP_ALIVE)) and self._response.content_type == "text/event-stream":
            self._keep_alive(period)

    def _keep_alive(self, period: float) -> None:
        """Write a comment whenever nothing else has been written for ``period`` seconds, while the client is there."""
        loop, write = asyncio.get_running_loop(), self.write
        last = loop.time()

        def noted(data: bytes) -> None:
            nonlocal last
            last = loop.time()
            write(data)

        def look() -> None:
            transport = self._protocol.transport
            if self._closed or transport is None or transport.is_closing():
                return
            if loop.time() - last >= period and not self.behind:
                noted(COMMENT)
            loop.call_at(last + period if last + period > loop.time() else loop.time() + period, look)

        self.write = noted  # type: ignore[method-assign]
        loop.call_later(period, look)

    def write(self, data: bytes) -> None:
        """One write, whatever waits. Raises ConnectionError where the client is gone.

        The chunk is framed here, past aiohttp's own writer, which costs twice as much and would wait without a limit.
        """
        if not self._prepared:
            self._held.append(data)
            return
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    @property
    def behind(self) -> bool:
        """True while more is unread than a connection's buffer should hold."""
        return self._protocol.writing_paused

    async def catch_up(self) -> None:
        """Wait until the client has read. Raises ConnectionError where it was cut off."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._request.writer.drain()
        except TimeoutError:
            if self._protocol.transport is not None:
                self._protocol.transport.abort()
            raise ConnectionResetError(f"the client read nothing for {self._stall_s:g} s and was cut off") from None

    async def close(self) -> web.StreamResponse:
        """The end of the body."""
        self._closed = True
        if self.behind:
            await self.catch_up()
        await self._response.write_eof()
        return self._response
