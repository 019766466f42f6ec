"""Calls as JSON objects of a name and arguments, which is how most families write them.

Arguments are given as the model writes them, piece by piece. A call begins where its arguments do: a name is known by
then, or the arguments wait for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any

from .reader import Broken, Parser, Wait, drop

NAMES, ARGUMENTS = ("name",), ("arguments", "parameters")
BARE_KEYS = (*NAMES, *ARGUMENTS, "type", "id", "description")
"""The keys that an object may have where nothing but its keys tells that it is a call."""

MAX_DEPTH = 200
_STRUCTURE, _STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,\]}:]")
_CLOSES = {"{": "}", "[": "]"}


class JsonReader(Parser):
    """Reads JSON that is still being written. ``NAMES`` are the keys of a call's name."""

    NAMES: tuple[str, ...] = NAMES

    def value(self, give: Callable[[str], None]) -> Wait:
        """Give one value as it stands, in pieces. Raises Broken where none is there."""
        first = yield from self.glyph()
        if first not in '"{[':
            yield from self._scalar(give)
            return
        open_, quoted, place = [], False, self.at
        while True:
            found = (_STRING if quoted else _STRUCTURE).search(self.text, place)
            if found is None or (found[0] == "\\" and found.end() == len(self.text)):
                end = len(self.text) if found is None else found.start()
                piece, self.at = self.text[self.at : end], end
                give(piece)
                yield from self.more()
                place = self.at
                continue
            place = found.end()
            char = found[0]
            if char == "\\":
                place += 1
                continue
            if char == '"':
                quoted = not quoted
            elif char in _CLOSES:
                open_.append(_CLOSES[char])
            if (char in "}]" and not quoted and (not open_ or open_.pop() != char)) or len(open_) > MAX_DEPTH:
                piece, self.at = self.text[self.at : place - 1], place - 1
                give(piece)
                raise Broken
            if not open_ and not quoted:
                piece, self.at = self.text[self.at : place], place
                give(piece)
                return

    def _scalar(self, give: Callable[[str], None]) -> Wait:
        seen = 0
        while (found := _SCALAR_END.search(self.text, self.at + seen)) is None:
            seen = len(self.text) - self.at
            yield from self.more()
        word, self.at = self.text[self.at : found.start()], found.start()
        if not _is_scalar(word):
            raise Broken
        give(word)

    def decoded(self) -> Generator[None, None, Any]:
        """One value. Raises Broken where it is no JSON."""
        pieces: list[str] = []
        yield from self.value(pieces.append)
        try:
            return json.loads("".join(pieces), strict=False)
        except (ValueError, RecursionError):
            raise Broken from None

    def call(self, bare: bool = False) -> Wait:
        """An object with a name and arguments. ``bare``: nothing else tells that it is a call, so that it must have
        both, the name first, and nothing that calls have not. Raises Broken."""
        yield from self.expect("{")
        name: str | None = None
        held: list[str] = []
        given = False
        while True:
            char = yield from self.glyph()
            if char in "},":
                self.at += 1
                if char == "}":
                    break
                continue
            if char != '"':
                raise Broken
            key = yield from self.decoded()
            yield from self.expect(":")
            if bare and (
                key not in BARE_KEYS or ((name is None or key not in ARGUMENTS) and (yield from self.glyph()) != '"')
            ):
                raise Broken
            if key in self.NAMES and name is None:
                name = yield from self.decoded()
                if not isinstance(name, str) or not name:
                    raise Broken
                if given:
                    self.begin(name)
                    self.arguments("".join(held))
            elif key in ARGUMENTS and not given:
                given = True
                if name is not None:
                    char = yield from self.glyph()
                    if bare and char not in '{"n':
                        raise Broken
                    self.begin(name)
                yield from self._arguments(held.append if name is None else self.arguments)
            else:
                yield from self.value(drop)
        if name is None or (bare and not given):
            raise Broken
        if not given:
            self.begin(name)
            self.arguments("{}")

    def _arguments(self, give: Callable[[str], None]) -> Wait:
        """The arguments' value; one that is JSON in a string is that JSON, and null is no arguments."""
        char = yield from self.glyph()
        if char == "{":
            yield from self.value(give)
            return
        value = yield from self.decoded()
        give(value if isinstance(value, str) else "{}" if value is None else json.dumps(value, ensure_ascii=False))

    def calls(self, bare: bool = False) -> Wait:
        """A list of calls, or one."""
        char = yield from self.glyph()
        if char == "{":
            yield from self.call(bare)
            return
        yield from self.expect("[")
        if (yield from self.glyph()) == "]":
            if bare or self.mark is not None:
                raise Broken
            self.at += 1
            return
        while True:
            yield from self.call(bare)
            char = yield from self.glyph()
            self.at += 1
            if char == "]":
                return
            if char != ",":
                raise Broken


def _is_scalar(word: str) -> bool:
    try:
        json.loads(word)
    except (ValueError, RecursionError):
        return False
    return bool(word)
