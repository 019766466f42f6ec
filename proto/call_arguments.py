"""The arguments of a tool's call, as text and as an object.

In the past of a conversation they are opaque: a call that was cut off, or one that is no JSON, is told to its model all
the same, so that whatever an answer holds may be sent back.
"""

from __future__ import annotations

from typing import Any

import msgspec

RAW = "_raw"
"""The one key of an object that stands for arguments that are none."""


def object_of(arguments: str) -> dict[str, Any] | None:
    """A call's arguments as an object; None where they are none: cut off, of another type, or nested without end, which
    a model may write within a string, where nothing bounds it."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def told_object(arguments: str) -> dict[str, Any]:
    """The same as clients and chat templates want them, always an object: what is none stands under ``_raw``."""
    found = object_of(arguments)
    return {RAW: arguments} if found is None else found
