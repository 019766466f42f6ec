"""Regular expressions of modules that a checkpoint's config holds, bounded in what a match can take.

Python's ``re`` tries one way after another to match, and their number may double with each letter of a name
("(a+)+$"). That takes a repetition of a group, which no known checkpoint has; what is left is counted.
"""

from __future__ import annotations

import re

_ONE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.S)
"""An escape, or a class of characters."""
_UNREAD = re.compile(r"\)\s*[*+{]|\(\?(?!:|=|!|<=|<!)")
"""A group that is repeated, or one of a rarer kind: a name, a flag, a condition."""
_MOST_WAYS = 1 << 24


def bounded(pattern: str) -> re.Pattern[str]:
    """``pattern`` compiled. Raises re.error where it is none, or one whose matching is not bounded."""
    try:
        found = re.compile(pattern)
    except (RecursionError, OverflowError) as error:
        raise re.error(f"{type(error).__name__}: {error}") from error
    plain = _ONE.sub("x", pattern)
    if _UNREAD.search(plain):
        raise re.error("repeated groups, names and flags are not supported")
    plain = plain.replace("(?", "(")
    ways = 32 ** len(re.findall(r"[*+{]", plain)) << plain.count("?")
    for piece in re.split(r"[()]", plain):
        ways *= piece.count("|") + 1
    if ways > _MOST_WAYS:
        raise re.error("it has too many repetitions and choices")
    return found
