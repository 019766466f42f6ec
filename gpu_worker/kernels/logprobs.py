"""Logprobs: a row's log-sum-exp, one token's value and strict rank, and its k best tokens.

Rows are taken as they are, or *processed*: divided by the temperature, -inf below the threshold (greedy rows as they
are). Equal values are ordered by id, the lowest first; nothing depends on other rows. NaN counts as less than every
number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from .columns import COLUMNS, INV_T

STATS_BLOCK = 4096
KEYS_BLOCK = 2048
_KEYS_AT_ONCE = 2**23  # int64 keys: 64 MiB


class Source(NamedTuple):
    """Which rows of a step's logits are looked at, and how."""

    logits: torch.Tensor  # float32 [S, V], each row contiguous
    slots: torch.Tensor  # int64 [n] on their device
    params: torch.Tensor | None = None  # int32 [S, COLUMNS]: processed
    thresholds: torch.Tensor | None = None  # float32 [S], with params


def stats(source: Source, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, sums, ranks) [n] of ``tokens`` int64 [n], one for each slot.

    Values float32: the tokens' own logits; sums float32: log of the sum of exp over the row (0 where every logit is
    -inf); ranks int32: 1 + the number of strictly greater logits.
    """
    from . import logprobs_jit

    count, vocab = len(source.slots), source.logits.shape[1]
    values, sums = (torch.empty(count, dtype=torch.float32, device=tokens.device) for _ in range(2))
    ranks = torch.empty(count, dtype=torch.int32, device=tokens.device)
    logprobs_jit.stats_kernel[(count,)](
        *_arguments(source), tokens, values, sums, ranks, vocab,
        PROCESSED=source.params is not None, HAS_THRESHOLD=source.thresholds is not None, COLUMNS=COLUMNS,
        BLOCK=STATS_BLOCK, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return values, sums, ranks


def best(source: Source, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best tokens of each slot, best first: ids int32 [n, k] and their logits float32 [n, k]; 0 < k <= V.

    A value and its id make one int64 key, all different, so that torch's selection has no ties to break.
    """
    vocab = source.logits.shape[1]
    step = max(1, _KEYS_AT_ONCE // vocab)
    tops = []
    for start in range(0, len(source.slots), step):
        part = source._replace(slots=source.slots[start : start + step])
        tops.append(_keys(part).topk(k).values)
    top = torch.cat(tops) if len(tops) > 1 else tops[0]
    ids = (~top).bitwise_and_(0x7FFFFFFF).to(torch.int32)
    high = (top >> 32).to(torch.int32)
    return ids, (high ^ ((high >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _keys(source: Source) -> torch.Tensor:
    """int64 [n, V]: the order of (value, lowest id first)."""
    from . import logprobs_jit

    count, vocab = len(source.slots), source.logits.shape[1]
    keys = torch.empty((count, vocab), dtype=torch.int64, device=source.logits.device)
    logprobs_jit.keys_kernel[(count, -(-vocab // KEYS_BLOCK))](
        *_arguments(source), keys, vocab,
        PROCESSED=source.params is not None, HAS_THRESHOLD=source.thresholds is not None, COLUMNS=COLUMNS,
        BLOCK=KEYS_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return keys


def _arguments(source: Source) -> tuple[object, ...]:
    logits, slots, params, thresholds = source
    return (
        logits, logits.stride(0), slots, slots if params is None else params,
        logits if thresholds is None else thresholds,
    )  # fmt: skip


# ---------------------------------------------------------------- the twins, on the host


def stats_numpy(source: Source, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The twin of ``stats``; tensors of the host."""
    count, shifted = len(source.slots), np.empty(source.logits.shape[1], np.float32)
    values, sums, ranks = np.empty(count, np.float32), np.empty(count, np.float32), np.empty(count, np.int32)
    for i, token in enumerate(tokens.tolist()):
        row = _row(source, i)
        top = row.max()
        if np.isnan(top):
            row = np.where(np.isnan(row), np.float32(-np.inf), row)
            top = row.max()
        values[i] = row[token]
        ranks[i] = 1 + np.count_nonzero(row > row[token])
        if np.isfinite(top):
            np.subtract(row, top, out=shifted)
            sums[i] = top + np.log(np.exp(shifted, out=shifted).sum())
        else:
            sums[i] = 0.0 if top < 0 else top
    return torch.from_numpy(values), torch.from_numpy(sums), torch.from_numpy(ranks)


def best_numpy(source: Source, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of ``best``; tensors of the host."""
    count = len(source.slots)
    ids, values = np.empty((count, k), np.int32), np.empty((count, k), np.float32)
    for i in range(count):
        row = _row(source, i)
        at = _candidates(row, k)
        negated = -row[at]
        order = np.argsort(np.where(np.isnan(negated), np.float32(np.inf), negated), kind="stable")[:k]
        ids[i] = at[order]
        values[i] = -negated[order]
    np.copyto(values, np.float32(-np.inf), where=np.isnan(values))
    return torch.from_numpy(ids), torch.from_numpy(values)


def _row(source: Source, i: int) -> np.ndarray:
    """Slot i's logits, float32 [V]: a view, or processed."""
    slot = int(source.slots[i])
    row = source.logits[slot].numpy()
    inv_t = 0.0 if source.params is None else source.params[slot].numpy().view(np.float32)[INV_T]
    if not inv_t:
        return row
    row = row * inv_t
    if source.thresholds is not None:
        row = np.where(row >= source.thresholds[slot].numpy(), row, np.float32(-np.inf))
    return row


def _candidates(row: np.ndarray, k: int) -> np.ndarray:
    """Ids, rising, of tokens among which the k best are sure to be."""
    sample, rank = row[::64], 2 * (k // 64) + 8
    if rank < len(sample):
        at = np.flatnonzero(row >= np.partition(sample, len(sample) - rank)[len(sample) - rank])
        # A row with many equal values must not be sorted whole: all above the k-th, and the first of those equal to it.
        if len(at) >= k:
            if len(at) > 4 * (k + 512):
                above = row[at]
                edge = np.partition(above, len(at) - k)[len(at) - k]
                at = np.sort(np.concatenate([at[above > edge], at[above == edge][:k]]))
            return at
    return np.arange(len(row))
