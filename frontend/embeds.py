"""``prompt_embeds``: prompts of embeddings, as base64 of a safetensors file with one tensor.

vLLM takes what torch.save wrote, which is a pickle: to read one is to run what it says, so here it is refused. The
header is read by these few lines, and no number of it is believed before it has been compared with the bytes there are.
"""

from __future__ import annotations

import base64
import binascii
import math
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from ..proto.work import Embeds
from .errors import ApiError
from .parsing import kind_of
from .prompts import MAX_PROMPTS

_NAME = "prompt_embeds"
_DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""By type the integers of the same size, and the bits that are all set in what is no finite number."""
_MAX_HEADER = 65536
_REMEDY = "send base64 of safetensors.torch.save({'prompt_embeds': tensor})"


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=8)]
    data_offsets: tuple[int, int]


def embeds_of_body(given: Any, size: int) -> list[Embeds]:
    """The prompts of the field, one or a list; ``size`` is how many numbers each of the model's embeddings has. Raises
    ApiError."""
    several = given if isinstance(given, list) else [given]
    if not several or len(several) > MAX_PROMPTS:
        raise _bad(f" must hold 1 to {MAX_PROMPTS} prompts, got {len(several)}")
    return [_embeds(each, f"[{n}]" if len(several) > 1 else "", size) for n, each in enumerate(several)]


def _embeds(given: Any, at: str, size: int) -> Embeds:
    if not isinstance(given, str):
        raise _bad(f"{at} must be a base64 string, got {kind_of(given)}")
    try:
        data = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise _bad(f"{at} is not valid base64; {_REMEDY}") from None
    entry, tensor = _tensor(data, at)
    name, _ = _DTYPES[entry.dtype]
    shape = entry.shape[1:] if len(entry.shape) == 3 and entry.shape[0] == 1 else entry.shape
    if len(shape) != 2 or shape[0] < 1 or shape[1] != size:
        raise _bad(f"{at} has the shape {entry.shape}; it must be [tokens, {size}], this model's hidden size")
    _check_finite(entry.dtype, tensor, at)
    digest = blake2b(tensor, digest_size=16, person=b"embeds", salt=name.encode()).digest()
    return Embeds(name, size, shape[0], digest, tensor)


def _tensor(data: bytes, at: str) -> tuple[_Entry, bytes]:
    """The file's only tensor: what its header says, and its bytes."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(_MAX_HEADER, len(data) - 8):
        if data.startswith((b"PK", b"\x80")):  # a header of such a length would be too long
            raise _bad(f"{at} is a file of torch.save, which is a pickle and is not opened; {_REMEDY}")
        raise _bad(f"{at} is no safetensors file; {_REMEDY}")
    try:
        header = msgspec.json.decode(data[8 : 8 + length])
        named = {name: msgspec.convert(told, _Entry) for name, told in header.items() if name != "__metadata__"}
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError, RecursionError):
        raise _bad(f"{at} is no safetensors file: its header cannot be read; {_REMEDY}") from None
    if len(named) != 1:
        raise _bad(f"{at} holds {len(named)} tensors; give one")
    (entry,) = named.values()
    if entry.dtype not in _DTYPES:
        raise _bad(f"{at} holds numbers of type {entry.dtype[:20]!r}; give float32, float16 or bfloat16")
    tensor, (start, end) = data[8 + length :], entry.data_offsets
    wanted = math.prod(entry.shape) * _DTYPES[entry.dtype][1]
    if start != 0 or end != wanted or end != len(tensor):
        raise _bad(f"{at} has {len(tensor)} bytes of numbers, and its header speaks of {wanted}")
    return entry, tensor


def _check_finite(dtype: str, tensor: bytes, at: str) -> None:
    import numpy as np  # which other requests do without

    kind, bits = _EXPONENTS[dtype]
    values = np.frombuffer(tensor, kind)
    odd = (values & bits) == bits
    if odd.any():
        raise _bad(f"{at} holds a number that is not finite, the first at {int(odd.argmax())}")


def _bad(what: str) -> ApiError:
    return ApiError(400, f"{_NAME}{what}.", _NAME)
