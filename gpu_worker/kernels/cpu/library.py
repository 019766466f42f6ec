"""Opens the compiled CPU kernels, and chooses the instruction set.

``QUIRE_CPU_KERNELS`` = auto | avx512bf16 | avx512 | avx2 | plain chooses one, off leaves everything to torch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from sysconfig import get_config_var

from ....proto.config import ConfigError

log = logging.getLogger(__name__)

NAMES = ("auto", "avx512bf16", "avx512", "avx2", "plain", "off")

F32, BF16, I8, I4, CODES, F16 = range(6)
"""How a number is stored: kernels.h's Q_F32, Q_BF16, Q_I8, Q_I4, Q_CODES, Q_F16."""


FUNCTIONS = (
    "linear", "prepare", "convert_row", "attention", "write_kv", "norm", "rotate", "activate", "gate", "embed",
    "code_row", "add", "softcap", "route", "combine", "shrink", "expand", "activated", "choose", "edit", "logprobs",
)  # fmt: skip
"""The functions of an instruction set, in the order of kernels.h's q_kernels."""


class Library:
    """The kernels of one instruction set; ``name`` is its name, ``c`` the functions of the library itself."""

    def __init__(self, path: Path, asked: str) -> None:
        """Raises OSError where the file cannot be opened, ConfigError where this processor lacks what is asked for."""
        self.path, self.c = path, ctypes.CDLL(str(path))
        self.c.q_use.restype = ctypes.c_char_p
        name = self.c.q_use(asked.encode())
        if name is None:
            raise ConfigError(f"QUIRE_CPU_KERNELS={asked}: this processor cannot run it; use auto.")
        self.name = name.decode()
        self.c.q_table.restype = ctypes.POINTER(ctypes.c_void_p)
        self.c.q_team_new.restype = ctypes.c_void_p
        self._teams: dict[int, int] = {}

    def function(self, name: str, *types: type) -> Callable[..., None]:
        """One of FUNCTIONS of the instruction set in use, which takes arguments of these types."""
        address = self.c.q_table()[1 + FUNCTIONS.index(name)]
        return ctypes.CFUNCTYPE(None, *types)(address)

    def team(self, threads: int) -> int:
        """The address of the team of ``threads`` threads, made at the first call and kept."""
        found = self._teams.get(threads)
        if found is None:
            made = self.c.q_team_new(threads)
            if not made:
                raise ConfigError(f"the system has no room for {threads} threads; use fewer (--cpu-threads).")
            found = self._teams[threads] = made
        return found


@functools.cache
def library() -> Library | None:
    """The kernels, or None where they are switched off or were not compiled. Raises ConfigError for a wrong name."""
    asked = os.environ.get("QUIRE_CPU_KERNELS", "auto")
    if asked not in NAMES:
        raise ConfigError(f"QUIRE_CPU_KERNELS={asked!r} must be one of {', '.join(NAMES)}.")
    if asked == "off":
        return None
    path = Path(__file__).with_name(f"_kernels{get_config_var('EXT_SUFFIX')}")
    try:
        return Library(path, asked)
    except OSError as error:
        log.warning(
            "no native CPU kernels (%s), so steps are several times slower: install a C compiler and quire again",
            error if path.exists() else "they were not compiled when quire was installed",
        )
        return None
