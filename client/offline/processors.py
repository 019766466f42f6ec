"""Logits processors by name. A Python function cannot cross a socket; its name can, where both ends can import it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...proto.config import ConfigError

_REMEDY = "put it into a module that can be imported, as a plain function, and give that or 'package.module:function'"


def processor_names(given: Any) -> list[str]:
    """Functions, or their names, as names ``package.module:function``. Raises TypeError, ConfigError."""
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise TypeError(f"logits_processors must be a list of functions or their names, got {type(given).__name__}.")
    return [_name(each) for each in given]


def _name(function: Any) -> str:
    if isinstance(function, str):
        return function
    if isinstance(function, type):
        raise TypeError(
            f"logits processor {function.__qualname__} is a class; here it is a function (prompt_ids, output_ids, "
            f"logits), run for requests that name it in their logits_processors; {_REMEDY}."
        )
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or module is None or name is None:
        raise TypeError(f"a logits processor must be a function or its name, got {function!r:.80}; {_REMEDY}.")
    if module == "__main__" or not name.isidentifier():
        raise ConfigError(f"logits processor {module}:{name} cannot be imported by the workers; {_REMEDY}.")
    try:
        found = getattr(import_module(module), name, None)
    except ImportError:
        found = None
    if found is not function:
        raise ConfigError(f"{module}:{name} is not the logits processor that was given; {_REMEDY}.")
    return f"{module}:{name}"
