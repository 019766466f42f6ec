"""What is wrong below the routes, in OpenAI's shape too: aiohttp answers it with plain text and logs a traceback."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from .errors import ApiError, error_response, from_http, internal_error

log = logging.getLogger(__name__)

_KINDS = {"method": "the method", "content-length": "Content-Length", "chunk": "a chunk", "'host'": "the Host header"}


class Runner(web.AppRunner):
    """An AppRunner whose connections are ``_Connection``."""

    __slots__ = ()

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        answer = made.request_handler

        async def handler(request: Any) -> web.StreamResponse:
            try:
                return await answer(request)
            except web.HTTPException as error:  # of aiohttp, before any middleware runs: an unknown Expect
                return error_response(from_http(request, error))

        return _Server(
            handler, request_factory=made.request_factory, handler_cancellation=made.handler_cancellation,
            loop=made._loop, **made._kwargs,
        )  # fmt: skip


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    __slots__ = ()

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
            error = internal_error(exc)
        else:
            error = _refusal(status, exc, message or "")
            log.info("refused a connection's bytes: %s", error.message)
        answer = error_response(error)
        answer.force_close()
        return answer


def _refusal(status: int, exc: BaseException | None, message: str) -> ApiError:
    """The parser's own words quote its buffers; only their kind is told."""
    words = message.split("\n")[0].lower()
    if isinstance(exc, LineTooLong):
        line = exc.args[0] if exc.args else b""  # what was too long, or words about it
        in_path = "header" not in line.lower() if isinstance(line, str) else b"/" in line[:8]
        if in_path:
            return ApiError(414, "the request line is too long; put less into the URL.")
        return ApiError(431, "a header is too long; send less in it.")
    if "too many headers" in words:
        return ApiError(431, "there are too many headers; send fewer.")
    if "https traffic" in words:
        return ApiError(400, "this port speaks HTTP and not HTTPS; use http://, or a proxy that ends TLS.")
    what = next((name for word, name in _KINDS.items() if word in words), "the request")
    return ApiError(status, f"this is not valid HTTP: {what} is wrong or missing.")
