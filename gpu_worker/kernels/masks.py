"""Tokens that must not be drawn: bit masks (grammars, allowed tokens) and bad words of several tokens.

A masked logit is -inf. Masks only ever lower logits, so their order among themselves does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from .columns import ALLOWED, COLUMNS, PROMPT_LEN, USES

BLOCK = 4096
WORD_BLOCK = 32


class Words(NamedTuple):
    """N bad words of two or more tokens in a step's slots, int32 columns on the device.

    Word i of ``slots[i]`` bans ``lasts[i]`` after the tokens ``prefixes[starts[i]:starts[i + 1]]``.
    """

    slots: torch.Tensor  # [N]
    lasts: torch.Tensor  # [N]
    starts: torch.Tensor  # [N + 1]
    prefixes: torch.Tensor


def mask_bits(
    logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor | None = None, params: torch.Tensor | None = None
) -> None:
    """Mask every token whose bit is 0, in place: bit i of word w is token 32 * w + i.

    ``logits`` float32 [S, V] with contiguous rows. ``bits`` int32 [S, W], a mask for each row of logits; or, with
    ``rows`` int64 [S] and ``params`` int32 [S, COLUMNS], [R, W] by persistent row, of which only rows that use
    ALLOWED are looked at.
    """
    from . import masks_jit

    slots, vocab = logits.shape
    masks_jit.mask_bits_kernel[(slots, -(-vocab // BLOCK))](
        logits, logits.stride(0), bits, bits.stride(0), bits if rows is None else rows,
        bits if params is None else params, vocab,
        BY_ROW=rows is not None, COLUMNS=COLUMNS, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def ban_words(
    logits: torch.Tensor,
    words: Words,
    history: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: torch.Tensor,
) -> None:
    """Mask the last token of each bad word whose other tokens are the last OUTPUT tokens of its row, in place.

    ``logits`` float32 [S, V] with contiguous rows; ``history`` int32 [R, L], each persistent row's token ids;
    ``rows`` and ``positions`` int64 [S]: row and position of the token to be drawn; ``params`` int32 [S, COLUMNS].
    """
    from . import masks_jit

    masks_jit.ban_words_kernel[(len(words.slots),)](
        logits, logits.stride(0), words.slots, words.lasts, words.starts, words.prefixes,
        history, history.stride(0), rows, positions, params,
        COLUMNS=COLUMNS, BLOCK=WORD_BLOCK, num_warps=1,
    )  # fmt: skip


# ---------------------------------------------------------------- the twins, on the host

_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)  # fmt: skip
"""By byte of a mask: what its eight logits may be at most. A masked copy would branch at every token, which takes
fifteen times as long where bits look random."""


def mask_bits_numpy(
    logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor | None = None, params: torch.Tensor | None = None
) -> None:
    """The twin of ``mask_bits``; tensors of the host."""
    values, words = logits.numpy(), bits.numpy()
    if rows is None or params is None:
        pairs = [(slot, slot) for slot in np.flatnonzero((words != -1).any(1))]
    else:
        slots = np.flatnonzero(params.numpy()[:, USES] & ALLOWED)
        pairs = list(zip(slots, rows.numpy()[slots], strict=True))
    for slot, row in pairs:
        ceiling = _CEILINGS.take(words[row].view(np.uint8), axis=0).reshape(-1)[: values.shape[1]]
        np.minimum(values[slot], ceiling, out=values[slot])


def ban_words_numpy(
    logits: torch.Tensor,
    words: Words,
    history: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: torch.Tensor,
) -> None:
    """The twin of ``ban_words``; tensors of the host."""
    slots, lasts, starts, prefixes = (column.numpy() for column in words)
    place = positions.numpy()[slots]
    lengths = np.diff(starts)
    fits = place - params.numpy()[slots, PROMPT_LEN] >= lengths
    # One comparison a token of every prefix: its word, and where in the row's history it would have to stand.
    word = np.repeat(np.arange(len(slots)), lengths)
    at = np.arange(len(prefixes)) - starts[word] + (place - lengths)[word]
    differs = history.numpy()[rows.numpy()[slots[word]], np.maximum(at, 0)] != prefixes
    matches = fits & (np.bincount(word[differs], minlength=len(slots)) == 0)
    logits.numpy()[slots[matches], lasts[matches]] = -np.inf
