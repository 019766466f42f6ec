"""Rows of a table of embeddings, looked up by token id: of floats, or of codes that become values in the lookup."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...kernels.codes import Codes
from ...kernels.cpu.codes import PackedCodes


class CodedTable:
    """A table [rows, columns] of codes. ``dtype``: of the rows that it gives.

    ``packed``: the codes as the native kernels read them, or None. They may be those of a product too.
    """

    __slots__ = ("_codes", "dtype", "packed", "shape")

    def __init__(self, held: Codes | PackedCodes, dtype: torch.dtype) -> None:
        self.packed = held if isinstance(held, PackedCodes) else None
        self._codes = held if isinstance(held, Codes) else None
        self.dtype, self.shape = dtype, torch.Size(held.shape)

    @property
    def nbytes(self) -> int:
        """Of the codes and all that belongs to them."""
        held = self.packed or self._codes
        return 0 if held is None else held.nbytes

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """[T, columns] for ``ids`` [T]: the bits of a table of ``Codes.values``."""
        if self._codes is not None:
            return self._codes.of_rows(ids).values(self.dtype)
        assert self.packed is not None
        return self.packed.values_of(ids).to(self.dtype)


Table = torch.Tensor | CodedTable


def embedding(ids: torch.Tensor, table: Table) -> torch.Tensor:
    """Rows ``ids`` [T] of ``table``: [T, columns]."""
    return F.embedding(ids, table) if isinstance(table, torch.Tensor) else table(ids)
