"""POST /v1/responses: OpenAI's Responses API over chats, with functions, thoughts, streams and what was said before.

A response that is stored is kept in this process, within bounds, for whoever has the same key: ``previous_response_id``
goes on from it. With several frontends the others do not know it, and after a restart nobody does.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohttp import web

from ..client.results import RequestError, StreamEvent
from .auth import OWNER
from .calls import Call, Choice, json_body
from .chat import begun
from .errors import ApiError
from .front import FRONT
from .parsing import Request, kind_of
from .response_items import Items, messages_of, new_id
from .schema import ChatRequest
from .sse import ChatChunks, to_json
from .tool_choice import ChoiceReader, Reading

MAX_STORED = 1000
"""Responses that one frontend keeps; the oldest go first."""
MAX_STORED_BYTES = 64 * 2**20
"""Bytes of their JSON, and of the conversations that led to them."""


class ResponsesRequest(Request, kw_only=True):
    """The body. None means: not given."""

    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,), "conversation": (), "include": ([],), "max_tool_calls": (), "prompt": (),
        "top_logprobs": (0,), "truncation": ("disabled",),
    }  # fmt: skip

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None

    def chat(self, before: list[dict[str, Any]]) -> ChatRequest:
        """The same as a chat that goes on from ``before``. Raises ApiError."""
        said = [*before, *_messages(self.input)]
        if self.instructions:
            said.insert(0, {"role": "system", "content": self.instructions})
        choice = self.tool_choice
        if isinstance(choice, dict) and "name" in choice:
            choice = {"type": "function", "function": {"name": choice["name"]}}
        chat = _Chat(
            model=self.model, messages=said, max_tokens=self.max_output_tokens, temperature=self.temperature,
            top_p=self.top_p, tools=[_tool(tool, n) for n, tool in enumerate(self.tools)] if self.tools else None,
            tool_choice=choice if self.tools else None, parallel_tool_calls=self.parallel_tool_calls,
            stream=self.stream, response_format=_format((self.text or {}).get("format")),
            reasoning_effort=_effort(self.reasoning),
        )  # fmt: skip
        chat.check()
        return chat

    def echoed(self) -> dict[str, Any]:
        """The fields of the request that its response repeats."""
        return {
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {}, "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id, "temperature": self.temperature, "top_p": self.top_p,
            "tool_choice": self.tool_choice or "auto", "tools": self.tools or [],
            "text": self.text or {"format": {"type": "text"}}, "reasoning": self.reasoning, "truncation": "disabled",
            "store": self.store is not False, "background": False, "user": self.user,
        }  # fmt: skip


# ---------------------------------------------------------------- from this API's words to a chat's


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, f"input must be a text or a list of items, not empty; got {kind_of(given)}.", "input")
    told: list[dict[str, Any]] = []
    for n, item in enumerate(given):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            told.append({"role": role, "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not (told and told[-1]["role"] == "assistant" and "tool_calls" in told[-1]):
                told.append({"role": "assistant", "content": None, "tool_calls": []})
            told[-1]["tool_calls"].append(call)
        elif kind == "function_call_output":
            told.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":  # templates leave thoughts of earlier turns out
            raise ApiError(400, f"input[{n}] of type {kind!r:.80} is not supported.", "input")
    return told


def _tool(given: Any, n: int) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise ApiError(
            400, f"tools[{n}] must be of type 'function'; tools of the server's own are not supported.", "tools"
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: given[name] for name in names if given.get(name) is not None}}


class _Chat(ChatRequest):
    """A chat whose errors name this API's fields."""

    def own_names(self) -> dict[str | None, str]:
        return {**ChatRequest.own_names(self), "max_tokens": "max_output_tokens", "messages": "input"}


def _format(given: Any) -> Any:
    kind = given.get("type") if isinstance(given, dict) else given
    if kind not in (None, "text", "json_object", "json_schema"):
        raise ApiError(400, f"text.format.type must be text, json_object or json_schema, got {kind!r:.80}.", "text")
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": {name: each for name, each in given.items() if name != "type"}}
    return given


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise ApiError(400, f"reasoning.effort must be a string, got {kind_of(effort)}.", "reasoning")
    return effort


# ---------------------------------------------------------------- what is kept


@dataclass
class Stored:
    """A response, and the conversation up to its end without the instructions, which hold for one turn."""

    owner: str
    response: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class Store:
    """Responses by id, the oldest first."""

    def __init__(self, most: int = MAX_STORED, most_bytes: int = MAX_STORED_BYTES) -> None:
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0

    def put(self, owner: str, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response; those that no room is left for are forgotten, itself where it alone is too large."""
        stored = Stored(owner, response, messages, len(to_json(response)) + len(to_json(messages)))
        self._kept[response["id"]] = stored
        self._bytes += stored.size
        while self._kept and (len(self._kept) > self._most or self._bytes > self._most_bytes):
            self._bytes -= self._kept.popitem(last=False)[1].size

    def get(self, id: str, owner: str) -> Stored:
        """What was kept for this owner. Raises ApiError 404."""
        found = self._kept.get(id)
        if found is None or found.owner != owner:
            raise ApiError(404, f"Response with id '{id[:80]}' not found; it may have been forgotten.", "response_id")
        return found

    def drop(self, id: str, owner: str) -> None:
        """Forget it. Raises ApiError 404."""
        self._bytes -= self.get(id, owner).size
        del self._kept[id]


STORE = web.AppKey("responses", Store)


async def get_response(request: web.Request) -> web.StreamResponse:
    """A response that was stored."""
    return json_body(request.app[STORE].get(request.match_info["id"], request.get(OWNER, "")).response)


async def delete_response(request: web.Request) -> web.StreamResponse:
    """Forget a response."""
    id = request.match_info["id"]
    request.app[STORE].drop(id, request.get(OWNER, ""))
    return json_body({"id": id, "object": "response.deleted", "deleted": True})


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer an input, or go on from a response that was stored."""
    front = request.app[FRONT]
    asked = await front.read(request, ResponsesRequest)
    model = await front.find_model(asked.model)
    front.check_generates("Responses")
    store, owner = request.app[STORE], request.get(OWNER, "")
    before = store.get(asked.previous_response_id, owner).messages if asked.previous_response_id else []
    body = asked.chat(before)
    streams, params, reading = await begun(request, front, body)
    call = ResponseCall(reading, streams, body, params, front.metrics)
    call.response = {
        "id": new_id("resp"), "object": "response", "created_at": int(time.time()), "model": model,
        "status": "in_progress", "output": [], "error": None, "incomplete_details": None, "usage": None,
        **asked.echoed(),
    }  # fmt: skip

    def keep(response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        if asked.store is not False:
            said = (body.messages or [])[1 if asked.instructions else 0 :]
            store.put(owner, response, [*said, *messages_of(items)])

    call.keep = keep
    if asked.stream:
        return await call.stream(request, ChatChunks("", 0, "", False), front.settings.stall_s)
    (choice,), _ = await call.complete()
    call.read(choice.text, True)
    return json_body(call.ended(choice.reason))


class ResponseCall(Call):
    """A call that is told in items."""

    def __init__(self, reading: Reading | None, *args: Any):
        super().__init__(*args)
        self._reading = reading or Reading(None, None)
        self._reader: ChoiceReader | None = None
        self._items = Items()
        self._number = 0
        self._render = self._events
        self.response: dict[str, Any] = {}
        self.keep: Any = None  # called with what is to be kept, once it has ended

    def read(self, text: str, last: bool) -> list[dict[str, Any]]:
        """The events of more text."""
        if self._reader is None:
            accepted = self._streams[0].accepted  # the prompt's end tells how its answer begins
            self._reader = self._reading.reader(accepted.prompt if accepted else None)
        return [event for delta in self._reader.deltas(text, last) for event in self._items.take(delta)]

    def ended(self, reason: str) -> dict[str, Any]:
        """The whole response; it is kept."""
        status = "incomplete" if reason == "length" else "completed"
        self._items.close(status)
        stream = self._streams[0]
        prompt = len(stream.accepted.prompt_ids) if stream.accepted else 0
        output = len(stream.children[0].tokens)
        self.response |= {
            "status": status, "output": self._items.items,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "usage": {
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": stream.cached_tokens},
                "output_tokens": output, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + output,
            },
        }  # fmt: skip
        self.keep(self.response, self._items.items)
        return self.response

    def _events(self, choice: Choice, event: StreamEvent) -> bytes:
        told: list[dict[str, Any]] = []
        if not choice.opened:
            choice.opened = True
            told += [{"type": f"response.{state}", "response": self.response} for state in ("created", "in_progress")]
        reason, _, _ = self._taken(choice, event)
        told += self.read(event.text, reason is not None)
        if reason is not None:
            status = "incomplete" if reason == "length" else "completed"
            told += self._items.close(status)
            told.append({"type": f"response.{status}", "response": self.ended(reason)})
        return b"".join(map(self._told, told))

    def _told(self, event: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        data = to_json({"type": event["type"], "sequence_number": number, **event})
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)

    def _ending(self, include_usage: bool) -> bytes:
        return b""

    def _failure(self, error: RequestError) -> bytes:
        fault = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message[:600]}
        failed = {**self.response, "status": "failed", "error": fault, "output": self._items.items}
        return self._told({"type": "response.failed", "response": failed})
