"""One request answered without HTTP: the same handlers, given a request that came over no connection.

What is told of load or of processes that are away (429, 503) is for clients that ask again, and so it is asked again.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.http import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from ...client.results import RequestError
from ...client.traced import CALLER, Caller
from ..errors import ApiError, error_body, from_http, internal_error
from ..front import BATCHED, FRONT
from ..gate import GATE

AGAIN_S = 1.0
"""When to ask again where the refusal does not say."""


class LocalRequest(web.Request):
    """A request with a JSON body, from inside this process."""

    def __init__(self, path: str, body: bytes):
        headers = CIMultiDict(
            {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))}
        )
        raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
        message = RawRequestMessage(
            "POST", path, HttpVersion11, CIMultiDictProxy(headers), raw, False, None, False, False, URL(path)
        )
        transport = SimpleNamespace(get_extra_info=lambda name, default=None: default, is_closing=lambda: False)
        protocol: Any = SimpleNamespace(transport=transport, ssl_context=None, peername=None, sockname=None)
        task: Any = asyncio.current_task()
        nothing: Any = None
        super().__init__(message, EMPTY_PAYLOAD, protocol, nothing, task, asyncio.get_running_loop())
        self._read_bytes = body  # what read() gives


async def answer_once(app: web.Application, path: str, body: bytes, owner: str, batched: bool) -> tuple[int, bytes]:
    """The status and the JSON of one request, whatever it is. Raises RequestError where it should be asked again."""
    request = LocalRequest(path, body)
    match = await app.router.resolve(request)
    match.add_app(app)
    request._match_info = match  # type: ignore[assignment]
    request[BATCHED] = batched
    try:
        app[GATE].adopt(request, owner)
        refuse_pieces(body)
        response = await match.handler(request)
        if isinstance(response, web.Response) and response.content_type != "application/json":
            raise no_line(response.content_type)
    except RequestError as error:
        if error.status in (429, 503):
            raise
        known: RequestError = error
    except web.HTTPException as error:
        known = from_http(request, error)
    except Exception as error:  # noqa: BLE001 - logged with its traceback, and told in the answer
        known = internal_error(error, request)
    else:
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            return response.status, response.body
        known = internal_error(TypeError(f"{path} answered with {type(response).__name__}"), request)
    finally:
        app[FRONT].close(request)
    app[FRONT].metrics.failed(known.status)
    return known.status, error_body(known)


async def answer(
    app: web.Application, path: str, body: bytes, owner: str = "", batched: bool = False,
    places: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008 - it holds nothing
) -> tuple[int, bytes]:  # fmt: skip
    """The status and the JSON of one request, asked again as long as it is refused for load. It has one of ``places``
    while it is asked, and none while it waits: a key that has used up its tokens keeps no other one waiting."""
    CALLER.set(Caller())  # and not who had the batches begin
    while True:
        try:
            async with places:
                return await answer_once(app, path, body, owner, batched)
        except RequestError as error:
            await asyncio.sleep(error.retry_after or AGAIN_S)


def no_line(kind: str, status: int = 400) -> ApiError:
    """What is told in place of an answer that cannot stand in a line of the output; ``kind`` is its content type."""
    return ApiError(status, f"an answer of a batch is a line of JSON, and this is {kind}.")


def refuse_pieces(body: bytes) -> None:
    """Raises ApiError 400 where the answer would not come whole."""
    try:
        asked = msgspec.json.decode(body, type=_Pieces)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the handler says what is wrong
    for name in _Pieces.__struct_fields__:
        if getattr(asked, name):
            raise ApiError(400, f"{name} must be false in a batch: an answer is one line.", name)


class _Pieces(msgspec.Struct):
    stream: Any = None
    background: Any = None
