"""What the wire would refuse is found before it is sent: the other end drops such a frame, and can tell nobody."""

from __future__ import annotations

import operator
from array import array
from functools import cache
from typing import Any, get_type_hints

import msgspec

from ..proto.codec import Decoder, encode
from ..proto.messages import Tokenize
from ..proto.work import bytes_of
from .results import RequestError

_decoder: Any = cache(Decoder)
_hints: Any = cache(get_type_hints)


def unsendable(value: Any, kind: Any) -> str | None:
    """Why ``value`` would not arrive as a ``kind``; None where it would."""
    try:
        _decoder(kind)(encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError, msgspec.MsgspecError) as error:
        if isinstance(error, UnicodeEncodeError):
            return "it holds a lone surrogate, which is no text"
        return str(error).rstrip(".") or type(error).__name__
    return None


def bad_field(struct: Any) -> tuple[str, str] | None:
    """The field that keeps a struct from being sent, and why; None where all of it can be."""
    reason = unsendable(struct, type(struct))
    if reason is None:
        return None
    for name, kind in _hints(type(struct)).items():
        value = getattr(struct, name)
        if isinstance(value, msgspec.Struct) and (inner := bad_field(value)) is not None:
            return inner
        if (why := unsendable(value, kind)) is not None:
            if name == "template":  # its own fields are what a request names
                name = next((key for key in value if unsendable(value[key], Any)), name)
            return name, why
    return type(struct).__name__, reason


def priority_of(value: Any) -> int:
    """A request's priority. Raises TypeError, ValueError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"priority must be an integer, got {value!r}.") from None
    if not -(2**31) <= number < 2**31:
        raise ValueError(f"priority must be a 32-bit integer, got {value!r}.")
    return number


def pack_ids(ids: list[int]) -> bytes:
    """Token ids as an int32 column. Raises RequestError 400 where one does not fit."""
    try:
        return array("i", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise RequestError(400, f"token ids must be integers of at most 31 bits ({error}).", "prompt") from error


def size_of(message: Tokenize) -> int:
    """Roughly the bytes that a request holds while it waits to be tokenized."""
    chat = sum(len(v) if isinstance(v, (str, list)) else 64 for each in message.messages or () for v in each.values())
    options = len(encode(message.template)) if message.template else 0
    given = len(message.prompt or "") + len(message.ids or b"") + len(message.cache_salt)
    return 512 + given + bytes_of(message.work) + chat + options
