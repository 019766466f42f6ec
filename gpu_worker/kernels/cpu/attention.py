"""Paged attention in C for layers that run outside a program: the same calls as ``layers/attention_cpu.py``'s.

It takes caches in the native layout (``kv_cache.py``): a head's keys as [num_blocks, head_dim, block_size], its values
as [num_blocks, block_size, head_dim], float32, bfloat16, or of 8 bits (``kernels/narrow.py``).
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch

from ...batch import StepBatch
from ..attention import Scores
from ..narrow import page_bytes
from .library import BF16, F32, Library, library

TILE = 16
"""kernels.h's Q_TILE, the most tokens of a tile."""
MAX_HEAD_DIM = 512
"""kernels.h's Q_HEAD_DIM."""

_TYPES = {torch.float32: F32, torch.bfloat16: BF16}
_CACHES = {**_TYPES, torch.float8_e4m3fn: 16, torch.float8_e5m2: 17, torch.int8: 18}
"""kernels.h's types of a cache."""


_PLAIN = Scores(1.0)


class Layer(ctypes.Structure):
    """kernels.h's q_attention."""

    _fields_ = (
        ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("block_size", c_int32),
        ("window", c_int32), ("cache_type", c_int32), ("scale", c_float), ("softcap", c_float),
        ("k_scale", c_float), ("v_scale", c_float),
        ("slopes", c_void_p), ("sinks", c_void_p), ("keys", c_void_p), ("values", c_void_p), ("head_stride", c_int64),
    )  # fmt: skip


class Tile(ctypes.Structure):
    """kernels.h's q_tile."""

    _fields_ = (("token", c_int32), ("count", c_int32), ("position", c_int32), ("row", c_int32))


class Batch(ctypes.Structure):
    """kernels.h's q_batch."""

    _fields_ = (
        ("tokens", c_int32), ("num_tiles", c_int32), ("ids", c_void_p), ("positions", c_void_p), ("slots", c_void_p),
        ("tables", c_void_p), ("table_stride", c_int64), ("tiles", c_void_p), ("splits", c_void_p),
    )  # fmt: skip


class Plan:
    """The tiles of one step, for every layer of it. Rows with context length 0 have none: their result is 0."""

    def __init__(self, batch: StepBatch) -> None:
        starts = np.asarray(batch.host_query_starts or batch.query_starts.tolist())
        contexts = np.asarray(batch.host_context_lens or batch.context_lens.tolist())
        self._tiles = tiles_of(starts, contexts)
        self._tables = batch.block_tables
        if self._tables.dtype != torch.int32 or self._tables.stride(-1) != 1:
            self._tables = self._tables.to(torch.int32).contiguous()
        self.complete = bool((contexts > 0).all())
        self.batch = Batch(
            tokens=int(starts[-1]), num_tiles=len(self._tiles), tables=self._tables.data_ptr(),
            table_stride=self._tables.stride(0), tiles=self._tiles.ctypes.data,
        )  # fmt: skip


def tiles_of(starts: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """Tiles [N, 4] int32 (q_tile: token, count, position, row) of rows with first tokens [R + 1] and contexts [R]."""
    counts = np.where(contexts > 0, np.diff(starts), 0)
    per_row = -(-counts // TILE)
    row = np.repeat(np.arange(len(counts)), per_row)
    begin = (np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * TILE
    tiles = np.empty((len(row), 4), np.int32)
    tiles[:, 0] = starts[:-1][row] + begin
    tiles[:, 1] = np.minimum(counts[row] - begin, TILE)
    tiles[:, 2] = (contexts - counts)[row] + begin
    tiles[:, 3] = row
    return tiles


def can_read(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels are on, and there are some for caches of this type and heads of this size."""
    return dtype in _CACHES and head_dim <= MAX_HEAD_DIM and _library() is not None


def native_layout(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the kernels are on, and read these caches [num_blocks, block_size, kv_heads, head_dim]."""
    blocks, size, heads, dim = k_cache.shape
    page = page_bytes(size, dim, k_cache.dtype) // k_cache.element_size()
    # torch makes what it likes of the stride of a single head, which nothing reads.
    head = blocks * page if heads > 1 else k_cache.stride(2)
    return (
        k_cache.device.type == "cpu"
        and can_read(k_cache.dtype, dim)
        and k_cache.stride() == (page, 1, head, size)
        and v_cache.stride()[:2] == (page, dim)
        and v_cache.stride()[3] == 1
        and (heads == 1 or v_cache.stride(2) == head)
    )


def layer_of(heads: int, k_cache: torch.Tensor, v_cache: torch.Tensor, scores: Scores) -> Layer:
    """One layer for the kernels. The caller keeps the caches and the tensors of ``scores`` alive."""
    _, size, kv_heads, dim = k_cache.shape
    return Layer(
        heads=heads, kv_heads=kv_heads, head_dim=dim, block_size=size, window=scores.window or 0,
        cache_type=_CACHES[k_cache.dtype], scale=scores.scale, softcap=scores.softcap,
        k_scale=scores.k_scale, v_scale=scores.v_scale,
        slopes=_floats(scores.slopes), sinks=_floats(scores.sinks), keys=k_cache.data_ptr(),
        values=v_cache.data_ptr(), head_stride=k_cache.stride(2) * k_cache.element_size(),
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: StepBatch,
    scores: Scores,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, head_dim] over each row's own pages -> [T, heads, head_dim].

    ``plan`` saves planning again for each layer. Raises MemoryError.
    """
    kernels = _loaded()
    plan = plan or Plan(batch)
    tokens, heads, dim = q.shape
    made = torch.empty if plan.complete else torch.zeros
    out = made((tokens, heads, dim), dtype=q.dtype if q.dtype in _TYPES else torch.float32)
    q = _rows(q)
    layer = layer_of(heads, k_cache, v_cache, scores)
    failed = kernels.c.q_attention_run(
        kernels.team(torch.get_num_threads()), ctypes.byref(layer), ctypes.byref(plan.batch), q.data_ptr(),
        q.stride(0) * 4, out.data_ptr(), out.stride(0) * out.element_size(), _TYPES[out.dtype],
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for the partial results of attention")
    return out


def write_cache(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor,
    scores: Scores = _PLAIN,
) -> None:  # fmt: skip
    """Write k and v [T, kv_heads, head_dim] to ``slots`` [T] int64; those of slot -1 go nowhere. ``scores`` has the
    scales of an fp8 cache."""
    kernels = _loaded()
    k, v = _rows(k), _rows(v)
    layer = layer_of(k_cache.shape[2], k_cache, v_cache, scores)
    kernels.c.q_write_run(
        kernels.team(torch.get_num_threads()), ctypes.byref(layer), len(k), slots.data_ptr(), k.data_ptr(),
        k.stride(0) * 4, v.data_ptr(), v.stride(0) * 4,
    )  # fmt: skip


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] in float32, the heads of a token one after another; without a copy where it is so."""
    x = x.float()
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _floats(x: torch.Tensor | None) -> int | None:
    if x is None:
        return None
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise TypeError(f"slopes and sinks must be contiguous float32, got {x.dtype}")
    return x.data_ptr()


def _loaded() -> Library:
    found = _library()
    if found is None:
        raise RuntimeError("the native CPU kernels are off; unset QUIRE_CPU_KERNELS")
    return found


_checked: list[Library | None] = []


def _library() -> Library | None:
    """The library, with the types of its functions set, and the size of each struct compared with C's, once."""
    if not _checked:
        found = library()
        if found is not None:
            for place, kind in enumerate((Layer, Tile, Batch)):
                size = found.c.q_attention_size(place)
                if size != ctypes.sizeof(kind):
                    raise RuntimeError(
                        f"{kind.__name__} has {ctypes.sizeof(kind)} bytes, {size} in C; compile the kernels again "
                        "(python gpu_worker/kernels/cpu/build.py)."
                    )
            found.c.q_attention_run.argtypes = (
                c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int32
            )  # fmt: skip
            found.c.q_write_run.argtypes = (
                c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int64
            )  # fmt: skip
            found.c.q_write_run.restype = None
        _checked.append(found)
    return _checked[0]
