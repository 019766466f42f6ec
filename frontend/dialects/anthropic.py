"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect of a chat, with tools, thoughts and streams.

A request becomes a ``ChatRequest`` and goes its way; what comes of it is told in blocks: thinking, text, tool_use.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from aiohttp import web

from ...client.results import RequestError, StreamEvent
from ...proto.call_arguments import told_object
from ..calls import Call, Choice, Ended, json_body
from ..chat import begun
from ..errors import ApiError, error_response, words_of
from ..front import FRONT, Front
from ..parsing import Request, kind_of
from ..schema import ChatRequest
from ..shapes import Shape, shape
from ..sse import ChatChunks, to_json
from ..tool_choice import ChoiceReader, Reading
from ..tools import Arguments, Begin, Content, Delta

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


_FIELDS = (
    "type text citations cache_control source title context id name input caller tool_use_id is_error thinking "
    "signature data"
)
_BLOCK = shape(_FIELDS, content=shape(_FIELDS))


class MessagesRequest(Request, kw_only=True):
    """The body. ``max_tokens`` is required, but for counting."""

    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}
    without_effect: ClassVar[tuple[str, ...]] = (
        "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
    )  # fmt: skip

    inside: ClassVar[Mapping[str, Shape]] = {
        "messages": shape("role id type", content=_BLOCK), "system": _BLOCK,
        "tools": shape("type name description input_schema cache_control strict eager_input_streaming input_examples "
                       "defer_loading allowed_callers"),
        "tool_choice": shape("type name disable_parallel_tool_use"), "thinking": shape("type budget_tokens display"),
        "output_config": shape("effort task_budget", format=shape("type schema name")),
    }  # fmt: skip

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    system: Any = None
    stop_sequences: Any = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = None

    def chat(self, thinks: bool = True) -> ChatRequest:
        """The same as a chat of OpenAI's; without ``thinks`` no thought is told apart, and none has a budget. Raises
        ApiError."""
        choice, one = _choice(self.tool_choice)
        budget = _budget(self.thinking)
        told = None if self.thinking is None else self.thinking.get("type") != "disabled"
        effort, format = _output(self.output_config)
        told_all = _conversation(self.system, self.messages)
        chat = ChatRequest(
            model=self.model, messages=told_all, max_tokens=self.max_tokens,
            continue_final_message=_goes_on(told_all[-1]) or None,
            stop=self.stop_sequences, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
            tools=[_tool(tool, n) for n, tool in enumerate(self.tools)] if self.tools else None,
            tool_choice=choice, parallel_tool_calls=False if one else None, stream=self.stream,
            chat_template_kwargs=None if told is None else {"enable_thinking": told},
            thinking_token_budget=budget if thinks else None, reasoning_effort=effort, response_format=format,
        )  # fmt: skip
        try:
            chat.check()
        except ApiError as error:
            raise ApiError(400, error.message.replace("reasoning_effort", "output_config.effort")) from error
        return chat


# ---------------------------------------------------------------- from Anthropic's words to OpenAI's


def _conversation(system: Any, messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not messages:
        raise ApiError(400, "messages must hold at least one message.", "messages")
    told: list[dict[str, Any]] = []
    if system:
        told.append({"role": "system", "content": _joined(system, "system")})
    for n, message in enumerate(messages):
        told += _message(message, f"messages[{n}]")
    return told


def _goes_on(last: dict[str, Any]) -> bool:
    """Whether the answer goes on with the last message: one of the assistant's that has said something, and no call."""
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _message(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One message as one or several: the result of a tool is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise ApiError(400, f"{where}.role must be 'user' or 'assistant', got {role!r:.80}.", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(
            400, f"{where}.content must be a string or a list of blocks, got {kind_of(content)}.", "messages"
        )
    told: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for position, block in enumerate(content):
        at = f"{where}.content[{position}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block.get("text"), f"{at}.text"))
            case "tool_result" if role == "user":
                given = block.get("content")
                id = _string(block.get("tool_use_id"), f"{at}.tool_use_id")
                text = _joined(given, f"{at}.content") if given else ""
                told.append({"role": "tool", "tool_call_id": id, "content": text})
            case "tool_use" if role == "assistant":
                name, id = (_string(block.get(key), f"{at}.{key}") for key in ("name", "id"))
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case "thinking" if role == "assistant":
                thoughts.append(_string(block.get("thinking"), f"{at}.thinking"))
            case "redacted_thinking" if role == "assistant":
                pass  # nobody here can read it
            case kind:
                raise ApiError(400, f"{at} of type {kind!r:.80} is not supported in a message of {role}.", "messages")
    if texts or calls or not told:
        said: dict[str, Any] = {"role": role, "content": "\n".join(texts) if texts or not calls else None}
        more = {"tool_calls": calls, "reasoning_content": "\n".join(thoughts)}
        told.append(said | {name: value for name, value in more.items() if value})
    return told


def _joined(given: Any, where: str) -> str:
    """A text, or the texts of blocks, joined by line breaks."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ApiError(400, f"{where} must be a string or a list of text blocks, got {kind_of(given)}.", where)
    blocks = [block if isinstance(block, dict) and block.get("type") == "text" else {} for block in given]
    return "\n".join(_string(block.get("text"), f"{where}[{n}].text") for n, block in enumerate(blocks))


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ApiError(400, f"{where} must be a string, got {kind_of(value)}; only text is supported.", "messages")
    return value


def _tool(given: Any, n: int) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type", "custom") != "custom":
        raise ApiError(400, f"tools[{n}] must be a tool with a name and an input_schema.", "tools")
    function = {
        "name": given.get("name"),
        "description": given.get("description"),
        "parameters": given.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(given: dict[str, Any] | None) -> tuple[Any, bool]:
    """OpenAI's tool_choice, and whether one call at most is wanted."""
    if given is None:
        return None, False
    kind, one = given.get("type"), bool(given.get("disable_parallel_tool_use"))
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, one
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise ApiError(400, f"tool_choice.type must be auto, any, tool or none, got {kind!r:.80}.", "tool_choice")
    return _CHOICES[kind], one


def _budget(thinking: dict[str, Any] | None) -> int | None:
    """Tokens of thoughts at most; None: no limit."""
    if thinking is None or thinking.get("type") == "disabled":
        return None
    budget = thinking.get("budget_tokens")
    if budget is not None and (type(budget) is not int or budget < 0):
        raise ApiError(400, f"thinking.budget_tokens must be an integer of at least 0, got {budget!r:.80}.", "thinking")
    return budget


def _output(config: dict[str, Any] | None) -> tuple[Any, Any]:
    """The effort of thoughts, and the form of the answer as OpenAI names it. Raises ApiError."""
    given = config or {}
    effort, format = given.get("effort"), given.get("format")
    if not isinstance(effort, str | None):
        raise ApiError(400, f"output_config.effort must be a string, got {kind_of(effort)}.", "output_config")
    if format is None:
        return effort, None
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        raise ApiError(400, "output_config.format must be an object of type json_schema.", "output_config")
    return effort, {"type": "json_schema", "json_schema": {"name": "output", "schema": format.get("schema")}}


# ---------------------------------------------------------------- routes


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    front = request.app[FRONT]
    asked = await front.read(request, MessagesRequest)
    call = await _begun(request, front, asked)
    if asked.stream:
        return await call.stream(request, ChatChunks("", 0, "", False), front.settings.stall_s)
    (choice,), _ = await call.complete()
    return json_body(call.message(choice))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens a conversation's prompt has. The request is let in to be rendered, and withdrawn at once."""
    front = request.app[FRONT]
    asked = await front.read(request, MessagesRequest)
    asked.max_tokens = 1
    call = await _begun(request, front, asked)
    try:
        return json_body({"input_tokens": await call.prompt_tokens()})
    finally:
        call.abort()


async def _begun(request: web.Request, front: Front, asked: MessagesRequest) -> MessagesCall:
    """The call of a request."""
    if asked.max_tokens is None:
        raise ApiError(400, "max_tokens must be given: the most tokens that are generated.", "max_tokens")
    model = await front.find_model(request, asked.model)
    front.check_generates("Messages")
    body = asked.chat(front.settings.reasoning_parser is not None)
    streams, params, reading = await begun(request, front, body)
    call = MessagesCall(reading, streams, body, params, front.metrics)
    call.head = {"id": "msg_" + uuid.uuid4().hex[:24], "type": "message", "role": "assistant", "model": model}
    return call


def refused(error: RequestError) -> web.Response:
    """An error in Anthropic's shape."""
    answer = error_response(error)
    answer.body = _error(error)
    return answer


def _error(error: RequestError) -> bytes:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return to_json({"type": "error", "error": {"type": kind, "message": words_of(error)}})


ROUTES = [web.post("/v1/messages", messages), web.post("/v1/messages/count_tokens", count_tokens)]


# ---------------------------------------------------------------- answers


class MessagesCall(Call):
    """A call that is told in blocks."""

    def __init__(self, reading: Reading | None, *args: Any):
        super().__init__(*args)
        self._reader = ChoiceReader(reading or Reading(None, None), None)
        self._reading = reading
        self._render = self._events
        self.head: dict[str, Any] = {}
        self._blocks = 0
        self._open: str | None = None  # the type of the block that is being told

    async def prompt_tokens(self) -> int:
        """Tokens of the prompt, as soon as they are known."""
        return len((await self._streams[0].wait_accepted()).prompt_ids)

    def message(self, choice: Ended) -> dict[str, Any]:
        """The whole answer."""
        self._begin_reading()
        blocks: list[dict[str, Any]] = []
        for delta in self._reader.deltas(choice.text, last=True):
            kind = _kind(delta)
            if isinstance(delta, Begin):
                blocks.append({"type": kind, "id": delta.id or _tool_id(), "name": delta.name, "input": ""})
            elif isinstance(delta, Arguments):
                blocks[-1]["input"] += delta.text
            else:
                field = "text" if kind == "text" else "thinking"
                if not blocks or blocks[-1]["type"] != kind:
                    blocks.append({"type": kind, field: "", **({} if kind == "text" else {"signature": ""})})
                blocks[-1][field] += delta.text
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = told_object(block["input"])
        return {**self.head, "content": blocks, **self._end(choice.reason, choice.stop), "usage": self._counts()}

    def _begin_reading(self) -> None:
        """The prompt is known by now, which tells how its answer begins."""
        accepted = self._streams[0].accepted
        self._reader = ChoiceReader(self._reading or Reading(None, None), accepted.prompt if accepted else None)

    def _end(self, reason: str, stop: int | str | None) -> dict[str, Any]:
        told = _REASONS.get(self._reader.reason(reason), "end_turn")
        if told == "end_turn" and isinstance(stop, str):
            told = "stop_sequence"
        return {"stop_reason": told, "stop_sequence": stop if told == "stop_sequence" else None}

    def _counts(self) -> dict[str, int]:
        stream = self._streams[0]
        prompt = len(stream.accepted.prompt_ids) if stream.accepted else 0
        cached = stream.cached_tokens
        output = len(stream.children[0].tokens)
        return {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
                "output_tokens": output}  # fmt: skip

    # -- a stream of events

    def _events(self, choice: Choice, event: StreamEvent) -> bytes:
        out: list[bytes] = []
        if not choice.opened:
            choice.opened = True
            self._begin_reading()
            usage = {**self._counts(), "output_tokens": 0}
            message = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            out.append(_event("message_start", message=message))
        reason, _, _ = self._taken(choice, event)
        for delta in self._reader.deltas(event.text, reason is not None):
            out += self._told(delta)
        if reason is not None:
            out += self._closed()
            usage = {"output_tokens": self._counts()["output_tokens"]}
            out.append(_event("message_delta", delta=self._end(reason, event.stop_reason), usage=usage))
        return b"".join(out)

    def _told(self, delta: Delta) -> list[bytes]:
        """The events of one delta: another block where it does not belong to the one that is open."""
        kind, out = _kind(delta), []
        if isinstance(delta, Begin) or kind != self._open:
            out += self._closed()
            block: dict[str, Any] = {"type": kind, "text": ""}
            if isinstance(delta, Begin):
                block = {"type": kind, "id": delta.id or _tool_id(), "name": delta.name, "input": {}}
            elif kind == "thinking":
                block = {"type": kind, "thinking": "", "signature": ""}
            out.append(_event("content_block_start", index=self._blocks, content_block=block))
            self._open = kind
        if isinstance(delta, Begin):
            return out
        if isinstance(delta, Arguments):
            piece = {"type": "input_json_delta", "partial_json": delta.text}
        elif isinstance(delta, Content):
            piece = {"type": "text_delta", "text": delta.text}
        else:
            piece = {"type": "thinking_delta", "thinking": delta.text}
        return [*out, _event("content_block_delta", index=self._blocks, delta=piece)]

    def _closed(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        self._blocks += 1
        return [_event("content_block_stop", index=self._blocks - 1)]

    def _ending(self, include_usage: bool) -> bytes:
        return _event("message_stop")

    def _failure(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + _error(error) + b"\n\n"


def _kind(delta: Delta) -> str:
    if isinstance(delta, Begin | Arguments):
        return "tool_use"
    return "text" if isinstance(delta, Content) else "thinking"


def _event(type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), to_json({"type": type, **fields}))


def _tool_id() -> str:
    return "toolu_" + uuid.uuid4().hex[:24]
