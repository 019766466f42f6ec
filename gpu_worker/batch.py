"""StepBatch: what one forward pass reads, and the shape of the paged KV cache.

The cache of a layer is two tensors, keys and values, of *logical* shape [num_blocks, block_size, kv_heads, head_dim].
Their memory order is the device's business (``kv_cache.py``): code here uses strides, never ``view`` across them.
A token's slot is ``block * block_size + offset``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
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
    # Where the pass is recorded in pieces (``graphs.py``): called in place of attention, with it and its arguments.
    attend: Callable[..., torch.Tensor] | None = None
    types: torch.Tensor | None = None  # [T] int64, an encoder's token types; None: all are 0
    # The same as lists, for code that runs on the host; empty on a GPU.
    host_query_starts: list[int] = field(default_factory=list)
    host_context_lens: list[int] = field(default_factory=list)
    # int32 [R - num_decodes]: the rows behind the decodes, the longest contexts first, and the tokens of those before
    # each; None: who needs them works them out.
    order: torch.Tensor | None = None
    order_starts: torch.Tensor | None = None
    # What kernels have worked out from this step's shape, for its other layers; made by the first that does.
    plans: dict[Any, Any] | None = None


class StepShape(NamedTuple):
    """The sizes of a step that the host knows, from which kernels and their tiles are chosen."""

    rows: int
    decodes: int  # the first so many rows, of one token each
    tokens: int
    query_len: int  # tokens of the longest row
    context: int  # an upper bound of the keys that any row sees


Chooser = Callable[[StepShape], Iterable[Hashable]]
"""What some part of a model chooses for a step of a shape: a value for each kernel that is compiled on its own. Equal
layers have equal choosers. The launching code chooses by the same function, so that the warm-up finds all there is."""


def idle_batch(shape: StepShape, block_size: int, device: torch.device) -> StepBatch:
    """A batch of ``shape`` whose rows are all padding: every kernel runs, and none touches the cache."""
    left, lengths = shape.tokens - shape.decodes, [1] * shape.decodes
    while left > 0:
        lengths.append(min(left, shape.query_len))
        left -= lengths[-1]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    zeros = torch.zeros(shape.tokens, dtype=torch.int64, device=device)
    return StepBatch(
        token_ids=zeros,
        positions=zeros,
        slots=torch.full_like(zeros, -1),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.zeros(len(lengths), dtype=torch.int32, device=device),
        block_tables=torch.zeros((len(lengths), -(-shape.context // block_size)), dtype=torch.int32, device=device),
        num_decodes=shape.decodes,
        max_query_len=shape.query_len,
        max_context_len=shape.context,
        block_size=block_size,
        host_query_starts=starts,
    )


def longest_first(counts: np.ndarray, ends: np.ndarray, num_decodes: int) -> tuple[np.ndarray, np.ndarray]:
    """``order`` and ``order_starts`` of a step of rows of ``counts`` tokens whose contexts are ``ends`` long."""
    order = num_decodes + np.argsort(-ends[num_decodes:], kind="stable")
    lengths = counts[order]
    return order.astype(np.int32), (lengths.cumsum() - lengths).astype(np.int32)
