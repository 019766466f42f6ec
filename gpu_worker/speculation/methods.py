"""Which proposer a method is."""

from __future__ import annotations

from typing import Any

from ...proto.speculation import SpeculativeConfig
from ..kv_cache import KVCache
from ..models.model import Model
from ..state import RowState
from .ngram import Ngram, Suffix
from .proposer import Proposer
from .runner import SpeculativeRunner

ROWS = {"cpu": 8, "cuda": 32}
"""Rows that speculate in one step, at most, where ``disable_by_batch_size`` says nothing."""


def lookup(config: SpeculativeConfig, state: RowState) -> Proposer:
    """The proposer of a method without a model."""
    most = config.drafts
    if config.method == "suffix":
        depth, factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor
        return Suffix(state, most, depth, factor, config.suffix_decoding_min_token_prob)
    return Ngram(state, most, config.prompt_lookup_min or 1, config.prompt_lookup_max or 1)


def speculative_runner(
    config: SpeculativeConfig, model: Model, state: RowState, kv: KVCache, max_tokens: int, **more: Any
) -> SpeculativeRunner:
    """A runner whose rows speculate as ``config`` says; ``more``: of Runner's arguments."""
    return SpeculativeRunner(
        model, state, kv, max_tokens, proposer=lookup(config, state), drafts=config.drafts,
        draft_rows=config.draft_rows(ROWS[state.device.type]), adapt=config.adapt, **more,
    )  # fmt: skip
