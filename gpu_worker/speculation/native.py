"""Drafts of a model or head, and their verification, as one call of C each (``kernels/cpu/speculate.py``).

Few rows speculate in a step and a pass of a small model takes some 20 us, so what Python does for each of them counts:
arrays are made once, and a call fills a few numbers in.
"""

from __future__ import annotations

from ctypes import addressof
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..kernels.cpu.sampling import Choice, Chooser
from ..kernels.cpu.speculate import Draft, Verification, drafting, verifying
from ..models.program import Program
from .head_program import HeadProgram

if TYPE_CHECKING:
    from ..state import RowState


class _Draws:
    """Where the tokens of ``slots`` rows of ``logits`` are drawn by the parameters of ``state``'s rows."""

    def __init__(self, chooser: Chooser, state: RowState, logits: np.ndarray) -> None:
        slots, vocab = logits.shape
        self.choice = choice = Choice()
        self.tokens, self.chosen = np.zeros(slots, np.int32), np.zeros(slots, np.float32)
        self.rows, self.positions = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._keep = chooser.prepare(choice, vocab), logits, state.sampling.packed_host
        choice.logits, choice.stride = logits.ctypes.data, logits.strides[0] // 4
        choice.params, choice.rows = state.sampling.packed_host.ctypes.data, self.rows.ctypes.data
        choice.positions, choice.tokens = self.positions.ctypes.data, self.tokens.ctypes.data
        choice.chosen = self.chosen.ctypes.data


class Drafter:
    """Drafts of at most ``rows`` rows by ``program``, which has their token ids in ``state``."""

    def __init__(self, program: Program, chooser: Chooser, state: RowState, rows: int) -> None:
        self._program, self._head = program, isinstance(program, HeadProgram)
        logits = program.room_of_logits(rows)
        vocabulary = program.vocabulary if isinstance(program, HeadProgram) else None
        self._draft = draft = Draft()
        if vocabulary is not None:
            draft.own, draft.logits, draft.vocabulary = len(vocabulary), logits.ctypes.data, vocabulary.ctypes.data
            logits = np.full((rows, state.vocab_size), -np.inf, np.float32)
        self._draws = draws = _Draws(chooser, state, logits)
        # Rows, where each begins, how many tokens, which is the last, where its drafts go, how many.
        self._columns = np.zeros((6, rows), np.int64)
        self._starts, self._ones, self._places = np.zeros(rows, np.int64), np.ones(rows, np.int64), np.arange(rows)
        row, start, count, output, draft.positions, draft.wanted = (line.ctypes.data for line in self._columns)
        first = draft.first
        first.row, first.start, first.count, first.output = row, start, count, output
        draws.choice.rows, draws.choice.positions = row, draft.positions
        draft.choice, draft.team = addressof(draws.choice), chooser.team
        draft.starts, draft.ones, draft.places = (
            each.ctypes.data for each in (self._starts, self._ones, self._places)
        )  # fmt: skip
        draft.tokens, draft.token_stride = state.tokens_host.ctypes.data, state.tokens_host.strides[0] // 4
        result = program.result
        draft.head, draft.result, draft.hidden_size = self._head, result.buffer, result.width
        self._given = np.zeros((rows, result.width), np.float32)
        draft.given = self._given.ctypes.data
        self._run = drafting(program.address, draft)

    def draft(
        self, rows: list[int], starts: list[int], known: list[int], wanted: list[int], given: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        """Write ``wanted`` drafts, which fall, behind the ``known`` tokens of each of ``rows``.

        ``starts``: before them keys and values are there, of tokens at least one before the last. ``given`` float32
        [T, hidden]: of a head, what the tokens from there to the last but one are given, one row after another.
        """
        size, behind, last = len(rows), int(self._head), -1
        counts = [end - start - behind for start, end in zip(starts, known, strict=True)]
        self._columns[:, :size] = rows, starts, counts, [last := last + count for count in counts], known, wanted
        first = self._draft.first
        first.rows = first.outputs = size
        if given is not None:
            first.given, first.given_stride = given.data_ptr(), given.stride(0)
        self._program.check(self._run())


class Verifier:
    """Verifies at most ``tokens`` drafted and last tokens of at most ``rows`` rows by ``program``, the target's."""

    def __init__(self, program: Program, chooser: Chooser, state: RowState, rows: int, tokens: int) -> None:
        self._program = program
        self._draws = draws = _Draws(chooser, state, program.room_of_logits(tokens))
        self._columns, self._right = np.zeros((3, rows), np.int64), np.zeros(rows, np.int32)
        self._outputs = np.arange(tokens)
        self._verification = told = Verification()
        step = told.step
        step.row, step.start, step.count = (line.ctypes.data for line in self._columns)
        step.output = self._outputs.ctypes.data
        told.choice, told.team, told.right = addressof(draws.choice), chooser.team, self._right.ctypes.data
        told.rows, told.positions = draws.rows.ctypes.data, draws.positions.ctypes.data
        told.tokens, told.token_stride = state.tokens_host.ctypes.data, state.tokens_host.strides[0] // 4
        self._run = verifying(program.address, told)

    def verify(self, rows: list[int], starts: list[int], counts: list[int]) -> list[int] | None:
        """How many drafts of each of ``rows`` are right, of the ``counts`` - 1 behind the token at ``starts``. What is
        drawn behind the last right one is written there.

        None where some token cannot be drawn; nothing was written.
        """
        size, step = len(rows), self._verification.step
        self._columns[:, :size] = rows, starts, counts
        step.rows, step.outputs = size, sum(counts)
        self._program.begin()
        if (failed := self._run()) < 0:
            return None
        self._program.check(failed)
        return self._right[:size].tolist()

    def hidden(self, tokens: int) -> torch.Tensor:
        """Hidden states float32 [tokens, hidden] of the last step's tokens, valid until the next."""
        return self._program.result.rows(tokens)
