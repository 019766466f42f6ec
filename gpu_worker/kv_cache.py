"""The paged KV cache of one device: for each layer a tensor of keys and one of values.

Logical shape [num_blocks, block_size, kv_heads, head_dim]. On the CPU a head's pages lie together
([kv_heads, num_blocks, block_size, head_dim] in memory), so that gathering them is one contiguous copy; on a GPU
a block's heads do ([num_blocks, kv_heads, block_size, head_dim]). Where the CPU's native kernels are on, keys lie as
[kv_heads, num_blocks, head_dim, block_size], so that a vector register holds one dim of many keys. Memory starts as
zeros, so that what lies behind the end of a sequence is always a finite number; on a CPU pages are taken from the
system shortly before they are first written (``ahead.py``).

A cache may be narrower than the model (``kernels/narrow.py``): fp8 of the same shape, or int8, whose pages end with
their scales, so that a block's copy has them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch

from .ahead import Ahead
from .kernels.cpu.attention import can_read
from .kernels.narrow import FLOAT8, page_bytes
from .spec import DecoderSpec
from .transfer import to_device

_ALIGNMENT = 64
"""Bytes: no vector of a page crosses a cache line."""


COPY_BYTES = 1 << 25
"""Most that a copy of blocks gathers at a time on a GPU, in memory that no profile has seen."""


class KVCache:
    """``k[layer]`` and ``v[layer]`` have the logical shape above, and are of ``dtype``."""

    def __init__(self, spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.on_write: Callable[[Sequence[int]], None] | None = None
        """Told which blocks ``write_blocks`` gives other content; a drafting model has none of that in its own."""
        self.bytes_of_block = self.block_bytes(spec, block_size, dtype)
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        # Neighbouring layers of one shape share an allocation, [2 * layers, num_blocks, kv_heads, values of a page], so
        # that copying a block is one operation for all of them. Not every operation knows fp8: its pools are bytes.
        self._pools: list[torch.Tensor] = []
        dim = spec.head_dim
        held = torch.uint8 if dtype in FLOAT8 else dtype
        values_of_page, page = block_size * dim, page_bytes(block_size, dim, dtype) // dtype.itemsize
        for heads, group in groupby(spec.kv_heads):
            layers = len(list(group))
            if device.type == "cpu":
                pool = _lazy_zeros((2 * layers, heads, num_blocks, page), held).transpose(1, 2)
            else:
                pool = torch.zeros((2 * layers, num_blocks, heads, page), dtype=held, device=device)
            self._pools.append(pool)
            numbers = pool[..., :values_of_page].view(dtype)
            if device.type == "cpu" and can_read(dtype, dim):
                keys = numbers[:layers].unflatten(-1, (dim, block_size)).permute(0, 1, 4, 2, 3)
            else:
                keys = numbers[:layers].unflatten(-1, (block_size, dim)).permute(0, 1, 3, 2, 4)
            values = numbers[layers:].unflatten(-1, (block_size, dim)).permute(0, 1, 3, 2, 4)
            self.k += list(keys.unbind(0))
            self.v += list(values.unbind(0))
        self._ahead: Ahead | None = None
        if device.type == "cpu" and self._pools:  # an encoder keeps nothing
            ranges = [pool.transpose(1, 2).view(torch.uint8).flatten(0, 1) for pool in self._pools]
            self._ahead = Ahead(ranges)

    def reach(self, block: int) -> None:
        """No block past this one is written next: memory is provided so far, and a little further."""
        if self._ahead is not None:
            self._ahead.reach(block)

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy blocks ``src`` [N] over blocks ``dst`` [N] in every layer; all are read before any is written.

        On a GPU a few layers' keys or values at a time: what was read is COPY_BYTES at most, or one layer's where that
        is more. A plan copies one block of a row at most, so that one layer's are a few MiB.
        """
        for pool in self._pools:
            if pool.is_contiguous():
                page_bytes = pool.shape[2] * pool.shape[3] * pool.itemsize
                for part in pool.split(max(1, COPY_BYTES // max(1, len(src) * page_bytes))):
                    part[:, dst] = part[:, src]
            else:  # a CPU's, contiguous with the heads first: in that order a block's page is one copy
                by_head = pool.transpose(1, 2)
                by_head.index_copy_(2, dst.long(), by_head.index_select(2, src))

    # -- blocks as bytes, for what keeps them elsewhere

    def read_blocks(self, blocks: Sequence[int], into: torch.Tensor) -> None:
        """Copy blocks to the host: ``into`` is uint8 [N, bytes_of_block] there, contiguous, and row n becomes block
        ``blocks[n]``: of each pool [2 * layers, kv_heads, page], an int8 page with its scales.

        On a GPU the copy is only queued, on the current stream, so ``into`` should be pinned: it holds the bytes once
        that stream gets there. Raises ValueError for a block, a shape or a dtype that does not fit.
        """
        self._check_pages(blocks, into)
        if into.is_cuda or self._pools[0].is_cuda:
            for first in range(0, len(blocks), step := self._staged_blocks()):
                at = self._places(blocks[first : first + step])
                parts = [pool[:, at].transpose(0, 1).flatten(1) for pool in self._bytes_of_pools()]
                into[first : first + step].copy_(torch.cat(parts, 1), non_blocking=True)
            return
        for page, block in zip(self._by_pool(into), blocks, strict=True):
            for part, pool in zip(page, self._bytes_of_pools(), strict=True):
                np.copyto(part, pool.numpy()[:, block])

    def write_blocks(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        """The other way round: row n of ``data`` becomes block ``blocks[n]``, each named once. The same errors, before
        anything is written."""
        self._check_pages(blocks, data)
        if len(set(blocks)) < len(blocks):
            raise ValueError(f"blocks {list(blocks)[:8]} are written, one of them twice")
        if self.on_write is not None:
            self.on_write(blocks)
        if data.is_cuda or self._pools[0].is_cuda:
            for first in range(0, len(blocks), step := self._staged_blocks()):
                at, start = self._places(blocks[first : first + step]), 0
                staged = data[first : first + step].to(self._pools[0].device, non_blocking=True)
                for pool in self._bytes_of_pools():
                    shape = pool.shape[0], *pool.shape[2:]
                    part = staged[:, start : (start := start + math.prod(shape))]
                    pool[:, at] = part.unflatten(1, shape).transpose(0, 1)
            return
        for page, block in zip(self._by_pool(data), blocks, strict=True):
            for values, pool in zip(page, self._bytes_of_pools(), strict=True):
                np.copyto(pool.numpy()[:, block], values)

    def _check_pages(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        wanted = (len(blocks), self.bytes_of_block)
        if data.dtype != torch.uint8 or data.shape != wanted or not data.is_contiguous():
            raise ValueError(f"pages of {data.dtype} {list(data.shape)} where contiguous uint8 {list(wanted)} is due")
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            wrong = min(blocks) if min(blocks) < 0 else max(blocks)
            raise ValueError(f"block {wrong} is not in [0, {self.num_blocks})")

    def _staged_blocks(self) -> int:
        """Blocks that a GPU's copy gathers at a time."""
        return max(1, COPY_BYTES // max(1, self.bytes_of_block))

    def _places(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(blocks, np.int64), self._pools[0].device)

    def _bytes_of_pools(self) -> list[torch.Tensor]:
        """Uint8 [2 * layers, num_blocks, kv_heads, bytes of a page]."""
        return [pool.view(torch.uint8) for pool in self._pools]

    def _by_pool(self, data: torch.Tensor) -> list[list[np.ndarray]]:
        """Each row of ``data``, cut into views of the shapes that a block has in each pool."""
        rows = []
        for row in data.numpy():
            start, parts = 0, []
            for pool in self._bytes_of_pools():
                shape = pool.shape[0], *pool.shape[2:]
                parts.append(row[start : (start := start + math.prod(shape))].reshape(shape))
            rows.append(parts)
        return rows

    @staticmethod
    def format_of(
        spec: DecoderSpec, block_size: int, dtype: torch.dtype, device: torch.device,
        scales: Sequence[tuple[float, float]] = (),
    ) -> str:  # fmt: skip
        """What ``read_blocks`` gives, in words: pages of caches of equal formats may be exchanged. ``scales`` are those
        of an fp8 cache, which its numbers mean nothing without."""
        heads = ",".join(f"{len(list(same))}x{count}" for count, same in groupby(spec.kv_heads))
        keys = "transposed" if device.type == "cpu" and can_read(dtype, spec.head_dim) else "plain"
        told = " ".join(f"{k!r},{v!r}" for k, v in scales) if dtype in FLOAT8 else "none"
        return (
            f"{str(dtype).removeprefix('torch.')} block {block_size} heads {heads} dim {spec.head_dim} keys {keys} "
            f"scales {told}"
        )

    @staticmethod
    def block_bytes(spec: DecoderSpec, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers."""
        return 2 * sum(spec.kv_heads) * page_bytes(block_size, spec.head_dim, dtype)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the system provides on first touch (numpy asks it for cleared pages, torch would write them)."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
