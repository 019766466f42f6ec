"""Penalties: repetition, frequency and presence of tokens that a row has already, in one pass over the logits.

Counts are int32 by persistent row and token: the low bits count the token in the row's output, SEEN says that it is in
its prompt. In order: repetition (prompt and output): logit > 0 ? logit / p : logit * p; frequency: - p * count;
presence: - p where count > 0 (output only). Each is rounded to float32, on every device alike.
"""

from __future__ import annotations

import numpy as np
import torch

from .columns import COLUMNS, FREQUENCY, PENALTIES, PRESENCE, REPETITION, USES

SEEN = 1 << 30
"""The bit of a count that marks a token of the prompt."""

BLOCK = 2048


def penalise(logits: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, params: torch.Tensor) -> None:
    """Apply the penalties of every row that uses PENALTIES, in place.

    ``logits`` float32 [S, V] with contiguous rows; ``counts`` int32 [R, V]; ``rows`` int64 [S]; ``params`` int32
    [S, COLUMNS].
    """
    from . import penalties_jit

    slots, vocab = logits.shape
    penalties_jit.penalise_kernel[(slots, -(-vocab // BLOCK))](
        logits, logits.stride(0), counts, counts.stride(0), rows, params, vocab,
        COLUMNS=COLUMNS, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def penalise_numpy(logits: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, params: torch.Tensor) -> None:
    """The twin of ``penalise``; tensors of the host. Looks at the tokens that the row has alone."""
    values, table, ints = logits.numpy(), counts.numpy(), params.numpy()
    floats = ints.view(np.float32)
    for slot in np.flatnonzero(ints[:, USES] & PENALTIES):
        seen = table[int(rows[slot])]
        ids = np.flatnonzero(seen != 0)
        repetition, frequency, presence = floats[slot, [REPETITION, FREQUENCY, PRESENCE]]
        x = values[slot, ids]
        x = np.where(x > 0, x / repetition, x * repetition)
        count = (seen[ids] & (SEEN - 1)).astype(np.float32)
        x -= frequency * count
        x -= presence * (count > 0)
        values[slot, ids] = x
