"""The paged KV cache of one device: for each layer a tensor of keys and one of values.

Logical shape [num_blocks, block_size, kv_heads, head_dim]. On the CPU a head's pages lie together
([kv_heads, num_blocks, block_size, head_dim] in memory), so that gathering them is one contiguous copy; on a GPU
a block's heads do ([num_blocks, kv_heads, block_size, head_dim]). Memory starts as zeros, so that what lies behind the
end of a sequence is always a finite number; on a CPU pages are taken from the system when they are first written.
"""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import torch

from .spec import DecoderSpec


class KVCache:
    """``k[layer]`` and ``v[layer]`` have the logical shape above."""

    def __init__(self, spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        # Neighbouring layers of one shape share an allocation, [2 * layers, blocks in their logical order, ...], so
        # that copying a block is one operation for all of them.
        self._pools: list[torch.Tensor] = []
        for heads, group in groupby(spec.kv_heads):
            layers = len(list(group))
            if device.type == "cpu":
                pool = _lazy_zeros((2 * layers, heads, num_blocks, block_size, spec.head_dim), dtype)
                pool = pool.permute(0, 2, 3, 1, 4)
            else:
                shape = (2 * layers, num_blocks, heads, block_size, spec.head_dim)
                pool = torch.zeros(shape, dtype=dtype, device=device).permute(0, 1, 3, 2, 4)
            self._pools.append(pool)
            self.k += list(pool[:layers].unbind(0))
            self.v += list(pool[layers:].unbind(0))

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy blocks ``src`` [N] over blocks ``dst`` [N] in every layer; all are read before any is written."""
        for pool in self._pools:
            pool[:, dst] = pool[:, src]  # index_select would make the whole permuted pool contiguous first

    @staticmethod
    def block_bytes(spec: DecoderSpec, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers."""
        return 2 * sum(spec.kv_heads) * block_size * spec.head_dim * dtype.itemsize


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the system provides on first touch (numpy asks it for cleared pages, torch would write them)."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
