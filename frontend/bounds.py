"""What a body may hold, known before any work is done for it: a conversation of more messages than the context has
tokens is refused here, for it would be rendered for seconds and then be refused all the same."""

from __future__ import annotations

from typing import Any

import msgspec

from .errors import ApiError

MAX_FIELDS = 1000
"""Names of a body, or of an object in it whose names are known."""
MAX_PARTS = 20_000
"""Parts of all messages together. A template may join them with nothing between, so the context does not bound them."""
MAX_MESSAGES = 100_000
"""Messages of a conversation, whatever the context is: as many as Anthropic's own service takes."""
UNSIZED = 20_000
"""Messages while the model's context is not known."""
LONGEST_TOKEN = 128
"""Bytes that one token stands for at most, as far as is worth to know: runs of spaces are the longest."""
CUT = 4
"""How many times the context may come where the request has what is too long cut off."""


def check_size(raw: dict[str, Any], size: int, context: int) -> None:
    """Refuse a body of ``size`` bytes that cannot be served by a model of ``context`` tokens (0: not known). Raises
    ApiError 400 naming the field."""
    check_fields(raw, "the body")
    room = context * (CUT if _is_cut(raw) else 1)
    messages, items, tools = raw.get("messages"), raw.get("input"), raw.get("tools")
    if type(messages) is list:
        _check_messages(messages, "messages", "messages", room, 1)
        _check_parts(messages, "messages")
        _check_calls(messages, room)
    if type(items) is list and items and type(items[0]) is dict:  # of Responses; a thought may take no token
        _check_messages(items, "input", "items", room, 2)
        _check_parts(items, "input")
    if type(kwargs := raw.get("chat_template_kwargs")) is dict:
        check_fields(kwargs, "chat_template_kwargs")
    if type(tools) is list and 0 < room * LONGEST_TOKEN < size and raw.get("tool_choice") != "none":
        _check_tools(tools, room)


def check_fields(given: dict[str, Any], where: str) -> None:
    """Refuse an object of more names than any that is known has. Raises ApiError."""
    if len(given) > MAX_FIELDS:
        raise ApiError(400, f"{where} has {len(given)} fields, over the limit of {MAX_FIELDS}; leave out what is "
                       "not known.")  # fmt: skip


def _is_cut(raw: dict[str, Any]) -> bool:
    """Whether the request has its prompt cut to what fits, in the words of vLLM or those of Ollama and TGI."""
    return any(raw.get(name) not in (None, False) for name in ("truncate_prompt_tokens", "truncate"))


def _check_messages(given: list[Any], name: str, what: str, room: int, per_token: int) -> None:
    limit = min(room * per_token or UNSIZED, MAX_MESSAGES)
    if len(given) > limit:
        why = f" that a context of {room} tokens can hold" if room and limit < MAX_MESSAGES else ""
        raise ApiError(400, f"{name} holds {len(given)} {what}, over the limit of {limit}{why}; send fewer of them.",
                       name)  # fmt: skip


def _check_parts(given: list[Any], name: str) -> None:
    contents = (one.get("content") for one in given if type(one) is dict)
    parts = sum(len(content) for content in contents if type(content) is list)
    if parts > MAX_PARTS:
        raise ApiError(400, f"{name} holds {parts} parts of content, over the limit of {MAX_PARTS}; join their texts.",
                       name)  # fmt: skip


def _check_calls(given: list[Any], room: int) -> None:
    """Calls of tools are told by their names, so that each takes a token, as messages do."""
    calls = sum(len(told) for one in given if type(one) is dict and type(told := one.get("tool_calls")) is list)
    limit = room or UNSIZED
    if calls > limit:
        raise ApiError(400, f"messages hold {calls} tool_calls, over the limit of {limit}; send fewer of them.",
                       "messages")  # fmt: skip


def _check_tools(tools: list[Any], room: int) -> None:
    size, limit = len(msgspec.json.encode(tools)), room * LONGEST_TOKEN
    if size > limit:
        raise ApiError(400, f"tools are {size} bytes, over the limit of {limit} that a context of {room} tokens can "
                       "hold; send fewer tools, or shorter schemas.", "tools")  # fmt: skip
