"""``call:name{key:value}``, of Gemma's models for calls, whose texts stand between marks of their own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator
from typing import Any

from .reader import Broken, Parser, Wait
from .tags import is_text, json_of

MAX_DEPTH = 50
"""Objects and lists within one another at most."""

_NAME = re.compile(r"[\w.-]+\Z")
_BARE_END = re.compile(r"[,}\]]")


class FunctionGemma(Parser):
    """``<start_function_call>call:f{k:<escape>text<escape>,n:5}<end_function_call>``. A call is told when all of it is
    there."""

    OPEN, CLOSE, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
    TYPED = False
    """Whether what stands between ``QUOTE`` is always a text."""

    def read(self) -> Wait:
        while True:
            yield from self.upto((self.OPEN,), self.content, keep=True)
            yield from self.guarded(self._call(), self.CLOSE)

    def _call(self) -> Wait:
        yield from self.expect("call:")
        name: list[str] = []
        yield from self.upto(("{",), name.append)
        said = "".join(name).strip()
        if not _NAME.match(said):
            raise Broken
        body = yield from self._body()
        values = _Values(body, self.QUOTE, self.TYPED, self.schemas.get(said, {}))
        arguments = values.object(0)
        self.begin(said)
        self.arguments(json.dumps(arguments, ensure_ascii=False))

    def _body(self) -> Generator[None, None, str]:
        """What is between the braces. Marks within a text are part of it."""
        parts: list[str] = []
        quoted = False
        while True:
            marks = (self.QUOTE,) if quoted else (self.QUOTE, self.CLOSE)
            mark = yield from self.upto(marks, parts.append)
            if mark == self.CLOSE:
                return "".join(parts).rstrip().removesuffix("}")
            parts.append(mark)
            quoted = not quoted


class Gemma4(FunctionGemma):
    """``<|tool_call>call:f{k:<|"|>text<|"|>,n:5}<tool_call|>``, of Gemma 4."""

    OPEN, CLOSE, QUOTE, TYPED = "<|tool_call>", "<tool_call|>", '<|"|>', True


class _Values:
    """Reads values from the first on. Raises Broken where they are nested too deeply."""

    def __init__(self, text: str, quote: str, typed: bool, schema: dict[str, Any]):
        self._text, self._quote, self._typed, self._at = text, quote, typed, 0
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}

    def object(self, depth: int) -> dict[str, Any]:
        """Keys and values up to the closing brace, or to the end."""
        found: dict[str, Any] = {}
        while not self._ends("}"):
            key = self._quoted() if self._follows(self._quote) else self._upto(":").strip()
            self._follows(":")
            found[key] = self._value(depth, self._properties.get(key) if depth == 0 else None)
            self._follows(",")
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._ends("]"):
            before = self._at
            found.append(self._value(depth, None))
            if not self._follows(",") and self._at == before:  # a brace that closes nothing
                self._at += 1
        return found

    def _value(self, depth: int, schema: Any) -> Any:
        if depth > MAX_DEPTH:
            raise Broken
        if self._follows(self._quote):
            text = self._quoted()
            return text if self._typed and not isinstance(schema, dict) else self._read(text, schema, self._typed)
        if self._follows("{"):
            return self.object(depth + 1)
        if self._follows("["):
            return self._list(depth + 1)
        found = _BARE_END.search(self._text, self._at)
        end = found.start() if found else len(self._text)
        word, self._at = self._text[self._at : end].strip(), end
        return self._read(word, None, False)

    def _read(self, text: str, schema: Any, typed: bool) -> Any:
        """A word as what it says it is; a text as what its schema wants."""
        if isinstance(schema, dict) and not (is_text(schema) and schema.get("type") is None):
            return json.loads(json_of(text, schema))
        if typed:
            return text
        try:
            return json.loads(text, parse_constant=str, parse_float=_finite)
        except (ValueError, RecursionError):
            return text

    def _quoted(self) -> str:
        return self._upto(self._quote)

    def _upto(self, mark: str) -> str:
        """What comes before ``mark``, which is passed; all that is left where it does not come."""
        place = self._text.find(mark, self._at)
        place = len(self._text) if place < 0 else place
        text, self._at = self._text[self._at : place], place + len(mark)
        return text

    def _follows(self, mark: str) -> bool:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def _ends(self, mark: str) -> bool:
        return self._follows(mark) or self._at >= len(self._text)


def _finite(word: str) -> float | str:
    """A number; one that JSON has not is a text."""
    number = float(word)
    return number if math.isfinite(number) else word
