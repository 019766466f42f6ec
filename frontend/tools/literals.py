"""Values that models write, as Python's or as JSON."""

from __future__ import annotations

import ast
import warnings
from typing import Any

MAX_LITERAL = 64 * 1024
"""Characters of one argument at most."""


def python_literal(text: str) -> Any:
    """The value of a literal; nothing of it is run. What Python's parser finds odd in a model's text is no news for the
    log. Raises ValueError, TypeError, SyntaxError, MemoryError or RecursionError where it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)
