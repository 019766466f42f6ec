"""How the log names a request."""

from __future__ import annotations


def short(uid: int) -> str:
    """A request's uid as lines of the log have it: who sent it, and its number there."""
    return f"{uid >> 32:x}-{uid & 0xFFFFFFFF}"


def about(uid: int) -> dict[str, str]:
    """``extra`` of a log record that is about this request."""
    return {"request_id": short(uid)}
