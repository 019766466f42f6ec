"""SampleBatch: what the sampling of one step works on, and why a slot of it may fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from .sampling_state import SamplingNeeds


class Failure(NamedTuple):
    """Why no token can be drawn for a row: the HTTP status and message for its request, the field at fault, and whether
    it is because what the model gave are not numbers."""

    status: int
    message: str
    param: str | None = None
    corrupted: bool = False


@dataclass(slots=True)
class SampleBatch:
    """S slots, each of which draws one token for one persistent row. Tensors are on the device of the logits."""

    rows: torch.Tensor  # [S] int64, the persistent row of each slot, all different
    positions: torch.Tensor  # [S] int64, where in its row each token goes (the prompt's first token is at 0)
    host_rows: np.ndarray  # ``rows`` and ``positions`` on the host
    host_positions: np.ndarray
    history: torch.Tensor  # [max_rows, L] int32, the token ids of each persistent row, up to ``positions``
    needs: SamplingNeeds  # ``SamplingState.needs`` of these rows and positions
    # [S, ceil(V / 32)] int32, the grammars' mask: bit i of word w is set where token 32 * w + i is allowed.
    mask: torch.Tensor | None = None
    # Runs the users' logits processors: changes the logits [S, V] in place.
    edit: Callable[[torch.Tensor], None] | None = None
    # By slot, why it cannot draw; its token means nothing. Sampling adds to it.
    failed: dict[int, Failure] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.host_rows)
