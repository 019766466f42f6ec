"""From logits to tokens: one pipeline, each stage a function, and the parameters of every persistent row.

Stages, in order; a stage that no row needs costs nothing (``SamplingNeeds``):

1. ``greedy``: nothing random in the batch: argmax of the raw logits, and no more.
2. ``kernels.sampling.cut``: logits / temperature; then min_p, top_k, top_p give the lowest value that may be drawn.
3. ``kernels.sampling.draw``: argmax of logits / temperature + Gumbel noise of (seed, position, token id) at or above
   the cut. Greedy rows in a mixed batch take the argmax there.

Stages that change logits (penalties, bias, masks) belong between 1 and 2, on the float32 logits, in place.
The result of a row depends on its own logits, parameters, seed and position alone: not on its place in the batch, on
other rows, or on which stages other rows needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..proto.messages import Admit
from .kernels import sampling
from .kernels.sampling import COLUMNS, INV_T, LOG_MIN_P, SEED_HIGH, SEED_LOW, TOP_K, TOP_P


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """Which stages some row of a step needs; known on the host, so nothing waits for the device."""

    random: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @property
    def cut(self) -> bool:
        """Some row may not draw every token."""
        return self.top_k or self.top_p or self.min_p


class SamplingState:
    """Sampling parameters by persistent row.

    The host's copy is the truth; ``packed``, int32 [max_rows, COLUMNS] on the device, follows it at the next
    ``sample``. The columns are described in ``kernels.sampling``.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str = "cpu", logprobs_mode: str = "raw_logprobs"
    ):
        self.vocab_size, self.logprobs_mode = vocab_size, logprobs_mode
        self.device = torch.device(device)
        self._ints = np.zeros((max_rows, COLUMNS), dtype=np.int32)
        self._floats = self._ints.view(np.float32)
        self._dirty = False
        on_host = self.device.type == "cpu"
        self.packed = torch.from_numpy(self._ints) if on_host else torch.zeros(
            (max_rows, COLUMNS), dtype=torch.int32, device=self.device
        )  # fmt: skip

    def admit(self, row: int, admit: Admit, ids: np.ndarray) -> None:
        """Give ``row`` to ``admit``. ``ids`` int32: the prompt, then outputs it resumes from."""
        params = admit.params
        floats, ints = self._floats[row], self._ints[row]
        floats[INV_T] = 0.0 if params.greedy else 1.0 / params.temperature
        floats[LOG_MIN_P] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        floats[TOP_P] = params.top_p
        ints[TOP_K] = max(params.top_k, 0)
        self._set_seed(row, admit.seed)

    def copy(self, src_rows: Sequence[int], dst_rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Fork: parameters of ``src_rows`` to ``dst_rows`` with new seeds; all are read before any is written."""
        self._ints[list(dst_rows)] = self._ints[list(src_rows)]
        for row, seed in zip(dst_rows, seeds, strict=True):
            self._set_seed(row, seed)

    def drop(self, rows: Sequence[int] | np.ndarray) -> None:
        """Release what the rows hold."""

    def append(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Count tokens that the scheduler chose (beams); int64 [N] each, on the host."""

    def needs(self, rows: np.ndarray, positions: np.ndarray) -> SamplingNeeds:
        """What these rows ask for when they draw the tokens of ``positions``; int64 [S] each, on the host."""
        at = np.asarray(rows, dtype=np.int64)
        floats, random = self._floats[at], self._floats[at, INV_T] != 0
        return SamplingNeeds(
            random=bool(random.any()),
            top_k=bool((random & (self._ints[at, TOP_K] > 0)).any()),
            top_p=bool((random & (floats[:, TOP_P] < 1)).any()),
            min_p=bool((random & (floats[:, LOG_MIN_P] > -np.inf)).any()),
        )

    def upload(self) -> None:
        """Bring the device's copy up to date, without waiting for it.

        The pinned copy is fresh each time, and torch keeps it until the stream has read it: the host may change rows
        again at once, while steps that used their old values are still queued.
        """
        if self._dirty and self.device.type != "cpu":
            staged = torch.from_numpy(self._ints).pin_memory()
            self.packed.copy_(staged, non_blocking=True)
        self._dirty = False

    def _set_seed(self, row: int, seed: int) -> None:
        self._ints[row, SEED_LOW : SEED_HIGH + 1] = np.array([seed % 2**64], dtype="<u8").view("<i4")
        self._dirty = True


class LogprobGroup(NamedTuple):
    """Logprobs of the sample slots that ask for the same ``k``: for each the token itself, then the k best."""

    slots: np.ndarray  # int64 [s], rising, on the host
    k: int
    ids: torch.Tensor  # int32 [s, k + 1]
    values: torch.Tensor  # float32 [s, k + 1]
    ranks: torch.Tensor  # int32 [s], 1 + the number of tokens strictly more likely than the first


class Sampled(NamedTuple):
    """What a step draws."""

    tokens: torch.Tensor  # int64 [S]
    logprobs: list[LogprobGroup] | None


def sample(
    logits: torch.Tensor,
    state: SamplingState,
    rows: torch.Tensor,
    positions: torch.Tensor,
    needs: SamplingNeeds,
    host_rows: np.ndarray,
    host_positions: np.ndarray,
    history: torch.Tensor,
    mask: torch.Tensor | None = None,
    edit: Callable[[torch.Tensor], None] | None = None,
) -> Sampled:
    """Draw one token for each row of ``logits``, which are changed in place.

    Args:
        logits: float32 [S, V], each row contiguous.
        state: parameters of the persistent rows, on the same device.
        rows: int64 [S], the persistent row of each row of logits.
        positions: int64 [S], absolute positions of the tokens being drawn (the prompt's first token is 0).
        needs: ``state.needs`` of the same rows and positions.
        host_rows, host_positions: rows and positions on the host, int64 [S].
        history: int32 [max_rows, L] on the device: the token ids of each persistent row.
        mask: int32 [S, ceil(V / 32)] on the device: bit i of word w set means that token 32 * w + i is allowed.
        edit: called with the logits at the place of the user's logits processors; changes them in place.
    """
    if not needs.random or not len(logits):
        return Sampled(greedy(logits), None)
    state.upload()
    params = state.packed[rows]
    if logits.is_cuda:
        cut, draw = sampling.cut, sampling.draw
    else:
        cut, draw = sampling.cut_torch, sampling.draw_torch
    cuts = cut(logits, params, needs.min_p, needs.top_k, needs.top_p) if needs.cut else None
    return Sampled(draw(logits, params, positions, cuts), None)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, the lowest id of equals; int64 [S]."""
    if logits.is_cuda or not len(logits):
        return logits.argmax(-1)
    # numpy's argmax is vectorised and stays on this thread: faster than torch's at every size measured.
    return torch.from_numpy(logits.numpy().argmax(-1))
