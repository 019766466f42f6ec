"""Blocks of a KV cache as bytes and back: every layout, dtype and shape of layers."""

from __future__ import annotations

import types

import pytest
import torch
from support.cpu_kernels import VARIANTS, using

from quire.gpu_worker.kernels.narrow import bits
from quire.gpu_worker.kv_cache import KVCache

CPU = torch.device("cpu")
SPECS = {
    "alike": types.SimpleNamespace(kv_heads=(2, 2, 2), head_dim=24),
    "of two shapes": types.SimpleNamespace(kv_heads=(1, 1, 4), head_dim=16),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def filled(spec, dtype: torch.dtype, seed: int, blocks: int = 6) -> KVCache:
    kv = KVCache(spec, blocks, 16, dtype, CPU)
    chance = torch.Generator().manual_seed(seed)
    for pool in kv._pools:
        raw = pool.view(torch.uint8)  # no NaN in any dtype, which would equal nothing
        raw.copy_(torch.randint(0, 120, raw.shape, generator=chance, dtype=torch.uint8))
    return kv


def same(one: KVCache, other: KVCache, block: int, others: int) -> bool:
    """All of a block, an int8 page's scales included."""
    return all(
        torch.equal(a[:, block].view(torch.uint8), b[:, others].view(torch.uint8))
        for a, b in zip(one._pools, other._pools, strict=True)
    )


@each_spec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_read_is_written_elsewhere(variant, dtype, spec):
    with using(variant):
        one, other, before = filled(spec, dtype, 0), filled(spec, dtype, 1), filled(spec, dtype, 1)
        pages = torch.empty((3, one.bytes_of_block), dtype=torch.uint8)
        one.read_blocks([5, 0, 2], pages)
        other.write_blocks([1, 4, 3], pages)
        assert [same(one, other, *pair) for pair in ((5, 1), (0, 4), (2, 3))] == [True] * 3
        assert [same(before, other, block, block) for block in (0, 2, 5)] == [True] * 3
        for layer in range(len(one.k)):  # as attention sees them
            assert torch.equal(bits(one.k[layer])[5], bits(other.k[layer])[1])
            assert torch.equal(bits(one.v[layer])[2], bits(other.v[layer])[3])


@each_spec
def test_the_bytes_of_a_block_are_all_that_it_takes(spec):
    kv = filled(spec, torch.int8, 0)
    assert kv.bytes_of_block * kv.num_blocks == sum(pool.numel() * pool.itemsize for pool in kv._pools)


@pytest.mark.parametrize(
    ("blocks", "shape", "dtype", "told"),
    [
        ([0], (1, 7), torch.uint8, r"pages of torch.uint8 \[1, 7\] where contiguous uint8 \[1, 2304\]"),
        ([0, 1], (1, 2304), torch.uint8, r"where contiguous uint8 \[2, 2304\]"),
        ([0], (1, 2304), torch.int8, "pages of torch.int8"),
        ([6], (1, 2304), torch.uint8, r"block 6 is not in \[0, 6\)"),
        ([-1], (1, 2304), torch.uint8, r"block -1 is not in \[0, 6\)"),
        ([3, 3], (2, 2304), torch.uint8, "one of them twice"),
    ],
)
def test_what_does_not_fit_changes_nothing(blocks, shape, dtype, told):
    spec = types.SimpleNamespace(kv_heads=(2, 1), head_dim=12)
    kv, before = (filled(spec, torch.bfloat16, 0) for _ in range(2))
    with pytest.raises(ValueError, match=told):
        kv.write_blocks(blocks, torch.zeros(shape, dtype=dtype))
    assert all(same(before, kv, block, block) for block in range(6))


def test_formats_differ_where_pages_do():
    spec, other = SPECS.values()
    formats = {
        KVCache.format_of(spec, 16, torch.float8_e4m3fn, CPU, [(1.0, 1.0)] * 3),
        KVCache.format_of(spec, 16, torch.float8_e4m3fn, CPU, [(1.0, 1.0), (1.0, 0.5), (1.0, 1.0)]),
        KVCache.format_of(spec, 16, torch.bfloat16, CPU),
        KVCache.format_of(spec, 32, torch.bfloat16, CPU),
        KVCache.format_of(other, 16, torch.bfloat16, CPU),
        KVCache.format_of(spec, 16, torch.int8, CPU),
    }
    assert len(formats) == 6
