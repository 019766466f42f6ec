"""Masks and penalties of a step in C (edit.c): ``kernels/masks.py`` and ``kernels/penalties.py`` define them."""

from __future__ import annotations

import ctypes

import numpy as np

from ..columns import ALLOWED, PENALTIES
from .library import Library

_MASK, _PENALISE = 0, 1


class _Edit(ctypes.Structure):
    """edit.h's q_edit."""

    _fields_ = (
        ("kind", ctypes.c_int32), ("slots", ctypes.c_int32), ("vocab", ctypes.c_int32), ("uses", ctypes.c_int32),
        ("logits", ctypes.c_void_p), ("stride", ctypes.c_int64),
        ("table", ctypes.c_void_p), ("table_stride", ctypes.c_int64),
        ("rows", ctypes.c_void_p), ("params", ctypes.c_void_p),
    )  # fmt: skip


class Editor:
    """Changes logits in place, by a team of ``threads`` threads.

    ``logits`` are float32 [S, V] with contiguous rows; ``rows`` int64 [S], each slot's row of the table; ``params``
    int32 [S, COLUMNS]. Rows that do not use the change stay as they are.
    """

    def __init__(self, library: Library, threads: int) -> None:
        self._c, self._team = library.c, ctypes.c_void_p(library.team(threads))

    def mask_bits(
        self, logits: np.ndarray, bits: np.ndarray, rows: np.ndarray | None = None, params: np.ndarray | None = None
    ) -> None:
        """``kernels.masks.mask_bits``; ``bits`` int32 [S, W], or [R, W] by row with ``rows`` and ``params``."""
        self._edit(_MASK, ALLOWED, logits, bits, rows, params)

    def penalise(self, logits: np.ndarray, counts: np.ndarray, rows: np.ndarray, params: np.ndarray) -> None:
        """``kernels.penalties.penalise``; ``counts`` int32 [R, V]."""
        self._edit(_PENALISE, PENALTIES, logits, counts, rows, params)

    def _edit(
        self, kind: int, uses: int, logits: np.ndarray, table: np.ndarray, rows: np.ndarray | None,
        params: np.ndarray | None,
    ) -> None:  # fmt: skip
        slots, vocab = logits.shape
        edit = _Edit(
            kind, slots, vocab, uses, logits.ctypes.data, logits.strides[0] // 4, table.ctypes.data,
            table.strides[0] // 4, None if rows is None else rows.ctypes.data,
            None if params is None else params.ctypes.data,
        )  # fmt: skip
        self._c.q_edit_logits(self._team, ctypes.byref(edit))
