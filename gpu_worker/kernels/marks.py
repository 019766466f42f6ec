"""Tokens as the host is told of them: a mark, below 0, stands for one that cannot be drawn.

The host does not see a GPU's logits, and waiting for them would hold up every row. So the device looks at the logit of
each chosen token, and the mark travels in the place of the token: it costs no byte and no wait.
"""

from __future__ import annotations

import torch

NAN = -1
"""The chosen token's logit is NaN."""

FORBIDDEN = -2
"""It is -infinity: no token is left to draw."""

BLOCK = 32


def marked(values: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``tokens`` int64 [S] as int32 [S], for the rows; and what the host is told, int32 [S], marks included.

    ``values``: logits [S, V] of any float type with contiguous rows; or float32 [S], what each token won with.
    """
    from . import marks_jit

    count = len(tokens)
    out = torch.empty((2, count), dtype=torch.int32, device=tokens.device)
    if count:
        marks_jit.mark_kernel[(-(-count // BLOCK),)](
            values, values.stride(0), tokens, out, count, BY_TOKEN=values.dim() == 2, NAN=NAN, FORBIDDEN=FORBIDDEN,
            BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip
    return out[0], out[1]


def marked_torch(values: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of ``marked``."""
    chosen = values.gather(1, tokens[:, None]).squeeze(1) if values.dim() == 2 else values
    told = torch.where(chosen > -torch.inf, tokens, torch.where(chosen.isnan(), NAN, FORBIDDEN))
    return tokens.to(torch.int32), told.to(torch.int32)
