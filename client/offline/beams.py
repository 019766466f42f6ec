"""LLM.beam_search: vLLM's call over the scheduler's own beam search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from ...proto.params import MAX_BEAMS, MAX_INT, ParamError, SamplingParams
from ...proto.structured import StructuredOutputsParams
from .outputs import Logprob, RequestOutput


@dataclass(slots=True)
class BeamSearchParams:
    """How to search. ``temperature`` is accepted for vLLM's sake; a search draws nothing, so it must be 0.

    Raises:
        ParamError (a ValueError): a value is of the wrong type or out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, limit in (("beam_width", MAX_BEAMS), ("max_tokens", MAX_INT)):
            value = getattr(self, name)
            if type(value) is not int:
                raise ParamError(f"{name} must be an integer, got {value!r}.", name)
            if not 1 <= value <= limit:
                raise ParamError(f"{name} must be in [1, {limit}], got {value}.", name)
        for name in ("temperature", "length_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ParamError(f"{name} must be a finite number, got {value!r}.", name)
        if self.temperature != 0:
            raise ParamError(f"temperature must be 0 when using beam search. Got {self.temperature}.", "temperature")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ParamError(f"{name} must be true or false, got {getattr(self, name)!r}.", name)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | NoneType):
            given = type(self.structured_outputs).__name__
            raise ParamError(f"structured_outputs must be StructuredOutputsParams, got {given}.", "structured_outputs")

    def sampling(self, most_logprobs: int) -> SamplingParams:
        """The request that searches so; ``most_logprobs`` is the most that a token may be asked for."""
        search: dict[str, Any] = {}
        if self.beam_width > 1:  # one beam is greedy
            search.update(
                n=self.beam_width, use_beam_search=True, early_stopping="never", length_penalty=self.length_penalty
            )
        return SamplingParams(
            temperature=0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output, structured_outputs=self.structured_outputs,
            logprobs=min(2 * self.beam_width, most_logprobs), **search,
        )  # fmt: skip


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the sequences found. ``tokens`` are the prompt's and the output's, and ``text`` is the text of both.

    ``logprobs`` has one entry for each output token, ``cum_logprob`` is the sum of the tokens' own.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The ``beam_width`` best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_output(output: RequestOutput, tokenizer: Any) -> BeamSearchOutput:
    """What a search returns, from the request's output. Without a tokenizer there is no text."""
    sequences = []
    for child in output.outputs:
        tokens = output.prompt_token_ids + child.token_ids
        text = None if tokenizer is None else tokenizer.decode(tokens)
        found = BeamSearchSequence(tokens, child.logprobs or [], child.cumulative_logprob or 0.0, text)
        found.finish_reason, found.stop_reason = child.finish_reason, child.stop_reason
        sequences.append(found)
    return BeamSearchOutput(sequences)
