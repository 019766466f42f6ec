"""The prompts of a request: a string, token ids, a list of either, or a conversation."""

from __future__ import annotations

from typing import Any

from .errors import ApiError
from .parsing import kind_of

MAX_PROMPTS = 2048
"""Prompts in one request at most."""


def prompts_of(given: Any, name: str, empty: bool = False) -> list[str] | list[list[int]]:
    """The prompts of field ``name``, at least one; a text may be empty where ``empty``. Raises ApiError."""
    if isinstance(given, str):
        prompts: list[Any] = [given]
    elif isinstance(given, list) and given and type(given[0]) is int:
        prompts = [given]
    elif isinstance(given, list):
        prompts = given
    elif given is None:
        raise ApiError(400, f"{name} must be given and must not be empty.", name)
    else:
        raise ApiError(400, f"{name} must be a string or a list, got {kind_of(given)}.", name)
    check_count(prompts, name, "prompts")
    kind = type(prompts[0])
    for position, one in enumerate(prompts):
        _check_prompt(one, kind, f"{name}[{position}]" if len(prompts) > 1 else name, name, empty)
    return prompts


def check_count(given: list[Any], name: str, what: str) -> None:
    """A list with something in it, and not too much. Raises ApiError."""
    if not given:
        raise ApiError(400, f"{name} must be given and must not be empty.", name)
    if len(given) > MAX_PROMPTS:
        raise ApiError(400, f"{name} holds {len(given)} {what}, over the limit of {MAX_PROMPTS}.", name)


def conversation_of(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The messages, each with a role, all their parts as parts of text. Raises ApiError."""
    if not messages:
        raise ApiError(400, "messages must hold at least one message.", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def text_of(message: dict[str, Any]) -> str:
    """What a message of ``conversation_of`` says, its parts joined by line breaks."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def template_of(
    generation_prompt: bool | None, go_on: bool | None, kwargs: dict[str, Any] | None, special: bool | None
) -> dict[str, Any]:
    """How the chat template is to be rendered; the detokenizer refuses what cannot be. ``special``: special tokens are
    added to what the template itself has written."""
    template: dict[str, Any] = {
        "add_generation_prompt": not go_on if generation_prompt is None else generation_prompt,
        "continue_final_message": bool(go_on),
    }
    if kwargs:
        template["chat_template_kwargs"] = kwargs
    if special:
        template["add_special_tokens"] = True
    return template


def _check_prompt(prompt: Any, kind: type[Any], where: str, name: str, empty: bool) -> None:
    if type(prompt) is not kind or kind not in (str, list):
        raise ApiError(400, f"{where} must be a string or a list of token ids, all alike; got {kind_of(prompt)}.", name)
    if not prompt and not (empty and kind is str):
        raise ApiError(400, f"{where} must not be empty.", name)
    if kind is list:
        if set(map(type, prompt)) != {int}:
            odd = next(i for i in prompt if type(i) is not int)
            raise ApiError(400, f"{where} must hold integers (token ids), got {kind_of(odd)}.", name)
        check_ids(prompt, where, name)


def check_ids(ids: list[int], where: str, name: str) -> None:
    """Refuse what is no token id of any model. Raises ApiError."""
    if ids and (min(ids) < 0 or max(ids) >= 2**31):
        odd = next(i for i in ids if not 0 <= i < 2**31)
        raise ApiError(400, f"{where} holds {odd}, which is no token id.", name)


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ApiError(400, f"{where}.role must be a string such as 'user', got {kind_of(role)}.", "messages")
    thought = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(thought, str):  # of an earlier turn: templates know it under one name or the other
        message = {**message, "reasoning": thought, "reasoning_content": thought}
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be a string or a list of parts, got {kind_of(content)}.", "messages")
    parts = []
    for position, part in enumerate(content):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        at = f"{where}.content[{position}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ApiError(400, f"{at} must be an object with a type, got {kind_of(part)}.", "messages")
        if part["type"] not in ("text", "input_text", "output_text", "refusal"):
            raise ApiError(400, f"{at} of type {part['type']!r} is not supported yet by this version.", "messages")
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise ApiError(400, f"{at}.text must be a string, got {kind_of(text)}.", "messages")
        parts.append({**part, "type": "text", "text": text})
    return {**message, "content": parts}
