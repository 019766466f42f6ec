"""The paged KV cache of one device: for each layer a tensor of keys and one of values.

Logical shape [num_blocks, block_size, kv_heads, head_dim]. On the CPU a head's pages lie together
([kv_heads, num_blocks, block_size, head_dim] in memory), so that gathering them is one contiguous copy; on a GPU
a block's heads do ([num_blocks, kv_heads, block_size, head_dim]). Where the CPU's native kernels are on, keys lie as
[kv_heads, num_blocks, head_dim, block_size], so that a vector register holds one dim of many keys. Memory starts as
zeros, so that what lies behind the end of a sequence is always a finite number; on a CPU pages are taken from the
system when they are first written.

A cache may be narrower than the model (``kernels/narrow.py``): fp8 of the same shape, or int8, whose pages end with
their scales, so that a block's copy has them too.
"""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import torch

from .kernels.cpu.attention import can_read
from .kernels.narrow import FLOAT8, page_bytes
from .spec import DecoderSpec

_ALIGNMENT = 64
"""Bytes: no vector of a page crosses a cache line."""


COPY_BYTES = 1 << 25
"""Most that a copy of blocks gathers at a time on a GPU, in memory that no profile has seen."""


class KVCache:
    """``k[layer]`` and ``v[layer]`` have the logical shape above, and are of ``dtype``."""

    def __init__(self, spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        self.num_blocks, self.block_size = num_blocks, block_size
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
