"""A classifier's head made of rows of a generator's: see ``proto.checkpoint.classifier_tokens``."""

from __future__ import annotations

from pathlib import Path

import torch

from ...proto.config import ConfigError
from ..spec import WeightNames
from .files import Entry, Tensors


def made_head(files: list[Path], names: WeightNames, rows: tuple[tuple[int, ...], ...]) -> Entry:
    """The head's weight, float32 [labels, hidden], of the rows of the module ``names.head_of`` in ``files``.

    Each of ``rows`` is (token,), that token's row, or (false, true), the second's minus the first's. Raises
    ConfigError where the files lack the tensor, or it has no such row or is quantized.
    """
    wanted = f"{names.head_of}.weight"
    for file in files:
        with Tensors.open(file) as tensors:
            for entry in tensors:
                if entry.name in (wanted, wanted.removeprefix(names.prefix)):
                    return _made(entry, rows)
    raise ConfigError(f"{files[0].parent}: the weights lack {wanted}, of which classifier_from_token makes the head; "
                      "leave classifier_from_token out, or use the generator's checkpoint.")  # fmt: skip


def _made(entry: Entry, rows: tuple[tuple[int, ...], ...]) -> Entry:
    entry.check(torch.float32)
    last = max(token for tokens in rows for token in tokens)
    if last >= entry.shape[0]:
        raise ConfigError(f"{entry.file}: {entry.name} has {entry.shape[0]} rows, and classifier_from_token names the "
                          f"token {last}; check that the tokenizer belongs to these weights.")  # fmt: skip

    def row(token: int) -> torch.Tensor:
        return entry.read(slice(token, token + 1)).float()

    weight = torch.cat([row(tokens[-1]) - row(tokens[0]) if len(tokens) == 2 else row(tokens[0]) for tokens in rows])
    return Entry(entry.file, entry.name, tuple(weight.shape), weight.dtype, lambda start, stop: weight[start:stop])
