"""What this process's limits are too low for, told at the start: what comes of them later does not say why."""

from __future__ import annotations

import resource
from collections.abc import Iterator

FEW_FILES = 1024
"""Open files that a server should be allowed: each stream takes one, and each process dozens for itself."""
SMALL_SPACE = 4 << 30
"""Bytes of address space; below that a library may end its process before Python hears of it."""


def too_low() -> Iterator[str]:
    """A line for each limit that is too low, with the remedy."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        yield (
            f"a process may open {hard} files at most, and each connection takes one: beyond that they are reset; "
            f"raise the hard limit (ulimit -Hn) to {FEW_FILES} or more."
        )
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < SMALL_SPACE:
        yield (
            f"a process may have {space >> 20} MiB of address space, in which libraries may end it without a word; "
            "lift the limit (ulimit -v unlimited)."
        )
