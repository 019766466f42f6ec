"""Logprobs of a step's rows in one call of C (logprobs.c): ``kernels/logprobs.py`` defines them."""

from __future__ import annotations

import ctypes

import numpy as np

from .library import Library


class _Logprobs(ctypes.Structure):
    """logprobs.h's q_logprobs."""

    _fields_ = (
        ("count", ctypes.c_int32), ("vocab", ctypes.c_int32), ("k", ctypes.c_int32), ("softmax", ctypes.c_int32),
        ("logits", ctypes.c_void_p), ("stride", ctypes.c_int64), ("slots", ctypes.c_void_p),
        ("params", ctypes.c_void_p), ("thresholds", ctypes.c_void_p), ("tokens", ctypes.c_void_p),
        ("ids", ctypes.c_void_p), ("values", ctypes.c_void_p), ("ranks", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )  # fmt: skip


class Teller:
    """Values, ranks and best tokens, by a team of ``threads`` threads; the same bits by any number."""

    def __init__(self, library: Library, threads: int) -> None:
        self._c, self._threads = library.c, threads
        self._team = ctypes.c_void_p(library.team(threads))
        self._c.q_logprobs_scratch.restype = ctypes.c_int64
        self._scratch, self._vocab = np.empty(0, np.float32), -1

    def tell(
        self,
        logits: np.ndarray,
        slots: np.ndarray,
        params: np.ndarray | None,
        thresholds: np.ndarray | None,
        tokens: np.ndarray,
        k: int,
        softmax: bool,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``tokens`` and the k best tokens of n rows of logits. Arrays are contiguous but for the rows of ``logits``.

        Args:
            logits: float32 [S, V], each row contiguous; not changed.
            slots: int64 [n], the row that each token is of.
            params: int32 [S, COLUMNS] (``kernels.columns``): rows are divided by their temperature; None: as they are.
            thresholds: float32 [S], with ``params``: lower values count as -inf; None: none does.
            tokens: int64 [n].
            k: how many of the best, 0 <= k <= V.
            softmax: log-probabilities, else logits.

        Returns:
            ids int32 [n, k + 1] and values float32 [n, k + 1] of the token itself, then of the best (NaN is given as
            -inf); ranks int32 [n], 1 + the number of strictly greater values.
        """
        count, vocab = len(slots), logits.shape[1]
        if vocab != self._vocab:
            # Of each thread. What a step does not touch of it is no memory.
            self._scratch = np.empty(self._c.q_logprobs_scratch(vocab) * self._threads + 16, np.float32)
            self._vocab = vocab
        ids, values = np.empty((count, k + 1), np.int32), np.empty((count, k + 1), np.float32)
        ranks = np.empty(count, np.int32)
        asked = _Logprobs(
            count, vocab, k, softmax, logits.ctypes.data, logits.strides[0] // 4, slots.ctypes.data,
            None if params is None else params.ctypes.data, None if thresholds is None else thresholds.ctypes.data,
            tokens.ctypes.data, ids.ctypes.data, values.ctypes.data, ranks.ctypes.data,
            -(-self._scratch.ctypes.data // 64) * 64,
        )  # fmt: skip
        if count:
            self._c.q_tell_logprobs(self._team, ctypes.byref(asked))
        return ids, values, ranks
