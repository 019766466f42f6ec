"""Calls as JSON objects of a name and arguments, which is how most families write them.

Arguments are given as the model writes them, piece by piece, and put right where that is no JSON. A call begins where
its arguments do: a name is known by then, or the arguments wait for it. What has arguments that are no object is none.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from .json_values import Give, ValueReader, whole_object
from .reader import Broken, Wait, drop

NAMES, ARGUMENTS = ("name",), ("arguments", "parameters")
BARE_KEYS = (*NAMES, *ARGUMENTS, "type", "id", "description")
"""The keys that an object may have where nothing but its keys tells that it is a call."""


class JsonReader(ValueReader):
    """Reads calls in JSON that is still being written. ``NAMES`` are the keys of a call's name."""

    NAMES: tuple[str, ...] = NAMES

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
            if char not in ('"' if bare else "\"'"):
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
                yield from self._arguments(name, held, bare)
            else:
                yield from self.value(drop)
        if name is None or (bare and not given):
            raise Broken
        if not given:
            self.begin(name)
            self.arguments("{}")

    def _arguments(self, name: str | None, held: list[str], bare: bool) -> Wait:
        """The arguments of the call ``name``, which begins with them; they are ``held`` where it is not known yet. An
        object in a string is that object, and null is no arguments. Raises Broken where they are no object."""
        char = yield from self.glyph()
        if bare and name is not None and char not in '{"n':
            raise Broken
        if char != "{":
            value = yield from self.decoded()
            told = "{}" if value is None or value == "" else whole_object(value) if isinstance(value, str) else None
            if told is None:
                raise Broken
            held.append(told)
        if name is not None:
            self.begin(name)
            self.arguments("".join(held))
        if char == "{":
            yield from self.value(held.append if name is None else self.arguments)

    def object(self, give: Give) -> Wait:
        """Give the object that is next. Raises Broken where there is none."""
        if (yield from self.glyph()) != "{":
            raise Broken
        yield from self.value(give)

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
