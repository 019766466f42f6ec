"""Tensors of a GGUF file by the names, in the order of rows and with the values of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from ...proto.checkpoint.gguf import gguf_file, read_gguf
from ...proto.checkpoint.gguf_config import Held, Keys, held_tensors
from ...proto.config import ConfigError

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

Rows = Callable[[int, int], torch.Tensor]
"""``Entry.rows`` of ``files.py``."""


def gguf_tensors(file: Path, data: BinaryIO) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, Rows]]:
    """Name, shape, dtype and rows of each tensor in ``file``, open as ``data``. Blocks of codes are uint8
    [rows, bytes of a row]. Raises ConfigError.
    """
    gguf = read_gguf(file)
    first = gguf_file(file) or file
    keys = Keys(gguf if first == file else read_gguf(first))
    for held in held_tensors(gguf, keys):
        dtype = _FLOATS.get(held.tensor.type.name)
        one_dim, row = len(held.shape) == 1, held.tensor.row_bytes
        shape = held.shape if dtype is not None else (*held.shape[:-1], row)
        if one_dim and dtype is None:
            raise ConfigError(f"{file}: tensor {held.tensor.name!r} has one dim and is quantized; download it again.")
        reader = _Reader(
            file, data, held, shape, dtype or torch.uint8, row // max(1, held.shape[0]) if one_dim else row
        )
        yield held.name, shape, dtype or torch.uint8, reader.rows


class _Reader:
    """Rows of one tensor. A vector's "rows" are its values."""

    def __init__(
        self, file: Path, data: BinaryIO, held: Held, shape: tuple[int, ...], dtype: torch.dtype, row_bytes: int
    ) -> None:
        self._file, self._data, self._held, self._shape, self._dtype = file, data, held, shape, dtype
        self._row_bytes, self._start = row_bytes, held.tensor.start + held.rows.start * held.tensor.row_bytes

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows ``first`` to ``last``, in the order and with the values of a Hugging Face folder."""
        held = self._held
        found = self._head_rows(first, last) if held.heads else self._read(first, last)
        found = found.view(self._dtype).view(last - first, *self._shape[1:])
        return found - held.added if held.added else found

    def _read(self, first: int, last: int) -> torch.Tensor:
        """uint8 [last - first, bytes of a row], as they lie in the file."""
        into = torch.empty((last - first) * self._row_bytes, dtype=torch.uint8)
        try:
            self._data.seek(self._start + first * self._row_bytes)
            found = self._data.readinto(memoryview(into.numpy()))  # type: ignore[attr-defined,arg-type]
        except OSError as error:
            raise ConfigError(f"{self._file} cannot be read: {error.strerror}; download it again.") from error
        if found != len(into):
            raise ConfigError(f"{self._file}: tensor {self._held.tensor.name!r} is cut short; download it again.")
        return into.view(last - first, self._row_bytes)

    def _head_rows(self, first: int, last: int) -> torch.Tensor:
        """The same of a tensor whose heads have their halves interleaved: row 2 i + h is row i of half h."""
        size = self._shape[0] // self._held.heads
        start, stop = first // size * size, -(-last // size) * size
        order = (
            np.arange(start, stop).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)[first - start : last - start]
        )
        return self._read(start, stop)[torch.from_numpy(order - start)]
