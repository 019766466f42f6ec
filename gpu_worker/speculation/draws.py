"""Draws of drafts: with the noise and the parameters with which the target will draw the same position.

A draw of the target is argmax(logits / temperature + noise(seed, position, token)) among the tokens that top_k, top_p
and min_p leave. A draft that is drawn so from the drafting model's logits is the same token wherever the two models
are of one mind, at any temperature. Penalties, biases and masks are the target's alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..kernels import columns as c
from ..sampling.sample_batch import SampleBatch
from ..sampling.sampler import sample
from ..sampling.sampling_state import SamplingNeeds

if TYPE_CHECKING:
    from ..state import RowState


def draw(logits: torch.Tensor, state: RowState, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """One token for each row of ``logits`` [S, V], int32 [S], on the device of the logits.

    Args:
        logits: may be changed; -inf for what cannot be drawn.
        rows: int64 [S], the persistent row of each.
        positions: int64 [S], where in its row each token goes.
    """
    rows_there, positions_there = state.upload(rows, positions)
    batch = SampleBatch(rows_there, positions_there, rows, positions, state.tokens, needs_of(state, rows))
    return sample(logits, state.sampling, batch).tokens


def needs_of(state: RowState, rows: np.ndarray) -> SamplingNeeds:
    """What ``rows`` need of the sampler for a draft."""
    uses = int(np.bitwise_or.reduce(state.sampling.packed_host[rows, c.USES], initial=0))
    return _NEEDS[uses & (c.RANDOM | c.BY_TOP_K | c.BY_TOP_P | c.BY_MIN_P)]


_NEEDS = [
    SamplingNeeds(
        random=bool(bits & c.RANDOM), top_k=bool(bits & c.BY_TOP_K), top_p=bool(bits & c.BY_TOP_P),
        min_p=bool(bits & c.BY_MIN_P),
    )
    for bits in range(16)
]  # fmt: skip
"""By the four lowest bits of USES."""
