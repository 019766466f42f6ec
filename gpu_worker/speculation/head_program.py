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


class HeadBuilder(Builder):
    """Writes a head's sections."""

    def __init__(self, model: Head, kv: KVCache, outputs: int, logits: torch.Tensor) -> None:
        self.head_model = model
        super().__init__(model, kv, outputs, logits)

    def _enter(self) -> None:
        """The hidden states that are given, and the embedding beside them."""
        parts, width = self.head_model.parts, self.spec.hidden_size
        joined = self.area("joined", 2 * width)
        at_embedding, at_hidden = (0, width) if parts.embed_first else (width, 0)
        self.add(native.Embed(*self._rows_of(parts.embed), parts.embed_scale, joined.part(at_embedding)), joined)
        zeroed = joined.part(at_embedding) if parts.zero_first else native.Buffer()
        given = joined.part(at_hidden)
        if parts.hidden_norm is not None:
            area = self.stream if parts.join is None else self.area("given", width)
            given = area.buffer
        elif parts.join is None:
            self.add(native.Give(width, self.stream.buffer), self.stream)
        self.add(native.Give(width, given, zeroed), joined)
        if parts.embed_norm is not None:
            norm, place = self._norm_struct(parts.embed_norm, width), joined.part(at_embedding)
            self.add(native.RowNorm(norm, place, place), joined)
        if parts.hidden_norm is not None:
            norm = self._norm_struct(parts.hidden_norm, width)
            self.add(native.RowNorm(norm, given, joined.part(at_hidden)), joined)
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
        self._model = model
        return HeadBuilder(model, kv, outputs, self._logits)

    @property
    def vocabulary(self) -> np.ndarray | None:
        """int64: the target's id of each of the head's tokens; None: they are the target's."""
        found = self._model.parts.vocabulary
        return None if found is None else found.numpy()

    def give(self, hidden: torch.Tensor) -> None:
        """``hidden`` float32 [T, hidden]: what the tokens of the next step are given, one row after another."""
        self._kept = kept = hidden.float()
        self._step.given, self._step.given_stride = kept.data_ptr(), kept.stride(0)

    def logits(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, outputs: np.ndarray) -> torch.Tensor:
        """As ``Program.logits``, [S, vocabulary of the target]."""
        return self._model.in_target(super().logits(rows, starts, counts, outputs))
