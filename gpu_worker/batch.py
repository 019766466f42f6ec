"""StepBatch: what one forward pass reads, and the shape of the paged KV cache.

The cache of a layer is two tensors, keys and values, of *logical* shape [num_blocks, block_size, kv_heads, head_dim].
Their memory order is the device's business (``kv_cache.py``): code here uses strides, never ``view`` across them.
A token's slot is ``block * block_size + offset``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class StepBatch:
    """T tokens of R compute rows; the first ``num_decodes`` rows have one token each.

    Rows beyond the real ones (padding of a CUDA graph) have context length 0, and their tokens slot -1: nothing is
    read or written for them.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, where each token's key and value go
    query_starts: torch.Tensor  # [R + 1] int32, first token of each row; the last entry is T
    context_lens: torch.Tensor  # [R] int32, keys each row can see, this step's own included
    block_tables: torch.Tensor  # [R, W] int32, physical block of each logical block
    num_decodes: int
    max_query_len: int
    max_context_len: int
    block_size: int
    # [S] int64: tokens whose hidden states are wanted, so that the last layer computes no others; None: all.
    outputs: torch.Tensor | None = None
    types: torch.Tensor | None = None  # [T] int64, an encoder's token types; None: all are 0
    # The same as lists, for code that runs on the host; empty on a GPU.
    host_query_starts: list[int] = field(default_factory=list)
    host_context_lens: list[int] = field(default_factory=list)
