"""Strings of a JSON schema, said so that llguidance honours them exactly: patterns, formats and constants.

Without ``\\uXXXX`` escapes some control characters cannot be written at all. llguidance 1.9.1 leaves such a character
out where it stands by itself (``^a\\x01b$`` would give "ab"), and takes a class that holds every control character to
hold the quote and the backslash too (``[^"]`` would give a quote). So nothing that it is told names them.
"""

from __future__ import annotations

import re
from typing import Any

_LOST = r"\x00-\x07\x0b\x0e-\x1f\x7f"
"""The characters that cannot be written, as part of a class."""

_PIECE = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|x..|u....|U.{8}|.)|[^\\]", re.S)
_MAY_BE_LOST = re.compile(rf"\\[xuUpPva]|[{_LOST}]")

_YEAR = r"(?:\d{3}[1-9]|\d\d[1-9]\d|\d[1-9]\d\d|[1-9]\d{3})"
_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:[zZ]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_N, _DAYS = r"\d{1,9}", r"\d{1,6}"
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_SPAN = f"(?:{_DAYS}Y(?:{_DAYS}M(?:{_DAYS}D)?)?|{_DAYS}M(?:{_DAYS}D)?|{_DAYS}D)(?:{_CLOCK})?"
_FORMATS = {
    "date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}[tT]{_TIME}$",
    "duration": f"^P(?:{_SPAN}|{_CLOCK}|{_DAYS}W)$",
}  # fmt: skip
"""llguidance's own have a year 0, a 29th of February in every year, a leap second in every minute, and any number of
digits, which a model can write for ever."""

_ANY = ("binary", "directory-path", "file-path", "password", "path")
"""Formats that every string has: they say how one is shown, sent or used."""


def narrow_strings(schema: dict[str, Any], out: dict[str, Any]) -> None:
    """Rewrite in ``out``, a copy of ``schema``, what it says of strings itself, not in its subschemas."""
    if isinstance(schema.get("pattern"), str):
        out["pattern"] = writable(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        out["patternProperties"] = {writable(name): each for name, each in out["patternProperties"].items()}
    form = schema.get("format")
    if not isinstance(form, str) or "string" not in _types(schema):
        return
    if form in _ANY:
        del out["format"]
    elif form in _FORMATS:
        del out["format"]
        if "pattern" in out or "enum" in out or "const" in out:
            more = out.get("allOf")
            out["allOf"] = [*(more if isinstance(more, list) else ()), {"pattern": _FORMATS[form]}]
        else:
            out["pattern"] = _FORMATS[form]


def lost_character(value: Any) -> str | None:
    """A character that a string of this constant has and that cannot be written; None where all can."""
    if isinstance(value, str):
        found = re.search(f"[{_LOST}]", value)
        return found[0] if found else None
    if isinstance(value, dict):
        value = list(value.values())  # names are written as they are
    lost = map(lost_character, value) if isinstance(value, list) else ()
    return next((each for each in lost if each is not None), None)


def writable(pattern: str) -> str:
    """A pattern for the same strings but those that cannot be written; a pattern that is none stays one."""
    out, at = [], 0
    while found := _PIECE.match(pattern, at):
        at, piece = found.end(), found[0]
        if piece == "[":
            at = _class_end(pattern, at)
            piece = pattern[found.start() : at]
            if "[^" in piece or _MAY_BE_LOST.search(piece):
                piece = f"[{piece}&&[^{_LOST}]]"
        elif _MAY_BE_LOST.match(piece):
            piece = f"[{piece}&&[^{_LOST}]]"
        out.append(piece)
    return "".join(out) + pattern[at:]


def _class_end(pattern: str, at: int) -> int:
    """Where the class ends whose inside begins at ``at``: after its own bracket, or at the end of the pattern."""
    depth, first = 1, True
    while depth and (found := _PIECE.match(pattern, at)):
        at, piece = found.end(), found[0]
        if piece == "[":
            depth, first = depth + 1, True
        elif piece == "]" and not first:
            depth -= 1
        elif not (first and piece == "^"):
            first = False
    return at


def _types(schema: dict[str, Any]) -> list[Any]:
    named = schema.get("type", "string")
    return named if isinstance(named, list) else [named]
