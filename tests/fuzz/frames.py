"""Frames for a socket whose messages are one closed union: random bytes, values hypothesis made, and lies.

A lie is a message of the union with every field of its right type and hostile values in it, or a sound message with
one thing changed.
"""

from __future__ import annotations

import random
import struct
import types
import typing
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

INTS = (0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"), 0.5, 1e9)
TEXTS = (
    "",
    "\0",
    "a",
    "\x1b[2J",
    "../../etc/passwd",
    "'; --",
    "%s%n",
    "é" * 40,
    "\U0001f600",
    "\ufffd",
    "x" * 5000,
    "{{7*7}}",
)


def hypotheses(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """``count`` values that hypothesis makes; ``number`` is the seed."""
    made: list[Any] = []
    quiet = settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
                     suppress_health_check=list(HealthCheck))  # fmt: skip

    @seed(number)
    @quiet
    @given(strategy)
    def collect(value: Any) -> None:
        made.append(value)

    collect()
    return made


def packable() -> st.SearchStrategy[Any]:
    """Anything that msgpack holds, two or three levels deep."""
    scalars = (
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20)
        | st.binary(max_size=40)
    )  # fmt: skip
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4)
        ),
        max_leaves=20,
    )


class Frames:
    """An endless supply for one union. ``sound`` makes messages that are right, for those with one thing changed;
    types named in ``without``, and frames that ``order`` is true of, are not sent on purpose (a Bye, say, that the
    peer must obey)."""

    def __init__(
        self, union: Any, rng: random.Random, sound: Callable[[random.Random], list[Any]] | None = None,
        without: tuple[type, ...] = (), order: Callable[[bytes], bool] = lambda frame: False,
    ):  # fmt: skip
        self.types = [each for each in typing.get_args(union) if each not in without]
        self.rng, self.sound, self._order = rng, sound, order
        self._forbidden = {each.__name__ for each in without}
        self._made: list[Any] = []

    def take(self, count: int) -> Iterator[bytes]:
        """``count`` frames."""
        made = hypotheses(packable(), max(1, count // 5), self.rng.randrange(2**31))
        for _ in range(count):
            frame = self._one(made)
            if not self._leaves(frame) and not self._order(frame):
                yield frame

    def _one(self, made: list[Any]) -> bytes:
        kind = self.rng.random()
        if kind < 0.15:
            return self.rng.randbytes(self.rng.choice((0, 1, 2, 5, 30, 300, 3000)))
        if kind < 0.3:
            tag = self.rng.choice(self.types).__name__
            value = self.rng.choice(made)
            return pack([tag, *value] if isinstance(value, list) else [tag, value])
        if kind < 0.6 or self.sound is None:
            return pack(self.build(self.rng.choice(self.types)))
        frame = pack(self.change(self.rng.choice(self.sound(self.rng))))
        if kind < 0.9 or not frame:
            return frame
        at = self.rng.randrange(len(frame))  # a bit flipped, or the end cut off
        return (
            frame[:at]
            if kind < 0.95
            else frame[:at] + bytes([frame[at] ^ 1 << self.rng.randrange(8)]) + frame[at + 1 :]
        )

    def _leaves(self, frame: bytes) -> bool:
        """Whether it decodes as a message that must not be sent."""
        try:
            value = msgspec.msgpack.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        return isinstance(value, list) and bool(value) and isinstance(value[0], str) and value[0] in self._forbidden

    # ------------------------------------------------------------ lies

    def change(self, value: Any) -> Any:
        """A sound message (as plain values) with one thing changed, somewhere in it."""
        if isinstance(value, list) and value and self.rng.random() < 0.9:
            at = self.rng.randrange(len(value))
            way = self.rng.random()
            if way < 0.05:
                return value[:at]
            if way < 0.1:
                return [*value, *value[at:]]
            return [*value[:at], self.change(value[at]), *value[at + 1 :]]
        if isinstance(value, dict) and value and self.rng.random() < 0.9:
            key = self.rng.choice(list(value))
            return {**value, key: self.change(value[key])}
        return self.hostile(value) if self.rng.random() < 0.8 else self.anything()

    def hostile(self, value: Any) -> Any:
        """Another value of the same type."""
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return self.rng.choice((*INTS, value + 1, value - 1))
        if isinstance(value, float):
            return self.rng.choice(FLOATS)
        if isinstance(value, str):
            return self.rng.choice(TEXTS)
        if isinstance(value, bytes):
            return self.column(value)
        return self.anything()

    def anything(self) -> Any:
        return self.rng.choice((None, True, self.rng.choice(INTS), self.rng.choice(FLOATS), self.rng.choice(TEXTS),
                                self.column(), [], {}, [[]], [None], {"a": 1}))  # fmt: skip

    def column(self, like: bytes = b"") -> bytes:
        """Bytes that may or may not be a column of whole items, of values that may or may not make sense."""
        way = self.rng.random()
        if way < 0.15:
            return b""
        if way < 0.3:
            return like + self.rng.randbytes(self.rng.randrange(1, 9))
        if way < 0.4:
            return like[: self.rng.randrange(len(like) + 1)]
        if way < 0.5:
            return like * self.rng.choice((2, 3, 100))
        values = [
            self.rng.choice((0, 1, -1, 5, 2047, 2048, 2**31 - 1, -(2**31))) for _ in range(self.rng.randrange(1, 6))
        ]
        return struct.pack(f"<{len(values)}{self.rng.choice('iq')}", *values)

    def build(self, kind: Any) -> Any:
        """A value of a type, as plain values: right types throughout, hostile values."""
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return self.build(self.rng.choice(args))
        if origin is list:
            return [self.build(args[0]) for _ in range(self.rng.choice((0, 1, 1, 2, 3)))]
        if origin is dict:
            return {self.build(args[0]): self.build(args[1]) for _ in range(self.rng.choice((0, 1, 2)))}
        if kind in (Any, type(None)):
            return None if kind is type(None) else self.anything()
        if issubclass(kind, msgspec.Struct):
            return self._struct(kind)
        if issubclass(kind, IntEnum):
            return int(self.rng.choice(list(kind)))
        return self.hostile(kind())

    def _struct(self, kind: type[msgspec.Struct]) -> Any:
        hints = typing.get_type_hints(kind)
        config = kind.__struct_config__
        fields = list(kind.__struct_fields__)
        if not config.array_like:  # parameters: a few of them, else all are refused
            chosen = self.rng.sample(fields, self.rng.randrange(min(4, len(fields)) + 1))
            return {name: self.build(hints[name]) for name in chosen}
        values = [self.build(hints[name]) for name in fields]
        return [config.tag, *values] if config.tag else values


def plain(message: Any) -> Any:
    """A message as lists, dicts and scalars."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def pack(value: Any) -> bytes:
    """One frame; what msgpack cannot hold is an empty one."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, TypeError, ValueError, msgspec.MsgspecError, RecursionError):
        return b""
