"""SamplingParams: vLLM's fields, defaults and range checks.

A value out of range is a ValueError whose message names the field, the limit and the value. What needs the model or
its tokenizer (ids in the vocabulary, ``max_logprobs``) is checked where a prompt is tokenized.
"""

from __future__ import annotations

import functools
import logging
import math
import numbers
from enum import IntEnum
from types import NoneType
from typing import Any

import msgspec

from .structured import GuidedDecodingParams, StructuredOutputsParams

log = logging.getLogger(__name__)

SIDES = ("left", "right")
"""Where a prompt may be cut."""
MAX_N = 16384
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_TEMPERATURE = 1e6
"""Above it, all tokens are alike to one part in ten thousand; 1 / temperature must not become 0, which is greedy."""
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_BEAMS = 64
MAX_IDS = 2**18
MAX_PROCESSORS = 64
MAX_LOGPROB_TOKEN_IDS = 128
MAX_INT = 2**31 - 1

_STRUCTURED, _SKIP_CACHE = "structured_outputs", "skip_reading_prefix_cache"
_FLAGS = (
    "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "use_beam_search", "flat_logprobs",
)  # fmt: skip


class RequestOutputKind(IntEnum):
    """What a stream of outputs carries: all so far, only what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


_PLAIN = frozenset(
    (NoneType, bool, int, float, str, list, dict, RequestOutputKind, StructuredOutputsParams, GuidedDecodingParams)
)


class ParamError(ValueError):
    """A parameter is out of range. ``param`` is the field's name, for the HTTP error."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to generate. Names, defaults and ranges are vLLM's.

    ``temperature`` below 1e-5 is greedy: top_p, top_k and min_p are then reset and n must be 1.
    ``top_k`` of 0 or -1 keeps every token. ``max_tokens=None`` generates up to ``max_model_len``.
    With ``n > 1`` child i draws with seed ``seed + i``; of ``best_of`` children the n with the highest
    ``cumulative_logprob`` are returned. With ``use_beam_search`` the width is ``best_of``, or n where it is left out.
    ``logprobs`` and ``prompt_logprobs``: so many of the most likely tokens beside the token itself; -1 is all.
    ``truncate_prompt_tokens`` keeps the prompt's end, or with ``truncation_side`` "right" its beginning.
    ``thinking_token_budget``: tokens of thoughts at most, then the thought is ended by force; -1 or None is no limit.
    ``logits_processors`` names functions that the workers were started with (``--logits-processor package.module:fn``).
    ``extra_args`` reach those functions that have a parameter of that name (HTTP: ``vllm_xargs``).
    ``logprob_token_ids``: in place of the most likely tokens, the logprobs of these, best first; ``logprobs`` is then
    how many there are.
    ``flat_logprobs``: LLM gives logprobs as FlatLogprobs.

    Raises:
        ParamError (a ValueError): a value is of the wrong type or out of range.
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
    logprobs: int | bool | None = None
    prompt_logprobs: int | bool | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    extra_args: dict[str, Any] | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    logits_processors: list[str] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None  # older name; moved to structured_outputs
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        if not _PLAIN.issuperset(map(type, msgspec.structs.astuple(self))):
            self._make_plain()
        self._normalise()
        self._check_ranges()
        self._check_stops()
        self._check_ids()
        self._check_lists()
        self._check_search()

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def width(self) -> int:
        """Sequences that are run: the beams of a beam search, else best_of, else n."""
        return self.best_of or self.n

    def clone(self) -> SamplingParams:
        """An independent copy (lists are copied; Python callables are shared)."""
        copy = msgspec.structs.replace(self)
        for name in self.__struct_fields__:
            value = getattr(copy, name)
            if isinstance(value, (list, dict)):
                setattr(copy, name, value.copy())
        return copy

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """SamplingParams of fields that are their defaults where they are None; ``max_tokens`` None is no limit."""
        return cls(**{name: value for name, value in fields.items() if value is not None or name == "max_tokens"})

    def _make_plain(self) -> None:
        """Take numbers, strings and lists of other kinds, such as numpy's, as Python's own: only those can be sent."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) in _PLAIN:
                continue
            if isinstance(value, numbers.Integral):
                setattr(self, name, int(value))
            elif isinstance(value, numbers.Real):
                setattr(self, name, float(value))
            elif isinstance(value, str):
                setattr(self, name, str.__str__(value))
            elif isinstance(value, (tuple, set, frozenset, range)):
                setattr(self, name, list(value))

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
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if type(self.best_of) is int and self.best_of == self.n:
            self.best_of = None
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                setattr(self, name, 1 if value else None)
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise ParamError("give structured_outputs or guided_decoding, its older name, not both.", _STRUCTURED)
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if isinstance(self.structured_outputs, GuidedDecodingParams):
            self.structured_outputs = self.structured_outputs.plain()
        if not self.logits_processors and isinstance(self.logits_processors, list):
            self.logits_processors = None

    def _check_ranges(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _integer("best_of", self.best_of, 1, MAX_N)
            if self.best_of < self.n:
                raise ParamError(
                    f"best_of must be greater than or equal to n, got n={self.n} and best_of={self.best_of}.", "best_of"
                )
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _number("temperature", self.temperature, 0.0, math.inf)
        self.temperature = min(self.temperature, MAX_TEMPERATURE)
        if GREEDY_BELOW <= self.temperature < MIN_TEMPERATURE:
            _warn_once(f"a temperature below {MIN_TEMPERATURE} overflows the logits; {MIN_TEMPERATURE} is used instead")
            self.temperature = MIN_TEMPERATURE
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, MAX_INT, hint="0 or -1 keeps every token")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_INT)
        _integer("min_tokens", self.min_tokens, 0, MAX_INT)
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, 0, MAX_INT, hint="-1 is no limit")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}.",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, MAX_INT, hint="-1 is the whole vocabulary")
        keep = self.truncate_prompt_tokens
        if keep is not None and not (type(keep) is int and keep == -1):
            _integer("truncate_prompt_tokens", keep, 1, MAX_INT, hint="-1 keeps what the model's context holds")
        extra = self.extra_args
        if extra is not None and not (isinstance(extra, dict) and all(isinstance(key, str) for key in extra)):
            raise ParamError(f"extra_args must be a dict by strings, got {extra!r:.80}.", "extra_args")
        if self.truncation_side not in (None, *SIDES):
            raise ParamError(
                f"truncation_side must be left or right, got {self.truncation_side!r:.80}.", "truncation_side"
            )
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ParamError(f"{name} must be true or false, got {getattr(self, name)!r}.", name)
        if not isinstance(self.skip_reading_prefix_cache, (bool, NoneType)):
            given = self.skip_reading_prefix_cache
            raise ParamError(f"skip_reading_prefix_cache must be true or false, got {given!r}.", _SKIP_CACHE)
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            kinds = ", ".join(f"{kind.value} ({kind.name})" for kind in RequestOutputKind)
            raise ParamError(f"output_kind must be one of {kinds}, got {self.output_kind!r}.", "output_kind") from None

    def _check_stops(self) -> None:
        stop = self.stop
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

    def _check_ids(self) -> None:
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ParamError(
                    "allowed_token_ids is empty, so that no token could be generated.", "allowed_token_ids"
                )
        if self.logprob_token_ids is not None:
            ids = _ids("logprob_token_ids", self.logprob_token_ids)
            if len(ids) > MAX_LOGPROB_TOKEN_IDS:
                raise ParamError(
                    f"logprob_token_ids must have at most {MAX_LOGPROB_TOKEN_IDS} token ids, got {len(ids)}.",
                    "logprob_token_ids",
                )
            self.logprob_token_ids, self.logprobs = ids or None, len(ids) or self.logprobs
        if self.logit_bias is not None:
            self.logit_bias = _bias(self.logit_bias) or None

    def _check_lists(self) -> None:
        words = self.bad_words
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ParamError(f"bad_words must be a list of strings, got {words!r:.80}.", "bad_words")
        if not all(words):
            raise ParamError("bad_words cannot contain an empty string.", "bad_words")
        if len(words) > MAX_BAD_WORDS:
            raise ParamError(f"bad_words must have at most {MAX_BAD_WORDS} strings, got {len(words)}.", "bad_words")
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, NoneType)):
            given = type(self.structured_outputs).__name__
            raise ParamError(f"structured_outputs must be StructuredOutputsParams, got {given}.", _STRUCTURED)
        names = self.logits_processors
        if names is None:
            return
        if callable(names) or (isinstance(names, list) and any(callable(name) for name in names)):
            raise ParamError(
                "logits_processors holds a Python callable, which cannot be sent to the process that samples. Put it "
                "into a module, start with logits_processor=['package.module:function'] (--logits-processor), and give "
                "that name here.",
                "logits_processors",
            )
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise ParamError(f"logits_processors must be a list of names, got {names!r:.80}.", "logits_processors")
        if len(names) > MAX_PROCESSORS:
            raise ParamError(
                f"logits_processors must have at most {MAX_PROCESSORS} names, got {len(names)}.", "logits_processors"
            )

    def _check_search(self) -> None:
        """Greedy, beam search and the rest each have fields that would mean nothing."""
        _number("length_penalty", self.length_penalty, -math.inf, math.inf)
        early = self.early_stopping
        if not (isinstance(early, bool) or early == "never"):
            raise ParamError(f"early_stopping must be True, False, or 'never', got {early!r}.", "early_stopping")
        if self.use_beam_search:
            self._check_beams()
            return
        if early is not False:
            raise ParamError(
                "early_stopping is not effective and must be False when not using beam search.", "early_stopping"
            )
        if self.length_penalty != 1.0:
            raise ParamError(
                "length_penalty is not effective and must be the default value of 1.0 when not using beam search.",
                "length_penalty",
            )
        if self.greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ParamError(f"n must be 1 when using greedy sampling (temperature 0), got n={self.n}.", "n")
            if self.best_of is not None:
                raise ParamError(f"best_of must be 1 when using greedy sampling. Got {self.best_of}.", "best_of")

    def _check_beams(self) -> None:
        if self.width > MAX_BEAMS:
            raise ParamError(
                f"best_of must be at most {MAX_BEAMS} when using beam search. Got {self.width}.", "best_of"
            )
        if not self.greedy:
            raise ParamError(f"temperature must be 0 when using beam search. Got {self.temperature}.", "temperature")
        for name, neutral, shown in (("top_p", 1, "1"), ("top_k", 0, "-1"), ("min_p", 0, "0")):
            if getattr(self, name) != neutral:
                raise ParamError(f"{name} must be {shown} when using beam search. Got {getattr(self, name)}.", name)
        if self.logprob_token_ids:
            raise ParamError("logprob_token_ids is not supported when using beam search.", "logprob_token_ids")
        if self.width == 1:  # which is to take the likeliest token each time
            self.use_beam_search, self.early_stopping, self.length_penalty = False, False, 1.0


def _ids(name: str, ids: Any) -> list[int]:
    """The ids, each once. A list longer than any vocabulary is refused before it costs anybody time."""
    if isinstance(ids, list) and len(ids) > MAX_IDS:
        raise ParamError(f"{name} must have at most {MAX_IDS} token ids, got {len(ids)}.", name)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ParamError(f"{name} must be a list of token ids, got {ids!r:.80}.", name)
    return list(dict.fromkeys(ids))


def _bias(given: Any) -> dict[int, float]:
    """Token id -> bias; ids may be written as strings, as JSON must. Values are held to [-100, 100], as in vLLM."""
    if not isinstance(given, dict):
        raise ParamError(f"logit_bias must map token ids to numbers, got {given!r:.80}.", "logit_bias")
    if len(given) > MAX_IDS:
        raise ParamError(f"logit_bias must have at most {MAX_IDS} token ids, got {len(given)}.", "logit_bias")
    bias = {}
    for key, value in given.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if type(token) is not int or not 0 <= token < 2**31:
            raise ParamError(f"logit_bias has the key {key!r:.80}, which is no token id.", "logit_bias")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ParamError(
                f"logit_bias of token {token} must be a number in [-100, 100], got {value!r}.", "logit_bias"
            )
        bias[token] = max(-100.0, min(100.0, float(value)))
    return bias


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
