"""The shapes of attention's launches on a card: tiles, warps, stages, and into how many splits keys are shared out.

All follows from sizes that the host knows. ``launches`` is the one place that chooses; the warm-up asks it, by way of
``LayerShape``, for every shape that a step may have.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..batch import StepShape
from .attention_flash import flash_in_use, flash_variant
from .card import Card, card_of
from .company import batch_invariant

MAX_SPLITS = 64
MIN_KEYS_PER_SPLIT = 128
INVARIANT_ROWS = 64
"""Rows of the one tile that everything goes through where a row's bits must not depend on its company: Hopper's widest
instructions take so many, and for one decode its products still take less time than its keys do to arrive."""
NARROW_ROWS = 64
"""Most rows of a tile over an fp8 cache: with 128 of 128 dims its kernels spill."""
_JOIN_KEYS = 128
"""What a second kernel that joins the splits costs, as keys that a program would read meanwhile. An estimate: a launch
inside a graph takes 1-2 us, and a program reads 128 keys of 128 dims (64 KiB) in about that time."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of one launch: rows and keys of a tile, warps and pipeline stages."""

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Variant:
    """What one launch of attention is compiled for, beside what the model says."""

    decode: bool  # for rows of one token
    tiles: Tiles
    split: bool = False  # keys are shared out among programs


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What of a layer tiles are chosen by."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    narrow: bool = False  # the cache is fp8

    def __call__(self, shape: StepShape) -> set[Hashable]:
        """As a ``batch.Chooser``: what each launch is compiled for, a library's too where one is in use."""
        chosen: set[Hashable] = {variant for variant, _ in launches(self, shape)}
        if flash_in_use() is not None and shape.decodes < shape.rows:
            chosen.add(flash_variant(shape.query_len, self.heads // self.kv_heads))
        return chosen


def launches(layer: LayerShape, shape: StepShape) -> list[tuple[Variant, int]]:
    """Each launch in a step of ``shape``, and its number of splits: decodes and the other rows apart, or all at once if
    batch-invariant."""
    group, card = layer.heads // layer.kv_heads, card_of(layer.device)
    sizes = layer.head_dim, layer.dtype, group
    if batch_invariant():
        return [(Variant(False, invariant_tiles(*sizes, card, layer.narrow)), 1)]
    made = []
    if shape.decodes:
        tiles = decode_tiles(*sizes, card, layer.narrow)
        context = shape.context if layer.window is None else min(shape.context, layer.window)
        heads, kind = shape.decodes * layer.kv_heads, (layer.head_dim, layer.dtype, tiles, card, layer.narrow)
        splits = choose_splits(heads, context, *kind)
        made.append((Variant(True, tiles, splits > 1), splits))
    if shape.decodes < shape.rows:
        made.append((Variant(False, prefill_tiles(*sizes, shape.query_len, card, layer.narrow)), 1))
    return made


def decode_tiles(head_dim: int, dtype: torch.dtype, group: int, card: Card, narrow: bool = False) -> Tiles:
    """Tiles for rows of one token, over an fp8 cache if ``narrow``; ``group`` query heads share a key head.

    Block numbers come one stage before the keys they point at, so three stages have one tile of keys under way while
    another is used. Keys of 128 dims that are widened in registers take 181 of them on a Hopper if there are 64, and
    128 if there are 32, so that a processor holds four programs instead of two.
    """
    keys = 32 if narrow and power(head_dim) > 64 else _keys(dtype, card)
    return _fit(Tiles(max(16, power(group)), keys, 4, _stages(card)), head_dim, dtype, card, narrow)


def prefill_tiles(
    head_dim: int, dtype: torch.dtype, group: int, max_query_len: int, card: Card, narrow: bool = False
) -> Tiles:
    """Tiles for rows of up to ``max_query_len`` tokens, over an fp8 cache if ``narrow``."""
    rows = power(max_query_len * group)
    return _wide_tiles(head_dim, dtype, group, min(rows, NARROW_ROWS) if narrow else rows, card, narrow)


def invariant_tiles(head_dim: int, dtype: torch.dtype, group: int, card: Card, narrow: bool = False) -> Tiles:
    """The tiles of every row in every step, where bits must not depend on the step."""
    return _wide_tiles(head_dim, dtype, group, INVARIANT_ROWS, card, narrow)


@lru_cache(maxsize=1 << 16)
def choose_splits(
    heads_in_batch: int,
    context: int,
    head_dim: int,
    dtype: torch.dtype,
    tiles: Tiles,
    card: Card,
    narrow: bool = False,
) -> int:
    """Into how many parts the keys of rows of one token are shared out; ``heads_in_batch`` is rows x key heads.

    A card runs ``resident`` programs of this kind on each processor at a time, and starts the rest in waves after
    them. What counts is the waves, times the keys that the longest program reads: the fewest splits are taken that come
    within a tenth of the best. ``context`` is an upper bound of the keys that any row sees.
    """
    slots = card.processors * resident(head_dim, dtype, tiles, card, narrow)
    most = min(MAX_SPLITS, max(1, context // MIN_KEYS_PER_SPLIT))
    key_tiles, costs = -(-context // tiles.block_n), []
    for count in range(1, most + 1):
        waves, share = -(-heads_in_batch * count // slots), -(-key_tiles // count)
        costs.append(waves * share * tiles.block_n + (_JOIN_KEYS if count > 1 else 0))
    return next(count for count, cost in enumerate(costs, 1) if cost <= 1.1 * min(costs))


def _keys(dtype: torch.dtype, card: Card) -> int:
    """Keys of a tile. AMD's compiler keeps addresses and masks of a tile in vector registers, and spills with 64."""
    return 64 if dtype.itemsize == 2 and card.backend != "hip" else 32


def _stages(card: Card) -> int:
    return 2 if card.backend == "hip" else 3


def _wide_tiles(head_dim: int, dtype: torch.dtype, group: int, rows: int, card: Card, narrow: bool) -> Tiles:
    # The accumulator lives in registers: 128 rows of 128 values over 8 warps. float32 products need three passes and
    # more registers still.
    padded, half = power(head_dim), dtype.itemsize == 2
    wide, keys = max(128, padded), _keys(dtype, card)
    block_m = max(16, power(group), min((128 if half else 32) * 128 // wide, rows))
    if half and asynchronous(card) and block_m >= 64:
        if narrow and padded > 128:  # 64 keys that are widened beside 64 rows of 256 dims spill
            keys //= 2
        warps = 8 if block_m * wide >= 128 * 128 else 4
        return _fit(Tiles(block_m, keys, warps, 3), head_dim, dtype, card, narrow)
    # Other products take their operands from registers: with 64 keys the widest accumulator spills, half as wide a one
    # too if keys are widened (with Triton 3.4), and so does fetching block numbers a stage ahead.
    if block_m * padded >= (64 if narrow else 128) * 128 and (card.backend != "hip" or padded > 128):
        keys //= 2
    warps = 4 if half and block_m * wide < 64 * 128 else 8
    return _fit(Tiles(block_m, keys, warps, 2), head_dim, dtype, card, narrow)


def asynchronous(card: Card) -> bool:
    """Whether products of wide tiles read both operands from shared memory and run beside other instructions."""
    return card.backend == "cuda" and int(card.arch) // 10 in (9, 10, 11)


def shared_bytes(head_dim: int, dtype: torch.dtype, tiles: Tiles, card: Card, narrow: bool = False) -> int:
    """An upper bound of the shared memory that the compiled kernel takes, and close to it.

    Queries, one tile of keys and one of values, the probabilities on their way from one product to the other, and
    block numbers of this tile and the next. Asynchronous products need a second tile of each. Read off the compiled
    kernels, which a test does again: the bound holds for any number of stages, as keys wait for their block numbers
    and are never fetched more than one tile ahead. Keys of an fp8 cache (``narrow``) lie there as they are stored, and
    for asynchronous products once more in the queries' type.
    """
    row = max(16, power(head_dim)) * dtype.itemsize
    queries, wide, weights = tiles.block_m * row, tiles.block_n * row, tiles.block_m * tiles.block_n * dtype.itemsize
    keys = wide // 2 if narrow and dtype.itemsize == 2 else wide
    if card.backend == "hip":  # queries are in registers by the time that keys come
        return max(queries, 2 * keys + (weights if dtype.itemsize > 2 or tiles.block_m >= 64 else 0))
    parts = 1 if dtype.itemsize == 2 else 2  # float32 is multiplied as two parts, of the left operand both kept
    synchronous = parts * (queries + weights) + 2 * keys + 8 * tiles.block_n
    if asynchronous(card) and tiles.block_m >= 64:
        held = weights + 512 if int(card.arch) >= 100 else 0  # by barriers, and by old compilers probabilities too
        return max(synchronous, queries + (3 if narrow else 4) * wide + held + 8 * tiles.block_n + 16 * tiles.block_m)
    return synchronous


def resident(head_dim: int, dtype: torch.dtype, tiles: Tiles, card: Card, narrow: bool = False) -> int:
    """About how many programs of decodes run on one processor at a time: what its registers and shared memory hold."""
    # Of a thread, as compiled without splits: 64 dims take 64-79 registers, 128 dims 111-154, 256 dims 168-227; over
    # an fp8 cache 64 dims 96, 128 dims 128-167, 256 dims 168.
    registers = min(217, max(96 if narrow else 72, int(power(head_dim) * 1.17)))
    if card.backend == "hip":  # of 512 in each lane of four units, which a program's four wavefronts go round
        by_registers = 512 // registers
    else:
        by_registers = 65536 // (-(-registers // 8) * 8 * 32 * tiles.warps)
    kept = 0 if card.backend == "hip" else 1024  # by the driver, of each program's shared memory
    shared = shared_bytes(head_dim, dtype, tiles, card, narrow) + kept
    return max(1, min(by_registers, card.shared_processor // shared))


def _fit(tiles: Tiles, head_dim: int, dtype: torch.dtype, card: Card, narrow: bool) -> Tiles:
    """Fewer keys a tile, then fewer rows, until a program's shared memory is what the card has."""
    while shared_bytes(head_dim, dtype, tiles, card, narrow) > card.shared:
        if tiles.block_n > 16:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        elif tiles.block_m > 16:
            tiles = replace(tiles, block_m=tiles.block_m // 2)
        else:
            break
    return tiles


def power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
