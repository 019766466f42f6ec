"""Bytes to messages and back: one msgpack frame a message, int columns for arrays of a step's size.

A column is the raw little-endian bytes of an array. One struct of columns is built in under a microsecond where a
list of structs takes forty, which is why every per-step message is made of them.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("quire's wire format is little-endian and this machine is not")

T = TypeVar("T")
MAX_FRAME = 256 * 2**20
"""Bytes of one message, at most."""
FEW = 16
"""Integers in a column that is packed by way of ``array``, at most."""

_encoder = msgspec.msgpack.Encoder()


class BadFrame(ValueError):
    """Bytes from a socket that are not a message of that socket's union."""


def encode(message: Any) -> bytes:
    """One packed frame."""
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one closed union of messages; anything else is a BadFrame."""

    def __init__(self, union: Any):
        self._decoder = msgspec.msgpack.Decoder(union)

    def __call__(self, frame: bytes | memoryview) -> T:
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise BadFrame(str(error)[:200]) from error


def i8(values: Iterable[int]) -> bytes:
    """Pack as int8."""
    return array("b", values).tobytes()


def i32(values: Iterable[int]) -> bytes:
    """Pack as int32; OverflowError where one does not fit."""
    return _pack("i", values) if type(values) is list and len(values) > FEW else array("i", values).tobytes()


def f32(values: Iterable[float]) -> bytes:
    """Pack as float32."""
    return array("f", values).tobytes()


def i64(values: Iterable[int]) -> bytes:
    """Pack as int64; OverflowError where one does not fit."""
    return _pack("q", values) if type(values) is list and len(values) > FEW else array("q", values).tobytes()


def u64(values: Iterable[int]) -> bytes:
    """Pack as uint64; OverflowError where one does not fit."""
    return array("Q", values).tobytes()


def _pack(code: str, values: list[int]) -> bytes:
    """``struct`` takes a long list in a third of the time that ``array`` takes."""
    try:
        return struct.pack(f"{len(values)}{code}", *values)
    except struct.error:
        return array(code, values).tobytes()  # raises what says which is wrong: OverflowError or TypeError


def _unpack(code: str, column: bytes) -> list[Any]:
    out = array(code)
    try:
        out.frombytes(column)
    except ValueError as error:
        raise BadFrame(f"a column of {len(column)} bytes is not a whole number of {out.itemsize}-byte items") from error
    return out.tolist()


def from_i8(column: bytes) -> list[int]:
    """Unpack int8; BadFrame if the length is not whole (never for int8)."""
    return _unpack("b", column)


def from_i32(column: bytes) -> list[int]:
    """Unpack int32; BadFrame if the length is not a multiple of 4."""
    return _unpack("i", column)


def from_u32(column: bytes) -> list[int]:
    """Unpack uint32; BadFrame if the length is not a multiple of 4."""
    return _unpack("I", column)


def from_f32(column: bytes) -> list[float]:
    """Unpack float32; BadFrame if the length is not a multiple of 4."""
    return _unpack("f", column)


def from_i64(column: bytes) -> list[int]:
    """Unpack int64; BadFrame if the length is not a multiple of 8."""
    return _unpack("q", column)


def from_u64(column: bytes) -> list[int]:
    """Unpack uint64; BadFrame if the length is not a multiple of 8."""
    return _unpack("Q", column)
