"""How strictly bodies are read: numbers and booleans that came as strings, and fields that nobody knows.

A body that is right in every type costs nothing here but a look at the names of its fields.
"""

from __future__ import annotations

import difflib
import functools
import heapq
import logging
import math
import re
import time
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from .errors import ApiError
from .shapes import Shape, unknown_within

log = logging.getLogger(__name__)

AGAIN_S = 60.0
"""Seconds until the same warning is given again."""
MAX_WARNINGS = 50
"""Different warnings in that time; more are not written, for names come from clients."""

MAX_DIGITS = 100
"""Characters of a string that may still be a number."""

_PLACE = re.compile(r"\[\d+\]")
_INTEGER = re.compile(r"[+-]?\d{1,30}(\.0*)?")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?")
_WORDS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


class Bodies:
    """The rules of one server. ``lenient``: numbers and booleans may come as strings, as in vLLM; ``reject_unknown``:
    a field that nobody knows is a 400. Each is a warning otherwise. Lists and objects may be ``max_depth`` deep in
    each other. ``clock`` gives seconds, ``context`` the most tokens that the model takes, or 0."""

    def __init__(
        self, lenient: bool = False, reject_unknown: bool = False, max_depth: int = 100,
        clock: Callable[[], float] = time.monotonic, context: Callable[[], int] = lambda: 0,
    ):  # fmt: skip
        self.lenient, self.reject_unknown, self.max_depth, self._clock = lenient, reject_unknown, max_depth, clock
        self.context = context
        self._warned: dict[str, float] = {}

    def check_names(self, raw: dict[str, Any], known: frozenset[str]) -> None:
        """Say which fields are none of ``known``. Raises ApiError where they are refused."""
        if not (unknown := raw.keys() - known):
            return
        for name in (each[:80] for each in heapq.nsmallest(MAX_WARNINGS, unknown)):
            self._unknown(name, name, name, known, name)

    def check_within(self, raw: dict[str, Any], known: Shape) -> None:
        """The same for the objects within; only the first are told. Raises ApiError where they are refused."""
        for where, name, names in unknown_within(raw, known):
            name = name[:80]
            everywhere = _PLACE.sub("[]", where)  # one warning for all messages
            self._unknown(f"{where}.{name}", f"{everywhere}.{name}", name, names, _PLACE.split(where)[0].split(".")[0])

    def _unknown(self, path: str, everywhere: str, name: str, known: frozenset[str], param: str) -> None:
        if self.reject_unknown:
            remedy = " Leave it out, or start without --reject-unknown-fields."
            raise ApiError(400, f"there is no field {path!r}{_hint(name, known)}{remedy}", param)
        if self._due(everywhere):  # names are compared for what is written alone, for it takes long
            text = "a request has a field %r, which is not known and means nothing%s"
            log.warning(text, everywhere, _hint(name, known))

    def loosened(self, raw: dict[str, Any], kind: Any) -> dict[str, Any]:
        """The same fields, with strings as the numbers and booleans that they say, where nothing else is expected."""
        if not self.lenient:
            return raw
        found = dict(raw)
        for name, wanted in _scalars(kind).items():
            value = raw.get(name)
            if isinstance(wanted, dict) and isinstance(value, dict):
                inner = {key: self._said(f"{name}.{key}", value[key], wanted[key]) for key in value.keys() & wanted}
                found[name] = {**value, **inner}
            elif isinstance(wanted, frozenset) and value is not None:
                found[name] = self._said(name, value, wanted)
        return found

    def _said(self, name: str, value: Any, wanted: frozenset[type]) -> Any:
        """What a string says, or a 0 or 1 in place of a boolean; what says nothing of the kind stays."""
        number = type(value) is int and value in (0, 1) and bool in wanted and int not in wanted
        if not isinstance(value, str) and not number:
            return value
        read = _read(str(value), wanted)
        if read is None:
            return value
        if self._due(name):
            text = "%s came as %.80r and is taken for %.80r; --no-lenient-types refuses it."
            log.warning(text, name, value, read)
        return read

    def _due(self, name: str) -> bool:
        """Whether a warning of this field is to be written now; then it is taken for written."""
        now = self._clock()
        if now - self._warned.get(name, -AGAIN_S) < AGAIN_S:
            return False
        self._warned = {each: then for each, then in self._warned.items() if now - then < AGAIN_S}
        if len(self._warned) >= MAX_WARNINGS:
            return False
        self._warned[name] = now
        return True


STRICT = Bodies()


def _hint(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.75)
    return f"; did you mean {near[0]}?" if near else "."


def _read(text: str, wanted: frozenset[type]) -> Any:
    text = text.strip()
    if len(text) > MAX_DIGITS:  # to find that long digits are no number takes a time that grows with their square
        return None
    if int in wanted and _INTEGER.fullmatch(text):
        return int(text.split(".")[0])
    if float in wanted and _NUMBER.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else None
    return _WORDS.get(text.lower()) if bool in wanted else None


@functools.cache
def _scalars(kind: Any) -> dict[str, frozenset[type] | dict[str, Any]]:
    """The fields of a struct that hold numbers or booleans and no strings, by their types; for a field that is a
    struct, the same of it."""
    found: dict[str, frozenset[type] | dict[str, Any]] = {}
    for each in msgspec.structs.fields(kind):
        name, hint = each.encode_name, each.type
        union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        kinds = [one for one in (typing.get_args(hint) if union else (hint,)) if one is not types.NoneType]
        if kinds and all(one in (int, float, bool) for one in kinds):
            found[name] = frozenset(kinds)
        elif len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], msgspec.Struct):
            found[name] = _scalars(kinds[0])
    return found
