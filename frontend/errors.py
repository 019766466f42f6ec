"""OpenAI's error shape: ``{"error": {"message", "type", "param", "code"}}``, on HTTP and inside a stream."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from ..client.results import RequestError
from .request_id import id_of

log = logging.getLogger(__name__)

MAX_MESSAGE = 600
"""Characters of a message at most: messages quote what the client sent, and that can be megabytes."""

INTERNAL = "the server failed while answering this request; its log has the details."

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(RequestError):
    """An answer other than 200. ``param`` names the field at fault; ``retry_after`` is seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(status, message, param, retry_after)
        self.headers = headers or {}


def words_of(error: RequestError) -> str:
    """An error's message, of a length that can be told."""
    message = error.message if len(error.message) <= MAX_MESSAGE else error.message[:MAX_MESSAGE] + "..."
    return message.encode("utf-8", "replace").decode()  # a header's bytes may be no text


def error_body(error: RequestError) -> bytes:
    """The JSON of an error."""
    kind = _TYPES.get(error.status, "BadRequestError" if error.status < 500 else "InternalServerError")
    fields = {"message": words_of(error), "type": kind, "param": error.param, "code": error.status}
    return msgspec.json.encode({"error": fields})


def error_response(error: RequestError) -> web.Response:
    """The HTTP answer for an error."""
    headers = dict(getattr(error, "headers", {}))
    if error.retry_after is not None or error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or 1)))
    answer = web.Response(
        status=error.status, body=error_body(error), content_type="application/json", charset="utf-8", headers=headers
    )
    if headers.get("Connection") == "close":
        answer.force_close()  # the header alone only asks the client to
    return answer


def internal_error(error: Exception, request: web.BaseRequest | None = None) -> ApiError:
    """What a client is told of a fault of ours; the log has the rest."""
    about = None if request is None else {"request_id": id_of(request)}
    log.error("a request failed: %s", error, exc_info=error, extra=about)
    return ApiError(500, INTERNAL)


Shapes = dict[tuple[str, str], Callable[[RequestError], web.Response]]
SHAPES: web.AppKey[Shapes] = web.AppKey("shapes", dict)
"""How errors are told on the paths of other dialects than OpenAI's."""


NOTE: web.AppKey[Callable[[web.BaseRequest, int, str], None]] = web.AppKey("note")
"""Who is told of refusals, with their status and reason."""


@web.middleware
async def errors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every way in which a handler can fail, or a middleware before it, in the shape of the path's dialect."""
    resource = request.match_info.route.resource
    path = request.path.rstrip("/") or "/" if resource is None else resource.canonical
    told = request.app[SHAPES].get((request.method, path), error_response)
    try:
        return await handler(request)
    except (RequestError, web.HTTPException) as error:
        known = from_http(request, error) if isinstance(error, web.HTTPException) else error
        request.app[NOTE](request, known.status, known.message)
        return told(known)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:  # noqa: BLE001 - logged with its traceback, and the client told
        return told(internal_error(error, request))


def from_http(request: web.BaseRequest, error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals: unknown path, wrong method, body too large."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not allowed on {request.path}; use {allowed}."
        return ApiError(405, message, headers={"Allow": allowed})
    if error.status == 404:
        path = request.path or f"{request.method} {request.raw_path}".rstrip()  # CONNECT has no path
        return ApiError(404, f"there is no {path} here; GET /v1/models is a place to start.")
    if error.status == 417:
        return ApiError(417, f"Expect: {request.headers.get('Expect', '')} is not supported; leave it out.")
    return ApiError(error.status, error.reason or "request refused.")
