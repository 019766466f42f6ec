"""One flag: a field of EngineArgs, and who reads it. ``config.py`` and ``http_args.py`` have the fields."""

from __future__ import annotations

from dataclasses import field
from typing import Any

SERVICES = ("frontend", "detokenizer", "scheduler", "gpu_worker")
EVERY = SERVICES
MODEL = ("frontend", "detokenizer", "gpu_worker")
CORE = ("scheduler",)
WORK = ("gpu_worker",)
TEXT = ("detokenizer",)
HTTP = ("frontend",)
LISTENS = ("detokenizer", "gpu_worker")


def flag(
    default: Any, services: tuple[str, ...], help: str, choices: tuple[str, ...] | None = None, also: str = "",
    several: bool = False, const: Any = None,
) -> Any:  # fmt: skip
    """``also``: other spellings, with spaces between them; ``several``: the command line takes several values, as for a
    list; ``const``: what it is where the flag is given without a value, which None does not allow."""
    return field(default=default, metadata={
        "services": services, "help": help, "choices": choices, "also": also, "several": several, "const": const,
    })  # fmt: skip
