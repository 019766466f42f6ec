"""The scheduler's whole state as bytes, and back: what a recording begins with, so that it can be replayed from there.

Any graph of objects of ``scheduler`` and ``proto`` is written down attribute by attribute, so state that is added to a
class is in it without being named here. It is no pickle: bytes name classes of these packages and nothing else, and no
code of theirs runs while objects are made. What the state shares stays shared, and the order of dicts is kept.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from ..proto.codec import from_i32
from ..proto.config import EngineArgs
from ..proto.hashing import HASH_SIZE
from .blame import Blame
from .block_pool import BlockPool
from .core import Scheduler
from .traced import TracedScheduler

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_ROOMS = (f"{__package__}.", f"{__package__.rpartition('.')[0]}.proto.")
_KINDS: dict[type, str] = {list: "list", dict: "dict", set: "set", deque: "deque", array: "array", Counter: "counter"}
_DTYPES = ("<i4", "<i8")
_FEW = 64  # bytes that are written down as they are
_RUN = 4096  # items of an array that are compared at once
_MOST = 2**23  # blocks of a pool: more than any scheduler takes (worker_registry.MAX_BLOCKS)
_NOT_OURS = frozenset(("scheduler", "keys", "flight_recorder", "log_level", "log_format", "advertise", "bind",
                       "otlp_traces_endpoint", "collect_detailed_traces"))  # fmt: skip

Attributes = dict[str, Any]


class SnapshotError(ValueError):
    """State that cannot be written down, or bytes that are no state of this version's."""


def dump(root: Any, outside: dict[int, str], redact: Callable[[Any, Attributes], Attributes] | None = None) -> bytes:
    """``root`` and all that it reaches. ``outside``: by id, objects that are named and not written down. ``redact``
    may replace an object's attributes, and gets a message's under the names of its fields."""
    return msgspec.msgpack.encode(_Dump(outside, redact).run(root))


def load(data: bytes, outside: dict[str, Any]) -> Any:
    """The root, made anew. Raises SnapshotError."""
    try:
        return _Load(msgspec.msgpack.decode(data), outside).run()
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"its state is not of this version of quire ({error})") from error


def fields(obj: Any) -> Attributes:
    """An object's attributes, in order: those of its ``__slots__`` that are set, and of its ``__dict__``."""
    names = [name for cls in reversed(type(obj).__mro__) for name in _slots(cls)]
    found = {name: getattr(obj, name) for name in names if hasattr(obj, name)}
    return {**found, **getattr(obj, "__dict__", {})}


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class _Dump:
    def __init__(self, outside: dict[int, str], redact: Callable[[Any, Attributes], Attributes] | None):
        self._outside, self._redact = outside, redact
        self._index: dict[int, int] = {}
        self._objects: list[Any] = []  # kept alive, so that no id is used twice

    def run(self, root: Any) -> list[Any]:
        """The table of objects; the root is the first. Not by recursion: a beam's past is a long chain."""
        table: list[Any] = []
        self._value(root)
        while len(table) < len(self._objects):
            table.append(self._entry(self._objects[len(table)]))
        return table

    def _value(self, value: Any) -> Any:
        """A plain value as it is, anything else as a list that begins with what it is."""
        kind = type(value)
        if kind in _PLAIN:
            return ["zeros", len(value)] if kind is bytes and _zeros(value) else value
        if id(value) in self._outside:
            return ["outside", self._outside[id(value)]]
        if isinstance(value, Enum):
            return ["enum", _name(kind), value.value]
        if isinstance(value, msgspec.Struct):
            return ["struct", _name(kind), self._struct(value)]
        if kind is frozenset:
            return ["frozenset", sorted(map(self._value, value))]
        if kind is tuple and _PLAIN.issuperset(map(type, value)):
            return ["tuple", *value]
        if hasattr(value, "__self__") and callable(value):
            return ["method", self._value(value.__self__), value.__name__]
        if id(value) not in self._index:
            self._index[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["at", self._index[id(value)]]

    def _struct(self, value: msgspec.Struct) -> bytes:
        if self._redact is not None:
            there = msgspec.structs.asdict(value)
            if (hidden := self._redact(value, there)) != there:
                value = msgspec.structs.replace(value, **hidden)
        return msgspec.msgpack.encode(value)

    def _entry(self, obj: Any) -> list[Any]:
        kind = type(obj)
        if kind in (list, set, deque):
            items = list(obj) if _PLAIN.issuperset(map(type, obj)) else [self._value(item) for item in obj]
            return [_KINDS[kind], items, obj.maxlen if isinstance(obj, deque) else None]
        if kind in (dict, Counter):
            return [_KINDS[kind], [self._value(k) for k in obj], [self._value(v) for v in obj.values()]]
        if kind is array:
            data = obj.tobytes()
            return ["array", obj.typecode, len(data) if _zeros(data) else data]
        if kind is np.ndarray:
            return ["ndarray", obj.dtype.str, list(obj.shape), _pack_zeros(obj.tobytes())]
        if isinstance(obj, tuple):
            items = list(obj)
            if self._redact is not None and kind is not tuple:
                items = list(self._redact(obj, dict(zip(kind._fields, obj, strict=True))).values())  # type: ignore[attr-defined]
            return ["tuple" if kind is tuple else _name(kind), [self._value(item) for item in items]]
        if isinstance(obj, BlockPool):
            attributes = _pack_pool(obj)
        elif isinstance(obj, EngineArgs):
            attributes = {name: value for name, value in vars(obj).items() if _ours(name)}
        else:
            attributes = fields(obj)
            if isinstance(obj, Blame):
                del attributes["_memory"]
            elif isinstance(obj, TracedScheduler):  # a replay makes no spans
                kind, attributes = Scheduler, obj.recorded()
            if self._redact is not None:
                attributes = self._redact(obj, attributes)
        return ["object", _name(kind), {name: self._value(value) for name, value in attributes.items()}]


class _Load:
    def __init__(self, table: list[list[Any]], outside: dict[str, Any]):
        self._table, self._outside = table, outside
        self._made: dict[int, Any] = {}

    def run(self) -> Any:
        """Everything that can change is made empty first, then tuples from the inside out, then all is filled."""
        for at, entry in enumerate(self._table):
            if (shell := _shell(entry)) is not None:
                self._made[at] = shell
        for at in range(len(self._table)):
            self._tuple(at)
        for objects in (False, True):  # what an object is made of comes first
            for at, entry in enumerate(self._table):
                if (entry[0] == "object") is objects:
                    self._fill(self._made[at], entry)
        return self._made[0]

    def _tuple(self, at: int) -> None:
        waiting, begun = [at], set()
        while waiting:
            now = waiting[-1]
            if now in self._made:
                waiting.pop()
                continue
            kind, items = self._table[now]
            inner = [item[1] for item in items if isinstance(item, list) and item[0] == "at"]
            missing = [index for index in inner if index not in self._made]
            if not missing:
                values = tuple(map(self._value, items))
                self._made[waiting.pop()] = values if kind == "tuple" else tuple.__new__(_class(kind, tuple), values)
            elif now in begun:
                raise SnapshotError("a tuple is within itself")
            begun.add(now)
            waiting += missing

    def _value(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind == "at":
            return self._made[rest[0]]
        if kind == "zeros":
            return bytes(rest[0])
        if kind == "tuple":
            return tuple(rest)
        if kind == "outside":
            return self._outside[rest[0]]
        if kind == "enum":
            return _class(rest[0], Enum)(rest[1])
        if kind == "struct":
            return msgspec.msgpack.decode(rest[1], type=_class(rest[0], msgspec.Struct))
        if kind == "frozenset":
            return frozenset(map(self._value, rest[0]))
        if kind == "method" and not rest[1].startswith("_"):
            return getattr(self._value(rest[0]), rest[1])
        raise SnapshotError(f"an unknown kind of value, {kind!r}")

    def _fill(self, made: Any, entry: list[Any]) -> None:
        kind, *rest = entry
        if kind in ("list", "deque"):
            made.extend(map(self._value, rest[0]))
        elif kind == "set":
            made.update(map(self._value, rest[0]))
        elif kind in ("dict", "counter"):
            pairs = zip(map(self._value, rest[0]), map(self._value, rest[1]), strict=True)
            dict.update(made, pairs)  # that of a Counter would count them
        elif kind == "object":
            attributes = {name: self._value(value) for name, value in rest[1].items()}
            if isinstance(made, BlockPool):
                attributes = _unpack_pool(attributes)
            for name, value in attributes.items():
                setattr(made, name, value)


def _shell(entry: list[Any]) -> Any:
    """What ``entry`` is, still empty; None for a tuple, which cannot be."""
    kind, *rest = entry
    if kind == "array":
        return array(rest[0], bytes(rest[1]))
    if kind == "ndarray":
        dtype, shape, parts = rest
        if dtype not in _DTYPES:
            raise SnapshotError(f"an array of {dtype}")
        return np.frombuffer(bytearray(b"".join(map(bytes, parts))), dtype).reshape(shape)
    if kind == "deque":
        return deque(maxlen=rest[1])
    if kind == "object":
        cls = _class(rest[0])
        if cls is Blame:
            return Blame()
        return EngineArgs() if cls is EngineArgs else cls.__new__(cls)
    makers: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "set": set, "counter": Counter}
    return makers[kind]() if kind in makers else None


def _zeros(data: bytes) -> bool:
    """These are to be written as their number: prompts and outputs whose tokens are left out."""
    return len(data) > _FEW and data == bytes(len(data))


def _pack_zeros(data: bytes) -> list[int | bytes]:
    """In parts; those of zeros as their number: most of a column is rows that nobody holds and ends of tables."""
    if len(data) % _FEW:
        return [data]
    filled = np.asarray(np.frombuffer(data, np.int64).reshape(-1, _FEW // 8).any(axis=1))
    edges = [0, *(1 + np.flatnonzero(filled[1:] != filled[:-1])).tolist(), len(filled)]
    return [
        data[_FEW * start : _FEW * stop] if filled[start] else _FEW * (stop - start)
        for start, stop in pairwise(edges)
        if stop > start
    ]


def _name(cls: type) -> str:
    if not cls.__module__.startswith(_ROOMS):
        raise SnapshotError(f"a {cls.__module__}.{cls.__qualname__} is no part of the scheduler's state")
    return f"{cls.__module__.partition('.')[2]}:{cls.__qualname__}"


def _class(name: str, base: type = object) -> Any:
    module, _, cls = name.partition(":")
    path = f"{__package__.partition('.')[0]}.{module}"
    found = getattr(sys.modules.get(path), cls, None) if path.startswith(_ROOMS) else None
    if not isinstance(found, type) or found.__module__ != path or not issubclass(found, base):
        raise SnapshotError(f"no class {name}")
    return found


def _ours(name: str) -> bool:
    services = EngineArgs.__dataclass_fields__[name].metadata["services"]
    return "scheduler" in services and name not in _NOT_OURS


# -- a pool may have millions of blocks, nearly all of them as they were in the beginning


def _pack_pool(pool: BlockPool) -> Attributes:
    packed: Attributes = {}
    for name, value in fields(pool).items():
        if isinstance(value, array):
            packed[name] = _pack_links(value)
        elif name == "_by_hash":
            packed[name] = b"".join(value), array("i", value.values()).tobytes()
        elif name != "_hash_of":  # the same as _by_hash, the other way round
            packed[name] = value
    return packed


def _unpack_pool(packed: Attributes) -> Attributes:
    attributes = {name: _unpack_links(value) if isinstance(value, list) else value for name, value in packed.items()}
    joined, blocks = packed["_by_hash"]
    hashes = [joined[at : at + HASH_SIZE] for at in range(0, len(joined), HASH_SIZE)]
    by_hash = dict(zip(hashes, from_i32(blocks), strict=True))
    hash_of: list[bytes | None] = [None] * len(attributes["refs"])
    for block_hash, block in by_hash.items():
        hash_of[block] = block_hash
    return {**attributes, "_by_hash": by_hash, "_hash_of": hash_of}


def _pack_links(values: array[int]) -> list[Any]:
    """Runs of one number, or of numbers that rise by one, as their first; the rest as bytes."""
    data, size = values.tobytes(), values.itemsize
    packed: list[int | bytes] = []
    for start in range(0, len(values), _RUN):
        part, first = data[size * start : size * (start + _RUN)], values[start]
        last = values[start + len(part) // size - 1]
        if not first and part == bytes(len(part)):
            packed.append(-1)
        elif 0 <= first == last + 1 - len(part) // size and part == array("i", range(first, last + 1)).tobytes():
            packed.append(first)
        else:
            packed.append(part)
    return [len(values), *packed]


def _unpack_links(packed: list[Any]) -> array[int]:
    count, *parts = packed
    if not 0 <= count <= _MOST:
        raise SnapshotError(f"a pool of {count} blocks")
    values = array("i")
    for part in parts:
        size = min(_RUN, count - len(values))
        if isinstance(part, bytes):
            values.frombytes(part)
        else:
            values.extend(range(part, part + size) if part >= 0 else bytes(size))
    return values
