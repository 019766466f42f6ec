"""Values that models write, as Python's or as JSON."""

from __future__ import annotations

import ast
import warnings
from typing import Any

import msgspec

MAX_LITERAL = 64 * 1024
"""Characters of one argument at most."""


def python_literal(text: str) -> Any:
    """The value of a literal; nothing of it is run. What Python's parser finds odd in a model's text is no news for the
    log. Raises ValueError, TypeError, SyntaxError, MemoryError or RecursionError where it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


def object_of(arguments: str) -> dict[str, Any] | None:
    """A call's arguments as an object; None where they are none: cut off, of another type, or nested without end, which
    a model may write within a string, where nothing bounds it."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
