"""The routes of the Responses API, with functions, thoughts, streams, what was said before, and what runs on unwatched.

A response that is stored is kept in this process, within bounds, for whoever has the same key: ``previous_response_id``
goes on from it. Other frontends on the same port ask this one (``elsewhere.py``); after a restart nobody knows it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from ...client.results import RequestError
from ..auth import OWNER
from ..calls import json_body
from ..chat import begun
from ..errors import ApiError, error_body
from ..front import FRONT, Front
from ..sse import ChatChunks, Outlet, to_json
from .call import ResponseCall, Silent
from .elsewhere import BETWEEN, items_elsewhere, stored_wherever, wherever
from .items import new_id
from .request import ResponsesRequest, items_of
from .store import RUNNING, STORE, Journal, Store, Stored

MAX_LISTED = 100
"""Items in one answer of the list of a response's input."""

_TOO_LONG = ("input_text", "input_tokens")
"""What is at fault where a prompt is over the context's length."""


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer an input, or go on from a response that was stored."""
    front, store, owner = request.app[FRONT], request.app[STORE], request.get(OWNER, "")
    asked = await front.read(request, ResponsesRequest)
    response = {
        "id": store.new_id(), "object": "response", "created_at": int(time.time()),
        "model": await front.find_model(request, asked.model),
        "status": "queued" if asked.background else "in_progress",
        "output": [], "error": None, "incomplete_details": None, "usage": None, **asked.echoed(),
    }  # fmt: skip
    front.check_generates("Responses")
    own = await _resolved(asked, front, store, owner)
    items = [*await _before(asked, front, store, owner), *_named(own)]
    call = await _call(request, front, asked, items, response)
    stored = Stored(owner, response, items)
    if asked.store is not False:
        call.keep = lambda: store.put(stored) if not stored.journal or store.holds(stored) else None
    if asked.background:
        return await _in_background(request, front, call, stored, bool(asked.stream))
    if asked.stream:
        return await call.stream(request, ChatChunks("", 0, "", False), front.settings.stall_s)
    return json_body(await call.whole())


async def _before(asked: ResponsesRequest, front: Front, store: Store, owner: str) -> list[dict[str, Any]]:
    """The items of the turns that the request goes on from. Raises ApiError."""
    if not asked.previous_response_id:
        return []
    id = asked.previous_response_id
    stored = await stored_wherever(front, store.name, id, owner) or store.get(id, owner)
    if (status := stored.response["status"]) not in ("completed", "incomplete"):
        raise ApiError(
            400, f"previous_response_id names a response that is {status}; only one that has completed can be gone on "
            "from.", "previous_response_id",
        )  # fmt: skip
    return [*stored.items, *stored.response["output"]]


async def _resolved(asked: ResponsesRequest, front: Front, store: Store, owner: str) -> list[dict[str, Any]]:
    """The request's own items, those that it refers to by id in full; these are no more bytes in all than a body may
    have, for one may be referred to often. Raises ApiError."""
    items, size, most = items_of(asked.input), 0, front.settings.max_request_bytes
    ids = {str(item.get("id")) for item in items if item["type"] == "item_reference"}
    kept = store.items(ids, owner) if ids else {}
    kept |= await items_elsewhere(front, ids - kept.keys(), owner)
    for n, item in enumerate(items):
        if item["type"] == "item_reference":
            found = kept.get(str(item.get("id")))
            if found is None:
                raise ApiError(
                    400, f"input[{n}]: item with id {item.get('id')!r:.80} not found; it may have been forgotten.",
                    "input",
                )  # fmt: skip
            size += len(to_json(found))
            if size > most:
                raise ApiError(
                    400, f"input refers to items of more than {most} bytes; refer to fewer, or start the server with a "
                    "larger --max-request-bytes.", "input",
                )  # fmt: skip
            items[n] = found
    return items


def _named(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = {"message": "msg", "reasoning": "rs"}
    return [item if "id" in item else {**item, "id": new_id(kinds.get(str(item["type"]), "fc"))} for item in items]


async def _call(
    request: web.Request, front: Front, asked: ResponsesRequest, items: list[dict[str, Any]], response: dict[str, Any]
) -> ResponseCall:
    """The call of a request, submitted. With ``truncation`` auto the oldest items are left out until the rest fits."""
    while True:
        body = asked.chat(items)
        streams, params, reading = await begun(request, front, body)
        call = ResponseCall(reading, asked.custom, response, streams, body, params, front.metrics)
        if asked.truncation != "auto" and not asked.background:
            return call
        try:
            await streams[0].wait_accepted()
            return call
        except RequestError as error:
            fewer = _shortened(items) if asked.truncation == "auto" and error.param in _TOO_LONG else items
            if len(fewer) == len(items):
                raise body.own_words(error) from error
            items = fewer
        except asyncio.CancelledError:
            call.release()
            raise


def _shortened(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the oldest quarter of what is no instruction, up to the user's next message; the last item stays."""
    told = [item for item in items if item.get("role") in ("system", "developer")]
    rest = [item for item in items if item.get("role") not in ("system", "developer")]
    first = max(1, len(rest) // 4)
    while first < len(rest) - 1 and rest[first].get("role") != "user":
        first += 1
    return [*told, *rest[min(first, len(rest) - 1) :]]


# ---------------------------------------------------------------- in the background


async def _in_background(
    request: web.Request, front: Front, call: ResponseCall, stored: Stored, stream: bool
) -> web.StreamResponse:
    """Answer at once, or with the events; what the client does then does not matter to the call."""
    stored.abort = call.cancel
    try:
        call.journal = journal = request.app[STORE].begin(stored)
    except ApiError:
        call.abort()
        raise
    call.begin()
    answer = None if stream else json_body(stored.response)
    front.enter()
    task = asyncio.create_task(call.tell(Silent()))
    stored.task = task

    def ended(_: asyncio.Task[None]) -> None:
        front.leave()
        journal.end()
        stored.task = None

    task.add_done_callback(ended)
    return answer or await _follow(request, journal, -1)


async def _follow(request: web.Request, journal: Journal, after: int) -> web.StreamResponse:
    """The events after number ``after``, those that are still to come too."""
    journal.check(after)
    outlet = Outlet(request, request.app[FRONT].settings.stall_s)
    await outlet.open()
    try:
        async for data in journal.after(after):
            outlet.write(data)
            if outlet.behind:
                await outlet.catch_up()
    except ApiError as error:  # it read too slowly
        outlet.write(b"event: error\ndata: " + error_body(error) + b"\n\n")
    return await outlet.close()


# ---------------------------------------------------------------- what was stored


def _found(request: web.Request) -> Stored:
    return request.app[STORE].get(request.match_info["id"], request.get(OWNER, ""))


async def get_response(request: web.Request) -> web.StreamResponse:
    """A response that was stored; with ``stream=true`` the events of one in the background."""
    stored = _found(request)
    if request.query.get("stream", "false").lower() not in ("true", "1"):
        return json_body(stored.response)
    if stored.journal is None:
        raise ApiError(400, "only a response that was made with background=true can be streamed again.", "stream")
    return await _follow(request, stored.journal, _number(request, "starting_after", -1))


async def cancel_response(request: web.Request) -> web.StreamResponse:
    """End a response that runs in the background; one that has ended stays as it is."""
    stored = _found(request)
    if stored.abort is None:
        raise ApiError(400, "Cannot cancel a synchronous response: it was not made with background=true.")
    stored.abort()
    return json_body(stored.response)


async def delete_response(request: web.Request) -> web.StreamResponse:
    """Forget a response."""
    id = request.match_info["id"]
    request.app[STORE].drop(id, request.get(OWNER, ""))
    return json_body({"id": id, "object": "response.deleted", "deleted": True})


async def input_items(request: web.Request) -> web.StreamResponse:
    """What a response was asked with, earlier turns included: the newest first, or with ``order=asc`` the oldest."""
    items = [_listed(item) for item in _found(request).items]
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order!r:.80}.", "order")
    if order == "desc":
        items.reverse()
    limit = _number(request, "limit", 20)
    if not 1 <= limit <= MAX_LISTED:
        raise ApiError(400, f"limit must be in [1, {MAX_LISTED}], got {limit}.", "limit")
    ids = [item["id"] for item in items]
    if (after := request.query.get("after")) is not None:
        if after not in ids:
            raise ApiError(400, f"after names no item of this response: {after!r:.80}.", "after")
        items = items[ids.index(after) + 1 :]
    shown = items[:limit]
    return json_body({
        "object": "list", "data": shown, "has_more": len(items) > limit,
        "first_id": shown[0]["id"] if shown else "", "last_id": shown[-1]["id"] if shown else "",
    })  # fmt: skip


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """An item whose content is a list of parts, as clients expect it."""
    content = item.get("content")
    if not isinstance(content, str):
        return item
    part: dict[str, Any] = {"type": "input_text", "text": content}
    if item.get("role") == "assistant":
        part = {"type": "output_text", "text": content, "annotations": []}
    return {"status": "completed", **item, "content": [part]}


async def count_input(request: web.Request) -> web.StreamResponse:
    """How many tokens a request's prompt has. It is let in to be rendered, and withdrawn at once."""
    front, store, owner = request.app[FRONT], request.app[STORE], request.get(OWNER, "")
    asked = await front.read(request, ResponsesRequest)
    await front.find_model(request, asked.model)
    front.check_generates("Responses")
    asked.background, asked.max_output_tokens = True, 1
    items = [*await _before(asked, front, store, owner), *await _resolved(asked, front, store, owner)]
    call = await _call(request, front, asked, items, {"status": RUNNING[0]})
    try:
        return json_body({"object": "response.input_tokens", "input_tokens": call.prompt_tokens})
    finally:
        call.abort()


def _number(request: web.Request, name: str, usual: int) -> int:
    text = request.query.get(name)
    if text is None:
        return usual
    try:
        return int(text)
    except ValueError:
        raise ApiError(400, f"{name} must be an integer, got {text!r:.80}.", name) from None


_KEPT = (
    (web.get, "/v1/responses/{id}", get_response),
    (web.delete, "/v1/responses/{id}", delete_response),
    (web.post, "/v1/responses/{id}/cancel", cancel_response),
    (web.get, "/v1/responses/{id}/input_items", input_items),
)

ROUTES: list[web.RouteDef] = [
    web.post("/v1/responses", responses),
    web.post("/v1/responses/input_tokens", count_input),
    *[of(path, wherever(handler)) for of, path, handler in _KEPT],
]

INNER: list[web.RouteDef] = [*BETWEEN, *[of(path, handler) for of, path, handler in _KEPT]]
"""What other frontends ask this one for."""
