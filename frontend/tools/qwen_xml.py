"""Calls written as tags: ``<function=name><parameter=key>value</parameter></function>``, of Qwen3-Coder.

A value is told by its schema: text stands as it is, numbers, booleans and objects are read.
"""

from __future__ import annotations

import json
from typing import Any

from .literals import MAX_LITERAL, python_literal
from .reader import Broken, Parser, Wait

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class QwenXml(Parser):
    """Each call between ``<tool_call>`` tags, which some answers leave out."""

    def read(self) -> Wait:
        while True:
            mark = yield from self.upto((_CALL, _FUNCTION), self.content, keep=True)
            yield from self.guarded(self._call(mark == _FUNCTION), _CALL_END)

    def _call(self, inside: bool) -> Wait:
        if not inside:
            yield from self.expect(_FUNCTION)
        head: list[str] = []
        yield from self.upto((">",), head.append)
        name = "".join(head).strip().strip("\"'")
        if not name or "\n" in name:
            raise Broken
        self.begin(name)
        properties = self.schemas.get(name, {}).get("properties")
        before = "{"
        while not (yield from self._closes()):
            yield from self.expect(_PARAMETER)
            head = []
            yield from self.upto((">",), head.append)
            key = "".join(head).strip().strip("\"'")
            schema = properties.get(key) if isinstance(properties, dict) else None
            self.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(schema if isinstance(schema, dict) else {})
            before = ", "
        self.arguments("{}" if before == "{" else "}")
        yield from self.follows(_CALL_END)

    def _closes(self) -> Any:
        """Whether the function ends here; the end of the call ends it too."""
        return (yield from self.follows(_FUNCTION_END)) or (yield from self.follows(_CALL_END))

    def _value(self, schema: dict[str, Any]) -> Wait:
        """One value. A text is given as it comes, without the line break at its begin and at its end."""
        pieces = _Text(self) if _is_text(schema) else _Whole(schema)
        ends = (_PARAMETER_END, _FUNCTION_END, _PARAMETER)
        end = yield from self.upto(ends, pieces.take)
        if end != _PARAMETER_END:  # it was left out
            self.at -= len(end)
        self.arguments(pieces.last())


class _Text:
    """A text as a JSON string, piece by piece; one line break at either end is the form's."""

    def __init__(self, parser: Parser):
        self._parser, self._begun, self._held = parser, False, ""

    def take(self, text: str) -> None:
        text = self._held + text
        if not self._begun:
            self._begun = True
            self._parser.arguments('"')
            text = text[1:] if text.startswith("\n") else text
        kept = text[:-1] if text.endswith("\n") else text
        self._held = text[len(kept) :]
        self._parser.arguments(json.dumps(kept, ensure_ascii=False)[1:-1])

    def last(self) -> str:
        return '"' if self._begun else '""'


class _Whole:
    """A value of another type, read when all of it is there."""

    def __init__(self, schema: dict[str, Any]):
        self._schema, self._parts = schema, list[str]()

    def take(self, text: str) -> None:
        self._parts.append(text)

    def last(self) -> str:
        return _json_of("".join(self._parts).removeprefix("\n").removesuffix("\n"), self._schema)


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows, as far as it says them plainly."""
    found: set[str] = set()
    for each in [schema, *_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]:
        kind = each.get("type") if isinstance(each, dict) else None
        found.update(str(one) for one in (kind if isinstance(kind, list) else [kind]) if one is not None)
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_text(schema: dict[str, Any]) -> bool:
    """A schema that says nothing else is one of text."""
    return _types(schema) <= {"string"}


def _json_of(said: str, schema: dict[str, Any]) -> str:
    """The value as JSON of one of the schema's types; as a string where it is of none."""
    types, word = _types(schema), said.strip()
    if word.lower() in ("true", "false") and "boolean" in types:
        return word.lower()
    if word.lower() in ("null", "none") and "null" in types:
        return "null"
    for read in (json.loads, python_literal):
        try:
            value = read(word) if len(word) <= MAX_LITERAL else word
            kind = _kind(value)
            if (kind in types and kind != "string") or (kind == "integer" and "number" in types):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
            if kind == "number" and "integer" in types and value == int(value):
                return str(int(value))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
            continue
    return json.dumps(said, ensure_ascii=False)


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", str: "string"}
    return kinds.get(type(value), "null" if value is None else "")
