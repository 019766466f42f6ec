"""Panics of the libraries that are written in Rust, as exceptions that everybody catches.

A panic comes to Python as a BaseException of no module that could be imported: it would pass every ``except Exception``
and end the process with a traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class RustPanic(ValueError):
    """What a panic said, in one line."""


@contextlib.contextmanager
def no_panics() -> Iterator[None]:
    """Raises RustPanic in place of a panic of what runs within."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RustPanic(" ".join(str(error).split())) from None
