"""Drawing tokens: the threshold (min_p, top_k, top_p) and the draw (argmax of scaled logits + Gumbel noise).

Everything works on *scaled logits* ``s = logits * (1 / temperature)`` in float32. All three filters keep the tokens
above some value, so together they are one number a row, the **threshold**: a token may be drawn if and only if
s >= threshold.

- min_p: s >= max(s) + log(min_p).
- top_k: s >= the k-th largest s (tokens tied with the k-th are kept).
- top_p, over what the two above left: a token is kept while the mass of the tokens strictly above it is less than
  top_p of the total (tokens tied at the edge are kept together).

``threshold.py`` has the threshold's way on a GPU; the twins below are what it is held to.

**Noise.** G = -log(-log1p(-v)), v = (x + 1/2) 2^-32, where x is the 32-bit word that Philox4x32-10 gives for
key = seed and counter = (position, token // 4, 0, 0), lane token % 4. A draw thus depends on (seed, position, logits)
alone. v is formed as (float32(x) + 0.5) * 2^-32: conversion, addition and product are each rounded to nearest, on every
device alike, and small v, from which every winner comes, is exact (x < 2^23). Near 1 it would round to 1 and the noise
to -infinity; v is held at 1 - 2^-24 there, so that the only token left is always drawable.
log1p(-v) is log(u) * v / (1 - u) with u = 1 - v, exact to a few units in the last place. Devices differ only in the
last bits of log and exp, which changes a draw when two tokens tie to about 1e-6.

Parameters of a row are one packed int32 row, ``[S, COLUMNS]`` (see ``columns``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch

from .columns import COLUMNS, INV_T, LOG_MIN_P, SEED_HIGH, SEED_LOW, TOP_K, TOP_P
from .threshold import threshold as threshold

MAX_NOISE = 22.9
"""No noise is larger: v >= 2^-33."""

DRAW_BLOCK = 2048

_MASK = 0xFFFFFFFF
_LOW, _HALF = np.uint64(_MASK), np.uint64(32)
_FACTORS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_BELOW_ONE = np.float32(1 - 2**-24)
_CHUNK = 8192  # Philox blocks at a time: the working set stays in the second-level cache
_FEW = 2048  # candidates of a row for which noise is computed token by token
_SLACK = 1e-3  # far over the rounding of a bound
_BUCKETS, _DEPTH = 4096, 32.0  # of the mass by depth below the maximum; deeper tokens share the last bucket
_COARSE = 64  # one logit in so many is looked at to guess where the k-th largest lies


def choices(rows: int) -> set[Hashable]:
    """What is chosen by the number of rows that draw: a value for each kernel that is compiled on its own. The warm-up
    asks for every number that may come."""
    return set()


def draw(
    logits: torch.Tensor, params: torch.Tensor, positions: torch.Tensor, thresholds: torch.Tensor | None
) -> torch.Tensor:
    """One token for each row, int64 [S]: the largest s + noise among s >= threshold; the largest logit in greedy rows.

    ``logits`` [S, V] of any float type, which is widened, with contiguous rows; ``params`` int32 [S, COLUMNS];
    ``positions`` int64 [S] of the tokens being drawn; ``thresholds`` float32 [S] or None. Ties go to the lowest id.
    """
    return _winners(logits, params, positions, thresholds, 0)[1]


def draw_part(
    logits: torch.Tensor, params: torch.Tensor, positions: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``draw`` among some of a vocabulary: ``logits`` are those of tokens ``first``, ``first`` + 1, ...

    What it compares, float32 [S], and the token, int64 [S], of each row: the largest of all parts, the lowest token of
    equals, is what ``draw`` gives for the whole.
    """
    best, tokens = _winners(logits, params, positions, None, first)
    values = best.gather(1, ((tokens + first % 4) // DRAW_BLOCK).unsqueeze(1)).squeeze(1)
    return values, tokens + first


def _winners(
    logits: torch.Tensor, params: torch.Tensor, positions: torch.Tensor, thresholds: torch.Tensor | None, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best value of each block of each row, float32 [S, blocks], and each row's winner among ``logits``."""
    from . import sampling_jit

    rows, vocab = logits.shape
    # Philox gives four tokens' words at a time; a part may begin within such four.
    skip = first % 4
    splits = -(-(vocab + skip) // DRAW_BLOCK)
    best = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sampling_jit.draw_kernel[(rows, splits)](
        logits, logits.stride(0), params, positions, best if thresholds is None else thresholds, best, ids,
        vocab, splits, first // 4, skip,
        HAS_THRESHOLD=thresholds is not None, COLUMNS=COLUMNS, BLOCK=DRAW_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    sampling_jit.reduce_kernel[(rows,)](
        best, ids, tokens, splits, vocab, SPLITS=max(16, 1 << (splits - 1).bit_length()), num_warps=1
    )
    return best, tokens


# ---------------------------------------------------------------- the twins, on the host
#
# numpy rather than torch: these are chains of small passes over one row, and numpy's are vectorised, run on one thread
# (a barrier between OpenMP threads costs more than a pass) and round alike whatever the batch.


def threshold_numpy(logits: torch.Tensor, params: torch.Tensor, min_p: bool, top_k: bool, top_p: bool) -> torch.Tensor:
    """The twin of ``threshold``; any device."""
    rows = _Rows(logits, params)
    out = np.full(len(logits), -np.inf, dtype=np.float32)

    for i in rows.random:
        scaled, floats, k = rows.scaled(i), rows.floats[i], int(rows.ints[i, TOP_K])
        top = scaled.max()
        if min_p and floats[LOG_MIN_P] > -np.inf:
            out[i] = top + floats[LOG_MIN_P]
        if top_k and 0 < k < len(scaled):
            out[i] = max(out[i], _kth_largest(scaled, k))
        if top_p and floats[TOP_P] < 1:
            out[i] = _nucleus(scaled, top, out[i], float(floats[TOP_P]))
    return torch.from_numpy(out).to(logits.device)


def draw_numpy(
    logits: torch.Tensor, params: torch.Tensor, positions: torch.Tensor, thresholds: torch.Tensor | None
) -> torch.Tensor:
    """The twin of ``draw``; any device."""
    rows = _Rows(logits, params)
    keys, places = rows.keys(), positions.cpu().numpy()
    out = _draw_rows(rows, keys, places, None if thresholds is None else thresholds.cpu().numpy(), 0)
    return torch.from_numpy(out.astype(np.int64, copy=False)).to(logits.device)


def draw_part_numpy(
    logits: torch.Tensor, params: torch.Tensor, positions: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of ``draw_part``; any device."""
    rows = _Rows(logits, params)
    keys, places = rows.keys(), positions.cpu().numpy()
    out = _draw_rows(rows, keys, places, None, first)
    values = np.take_along_axis(rows.values, out[:, None], 1)[:, 0]
    with np.errstate(invalid="ignore"):  # greedy rows of -infinity
        drawn = values * rows.floats[:, INV_T] + _noise_of(keys, places, out + first)
    values = np.where(rows.floats[:, INV_T] != 0, drawn, values)
    tokens = torch.from_numpy((out + first).astype(np.int64, copy=False))
    return torch.from_numpy(values).to(logits.device), tokens.to(logits.device)


def _draw_rows(
    rows: _Rows, keys: np.ndarray, places: np.ndarray, thresholds: np.ndarray | None, first: int
) -> np.ndarray:
    """The winner's place in each row of logits, which are of tokens ``first``, ...

    Noise is bounded and the most likely token's sum is a floor of the winner's, so tokens that cannot reach that floor
    get no noise computed.
    """
    out = rows.values.argmax(-1)
    lowest = np.full(len(out), -np.inf, dtype=np.float32) if thresholds is None else thresholds
    floors = _noise_of(keys, places, out + first)
    few: list[tuple[int, np.ndarray, np.ndarray]] = []
    every = _Every(rows.values.shape[1], first)
    for i in rows.random:
        scaled = rows.scaled(i)
        top = scaled[out[i]]
        if not np.isfinite(top):
            continue
        reach = max(lowest[i], top + floors[i] - MAX_NOISE)
        ids = np.flatnonzero(scaled >= reach)
        if len(ids) > max(len(scaled) // 8, _FEW):
            every.words_of(keys[i], int(places[i]))
            out[i] = every.winner(scaled, top, lowest[i])
        else:
            few.append((i, ids, scaled[ids]))
    _draw_among(few, keys, places, out, first)
    return out


def gumbel_torch(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The noise G of (seed, position, token), float32; int64 tensors of one shape, seeds as 64-bit patterns."""
    seed = seeds.cpu().numpy().astype(np.uint64)
    keys = np.stack([seed & _MASK, seed >> 32], axis=-1)
    return torch.from_numpy(_noise_of(keys, positions.cpu().numpy(), tokens.cpu().numpy())).to(seeds.device)


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, rounds: int = 10) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 of counter (c0, c1, c2, c3) and key (k0, k1): four 32-bit words.

    Each is a uint64 array or a Python int below 2^32. Ints stay ints as long as nothing mixes into them, so the first
    rounds, where most of the counter is one number, cost next to nothing.
    """
    for _ in range(rounds):
        p, q = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (q >> 32) ^ c1 ^ k0, q & _MASK, (p >> 32) ^ c3 ^ k1, p & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


class _Rows:
    """Logits and parameters as arrays of the host. ``random`` are the rows that are not greedy."""

    def __init__(self, logits: torch.Tensor, params: torch.Tensor):
        self.values, self.ints = logits.cpu().numpy(), params.cpu().contiguous().numpy()
        self.floats = self.ints.view(np.float32)
        self.random = np.flatnonzero(self.floats[:, INV_T]).tolist()
        self._scaled = np.empty(self.values.shape[1], np.float32)

    def keys(self) -> np.ndarray:
        """The rows' Philox keys, uint64 [S, 2]."""
        return self.ints[:, SEED_LOW : SEED_HIGH + 1].astype(np.uint64) & _MASK

    def scaled(self, i: int) -> np.ndarray:
        """Row i's logits / temperature, float32 [V], in memory that the next call uses again."""
        return np.multiply(self.values[i], self.floats[i, INV_T], out=self._scaled)


def _kth_largest(scaled: np.ndarray, k: int) -> np.float32:
    """The k-th largest value: among the tokens above a guess where that is enough of them, else among all."""
    above = _above_guess(scaled, k)
    pool = above if len(above) >= k else scaled
    return np.partition(pool, len(pool) - k)[len(pool) - k]


def _above_guess(scaled: np.ndarray, count: int) -> np.ndarray:
    """The values above a threshold that ``count`` of them probably pass, found from a sample of them."""
    sample = scaled[::_COARSE]
    rank = 2 * (count // _COARSE) + 8
    if rank >= len(sample):
        return scaled
    return scaled[scaled >= np.partition(sample, len(sample) - rank)[len(sample) - rank]]


def _nucleus(scaled: np.ndarray, top: np.float32, lowest: np.float32, top_p: float) -> np.float32:
    """The lowest value that top_p keeps among those >= ``lowest``. Sums are float64."""
    pool = scaled if lowest == -np.inf else scaled[scaled >= lowest]
    if not len(pool) or not np.isfinite(top):
        return lowest
    need = top_p * sum(float(np.exp(part - top).sum(dtype=np.float64)) for part in _parts(pool))
    head = _above_guess(pool, 256) if len(pool) > _FEW else pool
    edge = _first_at(head, top, 0.0, need)
    if edge is not None:
        return edge
    # Where many tokens share the mass, sorting them all would take long: a histogram of the mass by depth below the
    # top finds the bucket in which the target is reached. Equal values share a bucket, so the order is kept.
    deepest = float(top - pool.min())
    scale = np.float32(_BUCKETS / min(deepest, _DEPTH) if deepest > 1e-30 else 0)
    mass, buckets = np.zeros(_BUCKETS + 1), np.empty(len(pool), np.uint16)
    for part, into in zip(_parts(pool), _parts(buckets), strict=True):
        depths = top - part
        into[:] = np.minimum(depths * scale, _BUCKETS)
        mass += np.bincount(into, np.exp(-depths), _BUCKETS + 1)
    mass = mass.cumsum()
    at = min(int(np.searchsorted(mass, need)), _BUCKETS)
    inside = pool[buckets == at]
    edge = _first_at(inside, top, mass[at - 1] if at else 0.0, need)
    # Sums in another order may miss the target by a last bit.
    return edge if edge is not None else inside.min() if len(inside) else lowest


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Slices that stay in the second-level cache through a chain of passes."""
    return (array[start : start + _CHUNK] for start in range(0, len(array), _CHUNK))


def _first_at(pool: np.ndarray, top: np.float32, above: float, need: float) -> np.float32 | None:
    """The value of ``pool``, from the largest down, at which the mass (``above`` before it) reaches ``need``."""
    ordered = np.sort(pool)[::-1]
    mass = np.exp(ordered - top).cumsum(dtype=np.float64)
    mass += above
    # Those tied with the first that reaches the target lie at or above the same threshold.
    return ordered[int(np.searchsorted(mass, need))] if len(mass) and mass[-1] >= need else None


def _draw_among(
    few: list[tuple[int, np.ndarray, np.ndarray]], keys: np.ndarray, places: np.ndarray, out: np.ndarray, first: int
) -> None:
    """Draw for rows with few candidates (row, ids, scaled logits of ids), the noise of many rows in one pass."""
    while few:
        count = taken = 0
        while taken < len(few) and (count < 8 * _FEW or not taken):
            count += len(few[taken][1])
            taken += 1
        group, few = few[:taken], few[taken:]
        rows = np.repeat([i for i, _, _ in group], [len(ids) for _, ids, _ in group])
        noise = _noise_of(keys[rows], places[rows], first + np.concatenate([ids for _, ids, _ in group]))
        start = 0
        for i, ids, scaled in group:
            out[i] = ids[(scaled + noise[start : start + len(ids)]).argmax()]
            start += len(ids)


def _noise_of(keys: np.ndarray, places: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Noise of N (key [N, 2], position [N], token [N])."""
    counter = places.astype(np.uint64) & _MASK, tokens.astype(np.uint64) >> 2
    words = philox(*counter, 0, 0, keys[:, 0], keys[:, 1])
    return _noise(np.choose(tokens & 3, words).astype(np.float32))


class _Every:
    """Draws among all tokens of a row, in memory that serves one row after the other (fresh pages cost more)."""

    def __init__(self, vocab: int, first: int = 0):
        self._here = slice(first % 4, first % 4 + vocab)  # within the words of whole blocks
        self._blocks = np.arange(first // 4, -(-(first + vocab) // 4), dtype=np.uint64)
        self._x = np.empty((len(self._blocks), 4), dtype=np.float32)
        self._state = np.empty((3, 2, min(len(self._blocks), _CHUNK)), np.uint64)
        self._bounds = np.empty(vocab, np.float32)

    def words_of(self, key: np.ndarray, position: int) -> np.ndarray:
        """The 32-bit words of tokens ``first``, ... ``first`` + vocab - 1, rounded to float32.

        After three rounds of ``philox``, in which most is one number, (c0, c2) and (c1, c3) are one array each.
        """
        k0, k1 = int(key[0]), int(key[1])
        keys = np.array(
            [[[(k0 + r * 0x9E3779B9) & _MASK], [(k1 + r * 0xBB67AE85) & _MASK]] for r in range(3, 10)], np.uint64
        )
        for blocks, part in zip(_parts(self._blocks), _parts(self._x), strict=True):
            a, b, p = self._state[:, :, : len(blocks)]
            a[0], b[0], a[1], b[1] = philox(position & _MASK, blocks, 0, 0, k0, k1, 3)
            for k in keys:
                np.multiply(a, _FACTORS, out=p)
                np.right_shift(p[::-1], _HALF, out=a)
                a ^= b
                a ^= k
                np.bitwise_and(p[::-1], _LOW, out=b)
            part[:, 0], part[:, 1], part[:, 2], part[:, 3] = a[0], b[0], a[1], b[1]
        return self._x.reshape(-1)[self._here]

    def winner(self, scaled: np.ndarray, top: np.float32, lowest: np.float32) -> int:
        """The token with the largest sum among those >= ``lowest``, by the words made last.

        As -log1p(-v) >= v, no token's sum is over top + log(exp(s - top) / v). That bound is cheaper than the noise,
        which is computed for tokens of the highest bounds alone, unless some other might still win.
        """
        words = self._x.reshape(-1)[self._here]
        for s, x, bound in zip(_parts(scaled), _parts(words), _parts(self._bounds), strict=True):
            np.exp(s - top, out=bound)
            bound /= _uniform(x.copy())
        sample = self._bounds[::_COARSE]
        least = np.partition(sample, -8)[-8] if len(sample) > 8 else np.float32(0)
        ids = np.flatnonzero(self._bounds >= least)
        while True:
            sums = np.where(scaled[ids] >= lowest, scaled[ids] + _noise(words[ids]), np.float32(-np.inf))
            best = int(sums.argmax())
            if least == 0 or sums[best] > top + np.log(least) + _SLACK:
                return int(ids[best])
            ids, least = np.arange(len(scaled)), np.float32(0)


def _noise(x: np.ndarray) -> np.ndarray:
    """G of 32-bit words already rounded to float32; overwrites ``x``."""
    v = _uniform(x)
    u = 1 - v
    log = np.log(u)
    np.subtract(u, 1, out=u)
    # -log1p(-v) = log(u) * v / (u - 1) negated twice; where 1 - v rounds to 1 it is v itself.
    np.divide(v, u, out=u, where=u != 0)
    np.multiply(log, u, out=v, where=log != 0)
    np.log(v, out=v)
    return np.negative(v, out=v)


def _uniform(x: np.ndarray) -> np.ndarray:
    """v of 32-bit words already rounded to float32; overwrites ``x``."""
    x += np.float32(0.5)
    x *= np.float32(2**-32)
    return np.minimum(x, _BELOW_ONE, out=x)
