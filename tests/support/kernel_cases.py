"""Steps of attention for tests of the Triton kernels."""

import torch
from kernel_device import DEVICE

from quire.gpu_worker.batch import StepBatch

PLAIN = torch.float32 if DEVICE == "cpu" else torch.float16  # compiled, float32 takes long to compile; tested once
MIXED = [(1, 1), (1, 33), (1, 0), (1, 90), (5, 5), (17, 40), (2, 70)]
PREFILL = [(50, 50), (3, 3), (16, 64)]
DECODE = [(1, 17), (1, 0), (1, 130), (1, 1), (1, 16)]


def make(rows, heads=4, kv_heads=2, dim=32, page=16, dtype=PLAIN, order=(0, 2, 1, 3), seed=0, reach=None):
    """A step over ``rows`` of (query length, context length), decodes first; pages shuffled, unused memory NaN.

    ``reach`` is the longest context that the batch claims it may have.
    """
    generator = torch.Generator().manual_seed(seed)
    contexts = [c for _, c in rows]
    pages = [-(-c // page) for c in contexts]
    blocks = sum(pages) + 3
    shape = (blocks, page, kv_heads, dim)
    back = [order.index(i) for i in range(4)]
    k_cache, v_cache = (torch.full([shape[i] for i in order], float("nan")).permute(back) for _ in range(2))
    free = torch.randperm(blocks, generator=generator)
    table = torch.full((len(rows), max(max(pages), 1) + 2), 2**30, dtype=torch.int32)
    used = 0
    for row, context in enumerate(contexts):
        table[row, : pages[row]] = free[used : used + pages[row]]
        used += pages[row]
        for i in range(context):
            for cache in (k_cache, v_cache):
                cache[table[row, i // page], i % page] = torch.randn(kv_heads, dim, generator=generator)
    lengths = [n for n, _ in rows]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1])
    batch = StepBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        positions=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        slots=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        query_starts=starts.to(DEVICE),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        block_tables=table.to(DEVICE),
        num_decodes=next((i for i, n in enumerate(lengths) if n > 1), len(rows)),
        max_query_len=max(lengths),
        max_context_len=reach or max(contexts),
        block_size=page,
    )
    q = torch.randn(tokens, heads, dim, generator=generator).to(DEVICE, dtype)
    return q, k_cache.to(DEVICE, dtype), v_cache.to(DEVICE, dtype), batch
