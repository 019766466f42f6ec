"""Calls written as Python: ``[get_weather(city="Paris"), get_time(zone=None)]``. Nothing of it is run."""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from .literals import MAX_LITERAL, python_literal
from .reader import Broken, Parser, Wait

MAX_NAME = 256
"""Characters of a name at most."""

MAX_DEPTH = 50
"""Brackets within brackets of one argument at most."""

_NAME = re.compile(r"[A-Za-z_][\w.-]*\Z")
_WORD = re.compile(r"[^\w.-]")
_NEXT = re.compile(r"[\"'()\[\]{},]")
_CLOSES = {"{": "}", "[": "]", "(": ")"}
_ZEROS = re.compile(r"[+-]?0+[0-9]{1,18}")
_JSON_WORDS = {"true": True, "false": False, "null": None}


class Pythonic(Parser):
    """A list of calls, where the answer begins with it; of Llama 3.2, ToolACE and others."""

    MARKS: tuple[str, ...] = ()
    ENDS: tuple[str, ...] = ()
    BARE = True

    def read(self) -> Wait:
        if self.BARE:
            self.mark = 0
            yield from self.guarded(self._list())
        while self.MARKS:
            yield from self.upto(self.MARKS, self.content, keep=True)
            yield from self.guarded(self._list(), *self.ENDS)

    def _list(self) -> Wait:
        yield from self.expect("[")
        while True:
            yield from self._call()
            char = yield from self.glyph()
            self.at += 1
            if char == "]":
                break
            if char != ",":
                raise Broken
        for end in self.ENDS:
            if (yield from self.follows(end)):
                return

    def _word(self) -> Generator[None, None, str]:
        """The next name. Raises Broken."""
        yield from self.blanks()
        while (found := _WORD.search(self.text, self.at)) is None:
            yield from self._longer(MAX_NAME)
        word, self.at = self.text[self.at : found.start()], found.start()
        if len(word) > MAX_NAME or not _NAME.match(word):
            raise Broken
        return word

    def _longer(self, most: int) -> Wait:
        if len(self.text) - self.at > most:
            raise Broken
        yield from self.more()

    def _call(self) -> Wait:
        """``name(key=value, ...)``. It has begun once its first argument, or its end, shows that it is a call."""
        name = yield from self._word()
        yield from self.expect("(")
        before = "{"
        while True:
            char = yield from self.glyph()
            if char == ")":
                self.at += 1
                break
            key = yield from self._word()
            yield from self.expect("=")
            if before == "{":
                self._starts(name)
            value = yield from self._literal()
            self.arguments(f"{before}{json.dumps(key)}: {value}")
            before = ", "
            if (yield from self.glyph()) == ",":
                self.at += 1
        if before == "{":
            self._starts(name)
        self.arguments("{}" if before == "{" else "}")

    def _starts(self, name: str) -> None:
        if self.mark is not None and self.schemas and name not in self.schemas:
            raise Broken  # a list of something else
        self.begin(name)

    def _literal(self) -> Generator[None, None, str]:
        """A value up to the comma or the parenthesis after it, as JSON. Raises Broken where there is none."""
        open_: list[str] = []
        seen, quote = 0, ""
        while True:
            found = re.compile(rf"[\\{quote}]").search(self.text, self.at + seen) if quote else None
            found = found if quote else _NEXT.search(self.text, self.at + seen)
            if found is None or (found[0] == "\\" and found.end() == len(self.text)):
                seen = (len(self.text) if found is None else found.start()) - self.at
                yield from self._longer(MAX_LITERAL)
                continue
            char, seen = found[0], found.end() - self.at
            if char == "\\":
                seen += 1
            elif quote:
                quote = ""
            elif char in "\"'":
                quote = char
            elif char in _CLOSES:
                open_.append(_CLOSES[char])
                if len(open_) > MAX_DEPTH:
                    raise Broken
            elif not open_ and char in ",)":
                said = self.text[self.at : found.start()]
                if len(said) > MAX_LITERAL:  # as where it comes in pieces
                    raise Broken
                self.at = found.start()
                return _json_of(said)
            elif char != "," and (not open_ or open_.pop() != char):
                raise Broken


class Llama4Pythonic(Pythonic):
    """The same, also between ``<|python_start|>`` and ``<|python_end|>``; of Llama 4."""

    MARKS = ("<|python_start|>",)
    ENDS = ("<|python_end|>",)


class Lfm2(Pythonic):
    """The same between ``<|tool_call_start|>`` and ``<|tool_call_end|>`` alone; of LFM2."""

    MARKS, ENDS, BARE = ("<|tool_call_start|>",), ("<|tool_call_end|>",), False


class Olmo3(Pythonic):
    """Calls on lines of their own between ``<function_calls>`` tags; of OLMo 3."""

    MARKS, ENDS, BARE = ("<function_calls>",), ("</function_calls>",), False

    def _list(self) -> Wait:
        yield from self._call()
        while not (yield from self.follows(self.ENDS[0])):
            yield from self._call()


def _one_line(said: str) -> str:
    """A literal as Python reads it: line breaks and zeros within a text as escapes."""
    if said[:1] not in ("'", '"'):
        return said
    return said.replace("\r", "\\r").replace("\n", "\\n").replace("\0", "\\0")


def _json_of(said: str) -> str:
    """A Python literal as JSON; as a string where it is none, or has a value that JSON has not."""
    said = said.strip()
    if _ZEROS.fullmatch(said):  # as in a date
        said = str(int(said))
    try:
        value = _JSON_WORDS[said] if said in _JSON_WORDS else python_literal(_one_line(said))
        return json.dumps(list(value) if isinstance(value, set) else value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, KeyError):
        return json.dumps(said, ensure_ascii=False)
