"""Tools for chat templates that know of none: told in the system message, their calls and results as text.

The words are those of Hermes and Qwen, whose form of a call is the one that most models have seen; small models without
templates for tools (SmolLM2) were trained on it too. What a model writes in it is read by the parser ``hermes``.
"""

from __future__ import annotations

import json
from typing import Any

TOLD = "return a json object with function name and arguments within <tool_call></tool_call> XML tags"
_INSTRUCTIONS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n%s\n</tools>\n\n"
    f"For each function call, {TOLD}:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_RESULTS = ("tool", "function")

Message = dict[str, Any]


def has_calls(messages: list[Message]) -> bool:
    """Whether a conversation holds calls of tools, or their results."""
    return any(message["role"] in _RESULTS or message.get("tool_calls") for message in messages)


def in_words(messages: list[Message], tools: list[Any] | None, system: bool) -> list[Message]:
    """The conversation for a template that knows no tools. Results are messages of the user, and one message with what
    the user says next, for many templates want the roles by turns. Without ``system`` the template takes no system
    message: the first of the user's begins with what it would say.
    """
    told: list[Message] = []
    calls: list[Any] = []  # ids of the calls that wait for results, in order
    waiting: list[tuple[int, str]] = []  # results, each with its call's place
    for message in [*messages, None]:
        if message is not None and message["role"] in _RESULTS:
            id = message.get("tool_call_id")
            place = calls.index(id) if id in calls else len(calls)
            waiting.append((place, f"<tool_response>\n{_text(message)}\n</tool_response>"))
            continue
        if waiting:  # in the order of the calls, which is all that tells a model what answers what
            results = "\n".join(text for _, text in sorted(waiting, key=lambda each: each[0]))
            told.append({"role": "user", "content": results})
            waiting = []
            if message is not None and message["role"] == "user":
                told[-1]["content"] += "\n\n" + _text(message)
                continue
        if message is not None:
            told.append(_in_text(message))
            calls = [call.get("id") for call in message.get("tool_calls") or ()]
    return _instructed(told, tools, system) if tools else told


def _instructed(told: list[Message], tools: list[Any], system: bool) -> list[Message]:
    """The conversation with the words that tell of tools."""
    words = _INSTRUCTIONS % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if told and told[0]["role"] in ("system", "developer"):
        words = f"{_text(told[0])}\n\n{words}".strip()
        told = told[1:]
    if system:
        return [{"role": "system", "content": words}, *told]
    if told and told[0]["role"] == "user":
        return [{**told[0], "content": f"{words}\n\n{_text(told[0])}"}, *told[1:]]
    return [{"role": "user", "content": words}, *told]


def _in_text(message: Message) -> Message:
    """A message with its calls as text; their arguments as they stand."""
    given = [call.get("function") or _as_function(call.get("custom")) for call in message.get("tool_calls") or ()]
    if not given:
        return message
    texts = [_text(message)] if message.get("content") else []
    for function in given:
        if isinstance(function, dict):
            arguments = function.get("arguments") or "{}"
            said = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            name = json.dumps(function.get("name"), ensure_ascii=False)
            texts.append(f'<tool_call>\n{{"name": {name}, "arguments": {said}}}\n</tool_call>')
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(texts)}


def _as_function(custom: Any) -> dict[str, Any] | None:
    """A call of a custom tool, whose input is a text."""
    return {"name": custom.get("name"), "arguments": {"input": custom.get("input")}} if custom else None


def _text(message: Message) -> str:
    """A content, its parts joined."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else part.get("text", "") for part in content)
