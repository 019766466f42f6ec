"""Embeddings that prompts bring along, in place of those of their token ids (``--enable-prompt-embeds``)."""

from __future__ import annotations

import numpy as np
import torch

from ...proto.work import Embeds

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Given:
    """The embeddings of one worker's rows, [tokens, ``width``] each, and those that a step computes.

    A step says with ``begin`` which of its tokens have some; then ``fill`` is called with its embeddings, all at once
    or in passes of some tokens, one after another.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width, self._dtype, self._device = width, dtype, device
        self._rows: dict[int, tuple[int, torch.Tensor]] = {}  # the position of the first, and the embeddings
        self._at = np.zeros(0, np.int64)  # tokens of the step, rising
        self._values = torch.empty(0)
        self._passed = 0  # tokens of the step that have been filled

    @property
    def active(self) -> bool:
        """Whether some token of this step has an embedding of its own."""
        return len(self._at) > 0

    def admit(self, row: int, embeds: Embeds) -> None:
        """``row`` has these. Raises ValueError where they do not fit the model."""
        if embeds.size != self.width or embeds.dtype not in _DTYPES:
            raise ValueError(
                f"prompt_embeds are {embeds.dtype} vectors of {embeds.size} numbers; this model's have {self.width}."
            )
        # A copy: the message's bytes are read-only, and need not be aligned.
        flat = torch.frombuffer(bytearray(embeds.data), dtype=_DTYPES[embeds.dtype]) if embeds.data else torch.empty(0)
        self._rows[row] = embeds.first, flat.view(-1, self.width).to(self._device, self._dtype)

    def drop(self, rows: list[int]) -> None:
        """These rows have none."""
        if self._rows:
            for row in rows:
                self._rows.pop(row, None)

    def begin(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """A step computes ``counts`` tokens of each of ``rows`` from position ``starts`` on, int64 [R] each."""
        self._passed = 0
        if len(self._at):
            self._at = self._at[:0]
        if self._rows:
            self._find(rows.tolist(), starts.tolist(), counts.tolist())

    def _find(self, rows: list[int], starts: list[int], counts: list[int]) -> None:
        at, values, before = [], [], 0
        for row, start, count in zip(rows, starts, counts, strict=True):
            if (held := self._rows.get(row)) is not None:
                first, vectors = held
                low, high = max(start, first), min(start + count, first + len(vectors))
                if low < high:
                    at.append(np.arange(low, high) - start + before)
                    values.append(vectors[low - first : high - first])
            before += count
        if at:
            self._at, self._values = np.concatenate(at), torch.cat(values)

    def fill(self, x: torch.Tensor) -> None:
        """Put them into ``x`` [T, width], the embeddings of the step's next T tokens."""
        if not len(self._at):
            return
        low, high = np.searchsorted(self._at, (self._passed, self._passed + len(x)))
        if low < high:
            places = torch.from_numpy(self._at[low:high] - self._passed).to(x.device)
            x[places] = self._values[low:high].to(x.dtype)
        self._passed += len(x)
