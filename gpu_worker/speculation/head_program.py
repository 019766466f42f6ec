"""A head's step as one call of C: the decoder's program with another beginning (``models/program_builder.py``)."""

from __future__ import annotations

import numpy as np
import torch

from ..kernels.cpu import program as native
from ..kernels.cpu.linear import ADD
from ..kv_cache import KVCache
from ..models.blocks import Block
from ..models.decoder import Decoder
from ..models.program import Program
from ..models.program_builder import Builder
from ..models.program_writer import Area
from .head_model import Head


class Given:
    """The hidden states of a step, of which each pass through the body takes the next."""

    def __init__(self) -> None:
        self._rows = torch.empty(0)
        self._next = 0
        self._first: np.ndarray = np.zeros(0, np.int64)

    def begin(self, rows: torch.Tensor, first: np.ndarray) -> None:
        """``rows`` float32 [T, hidden]; ``first``: which of them are at position 0, ascending."""
        self._rows, self._first, self._next = rows, first, 0

    def take(self, count: int) -> tuple[torch.Tensor, list[int]]:
        """The next ``count``, and which of these are at position 0."""
        start, self._next = self._next, self._next + count
        first = self._first[(self._first >= start) & (self._first < self._next)] - start
        return self._rows[start : self._next], first.tolist()


class HeadBuilder(Builder):
    """Writes a head's sections."""

    def __init__(self, model: Head, given: Given, kv: KVCache, outputs: int, logits: torch.Tensor) -> None:
        self.head_model, self.given = model, given
        super().__init__(model, kv, outputs, logits)

    def _enter(self) -> None:
        """The hidden states that are given, and the embedding beside them."""
        parts, width = self.head_model.parts, self.spec.hidden_size
        joined = self.area("joined", 2 * width)
        at_embedding, at_hidden = (0, width) if parts.embed_first else (width, 0)
        self.add(native.Embed(*self._rows_of(parts.embed), parts.embed_scale, joined.part(at_embedding)), joined)
        into = self.stream if parts.join is None else self.area("given", width)

        def take(rows: int) -> None:
            hidden, first = self.given.take(rows)
            into.rows(rows).copy_(hidden)
            if first and parts.zero_first:
                joined.tensor[first, at_embedding : at_embedding + width] = 0.0
            if parts.hidden_norm is None:
                joined.tensor[:rows, at_hidden : at_hidden + width] = hidden

        operation = native.Call(number=len(self.calls))
        self.calls.append((operation, take))
        self.add(operation, joined)
        if parts.embed_norm is not None:
            norm, place = self._norm_struct(parts.embed_norm, width), joined.part(at_embedding)
            self.add(native.RowNorm(norm, place, place), joined)
        if parts.hidden_norm is not None:
            norm = self._norm_struct(parts.hidden_norm, width)
            self.add(native.RowNorm(norm, into.buffer, joined.part(at_hidden)), joined)
        self.joined = joined
        if parts.join is not None:
            self.product(joined, parts.join, self.stream)

    def _shape(self, block: Block) -> None:
        if self.head_model.parts.join is not None:
            self._pre_norm(block)
            return
        self._attend(block, self.joined)
        self.product(self.attended, block.attention.o, self.stream, ADD)
        self._mlp(block.mlp, self._normed(block.mlp_norm), self.stream, ADD)

    def _leave(self) -> Area:
        parts = self.head_model.parts
        if parts.out_norm is None or not parts.norm_is_fed_back:
            return self.stream
        return self._norm(parts.out_norm, self.stream, self.area("result", self.spec.hidden_size))

    def _logits(self, logits: Area) -> None:
        parts = self.head_model.parts
        if parts.out_norm is not None and not parts.norm_is_fed_back:
            self.result, given = (
                self._norm(parts.out_norm, self.result, self.area("last", self.result.width)),
                self.result,
            )
            super()._logits(logits)
            self.result = given
            return
        super()._logits(logits)


class HeadProgram(Program):
    """The step of a head. Call ``give`` before each."""

    def _write(self, model: Decoder, kv: KVCache, outputs: int) -> Builder:
        if not isinstance(model, Head):
            raise TypeError(f"{type(model).__name__} is no head")
        self._model, self._given = model, Given()
        return HeadBuilder(model, self._given, kv, outputs, self._logits)

    def give(self, hidden: torch.Tensor, starts: np.ndarray, counts: np.ndarray) -> None:
        """``hidden`` float32 [T, hidden]: what the tokens of the next step are given, one row after another."""
        first = (counts.cumsum() - counts)[starts == 0]
        self._given.begin(hidden, first)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocabulary of the target]."""
        return self._model.in_target(super().head(hidden))
