"""The Triton kernels over fp8 caches against their twins. Compiled on a GPU, else interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DECODE, MIXED, make
from kernel_device import DEVICE
from narrow_caches import extremes

pytest.importorskip("triton")

from quire.gpu_worker.kernels import attention, narrow
from quire.gpu_worker.kernels.attention import Scores
from quire.gpu_worker.kernels.company import set_batch_invariant
from quire.gpu_worker.kernels.narrow import FLOAT8
from quire.gpu_worker.kernels.rope import rope_write, rope_write_torch

each_dtype = pytest.mark.parametrize("dtype", FLOAT8, ids=str)


def zeros(blocks: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    cache = torch.full((blocks, heads, 16, dim), 0x5A, dtype=torch.uint8, device=DEVICE).transpose(1, 2)
    return cache.view(dtype)


@each_dtype
@pytest.mark.parametrize("rotary", [None, False, True], ids=["no rope", "halves", "pairs"])
def test_what_is_written_is_the_definition_to_the_bit(dtype, rotary):
    x = extremes(dtype).to(DEVICE)
    tokens, (kernel, twin) = len(x), ([zeros(30, 2, 24, dtype) for _ in "kv"] for _ in range(2))
    slots = torch.randperm(tokens + 7, generator=torch.Generator().manual_seed(0))[:tokens].to(DEVICE)
    slots[3] = -1
    tables = None, None
    if rotary is not None:
        angles = torch.arange(tokens)[:, None] * torch.tensor([0.0, 0.3, 0.01])
        tables = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    places = torch.arange(tokens, device=DEVICE)
    for caches, write in ((kernel, rope_write), (twin, rope_write_torch)):
        q = torch.zeros(tokens, 4, 24, device=DEVICE)
        write(q, x * 0.3, x, *tables, places, slots, *caches, bool(rotary), 0.3, 0.5)
    for one, other in zip(kernel, twin, strict=True):
        codes, wanted = narrow.bits(one), narrow.bits(other)
        # The bits of a NaN's sign are nobody's; products of it differ in them.
        nan = other.float().isnan()
        assert torch.equal(one.float().isnan(), nan) and torch.equal(codes[~nan], wanted[~nan])


@each_dtype
@pytest.mark.parametrize("rows", [MIXED, DECODE, [(1, 1000), (1, 900)]], ids=["mixed", "decode", "splits"])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "window": 20}], ids=["plain", "softcap and window"])
def test_attention_is_the_twins(dtype, rows, options):
    q, k_cache, v_cache, batch = make(rows, heads=6, kv_heads=2, dim=40)
    k_cache, v_cache = (narrow.encode(x, dtype, scale) for x, scale in ((k_cache, 0.013), (v_cache, 0.007)))
    scores = Scores(0.2, k_scale=0.013, v_scale=0.007, **options)
    got = attention.paged_attention(q, k_cache, v_cache, batch, scores)
    wanted = attention.paged_attention_torch(q, k_cache, v_cache, batch, scores)
    tolerance = 2e-5 if q.dtype == torch.float32 else 3e-3
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@each_dtype
def test_every_number_is_read_as_what_it_is(dtype):
    """One key of weight 1 for each of 256 values, NaN among them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    k_cache, v_cache = zeros(16, 1, 16, dtype), zeros(16, 1, 16, dtype)
    narrow.bits(k_cache).zero_()
    narrow.bits(v_cache)[:, 0] = numbers.to(DEVICE)
    *_, batch = make([(1, 1)] * 16, heads=1, kv_heads=1, dim=16)
    batch.block_tables[:, 0] = torch.arange(16)
    q = torch.ones(16, 1, 16, device=DEVICE)
    got = attention.paged_attention(q, k_cache, v_cache, batch, Scores(1.0, v_scale=0.5))
    wanted = numbers.view(dtype).float().to(DEVICE) * 0.5
    finite = wanted.isfinite()
    assert torch.equal(got[finite], wanted[finite])
    assert torch.equal(got[wanted.isnan()].isnan(), torch.ones_like(got[wanted.isnan()], dtype=torch.bool))


def test_batch_invariant_attention_reads_them_too():
    q, k_cache, v_cache, batch = make(MIXED)
    caches = [narrow.encode(x, FLOAT8[0], 0.01) for x in (k_cache, v_cache)]
    scores = Scores(0.2, k_scale=0.01, v_scale=0.01)
    wanted = attention.paged_attention_torch(q, *caches, batch, scores)
    set_batch_invariant(True)
    try:
        got = attention.paged_attention(q, *caches, batch, scores)
    finally:
        set_batch_invariant(False)
    tolerance = 2e-5 if q.dtype == torch.float32 else 3e-3
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
