"""Logprobs of a step's slots and of prompts: the token itself first, then the k best, with the token's strict rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from ..kernels import logprobs as kernels
from ..kernels.cpu.library import library
from ..kernels.cpu.logprobs import Teller
from ..kernels.logprobs import Source
from ..transfer import to_device

_TOGETHER = 64
"""Slots that ask for at most so many are selected in one pass, for the largest number among them."""


class LogprobGroup(NamedTuple):
    """Logprobs of the sample slots that ask for the same ``k``: for each the token itself, then the k best."""

    slots: np.ndarray  # int64 [s], rising, on the host
    k: int
    ids: torch.Tensor  # int32 [s, k + 1]
    values: torch.Tensor  # float32 [s, k + 1]
    ranks: torch.Tensor  # int32 [s], 1 + the number of tokens strictly more likely than the first


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, k: int, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row of ``logits``: ``tokens`` and the k best, as they are.

    Args:
        logits: [N, V] of any float type, each row contiguous; not changed.
        tokens: int64 [N].
        k: how many of the best; -1, and what is over the vocabulary, is all of it.
        mode: a ``logprobs_mode``; those of logits give logits in place of their log-softmax.

    Returns:
        ids int32 [N, k + 1], values float32 [N, k + 1] (NaN is given as -inf), ranks int32 [N].
    """
    vocab = logits.shape[1]
    source = Source(logits.float(), torch.arange(len(logits), device=logits.device))
    return _values(source, tokens, vocab if k < 0 else min(k, vocab), mode.endswith("logprobs"))


def grouped(
    source: Source, tokens: torch.Tensor, slots: np.ndarray, ks: np.ndarray, softmax: bool
) -> Iterator[LogprobGroup]:
    """Logprobs of ``source.slots`` by the k that each wants.

    ``tokens`` int64 [n] on the device, ``slots`` int64 [n] (how the slots are called in the answer) and ``ks`` [n] on
    the host; ``softmax``: log-probabilities, else logits.
    """
    device = tokens.device
    for part in _parts(np.unique(ks).tolist()):
        at = np.flatnonzero((ks >= part[0]) & (ks <= part[-1]))
        some, own = source, tokens
        if len(at) < len(ks):
            at_d = to_device(at, device)
            some, own = source._replace(slots=source.slots[at_d]), tokens[at_d]
        ids, values, ranks = _values(some, own, part[-1], softmax)
        for k in part:
            if len(part) == 1:
                yield LogprobGroup(slots[at], k, ids, values, ranks)
                continue
            these = np.flatnonzero(ks[at] == k)
            pick = to_device(these, device)
            yield LogprobGroup(slots[at][these], k, ids[pick, : k + 1], values[pick, : k + 1], ranks[pick])


def named(
    source: Source, tokens: torch.Tensor, slots: np.ndarray, ids: list[np.ndarray], softmax: bool
) -> Iterator[LogprobGroup]:
    """As ``grouped``, but of the ids (int64, one array for each slot) in place of the best, best first."""
    device = tokens.device
    for at, own in enumerate(ids):
        asked = torch.cat([tokens[at : at + 1], to_device(own, device)])
        part = source._replace(slots=source.slots[at : at + 1].expand(len(asked)).contiguous())
        found, values, ranks = _values(part, asked, 0, softmax)
        order = torch.cat([values.new_zeros(1).long(), 1 + values[1:, 0].argsort(descending=True, stable=True)])
        ids_of, values_of = found[order].view(1, -1), values[order].view(1, -1)
        yield LogprobGroup(slots[at : at + 1], len(own), ids_of, values_of, ranks[:1])


def _parts(ks: list[int]) -> Iterator[list[int]]:
    """Rising ks in lists that are selected together: none, few, and each of the larger ones."""
    yield from ([0] for k in ks if k == 0)
    few = [k for k in ks if 0 < k <= _TOGETHER]
    if few:
        yield few
    yield from ([k] for k in ks if k > _TOGETHER)


def _values(
    source: Source, tokens: torch.Tensor, k: int, softmax: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    native = None if tokens.is_cuda else _teller()
    if native is not None:
        return _values_natively(native, source, tokens, k, softmax)
    values, sums, ranks, best = (_look if tokens.is_cuda else _look_on_host)(source, tokens, k)
    ids, values = tokens.to(torch.int32)[:, None], values[:, None]
    if best is not None:
        ids, values = torch.cat([ids, best[0]], dim=1), torch.cat([values, best[1]], dim=1)
    if softmax:
        values = values - sums[:, None]
    return ids, torch.nan_to_num(values, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), ranks


@functools.cache
def _teller() -> Teller | None:
    """Native kernels for logits on the host, by as many threads as torch has; None where there are none."""
    found = library()
    return None if found is None else Teller(found, torch.get_num_threads())


def _values_natively(
    native: Teller, source: Source, tokens: torch.Tensor, k: int, softmax: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, slots, params, thresholds = source
    ids, values, ranks = native.tell(
        logits.numpy(), slots.numpy(), None if params is None else params.numpy(),
        None if thresholds is None else thresholds.numpy(), tokens.numpy(), k, softmax,
    )  # fmt: skip
    return torch.from_numpy(ids), torch.from_numpy(values), torch.from_numpy(ranks)


_Look = tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]


def _look(source: Source, tokens: torch.Tensor, k: int) -> _Look:
    """``kernels.stats`` and, with k, ``kernels.best``."""
    return *kernels.stats(source, tokens), kernels.best(source, k) if k and len(tokens) else None


def _look_on_host(source: Source, tokens: torch.Tensor, k: int) -> _Look:
    """The same by the twins: both of one row while it is in the cache, then the next row."""
    if not k or len(tokens) < 2:
        best = kernels.best_numpy(source, k) if k and len(tokens) else None
        return *kernels.stats_numpy(source, tokens), best
    ones = [source._replace(slots=source.slots[i : i + 1]) for i in range(len(tokens))]
    found = [(kernels.stats_numpy(one, tokens[i : i + 1]), kernels.best_numpy(one, k)) for i, one in enumerate(ones)]
    stats, best = zip(*found, strict=True)
    values, sums, ranks = map(torch.cat, zip(*stats, strict=True))
    ids, tops = map(torch.cat, zip(*best, strict=True))
    return values, sums, ranks, (ids, tops)
