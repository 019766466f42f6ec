"""How vectors are written into an answer: as numbers, as base64, or as bytes, in one of several types and orders."""

from __future__ import annotations

import base64
import functools
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from .sse import to_json

if TYPE_CHECKING:
    import numpy

    from ..client.results import Pooled

FORMATS = ("float", "base64", "bytes", "bytes_only")
TYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
ORDERS = ("native", "little", "big")

_FRACTION_BITS = {"fp8_e4m3": 3, "fp8_e5m2": 2}
_LARGEST = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}


def writer(form: str, kind: str, order: str) -> Callable[[numpy.ndarray], Any]:
    """What writes one vector as a value of JSON: numbers for "float", else base64 of its bytes."""
    if form == "float":
        return lambda data: msgspec.Raw(to_json(data.tolist()))
    return lambda data: base64.b64encode(packed(data, kind, order)).decode()


def packed(data: numpy.ndarray, kind: str, order: str) -> bytes:
    """float32 values as bytes of another type, each rounded to the nearest and then to the even one."""
    import numpy

    flat = numpy.ascontiguousarray(data, dtype=numpy.float32).reshape(-1)
    if kind in _FRACTION_BITS:
        return _narrow(flat, kind).tobytes()
    if kind == "bfloat16":
        bits = flat.view(numpy.uint32)
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
    else:
        found = flat.astype(kind)
    little = order == "little" or (order == "native" and sys.byteorder == "little")
    return found.astype(found.dtype.newbyteorder("<" if little else ">")).tobytes()


def as_bytes(pooled: list[Pooled], kind: str, order: str, told: dict[str, Any] | None) -> web.Response:
    """All vectors one after the other as the body; with ``told``, the header ``metadata`` is that and where each is."""
    parts = [packed(each.data, kind, order) for each in pooled]
    headers = {}
    if told is not None:
        places, at = [], 0
        for index, (each, part) in enumerate(zip(pooled, parts, strict=True)):
            place = {"index": index, "embed_dtype": kind, "endianness": order, "start": at, "end": at + len(part)}
            places.append({**place, "shape": list(each.data.shape)})
            at += len(part)
        headers["metadata"] = json.dumps({**told, "data": places})
    return web.Response(body=b"".join(parts), content_type="application/octet-stream", headers=headers)


def _narrow(flat: numpy.ndarray, kind: str) -> numpy.ndarray:
    """float8 codes of float32 values. Beyond the largest value is NaN (e4m3) or infinity (e5m2), as in torch."""
    import numpy

    bounds = _middles(kind)
    size = numpy.abs(flat)
    code = numpy.searchsorted(bounds, size, side="left")
    tied = (code < len(bounds)) & (size == bounds[numpy.minimum(code, len(bounds) - 1)]) & (code % 2 == 1)
    code = numpy.where(tied, code + 1, code).astype(numpy.uint8)
    return code | numpy.where(numpy.signbit(flat), numpy.uint8(0x80), numpy.uint8(0))


@functools.cache
def _middles(kind: str) -> numpy.ndarray:
    """Between the values of the codes of a float8 type from 0 on, and one value more than there is."""
    import numpy

    bits = _FRACTION_BITS[kind]
    code = numpy.arange(_LARGEST[kind] + 2)
    exponent, fraction = code >> bits, (code & (2**bits - 1)) / 2**bits
    bias = 2 ** (6 - bits) - 1
    values = numpy.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - float(bias)))
    return (values[:-1] + values[1:]) / 2
