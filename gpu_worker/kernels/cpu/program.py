"""A model's step as a list of operations that C runs in one call: ctypes' twins of program.h, and the call.

``models/program.py`` writes the lists.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p, sizeof

from ....proto.config import ConfigError
from .attention import Layer
from .library import Library, library
from .structs import Epilogue, Rows

PASS = 256
"""Tokens that go through the body at a time: program.h's Q_PASS."""


class Buffer(Structure):
    """q_buffer: rows in memory; ``stride`` is in bytes."""

    _fields_ = [("data", c_void_p), ("stride", c_int64)]


class Norm(Structure):
    """q_norm."""

    _fields_ = [("kind", c_int32), ("size", c_int32), ("eps", c_float), ("weight", c_void_p), ("bias", c_void_p)]


class Op(Structure):
    """q_op."""

    _fields_ = [("kind", c_int32), ("arguments", c_void_p)]


class Linear(Structure):
    """A product, and what becomes of it."""

    _fields_ = [("weight", c_void_p), ("rows", Rows), ("to", Epilogue)]


class Attend(Structure):
    """Rotates, writes to the cache, and attends."""

    _fields_ = [
        ("layer", Layer), ("qkv", Buffer), ("out", Buffer), ("cos", c_void_p), ("sin", c_void_p),
        ("rotary_dim", c_int32), ("interleaved", c_int32), ("out_type", c_int32), ("wanted_only", c_int32),
    ]  # fmt: skip


class Gather(Structure):
    """The rows whose result is wanted, to the rows of the tail."""

    _fields_ = [("source", Buffer * 2), ("to", Buffer * 2), ("bytes", c_int64 * 2)]


CALLBACK = CFUNCTYPE(c_int32, c_int32, c_int32)


class Call(Structure):
    """What no operation can do, on the caller's thread."""

    _fields_ = [("call", CALLBACK), ("number", c_int32)]


class Routing(Structure):
    """q_routing: which experts the rows go to, one for each of a row's slots."""

    _fields_ = [
        ("experts", c_int32), ("top_k", c_int32), ("ids", c_void_p), ("weights", c_void_p), ("slots", c_void_p),
        ("ends", c_void_p),
    ]  # fmt: skip


class Router(Structure):
    """q_router: how logits become experts and weights."""

    _fields_ = [
        ("experts", c_int32), ("top_k", c_int32), ("scoring", c_int32), ("renormalise", c_int32), ("groups", c_int32),
        ("topk_groups", c_int32), ("scale", c_float), ("correction", c_void_p),
    ]  # fmt: skip


class Dispatch(Structure):
    """Rows, as products read them, to the slots of their experts."""

    _fields_ = [("routing", c_void_p), ("source", Rows), ("to", Rows), ("bytes", c_int64), ("groups", c_int32)]


class Experts(Structure):
    """The slots of each expert times its own weight."""

    _fields_ = [("routing", c_void_p), ("weights", c_void_p), ("rows", Rows), ("to", Epilogue)]


class Embed(Structure):
    """out = scale * the token's row of a table, or of a weight of ``codes``."""

    _fields_ = [
        ("table", c_void_p), ("codes", c_void_p), ("table_stride", c_int64), ("type", c_int32), ("size", c_int32),
        ("scale", c_float), ("out", Buffer),
    ]  # fmt: skip


class Position(Structure):
    """out += the row of a table for the token's position."""

    _fields_ = [
        ("table", c_void_p), ("table_stride", c_int64), ("type", c_int32), ("size", c_int32), ("offset", c_int32),
        ("scratch", Buffer), ("out", Buffer),
    ]  # fmt: skip


class RowNorm(Structure):
    """out = norm(source)."""

    _fields_ = [("norm", Norm), ("source", Buffer), ("out", Buffer)]


class HeadNorm(Structure):
    """A norm of each head, in place."""

    _fields_ = [("norm", Norm), ("rows", Buffer), ("heads", c_int32), ("own", c_int32)]


class Prepare(Structure):
    """Rows as a product reads them."""

    _fields_ = [
        ("weight", c_void_p), ("each", c_int32), ("source", Buffer), ("out", Buffer), ("scales", c_void_p),
        ("sums", c_void_p),
    ]  # fmt: skip


class Sum(Structure):
    """out += scale * source."""

    _fields_ = [("size", c_int32), ("scale", c_float), ("source", Buffer), ("out", Buffer)]


class Clamp(Structure):
    """Into [-limit, limit], in place."""

    _fields_ = [("size", c_int32), ("limit", c_float), ("rows", Buffer)]


class Grow(Structure):
    """Times the factor of the token's position, in place."""

    _fields_ = [("size", c_int32), ("factors", c_void_p), ("rows", Buffer)]


class Softcap(Structure):
    """cap * tanh(x / cap), in place."""

    _fields_ = [("size", c_int32), ("cap", c_float), ("rows", Buffer)]


class Route(Structure):
    """The experts of each row, from the router's logits."""

    _fields_ = [("router", Router), ("logits", Buffer), ("to", c_void_p)]


class Combine(Structure):
    """out = or += the weighted sum of a row's slots."""

    _fields_ = [("routing", c_void_p), ("results", Buffer), ("out", Buffer), ("size", c_int32), ("add", c_int32)]


class GatedSum(Structure):
    """out += scale * sigmoid(gate) * source, with one gate for each row."""

    _fields_ = [("size", c_int32), ("scale", c_float), ("gate", Buffer), ("source", Buffer), ("out", Buffer)]


class Adapt(Structure):
    """out += what the rows' adapters make of source."""

    _fields_ = [
        ("of", c_void_p), ("routing", c_void_p), ("source", Buffer), ("out", Buffer), ("shrunk", c_void_p),
        ("scale", c_float), ("source_type", c_int32), ("tail", c_int32), ("dense", c_int32),
    ]  # fmt: skip


class Activate(Structure):
    """out = activation(source), or activation(first half) * second half."""

    _fields_ = [
        ("kind", c_int32), ("gated", c_int32), ("size", c_int32), ("each", c_int32), ("out_type", c_int32),
        ("source", Buffer), ("out", Buffer),
    ]  # fmt: skip


class Give(Structure):
    """out = the hidden state that the step gives the token; ``zeroed`` is 0 at position 0."""

    _fields_ = [("size", c_int32), ("out", Buffer), ("zeroed", Buffer)]


KINDS: tuple[type[Structure], ...] = (
    Linear, Attend, Gather, Call, Dispatch, Experts, Adapt, Embed, Position, RowNorm, HeadNorm, Prepare, Sum, Clamp,
    Grow, Softcap, Route, Combine, GatedSum, Activate, Give,
)  # fmt: skip
"""The operations in the order of program.h's q_kind."""


class Step(Structure):
    """q_step."""

    _fields_ = [
        ("rows", c_int32), ("outputs", c_int32), ("row", c_void_p), ("start", c_void_p), ("count", c_void_p),
        ("output", c_void_p), ("hidden", c_void_p), ("hidden_stride", c_int64), ("nanoseconds", c_void_p),
        ("given", c_void_p), ("given_stride", c_int64),
    ]  # fmt: skip


class Parts(Structure):
    """q_program_parts."""

    _fields_ = [
        ("team", c_void_p), ("together", c_int32), ("body", c_void_p), ("tail", c_void_p), ("head", c_void_p),
        ("body_ops", c_int32), ("tail_ops", c_int32), ("head_ops", c_int32), ("block_size", c_int32),
        ("outputs", c_int32),
        ("result", Buffer), ("hidden_size", c_int64), ("tokens", c_void_p), ("tables", c_void_p),
        ("token_stride", c_int64), ("table_stride", c_int64),
        ("adapters", c_void_p), ("slots", c_int32), ("body_slots", c_void_p), ("tail_slots", c_void_p),
    ]  # fmt: skip


class NativeProgram:
    """Three lists of operations, ready to run. ``parts`` has everything but the lists and the team of ``threads``,
    which is that of ``beside`` where there is one: programs that run in turns need no threads of their own each."""

    def __init__(
        self, parts: Parts, body: Sequence[Structure], tail: Sequence[Structure], head: Sequence[Structure],
        threads: int, beside: NativeProgram | None = None,
    ) -> None:  # fmt: skip
        self._library = _native()
        self._keep: list[object] = [body, tail, head, beside]
        # Its own, for what a call computes may want the team that everybody shares.
        self._team: int = beside._team if beside else self._library.c.q_team_new(threads)
        parts.team = self._team
        if not parts.team:
            raise ConfigError(f"the system has no room for {threads} threads; use fewer (--cpu-threads).")
        if beside is None:
            weakref.finalize(self, self._library.c.q_team_free, parts.team)
        for name, operations in (("body", body), ("tail", tail), ("head", head)):
            listed = (Op * max(1, len(operations)))(*(Op(KINDS.index(type(op)), addressof(op)) for op in operations))
            self._keep.append(listed)
            setattr(parts, name, addressof(listed))
            setattr(parts, f"{name}_ops", len(operations))
        address = self._library.c.q_program_new(byref(parts))
        if not address:
            raise MemoryError("no memory for the step's program")
        weakref.finalize(self, self._library.c.q_program_free, address)
        self.address: int = address
        self.run: Callable[[object], int] = functools.partial(self._library.c.q_program_run, address)
        """(a Step by reference) -> 0, or what the call returned that failed."""
        self.run_head: Callable[[int, object], int] = functools.partial(self._library.c.q_program_head, address)
        """(rows, nanoseconds or None) -> the same."""
        self.threads_of: Callable[[int], int] = functools.partial(self._library.c.q_program_threads, address)
        """(tokens of a step) -> how many threads run it."""


@functools.cache
def _native() -> Library:
    """The library with the functions of program.c declared. Raises ConfigError where it is of another version."""
    found = library()
    if found is None:
        raise ConfigError("there are no native CPU kernels; install quire where a C compiler is.")
    structs: tuple[type[Structure], ...] = (Op, *KINDS, Routing, Step, Parts)
    sizes = (c_int32 * len(structs))()
    found.c.q_program_sizes(sizes, len(structs))
    if list(sizes) != [sizeof(struct) for struct in structs]:
        raise ConfigError("the native CPU kernels are of another version of quire; install it again.")
    found.c.q_team_free.argtypes = (c_void_p,)
    found.c.q_team_free.restype = None
    found.c.q_program_new.restype = c_void_p
    found.c.q_program_free.argtypes = (c_void_p,)
    found.c.q_program_free.restype = None
    found.c.q_program_run.argtypes = (c_void_p, ctypes.POINTER(Step))
    found.c.q_program_threads.argtypes = (c_void_p, c_int64)
    found.c.q_program_head.argtypes = (c_void_p, c_int32, c_void_p)
    return found
