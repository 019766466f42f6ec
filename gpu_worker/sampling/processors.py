"""Users' logits processors: functions registered with ``--logits-processor package.module:function``.

A request names them in ``logits_processors``. Each is called for each token of that request with its row of float32
logits [V] and returns logits of the same shape, in vLLM's two forms by its number of positional parameters:
``fn(output_ids, logits)`` or ``fn(prompt_ids, output_ids, logits)``. The ids are lists of int that the function must
not change; the logits may be changed in place. One that has a keyword-only parameter ``extra_args`` is given the
request's, a dict or None. A function that raises fails its own request alone.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...proto.config import ConfigError
from ...proto.work import Generate
from .followers import Histories

log = logging.getLogger(__name__)

FLAG = "--logits-processor"
Function = Callable[..., Any]
"""``f(prompt_ids, output_ids, logits, extra_args=None)``."""


class SlotError(Exception):
    """No token can be drawn for one row; ``status`` is the HTTP status of its request's failure."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def load_functions(names: Sequence[str]) -> dict[str, Function]:
    """Import what the flag names. Raises ConfigError, one line, where a name cannot be used."""
    return {name: _load(name) for name in names}


def _load(name: str) -> Function:
    module, _, attribute = name.partition(":")
    if not module or not attribute.isidentifier():
        raise ConfigError(f"{FLAG} {name!r} is not of the form package.module:function.")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the user's code
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{FLAG} {name!r} cannot be imported ({said:.300}); install its package, or put its folder on PYTHONPATH."
        ) from error
    if isinstance(function, type):
        raise ConfigError(f"{FLAG} {name!r} is a class; give a function, or an instance that can be called.")
    if not callable(function):
        raise ConfigError(f"{FLAG} {name!r} is of type {type(function).__name__}, which cannot be called.")
    count = _positional(function)
    if count in (2, 3):
        return _called(function, count)
    raise ConfigError(
        f"{FLAG} {name!r} takes {'an unknown number of' if count is None else count} positional parameters; it must "
        "take (output_ids, logits) or (prompt_ids, output_ids, logits)."
    )


def _called(function: Callable[..., Any], count: int) -> Function:
    """The function by all four arguments, of which it is given those it takes."""
    extra = inspect.signature(function).parameters.get("extra_args")
    wants = extra is not None and extra.kind is extra.KEYWORD_ONLY

    def call(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor, extra_args: Any = None) -> Any:
        given = (prompt_ids, output_ids, logits)[3 - count :]
        return function(*given, extra_args=extra_args) if wants else function(*given)

    return call


def _positional(function: Callable[..., Any]) -> int | None:
    """How many positional parameters ``function`` has; None where Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)


def _said(error: BaseException) -> str:
    """An exception in one line; its own words may fail, too."""
    try:
        words = str(error)
    except Exception as worse:  # noqa: BLE001  # of the user's class
        words = f"(whose text raised {type(worse).__name__})"
    line = f"{type(error).__name__}: {' '.join(words.split())}"
    return line if len(line) <= 300 else line[:299] + "…"


@dataclass(slots=True)
class _History:
    names: list[str]
    prompt: list[int]
    outputs: list[int]
    extra: dict[str, Any] | None


class Processors(Histories):
    """The tokens of each row that named functions, and the calls."""

    def __init__(self, functions: dict[str, Function]):
        self._functions = functions
        self._rows: dict[int, _History] = {}

    def admit(self, row: int, work: Generate, prompt_len: int, ids: np.ndarray) -> None:
        tokens = ids.tolist()
        names = work.params.logits_processors or []
        self._rows[row] = _History(names, tokens[:prompt_len], tokens[prompt_len:], work.params.extra_args)

    def copy(self, src: list[int], dst: list[int]) -> None:
        taken = [self._rows[row] for row in src]
        for row, one in zip(dst, taken, strict=True):
            self._rows[row] = _History(one.names, one.prompt, one.outputs.copy(), one.extra)

    def drop(self, rows: list[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)

    def advance(self, rows: list[int], tokens: list[int]) -> None:
        for row, token in zip(rows, tokens, strict=True):
            self._rows[row].outputs.append(token)

    def reset(self) -> None:
        self._rows.clear()

    def apply(self, row: int, logits: torch.Tensor) -> None:
        """Change one row's logits [V] in place. Raises SlotError where a name is unknown or a function fails."""
        history = self._rows[row]
        for name in history.names:
            function = self._functions.get(name)
            if function is None:
                registered = ", ".join(self._functions) or "none"
                raise SlotError(
                    400,
                    f"logits_processors names {name!r}, which is not registered (registered: {registered}); start the "
                    f"server with {FLAG} package.module:function.",
                )
            try:
                self._call(name, function, history, logits)
            except (SlotError, KeyboardInterrupt):  # Ctrl-C ends the worker, whatever it was doing
                raise
            except BaseException as error:  # a user's code may raise anything, SystemExit included
                said = _said(error)
                log.warning("logits processor %s raised %s", name, said)
                log.debug("where it did", exc_info=True)
                raise SlotError(500, f"logits processor {name} raised {said}") from None

    @staticmethod
    def _call(name: str, function: Function, history: _History, logits: torch.Tensor) -> None:
        changed = function(history.prompt, history.outputs, logits, history.extra)
        if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
            shown = f"shape {list(changed.shape)}" if isinstance(changed, torch.Tensor) else type(changed).__name__
            raise SlotError(
                500, f"logits processor {name} returned {shown} where logits of shape {list(logits.shape)} are due."
            )
        if changed is not logits:
            logits.copy_(changed)
