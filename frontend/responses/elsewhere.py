"""Responses that another frontend on this port keeps: its name is in their ids, and it is asked for them."""

from __future__ import annotations

import functools
import re
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from ..auth import OWNER
from ..calls import json_body
from ..errors import ApiError, Handler, error_body
from ..front import FRONT, Front
from ..peers import Gone, body_of
from ..sse import Outlet
from .store import STORE, Stored

_ID = re.compile(r"resp_([0-9a-f]{8})[0-9a-f]{24}")
_KEPT, _ITEMS = "/kept/", "/items"


def _place(id: str, own: str) -> str | None:
    """The frontend that made a response's id; None for this one, and for what is no id of ours."""
    found = _ID.fullmatch(id)
    return found[1] if found is not None and found[1] != own else None


def _gone(id: str, param: str) -> ApiError:
    return ApiError(
        404, f"Response with id '{id[:80]}' not found: it was kept by a frontend process that is gone, and its memory "
        "with it; send the conversation itself.", param,
    )  # fmt: skip


def wherever(handler: Handler) -> Handler:
    """The handler of a response that is kept here, or in another frontend, which then answers instead."""

    @functools.wraps(handler)
    async def found(request: web.Request) -> web.StreamResponse:
        id = request.match_info["id"]
        place = _place(id, request.app[STORE].name)
        if place is None:
            return await handler(request)
        peers = request.app[FRONT].peers
        if peers is None:
            raise _gone(id, "response_id")
        path = request.path[request.path.rindex("/v1/responses/") :]
        try:
            async with peers.ask(place, request.method, path, request.get(OWNER, ""), request.query) as answer:
                return await _passed_on(request, answer)
        except Gone:
            raise _gone(id, "response_id") from None

    return found


async def _passed_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Another frontend's answer as this one's; events as they come."""
    if answer.content_type != "text/event-stream":
        kept = {name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers}
        return web.Response(
            status=answer.status, body=await body_of(answer), content_type=answer.content_type, charset="utf-8",
            headers=kept,
        )  # fmt: skip
    outlet = Outlet(request, request.app[FRONT].settings.stall_s)
    await outlet.open()
    try:
        cut = b""
        async for data in answer.content.iter_any():
            whole, end, cut = (cut + data).rpartition(b"\n\n")  # of an event that is cut off nothing is told
            outlet.write(whole + end)
            if outlet.behind:
                await outlet.catch_up()
    except aiohttp.ClientError:
        error = ApiError(503, "the frontend that ran this response is gone, and the response with it; ask again.")
        outlet.write(b"event: error\ndata: " + error_body(error) + b"\n\n")
    return await outlet.close()


async def stored_wherever(front: Front, own: str, id: str, owner: str) -> Stored | None:
    """A response to go on from that another frontend keeps; None where it would be this one. Raises ApiError."""
    place = _place(id, own)
    if place is None:
        return None
    try:
        if front.peers is None:
            raise Gone
        async with front.peers.ask(place, "GET", _KEPT + id, owner) as answer:
            body = await body_of(answer)
            if answer.status == 200:
                told = msgspec.json.decode(body)
                return Stored(owner, told["response"], told["items"])
            raise ApiError(answer.status, msgspec.json.decode(body)["error"]["message"], "previous_response_id")
    except Gone:
        raise _gone(id, "previous_response_id") from None


async def items_elsewhere(front: Front, ids: set[str], owner: str) -> dict[str, dict[str, Any]]:
    """Those of the items that any other frontend keeps for this owner."""
    found: dict[str, dict[str, Any]] = {}
    if ids and front.peers is not None:
        for told in await front.peers.ask_all("POST", _ITEMS, owner, sorted(ids)):
            found |= told
    return found


async def kept(request: web.Request) -> web.StreamResponse:
    """For another frontend: a response with the items that it was asked with."""
    stored = request.app[STORE].get(request.match_info["id"], request[OWNER])
    return json_body({"response": stored.response, "items": stored.items})


async def items(request: web.Request) -> web.StreamResponse:
    """For another frontend: those of the items with these ids that are kept here."""
    ids = msgspec.json.decode(await request.read(), type=set[str])
    return json_body(request.app[STORE].items(ids, request[OWNER]))


BETWEEN = [web.get(_KEPT + "{id}", kept), web.post(_ITEMS, items)]
