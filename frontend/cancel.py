"""POST /v1/requests/{id}/cancel: ending a request from another connection, as vLLM has it.

A request is known by the id that its answer has, and by its X-Request-Id, to those with the same API key. What had been
generated is its answer, with the finish reason "abort". What this frontend does not run the others
on its port are asked to end.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from .auth import OWNER
from .calls import json_body
from .errors import ApiError
from .front import FRONT
from .parsing import Request

MAX_IDS = 1024
"""Ids of one call at most."""
_INNER = "/cancel"


class CancelRequest(Request, kw_only=True):
    """POST /v1/requests/cancel."""

    request_ids: list[str] | None = None


async def cancel(request: web.Request) -> web.Response:
    """End one request; 404 where none of this id is open."""
    id = request.match_info["id"]
    if not await _ended(request, [id]):
        raise ApiError(404, f"Request {id:.128} not found or already completed.")
    return json_body({"status": "cancelled", "request_id": id})


async def cancel_several(request: web.Request) -> web.Response:
    """End those of a list that are open; the answer names them."""
    front = request.app[FRONT]
    body = await front.read(request, CancelRequest)
    ids = body.request_ids or []
    if len(ids) > MAX_IDS:
        raise ApiError(400, f"request_ids holds {len(ids)} ids, over the limit of {MAX_IDS}.", "request_ids")
    return json_body({"status": "cancelled", "cancelled_request_ids": await _ended(request, ids)})


async def _ended(request: web.Request, ids: list[str]) -> list[str]:
    """End what is open by these ids, here or else in another frontend; the ids of what was."""
    front, owner = request.app[FRONT], request.get(OWNER, "")
    ended = {id for id in ids if front.calls.cancel(id, owner)}
    missing = sorted(set(ids) - ended)
    if missing and front.peers is not None:
        for told in await front.peers.ask_all("POST", _INNER, owner, missing):
            ended |= set(told)
    return [id for id in dict.fromkeys(ids) if id in ended]


async def cancel_here(request: web.Request) -> web.Response:
    """For another frontend: end those of a list that are open here; the answer is their ids."""
    ids = msgspec.json.decode(await request.read(), type=list[str])
    return json_body([id for id in ids if request.app[FRONT].calls.cancel(id, request[OWNER])])


ROUTES = [
    web.post("/v1/requests/cancel", cancel_several),
    web.post("/v1/requests/{id}/cancel", cancel),
    web.delete("/v1/requests/{id}", cancel),
]
INNER = [web.post(_INNER, cancel_here)]
"""What other frontends ask this one for."""
