"""What a row's sampling needs beyond the fixed-size parameters of ``SamplingState``: token counts for penalties, the
tokens it may draw, and its lists of banned tokens, biases and bad words.

Counts and allowed tokens are tables of the device, ``[max_rows, ...]``, allocated when a row first needs them. The rest
is short lists, kept on the host by row and put together for the rows of a step; as steps mostly have the rows of the
step before, what was put together is kept until they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...proto.params import SamplingParams
from ...proto.work import Generate
from ..kernels.columns import COUNTED, USES
from ..kernels.masks import Words
from ..kernels.penalties import SEEN
from ..transfer import to_device


class Table:
    """int32 [max_rows, width] on the device, zero at first. On the host, pages cost nothing until they are written."""

    def __init__(self, max_rows: int, width: int, device: torch.device):
        self.shape, self.device = (max_rows, width), device
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The table, allocated at first use."""
        if self._tensor is None:
            if self.device.type == "cpu":
                self._tensor = torch.from_numpy(np.zeros(self.shape, np.int32))
            else:
                self._tensor = torch.zeros(self.shape, dtype=torch.int32, device=self.device)
        return self._tensor

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Rows ``src`` to rows ``dst``, as if all were read before any is written."""
        table = self.tensor
        kept = {row: table[row].clone() for row in set(src) & set(dst)}
        for from_row, to_row in zip(src, dst, strict=True):
            if from_row != to_row:
                table[to_row].copy_(kept[from_row] if from_row in kept else table[from_row])


class Counts(Table):
    """How often each token is in each row's output, and whether it is in its prompt (``kernels.penalties``)."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device):
        super().__init__(max_rows, vocab_size, device)
        self._stale = np.zeros(max_rows, bool)  # rows that are not all zero

    def rebuild(self, row: int, prompt: np.ndarray, outputs: np.ndarray) -> None:
        """What drawing ``outputs`` after ``prompt`` would have left."""
        if self._stale[row]:
            self.tensor[row].zero_()
        ids, counts = np.unique(outputs, return_counts=True)
        seen = np.unique(prompt)
        values = np.concatenate([counts, np.full(len(seen), SEEN)])
        ids, place = np.unique(np.concatenate([ids, seen]), return_inverse=True)
        counts = np.bincount(place, values, len(ids)).astype(np.int32)
        self.tensor[row, to_device(ids.astype(np.int64), self.device)] = to_device(counts, self.device)
        self._stale[row] = True

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        super().copy(src, dst)
        self._stale[list(dst)] = True

    def append(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Count one more token of each of ``rows``, all different; int64 on the host."""
        at = to_device(rows, self.device), to_device(tokens, self.device)
        self.tensor[at] = self.tensor[at] + 1

    def count(self, rows: torch.Tensor, tokens: torch.Tensor, params: torch.Tensor) -> None:
        """Count the token that each row of a step drew, where the row uses COUNTED; the device waits for nothing."""
        counted = (params[:, USES] & COUNTED) != 0
        if self.device.type == "cpu":  # touch no page of other rows
            rows, tokens, counted = rows[counted], tokens[counted], counted[counted]
        flat = self.tensor.view(-1)
        flat.index_add_(0, rows * self.shape[1] + tokens, counted.to(torch.int32))


class Bias(NamedTuple):
    """What is added to logits of single tokens, -inf for a ban; ids are different and rising."""

    ids: np.ndarray  # int64
    values: np.ndarray  # float32


class RowEdits(NamedTuple):
    """One row's lists. Never changed, so forks share them."""

    always: Bias  # logit_bias and bad words of one token
    waiting: Bias  # the same and what min_tokens bans
    lasts: np.ndarray  # int32 [N]: the last tokens of bad words of several
    lengths: np.ndarray  # int32 [N]: their other tokens
    prefixes: np.ndarray  # int32: those tokens, one word after the other


def row_edits(work: Generate, vocab_size: int) -> RowEdits:
    """The lists of one request. Ids that are outside the vocabulary cannot be drawn anyway and are left out."""
    words = [word for word in work.bad_words if word and all(0 <= token < vocab_size for token in word)]
    banned = _inside([word[0] for word in words if len(word) == 1], vocab_size)
    early = _inside(np.frombuffer(work.suppressed_ids, np.int32), vocab_size) if work.params.min_tokens else banned[:0]
    longer = [word for word in words if len(word) > 1]
    given = work.params.logit_bias or {}
    return RowEdits(
        _bias(given, banned, vocab_size),
        _bias(given, np.concatenate([banned, early]), vocab_size),
        np.array([word[-1] for word in longer], np.int32),
        np.array([len(word) - 1 for word in longer], np.int32),
        np.array([token for word in longer for token in word[:-1]], np.int32),
    )


def allowed_bits(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)]: the bits of ``allowed_token_ids``."""
    bits = np.zeros((vocab_size + 31) // 32 * 32, bool)
    bits[_inside(params.allowed_token_ids or [], vocab_size)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _inside(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, dtype=np.int64)
    return array[(array >= 0) & (array < vocab_size)]


def _bias(given: dict[int, float], banned: np.ndarray, vocab_size: int) -> Bias:
    tokens = np.array(list(given), np.int64)
    inside = (tokens >= 0) & (tokens < vocab_size)
    ids = np.unique(np.concatenate([tokens[inside], banned]))
    values = np.zeros(len(ids), np.float32)
    values[np.searchsorted(ids, tokens[inside])] = np.array(list(given.values()), np.float32)[inside]
    values[np.searchsorted(ids, banned)] = -np.inf
    return Bias(ids, values)


def joined_bias(parts: Sequence[Bias], slots: np.ndarray, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Slots int64, ids int64 and values float32 [N] on the device: ``parts[i]`` is of ``slots[i]``."""
    columns = (
        np.repeat(slots, [len(part.ids) for part in parts]),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.values for part in parts]),
    )
    return tuple(to_device(column, device) for column in columns)


def joined_words(parts: Sequence[RowEdits], slots: np.ndarray, device: torch.device) -> Words:
    """The bad words of several tokens of a step: ``parts[i]`` are those of ``slots[i]``."""
    starts = np.zeros(sum(len(part.lasts) for part in parts) + 1, np.int32)
    np.concatenate([part.lengths for part in parts]).cumsum(out=starts[1:])
    columns = (
        np.repeat(slots, [len(part.lasts) for part in parts]).astype(np.int32),
        np.concatenate([part.lasts for part in parts]),
        starts,
        np.concatenate([part.prefixes for part in parts]),
    )
    return Words(*(to_device(column, device) for column in columns))
