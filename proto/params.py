"""SamplingParams: vLLM's fields, defaults and range checks.

A value out of range is a ValueError whose message names the field, the limit and the value. A field that this
version does not honour yet is refused in the same way rather than ignored (``NOT_YET``).
"""

from __future__ import annotations

import functools
import logging
import math
from enum import IntEnum
from typing import Any

import msgspec

log = logging.getLogger(__name__)

MAX_N = 16384
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_STOP_STRINGS = 64


class RequestOutputKind(IntEnum):
    """What a stream of outputs carries: all so far, only what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class ParamError(ValueError):
    """A parameter is out of range. ``param`` is the field's name, for the HTTP error."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


# Fields that exist in the interface but whose effect is not built yet, with the value that means "not asked for".
NOT_YET: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "bad_words": [],
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "logits_processors": None,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
}


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to generate. Names, defaults and ranges are vLLM's.

    ``temperature`` below 1e-5 is greedy: top_p, top_k and min_p are then reset and n must be 1.
    ``top_k`` of 0 or -1 keeps every token. ``max_tokens=None`` generates up to ``max_model_len``.
    With ``n > 1`` child i draws with seed ``seed + i``.

    Raises:
        ParamError (a ValueError): a value is of the wrong type or out of range, or not honoured yet.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logits_processors: Any = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_supported()
        if self.greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ParamError(f"n must be 1 when using greedy sampling (temperature 0), got n={self.n}.", "n")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    def clone(self) -> SamplingParams:
        """An independent copy (lists are copied; Python callables are shared)."""
        copy = msgspec.structs.replace(self)
        for name in self.__struct_fields__:
            value = getattr(copy, name)
            if isinstance(value, (list, dict)):
                setattr(copy, name, value.copy())
        return copy

    def _normalise(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.bad_words is None:
            self.bad_words = []
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        if self.best_of is not None and self.best_of == self.n:
            self.best_of = None

    def _check_ranges(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("temperature", self.temperature, 0.0, 2.0)
        if self.repetition_penalty != 1.0:
            _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if GREEDY_BELOW <= self.temperature < MIN_TEMPERATURE:
            _warn_once(f"a temperature below {MIN_TEMPERATURE} overflows the logits; {MIN_TEMPERATURE} is used instead")
            self.temperature = MIN_TEMPERATURE
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, 2**31 - 1, hint="0 or -1 keeps every token")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}.",
                "min_tokens",
            )
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ParamError(f"{name} must be true or false, got {getattr(self, name)!r}.", name)
        self._check_stops()

    def _check_stops(self) -> None:
        stop, ids = self.stop, self.stop_token_ids
        if not isinstance(stop, list) or not all(isinstance(s, str) for s in stop):
            raise ParamError(f"stop must be a string or a list of strings, got {stop!r}.", "stop")
        if "" in stop:
            raise ParamError("stop cannot contain an empty string.", "stop")
        if len(stop) > MAX_STOP_STRINGS:
            raise ParamError(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stop)}.", "stop")
        if stop and not self.detokenize:
            raise ParamError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.", "stop"
            )
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise ParamError(f"stop_token_ids must be a list of token ids, got {ids!r}.", "stop_token_ids")

    def _check_supported(self) -> None:
        if self.best_of is not None:
            raise ParamError(f"best_of={self.best_of} is not supported yet by this version; leave it out.", "best_of")
        for name, unset in NOT_YET.items():
            value = getattr(self, name)
            if value != unset:
                raise ParamError(f"{name}={value!r} is not supported yet by this version; leave it out.", name)


@functools.cache
def _warn_once(message: str) -> None:
    """A warning that a client could otherwise repeat as often as it likes."""
    log.warning(message)


def _integer(name: str, value: Any, low: int, high: int, hint: str = "") -> None:
    if type(value) is not int:
        raise ParamError(f"{name} must be an integer, got {value!r}.", name)
    if value < low:
        raise ParamError(f"{name} must be at least {low}, got {value}." + (f" ({hint})" if hint else ""), name)
    if value > high:
        raise ParamError(f"{name} must be at most {high}, got {value}.", name)


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParamError(f"{name} must be a number, got {value!r}.", name)
    if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        raise ParamError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value}.", name)
