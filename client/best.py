"""best_of and beam search, as the rest of the stack sees them: what is sent, and what is kept of what comes back.

Without beam search ``best_of`` exists in Engine alone: so many children are run, each with logprobs, and the n with
the highest cumulative log-probability are kept. A beam search is the scheduler's; only its logprobs are forced on.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from ..proto.params import SamplingParams

Item = TypeVar("Item")


def to_wire(params: SamplingParams) -> SamplingParams:
    """The parameters that are sent for those of the user; the same object for most."""
    logprobs = 0 if params.logprobs is None else params.logprobs
    if params.use_beam_search:
        return params if params.logprobs is not None else msgspec.structs.replace(params, logprobs=logprobs)
    if params.best_of is None:
        return params
    return msgspec.structs.replace(params, n=params.best_of, best_of=None, logprobs=logprobs)


def from_wire(resolved: SamplingParams, asked: SamplingParams) -> SamplingParams:
    """What came back resolved, in the user's terms."""
    if not is_held(asked):
        return resolved
    return msgspec.structs.replace(resolved, n=asked.n, best_of=asked.best_of, logprobs=asked.logprobs)


def is_held(asked: SamplingParams) -> bool:
    """True where nothing of a request can be shown before all of it is there."""
    return asked.use_beam_search or asked.best_of is not None


def choose(items: list[Item], scores: list[float | None], n: int) -> list[Item]:
    """The n items with the highest scores, best first; of equals the first. What has no score comes last."""
    ranked = [-math.inf if score is None or math.isnan(score) else score for score in scores]
    return [items[index] for index in sorted(range(len(items)), key=lambda index: -ranked[index])[:n]]
