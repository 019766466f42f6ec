"""Calls written as tags, an argument each: ``<function=name><parameter=key>value</parameter></function>``.

A value is told by its schema: text stands as it is, numbers, booleans and objects are read.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from .literals import MAX_LITERAL, python_literal
from .reader import Broken, Parser, Wait, drop

_ANY: dict[str, Any] = {"type": ["integer", "number", "boolean", "object", "array", "null"]}
"""The schema of a value that is told to be no text, where its own says nothing."""

_SAID = {'string="true"': True, 'string="false"': False}
"""What a tag may tell of its value: whether it is a text."""


class Tags(Parser):
    """Calls of Qwen3-Coder. ``CALL`` tags stand around one call or several; some answers leave them out where ``BARE``.
    With ``LINES`` a value has a line of its own: a line break at its begin and at its end is the form's."""

    CALL, CALL_END = "<tool_call>", "</tool_call>"
    FUNCTION, FUNCTION_END = "<function=", "</function>"
    PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
    BARE, LINES = True, True

    def read(self) -> Wait:
        marks = (self.CALL, self.FUNCTION) if self.BARE else (self.CALL,)
        while True:
            mark = yield from self.upto(marks, self.content, keep=True)
            yield from self.guarded(self._calls(mark == self.FUNCTION), self.CALL_END)

    def _calls(self, inside: bool) -> Wait:
        if not inside:
            yield from self._pass()
            yield from self.expect(self.FUNCTION)
        yield from self._function()
        while True:
            yield from self._pass()
            if (yield from self.follows(self.CALL_END)) or not (yield from self.follows(self.FUNCTION)):
                return
            yield from self._function()

    def _pass(self) -> Wait:
        """Pass over what may stand between functions."""
        yield from ()

    def _function(self) -> Wait:
        name, _ = yield from self._head()
        if not name or "\n" in name:
            raise Broken
        self.begin(name)
        properties = self.schemas.get(name, {}).get("properties")
        before = "{"
        while not (yield from self._closes()):
            yield from self.expect(self.PARAMETER)
            key, text = yield from self._head()
            schema = properties.get(key) if isinstance(properties, dict) else None
            self.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(schema if isinstance(schema, dict) else {}, text)
            before = ", "
        self.arguments("{}" if before == "{" else "}")

    def _head(self) -> Generator[None, None, tuple[str, bool | None]]:
        """What a tag names, and whether its value is a text, where the tag tells."""
        head: list[str] = []
        yield from self.upto((">",), head.append)
        said = "".join(head).strip()
        name, _, more = said[1:].partition(said[0]) if said[:1] in ("'", '"') else (said, "", "")
        text = next((told for word, told in _SAID.items() if word in more), None)
        return name.strip(), text

    def _closes(self) -> Any:
        """Whether the function ends here; the end of the call ends it too, and is left for who reads that."""
        if (yield from self.follows(self.FUNCTION_END)):
            return True
        if (yield from self.follows(self.CALL_END)):
            self.at -= len(self.CALL_END)
            return True
        return False

    def _value(self, schema: dict[str, Any], text: bool | None) -> Wait:
        """One value, of which ``text`` is what its tag tells. A text is given as it comes."""
        types = _types(schema)
        schema = _ANY if text is False and not types else schema
        # Where a text may stand, a tag that says so is believed: null is a word then, whatever else the schema allows.
        plain = is_text(schema) or (text is True and "string" in types)
        pieces = Text(self, self.LINES) if plain else Whole(schema, self.LINES)
        ends = (self.PARAMETER_END, self.FUNCTION_END, self.PARAMETER)
        end = yield from self.upto(ends, pieces.take)
        if end != self.PARAMETER_END:  # it was left out
            self.at -= len(end)
        self.arguments(pieces.last())


class SeedOss(Tags):
    """The same between ``<seed:tool_call>`` tags, of Seed-OSS."""

    CALL, CALL_END, BARE = "<seed:tool_call>", "</seed:tool_call>", False


class MiniMaxM2(Tags):
    """``<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke></minimax:tool_call>``, of
    MiniMax-M2."""

    CALL, CALL_END = "<minimax:tool_call>", "</minimax:tool_call>"
    FUNCTION, FUNCTION_END, PARAMETER = "<invoke name=", "</invoke>", "<parameter name="
    BARE, LINES = False, False


class DeepSeekV32(Tags):
    """The same in the words of DeepSeek V3.2, whose parameters say whether they are ``string="true"``."""

    CALL, CALL_END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    FUNCTION, FUNCTION_END = "<｜DSML｜invoke name=", "</｜DSML｜invoke>"
    PARAMETER, PARAMETER_END = "<｜DSML｜parameter name=", "</｜DSML｜parameter>"
    BARE, LINES = False, False


class DeepSeekV4(DeepSeekV32):
    """The same between other marks, of DeepSeek V4."""

    CALL, CALL_END = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"


class Step3(Tags):
    """``<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">`` and so on, of Step3."""

    CALL, CALL_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
    FUNCTION, FUNCTION_END = "<steptml:invoke name=", "</steptml:invoke>"
    PARAMETER, PARAMETER_END = "<steptml:parameter name=", "</steptml:parameter>"
    BARE, LINES = False, False

    def _pass(self) -> Wait:
        """Marks of single calls, and names, which are told again."""
        mark = yield from self.upto((self.FUNCTION, self.CALL_END), drop)
        self.at -= len(mark)


class Glm(Parser):
    """``<tool_call>name`` and, for each argument, ``<arg_key>k</arg_key><arg_value>v</arg_value>``, of GLM 4.5 and
    later."""

    _END, _KEY, _KEY_END = "</tool_call>", "<arg_key>", "</arg_key>"
    _VALUE, _VALUE_END = "<arg_value>", "</arg_value>"

    def read(self) -> Wait:
        while True:
            yield from self.upto(("<tool_call>",), self.content, keep=True)
            yield from self.guarded(self._call(), self._END)

    def _call(self) -> Wait:
        head: list[str] = []
        yield from self.blanks()
        mark = yield from self.upto(("\n", self._KEY, self._END), head.append)
        name = "".join(head).strip()
        if not name or name[0] in "{[<":
            raise Broken
        if mark != "\n":
            self.at -= len(mark)
        elif not (yield from self._goes_on()):
            raise Broken
        self.begin(name)
        properties = self.schemas.get(name, {}).get("properties")
        before = "{"
        while not (yield from self.follows(self._END)):
            yield from self.expect(self._KEY)
            key: list[str] = []
            yield from self.upto((self._KEY_END,), key.append)
            said = "".join(key).strip()
            yield from self.expect(self._VALUE)
            schema = properties.get(said) if isinstance(properties, dict) else None
            schema = schema if isinstance(schema, dict) else {}
            self.arguments(f"{before}{json.dumps(said, ensure_ascii=False)}: ")
            pieces = Text(self, lines=False) if is_text(schema) else Whole(schema, lines=False)
            yield from self.upto((self._VALUE_END,), pieces.take)
            self.arguments(pieces.last())
            before = ", "
        self.arguments("{}" if before == "{" else "}")

    def _goes_on(self) -> Generator[None, None, bool]:
        """Whether the next line is one of a call's."""
        for mark in (self._KEY, self._END):
            if (yield from self.follows(mark)):
                self.at -= len(mark)
                return True
        return False


class Text:
    """A text as a JSON string, piece by piece; with ``lines`` one line break at either end is the form's."""

    def __init__(self, parser: Parser, lines: bool):
        self._parser, self._lines, self._begun, self._held = parser, lines, False, ""

    def take(self, text: str) -> None:
        text = self._held + text
        if not self._begun:
            self._begun = True
            self._parser.arguments('"')
            text = text[1:] if self._lines and text.startswith("\n") else text
        kept = text[:-1] if self._lines and text.endswith("\n") else text
        self._held = text[len(kept) :]
        self._parser.arguments(json.dumps(kept, ensure_ascii=False)[1:-1])

    def last(self) -> str:
        return '"' if self._begun else '""'


class Whole:
    """A value of another type, read when all of it is there; ``lines`` as with a text, which it may be after all."""

    def __init__(self, schema: dict[str, Any], lines: bool):
        self._schema, self._lines, self._parts = schema, lines, list[str]()

    def take(self, text: str) -> None:
        self._parts.append(text)

    def last(self) -> str:
        said = "".join(self._parts)
        return json_of(said.removeprefix("\n").removesuffix("\n") if self._lines else said, self._schema)


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows, as far as it says them plainly."""
    found: set[str] = set()
    for each in [schema, *_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]:
        kind = each.get("type") if isinstance(each, dict) else None
        found.update(str(one) for one in (kind if isinstance(kind, list) else [kind]) if one is not None)
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_text(schema: dict[str, Any]) -> bool:
    """A schema that says nothing else is one of text."""
    return _types(schema) <= {"string"}


def json_of(said: str, schema: dict[str, Any]) -> str:
    """The value as JSON of one of the schema's types; as a string where it is of none."""
    types, word = _types(schema), said.strip()
    if word.lower() in ("true", "false") and "boolean" in types:
        return word.lower()
    if word.lower() in ("null", "none") and "null" in types:
        return "null"
    for read in (json.loads, python_literal) if len(word) <= MAX_LITERAL else (json.loads,):
        try:
            value = read(word)
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
