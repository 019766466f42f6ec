"""What is wrong below the routes, in OpenAI's shape too: aiohttp answers it with plain text and logs a traceback."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
from contextlib import suppress
from functools import partial
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler, _ErrInfo
from yarl import URL

from .errors import ApiError, error_body, error_response, from_http, internal_error

log = logging.getLogger(__name__)

_KINDS = {"method": "the method", "content-length": "Content-Length", "chunk": "a chunk", "'host'": "the Host header"}


class Runner(web.AppRunner):
    """An AppRunner whose connections are ``_Connection``, so many from one address at a time. A request for a path
    below ``root_path`` is one for the rest of that path: what a proxy has not taken off. A client that reads nothing of
    an answer for ``stall_s`` seconds is cut off."""

    __slots__ = ("_most", "_root", "_stall_s")

    def __init__(
        self, app: web.Application, root_path: str | None = None, max_connections_per_address: int | None = None,
        stall_s: float = 30.0, **options: Any,
    ):  # fmt: skip
        super().__init__(app, **options)
        self._root, self._most, self._stall_s = root_path, max_connections_per_address, stall_s

    @property
    def requests(self) -> int:
        """How many requests have come."""
        return self.server.requests_count if self.server is not None else 0

    async def emptied(self) -> None:
        """Wait until no connection is open."""
        if isinstance(self.server, _Server):
            await self.server.emptied()

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        answer = made.request_handler

        async def handler(request: Any) -> web.StreamResponse:
            try:
                return await answer(request)
            except web.HTTPException as error:  # of aiohttp, before any middleware runs: an unknown Expect
                return error_response(from_http(request, error))

        factory = made.request_factory if self._root is None else partial(_below, self._root, made.request_factory)
        return _Server(
            self._most, self._stall_s, handler, request_factory=factory, handler_cancellation=made.handler_cancellation,
            loop=made._loop, **made._kwargs,
        )  # fmt: skip


def close_after(request: web.Request) -> None:
    """Have the connection be closed after this answer, which says so."""
    request._message = request._message._replace(should_close=True)


def _below(root: str, factory: Any, message: Any, *rest: Any) -> web.Request:
    """The request that ``factory`` makes, with the root taken off its path."""
    path = message.path[len(root) :] if message.path.startswith(root) else ""
    if path[:1] in ("/", "?") or message.path == root:
        path = path if path.startswith("/") else "/" + path
        bare, _, query = path.partition("?")
        message = message._replace(path=path, url=URL.build(path=bare, query_string=query, encoded=True))
    return factory(message, *rest)


class _Server(web.Server):
    def __init__(self, most: int | None, stall_s: float, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.most, self.stall_s, self._open, self._emptied = most, stall_s, 0, asyncio.Event()
        self.counts: dict[str, int] = {}  # connections that are open, by address; kept where there is a limit

    def entered(self) -> None:
        """A connection has been opened."""
        self._open += 1
        self._emptied.clear()

    def left(self) -> None:
        """A connection is gone."""
        self._open -= 1
        if not self._open:
            self._emptied.set()

    async def emptied(self) -> None:
        """Wait until no connection is open."""
        if self._open:
            await self._emptied.wait()

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    __slots__ = ("_address", "_house", "_unread")

    def __init__(self, house: _Server, **options: Any):
        super().__init__(house, **options)
        self._house, self._address = house, ""
        self._unread: asyncio.TimerHandle | None = None  # when to look whether the client reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer one too many of an address at once, and let it go."""
        super().connection_made(transport)
        self._house.entered()
        if (most := self._house.most) is None:
            return
        peer, counts = transport.get_extra_info("peername"), self._house.counts
        if not isinstance(peer, tuple):  # of a Unix socket, who cannot be told apart
            return
        self._address = address = peer[0]
        counts[address] = count = counts.get(address, 0) + 1
        if count > most:
            log.info("refused a connection of %s, which has %d open", address, most)
            cast(asyncio.Transport, transport).write(_one_too_many(address, most))  # uvloop's is no subclass
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The address may open another one."""
        super().connection_lost(exc)
        self._look_no_more()
        self._house.left()
        if self._address:
            counts = self._house.counts
            counts[self._address] -= 1
            if not counts[self._address]:
                del counts[self._address]
            self._address = ""

    def pause_writing(self) -> None:
        """More is unread than a connection's buffer should hold: an answer of any length is kept until it is read."""
        super().pause_writing()
        self._look_later()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._look_no_more()

    def _look_later(self) -> None:
        if (transport := self.transport) is not None:
            unread = _unread(transport)
            self._unread = self._loop.call_later(self._house.stall_s, self._look, unread)

    def _look_no_more(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _look(self, before: int) -> None:
        """Cut off a client that has read nothing since there were ``before`` bytes. A slow one may take its time."""
        if (transport := self.transport) is None:
            return
        if (unread := _unread(transport)) >= before:
            log.info("cut off %s, which read nothing of %d bytes for %g s", self._peer(), unread, self._house.stall_s)
            transport.abort()
        else:
            self._look_later()

    def _peer(self) -> str:
        peer = self.transport.get_extra_info("peername") if self.transport is not None else None
        return peer[0] if isinstance(peer, tuple) else "a socket"

    @property
    def writing_paused(self) -> bool:
        """True while more is unread than a connection's buffer should hold; aiohttp 3.10 has no name for it."""
        return self._paused

    def data_received(self, data: bytes) -> None:
        """Bytes that are no HTTP end the body they stand in at once: aiohttp lets its reader wait for the rest."""
        super().data_received(data)
        if not self._messages or not isinstance(self._messages[-1][0], _ErrInfo):
            return
        if len(self._messages) > 1:
            body = self._messages[-2][1]
        elif self._current_request is not None:
            body = self._current_request.content
        else:
            return
        if not body.is_eof():
            error = _refusal(400, None, self._messages[-1][0].message)
            error.headers["Connection"] = "close"
            body.set_exception(error)
            body.feed_eof()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what is no HTTP, or to a fault outside of the handlers; the connection is closed after it."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun and cannot become another")
        if isinstance(exc, UnicodeEncodeError) and request.headers.get("Expect"):
            error = from_http(request, web.HTTPExpectationFailed())  # aiohttp quoted it, and its bytes are no text
        elif status >= 500 and isinstance(exc, Exception):
            error = internal_error(exc, request)
        else:
            error = _refusal(status, exc, message or "")
            log.info("refused a connection's bytes: %s", error.message)
        answer = error_response(error)
        answer.force_close()
        return answer


def _unread(transport: asyncio.Transport) -> int:
    """Bytes that the other side has not taken, here and in the system's own buffer: that takes more from here only once
    a third of it is empty, which a slow client may need minutes for."""
    taken = 0
    with suppress(OSError, AttributeError):  # a system that does not tell, or a connection that has no socket
        socket = transport.get_extra_info("socket")
        taken = int.from_bytes(fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return transport.get_write_buffer_size() + taken


def _one_too_many(address: str, most: int) -> bytes:
    """A whole answer, for a connection on which nothing has been read."""
    body = error_body(
        ApiError(
            429, f"{address} has {most} connections open, which is the limit; use them again, or raise "
            "--max-connections-per-address.",
        )
    )  # fmt: skip
    head = "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json; charset=utf-8\r\nRetry-After: 1\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def _refusal(status: int, exc: BaseException | None, message: str) -> ApiError:
    """The parser's own words quote its buffers; only their kind is told."""
    words = message.split("\n")[0].lower()
    if isinstance(exc, LineTooLong):
        limit = exc.args[1] if len(exc.args) > 1 else "its"
        line = exc.args[0] if exc.args else b""  # what was too long, or words about it
        in_path = "header" not in line.lower() if isinstance(line, str) else b"/" in line[:8]
        if in_path:
            return ApiError(414, f"the request line is over the limit of {limit} bytes; put less into the URL.")
        return ApiError(
            431, f"a header is over the limit of {limit} bytes; send less in it, or raise --max-header-bytes."
        )
    if "too many headers" in words:
        return ApiError(431, "there are too many headers; send fewer.")
    if "https traffic" in words:
        return ApiError(400, "this port speaks HTTP and not HTTPS; use http://, or a proxy that ends TLS.")
    what = next((name for word, name in _KINDS.items() if word in words), "the request")
    return ApiError(status, f"this is not valid HTTP: {what} is wrong or missing.")
