"""ctypes' twins of speculate.h: drafts one after another, and their verification, each in one call of C."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import Structure, c_int32, c_int64, c_void_p, sizeof
from typing import Any

from ....proto.config import ConfigError
from .library import library
from .program import Buffer, Step
from .sampling import Choice


class Draft(Structure):
    """q_draft."""

    _fields_ = [
        ("first", Step), ("choice", c_void_p), ("team", c_void_p), ("wanted", c_void_p), ("positions", c_void_p),
        ("starts", c_void_p), ("ones", c_void_p), ("places", c_void_p), ("tokens", c_void_p), ("token_stride", c_int64),
        ("head", c_int32), ("own", c_int32), ("vocabulary", c_void_p), ("logits", c_void_p), ("result", Buffer),
        ("given", c_void_p), ("hidden_size", c_int64),
    ]  # fmt: skip


class Verification(Structure):
    """q_verification."""

    _fields_ = [
        ("step", Step), ("choice", c_void_p), ("team", c_void_p), ("rows", c_void_p), ("positions", c_void_p),
        ("tokens", c_void_p), ("token_stride", c_int64), ("right", c_void_p),
    ]  # fmt: skip


@functools.cache
def _library() -> Any:
    """The functions of speculate.c. Raises ConfigError where they are of another version."""
    found = library()
    if found is None:
        raise ConfigError("there are no native CPU kernels; install quire where a C compiler is.")
    sizes = (c_int32 * 3)()
    found.c.q_speculation_sizes(sizes)
    if list(sizes) != [sizeof(struct) for struct in (Choice, Draft, Verification)]:
        raise ConfigError("the native CPU kernels are of another version of quire; install it again.")
    found.c.q_draft_tokens.argtypes = (c_void_p, ctypes.POINTER(Draft))
    found.c.q_verify_drafts.argtypes = (c_void_p, ctypes.POINTER(Verification))
    return found.c


def drafting(program: int, draft: Draft) -> Callable[[], int]:
    """What carries out ``draft``, as it is then, by the program at this address: 0, or what a call returned that
    failed."""
    return functools.partial(_library().q_draft_tokens, program, ctypes.byref(draft))


def verifying(program: int, verification: Verification) -> Callable[[], int]:
    """The same of ``verification``; -1: some token cannot be drawn."""
    return functools.partial(_library().q_verify_drafts, program, ctypes.byref(verification))
