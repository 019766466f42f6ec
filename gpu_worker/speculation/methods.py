"""Which proposer a method is."""

from __future__ import annotations

from ...proto.speculation import SpeculativeConfig
from ..device import LongSteps
from ..kv_cache import KVCache
from ..models.model import Model
from ..models.program import Program
from ..parallel.parallel import Group
from ..state import RowState
from .loading import Drafting
from .ngram import Ngram, Suffix
from .proposer import Proposer
from .runner import SpeculativeRunner
from .shared import Absent

HIDDEN = ("eagle", "eagle3", "medusa", "mtp")
"""The methods that draft from hidden states of the target."""
ROWS = {"cpu": 8, "cuda": 32}
"""Rows that speculate in one step, at most, where ``disable_by_batch_size`` says nothing."""


def draft_rows(config: SpeculativeConfig, device: str, rows: int) -> int:
    """Of ``rows`` on a device of this type, those that speculate in one step at most."""
    return min(config.draft_rows(ROWS[device]), rows)


def lookup(config: SpeculativeConfig, state: RowState) -> Proposer:
    """The proposer of a method without a model."""
    most = config.drafts
    if config.method == "suffix":
        depth, factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor
        return Suffix(state, most, depth, factor, config.suffix_decoding_min_token_prob)
    return Ngram(state, most, config.prompt_lookup_min or 1, config.prompt_lookup_max or 1)


def speculative_runner(
    config: SpeculativeConfig, model: Model, state: RowState, kv: KVCache, max_tokens: int,
    drafting: Drafting | None = None, group: Group | None = None, long: LongSteps | None = None,
) -> SpeculativeRunner:  # fmt: skip
    """A runner whose rows speculate as ``config`` says, with what was loaded for it; ``group`` and ``long`` as
    ``Runner`` has them."""

    def proposer(program: Program | None) -> Proposer:
        if group is not None and not group.leader:
            return Absent(config.method in HIDDEN)
        if drafting is None:
            return lookup(config, state)
        return drafting.proposer(state, kv, max_tokens, long, program)

    return SpeculativeRunner(
        model, state, kv, max_tokens, proposer=proposer, drafts=config.drafts,
        draft_rows=draft_rows(config, state.device.type, state.max_rows), adapt=config.adapt, group=group, long=long,
        taps=() if drafting is None else drafting.taps,
    )  # fmt: skip
