"""Chooses a step's tokens in one call of C (choose.c): what ``kernels/sampling.py`` defines, for every row at once."""

from __future__ import annotations

import ctypes

import numpy as np

from .library import Library


class Choice(ctypes.Structure):
    """choose.h's q_choice."""

    _fields_ = (
        ("slots", ctypes.c_int32), ("vocab", ctypes.c_int32), ("first", ctypes.c_int32),
        ("logits", ctypes.c_void_p), ("stride", ctypes.c_int64),
        ("params", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("positions", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p), ("chosen", ctypes.c_void_p),
        ("values", ctypes.c_void_p), ("thresholds", ctypes.c_void_p), ("scratch", ctypes.c_void_p),
    )  # fmt: skip


class Chooser:
    """Thresholds, draws and most likely tokens, by a ``team`` of ``threads`` threads; the same bits by any number."""

    def __init__(self, library: Library, threads: int) -> None:
        self._c, self._threads = library.c, threads
        self.team = library.team(threads)
        self._team = ctypes.c_void_p(self.team)
        self._c.q_choose_scratch.restype = ctypes.c_int64
        self._choice, self._scratch, self._vocab = Choice(), np.empty(0, np.float32), -1
        self._pointer = ctypes.byref(self._choice)
        self._addresses: dict[str, tuple[np.ndarray | None, int | None]] = {}

    def choose(
        self,
        logits: np.ndarray,
        params: np.ndarray | None,
        rows: np.ndarray | None,
        positions: np.ndarray | None,
        tokens: np.ndarray,
        chosen: np.ndarray,
        values: np.ndarray | None = None,
        thresholds: np.ndarray | None = None,
        first: int = 0,
    ) -> None:
        """One token for each of S rows of logits: the most likely one where INV_T is 0, else threshold and draw.

        Arrays are contiguous but for the stride of ``logits`` from row to row.

        Args:
            logits: float32 [S, V] of tokens ``first``, ...; not changed.
            params: int32 [R, COLUMNS] (``kernels.columns``); None: every row takes its most likely token.
            rows: int64 [S], each slot's row of ``params``; None: slot i has row i.
            positions: int64 [S] of the tokens that are drawn.
            tokens, chosen: out, int32 [S] and float32 [S]: the token, and its logit (NaN if the row has one).
            values: out, float32 [S]: logit / temperature + noise of the token; of most likely ones the logit.
            thresholds: out, float32 [S]: the lowest logit / temperature that may be drawn, -inf for none.
        """
        choice, (choice.slots, vocab) = self._choice, logits.shape
        if vocab != self._vocab:
            self._prepare(vocab)
        choice.stride, choice.first = logits.strides[0] // 4, first
        self._point(
            logits=logits, params=params, rows=rows, positions=positions, tokens=tokens, chosen=chosen, values=values,
            thresholds=thresholds,
        )  # fmt: skip
        if choice.slots:
            self._c.q_choose(self._team, self._pointer)

    def _prepare(self, vocab: int) -> None:
        """Room for rows of ``vocab`` logits."""
        self._scratch = self.prepare(self._choice, vocab)
        self._vocab = vocab

    def prepare(self, choice: Choice, vocab: int) -> np.ndarray:
        """Let ``choice`` be of rows of ``vocab`` logits. Returns its scratch, of each thread, aligned to 64
        bytes, which must live as long as ``choice`` is used."""
        scratch = np.empty(self._c.q_choose_scratch(vocab) * self._threads + 16, np.float32)
        choice.scratch, choice.vocab = -(-scratch.ctypes.data // 64) * 64, vocab
        return scratch

    def _point(self, **arrays: np.ndarray | None) -> None:
        """Asking an array for its address takes longer than most of a step's choice, so those of the last call, which
        most often come again, are kept (with the arrays, so that an address is of no other)."""
        for name, array in arrays.items():
            known = self._addresses.get(name)
            if known is None or known[0] is not array:
                known = array, None if array is None else array.__array_interface__["data"][0]
                self._addresses[name] = known
                setattr(self._choice, name, known[1])
