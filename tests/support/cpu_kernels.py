"""The native CPU kernels for tests: every instruction set that this machine can run, one after another."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from quire.gpu_worker.kernels.cpu.library import NAMES, Library, library
from quire.proto.config import ConfigError

VARIANTS = [name for name in NAMES if name not in ("auto", "off")]


@contextmanager
def using(variant: str) -> Iterator[Library]:
    """The library with ``variant`` in use, by the whole process until the end; a skip where it cannot run."""
    found = library()
    if found is None:
        pytest.skip("no native CPU kernels: they were not compiled, or QUIRE_CPU_KERNELS=off")
    try:
        chosen = Library(found.path, variant)
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        yield chosen
    finally:
        found.c.q_use(found.name.encode())


def address(array: np.ndarray | None) -> Any:
    """Where an array's values lie; NULL for None."""
    return None if array is None else array.ctypes.data_as(ctypes.c_void_p)
