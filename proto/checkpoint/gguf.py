"""The head of a GGUF file (versions 2 and 3): its metadata, and where each tensor lies. No tensor is read here.

The layout is that of ggml's docs/gguf.md: magic, version, number of tensors, number of keys, the keys with typed
values, the tensors' names, shapes, types and offsets, then the data, aligned. A file is not trusted: each count and
length is held to a limit and to the size of the file before anything is made of it, and what is read of a file is no
more than ``MOST_HEAD`` bytes. Every fault is a ConfigError, one line that names the file and the key or tensor.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..config import ConfigError
from ..readable import is_file, is_folder, unreadable

MOST_HEAD = 64 << 20
"""Bytes of a head; those of the largest vocabularies in use take 15 MB."""
_MOST_KEYS = 1 << 14
_MOST_TENSORS = 20_000
_MOST_TEXTS = 1 << 20
"""Texts of all arrays together: the largest vocabularies in use have 262,144 tokens and twice as many merges."""
_MOST_ARRAYS = 256
"""Arrays within arrays, which files in use have none of."""
_MOST_VALUES = 1 << 22
"""Values of all arrays together: a vocabulary of 262,144 tokens with its merges, scores and types has 1.3 million."""
_MOST_TEXT = 4 << 20
_MOST_NAME = 1 << 10
_MOST_DIMS = 4
_MOST_NESTED = 2
_PIECE = 1 << 20

_U8, _I8, _U16, _I16, _U32, _I32, _F32, _BOOL, _TEXT, _ARRAY, _U64, _I64, _F64 = range(13)
_NUMBERS = {
    _U8: "B", _I8: "b", _U16: "H", _I16: "h", _U32: "I", _I32: "i", _F32: "f", _BOOL: "B", _U64: "Q", _I64: "q",
    _F64: "d",
}  # fmt: skip
_BYTES = {kind: struct.calcsize("<" + code) for kind, code in _NUMBERS.items()}


@dataclass(frozen=True)
class Type:
    """A type of tensors: ``block`` values of a row lie in ``nbytes`` bytes."""

    name: str
    block: int
    nbytes: int


TYPES = {
    number: Type(name, block, nbytes)
    for number, name, block, nbytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
    )
}  # fmt: skip
"""ggml's types by number."""


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. ``shape`` has the rows' length last; ``start`` counts bytes from the file's beginning."""

    name: str
    shape: tuple[int, ...]
    type: Type
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.shape[-1] // self.type.block * self.type.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GGUF:
    """What the head of ``file`` says. Values of ``metadata`` are numbers, texts, booleans, and lists or arrays."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def gguf_file(model: str | Path) -> Path | None:
    """The GGUF file that ``model`` names, the first where a model lies in several; None where it is something else.

    ``model`` is such a file, or a folder that holds one model so and neither a config.json that says an architecture
    of its own nor other weights. Raises ConfigError for a folder with several models.
    """
    path = Path(model)
    if path.suffix == ".gguf":
        return _first(path)
    if not is_folder(path) or is_file(path / "model.safetensors") or next(path.glob("*.safetensors"), None):
        return None
    found = sorted({_first(file) for file in path.glob("*.gguf") if is_file(file) and "mmproj" not in file.name})
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise ConfigError(f"{path} holds several models ({names}{', …' if len(found) > 4 else ''}); name one file.")
    return found[0] if found else None


_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def _first(file: Path) -> Path:
    split = _SPLIT.fullmatch(file.name)
    return file if split is None else file.with_name(f"{split[1]}-00001-of-{split[3]}.gguf")


def gguf_files(first: Path) -> list[Path]:
    """All files of the model that begins in ``first``. Raises ConfigError where one of a split model is missing."""
    split = _SPLIT.fullmatch(first.name)
    if split is None:
        return [first]
    count = int(split[3])
    files = [first.with_name(f"{split[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    if missing := [file.name for file in files if not is_file(file)]:
        raise ConfigError(f"{first} is one of {count} files, and {missing[0]} is missing; download it too.")
    return files


def read_gguf(file: Path) -> GGUF:
    """Read the head of one file. Raises ConfigError."""
    if not is_file(file):
        raise ConfigError(f"{file} is no file; give the path of a .gguf file.")
    try:
        with file.open("rb", buffering=0) as data:
            return _Head(file, data, file.stat().st_size).read()
    except PermissionError as error:
        raise unreadable(file) from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; download it again.") from error


class _Head:
    """A head while it is read: the bytes so far, and where the next value begins."""

    def __init__(self, file: Path, data: BinaryIO, size: int) -> None:
        self._file, self._data, self._size = file, data, size
        self._bytes, self._at = bytearray(), 0
        self._values = self._texts = self._arrays = 0

    def _fault(self, text: str) -> ConfigError:
        return ConfigError(f"{self._file}: {text}; download it again.")

    def _take(self, count: int, what: str) -> int:
        """Have the next ``count`` bytes in memory; where they begin."""
        at, end = self._at, self._at + count
        if end > self._size:
            raise self._fault(f"{what} ends behind the end of the file, at byte {end} of {self._size}")
        if end > MOST_HEAD:
            raise self._fault(f"{what} makes the metadata longer than {MOST_HEAD >> 20} MiB, the most that is read")
        while len(self._bytes) < end:
            more = self._data.read(max(_PIECE, end - len(self._bytes)))
            if not more:
                raise self._fault(f"{what} is cut short")
            self._bytes += more
        self._at = end
        return at

    def _number(self, code: str, what: str) -> Any:
        at = self._take(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self._bytes, at)[0]

    def _text(self, what: str, most: int = _MOST_TEXT) -> str:
        length = self._number("Q", what)
        if length > most:
            raise self._fault(f"{what} has a text of {length} bytes, more than {most}")
        at = self._take(length, what)
        try:
            return self._bytes[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise self._fault(f"{what} is not UTF-8 (byte {error.start} of {length})") from None

    def _name(self, what: str) -> str:
        """The name of a key or a tensor, which goes into messages and logs."""
        name = self._text(what, _MOST_NAME)
        if not name.isprintable():
            raise self._fault(f"{what} has characters that cannot be printed: {name[:80]!r}")
        return name

    # ------------------------------------------------------------ the parts

    def read(self) -> GGUF:
        tensors, keys = self._counts()
        metadata: dict[str, Any] = {}
        for index in range(keys):
            name = self._name(f"key {index} of {keys}")
            if name in metadata:
                raise self._fault(f"key {name!r} is there twice")
            metadata[name] = self._value(f"key {name!r}", self._number("I", f"key {name!r}"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._fault(f"key 'general.alignment' must be a power of two from 8 to 1048576, got {alignment!r}")
        found: dict[str, GGUFTensor] = {}
        for index in range(tensors):
            tensor = self._tensor(index, tensors, alignment)
            if tensor.name in found:
                raise self._fault(f"tensor {tensor.name!r} is there twice")
            found[tensor.name] = tensor
        start = -(-self._at // alignment) * alignment
        placed = {name: GGUFTensor(name, t.shape, t.type, start + t.start) for name, t in found.items()}
        self._check_places(list(placed.values()))
        return GGUF(self._file, metadata, placed)

    def _counts(self) -> tuple[int, int]:
        """The numbers of tensors and of keys."""
        at = self._take(4, "the magic number")
        if self._bytes[at : at + 4] != b"GGUF":
            raise self._fault("it does not begin with 'GGUF', so it is no GGUF file")
        version = self._number("I", "the version")
        if version & 0xFFFF == 0 and version >> 16:
            raise ConfigError(f"{self._file} is big-endian, and only little-endian GGUF files are read; convert it.")
        if version not in (2, 3):
            raise ConfigError(
                f"{self._file}: GGUF version {version} is not read, only 2 and 3; convert the model anew."
            )
        tensors, keys = self._number("Q", "the number of tensors"), self._number("Q", "the number of keys")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            which, count, most = ("tensors", tensors, _MOST_TENSORS) if tensors > _MOST_TENSORS else (
                "keys", keys, _MOST_KEYS)  # fmt: skip
            raise self._fault(f"it says to have {count} {which}, more than {most}")
        return tensors, keys

    def _value(self, what: str, kind: int, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self._text(what)
        if kind == _ARRAY:
            return self._array(what, depth)
        if kind not in _NUMBERS:
            raise self._fault(f"{what} has a value of type {kind}, which GGUF does not know")
        value = self._number(_NUMBERS[kind], what)
        if kind == _BOOL and value > 1:
            raise self._fault(f"{what} must be 0 or 1, being true or false, got {value}")
        return bool(value) if kind == _BOOL else value

    def _array(self, what: str, depth: int) -> Any:
        kind, count = self._number("I", what), self._number("Q", what)
        if depth >= _MOST_NESTED:
            raise self._fault(f"{what} has arrays within arrays, more than {_MOST_NESTED} deep")
        self._values += count
        if self._values > _MOST_VALUES:
            raise self._fault(f"{what} has {count} values, which makes more than {_MOST_VALUES} in all arrays")
        if kind in _NUMBERS:
            at = self._take(count * _BYTES[kind], what)
            values = array(_NUMBERS[kind])
            values.frombytes(self._bytes[at : self._at])
            if sys.byteorder == "big":
                values.byteswap()
            return values
        self._texts += count if kind == _TEXT else 0
        self._arrays += count if kind == _ARRAY else 0
        if self._texts > _MOST_TEXTS or self._arrays > _MOST_ARRAYS:
            which, most = ("texts", _MOST_TEXTS) if self._texts > _MOST_TEXTS else ("arrays", _MOST_ARRAYS)
            raise self._fault(f"{what} has {count} values, which makes more than {most} {which} in all arrays")
        least = 8 if kind == _TEXT else 12
        if self._at + count * least > self._size:
            raise self._fault(f"{what} says to have {count} values, more than the file has room for")
        return [self._value(what, kind, depth + 1) for _ in range(count)]

    def _tensor(self, index: int, count: int, alignment: int) -> GGUFTensor:
        """The next tensor; its ``start`` is counted from the beginning of the data."""
        name = self._name(f"the name of tensor {index} of {count}")
        what = f"tensor {name!r}"
        dims = self._number("I", what)
        if not 1 <= dims <= _MOST_DIMS:
            raise self._fault(f"{what} has {dims} dims; 1 to {_MOST_DIMS} are possible")
        shape = tuple(self._number("Q", what) for _ in range(dims))[::-1]
        kind, start = self._number("I", what), self._number("Q", what)
        if not all(shape):
            raise self._fault(f"{what} has shape {shape}, which holds nothing")
        if kind not in TYPES:
            raise self._fault(f"{what} has type {kind}, which is not known")
        if shape[-1] % TYPES[kind].block:
            raise self._fault(
                f"{what} has rows of {shape[-1]} values, and {TYPES[kind].name} has blocks of {TYPES[kind].block}"
            )
        if start % alignment:
            raise self._fault(f"{what} begins at byte {start} of the data, which is no multiple of {alignment}")
        return GGUFTensor(name, shape, TYPES[kind], start)

    def _check_places(self, tensors: list[GGUFTensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise self._fault(f"tensor {tensor.name!r} overlaps {before!r} (byte {tensor.start} of the file)")
            end, before = tensor.start + tensor.nbytes, tensor.name
            if end > self._size:
                raise self._fault(
                    f"tensor {tensor.name!r} ends at byte {end}, and the file has {self._size}: it is cut short"
                )
