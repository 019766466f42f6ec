"""Caches of 8 bits on a CPU: what is written, to the bit, and attention over it, in every instruction set here."""

from __future__ import annotations

import types

import pytest
import tiny_models
import torch
from narrow_caches import DTYPES, extremes, rounded
from program_rig import ProgramRig
from support.cpu_kernels import VARIANTS, using
from support.paged_cases import batch_of, definition

from quire.gpu_worker.kernels import narrow
from quire.gpu_worker.kernels.attention import Scores
from quire.gpu_worker.kernels.cpu.attention import native_layout, paged_attention, write_cache
from quire.gpu_worker.kernels.narrow import FLOAT8
from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.layers import attention_cpu
from quire.gpu_worker.models.kv_scales import scales_to_read, set_scales
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config

CPU = torch.device("cpu")
LENS = [(1, 1), (1, 7), (1, 130), (1, 300), (5, 5), (3, 77), (40, 300), (33, 265)]
FEATURES = {
    "plain": {},
    "all": {"window": 270, "softcap": 2.0, "slopes": torch.linspace(-0.07, 0.13, 6), "sinks": torch.linspace(-3, 5, 6)},
}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest):
    with using(request.param):
        yield request.param


def cache_of(heads: int, blocks: int, size: int, dim: int, dtype: torch.dtype) -> KVCache:
    kv = KVCache(types.SimpleNamespace(kv_heads=(heads,), head_dim=dim), blocks, size, dtype, CPU)
    for cache in kv.k + kv.v:
        narrow.bits(cache).fill_(0x5A)
        if dtype == torch.int8:
            narrow.page_scales(cache).fill_(100.0)
    return kv


@each_dtype
def test_what_is_written_is_the_definition_to_the_bit(variant, dtype):
    x, scales = extremes(dtype), Scores(1.0, k_scale=0.3, v_scale=0.5)
    slots = torch.randperm(len(x) + 7)[: len(x)]
    native, twin = (cache_of(2, 30, 16, 24, dtype) for _ in range(2))
    assert native_layout(native.k[0], native.v[0])
    write_cache(native.k[0], native.v[0], x * 0.3, x, slots, scales)
    narrow.write(twin.k[0], x * 0.3, slots, 0.3)
    narrow.write(twin.v[0], x, slots, 0.5)
    for one, other in ((native.k[0], twin.k[0]), (native.v[0], twin.v[0])):
        assert torch.equal(narrow.bits(one), narrow.bits(other))
        if dtype == torch.int8:
            assert torch.equal(narrow.page_scales(one).nan_to_num(7e7), narrow.page_scales(other).nan_to_num(7e7))


@each_dtype
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("size", "dim"), [(16, 64), (8, 20), (32, 40)])
def test_attention_is_that_of_rounded_keys_and_values(variant, dtype, feature, size, dim):
    case = Case(dtype, size, dim)
    scores = Scores(0.2, **FEATURES[feature], **case.scales)
    wanted = case.wanted(scores)
    torch.testing.assert_close(case.attend(paged_attention, scores), wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(case.attend(attention_cpu.paged_attention, scores), wanted, rtol=2e-5, atol=2e-5)


@each_dtype
def test_a_row_has_the_same_bits_alone(variant, dtype):
    case = Case(dtype, 16, 64)
    scores = Scores(0.2, **case.scales)
    together, start = case.attend(paged_attention, scores), 0
    for row, (count, _) in enumerate(LENS):
        alone = batch_of([LENS[row]], [case.tables[row]], 16)
        got = paged_attention(case.q[start : start + count], case.kv.k[0], case.kv.v[0], alone, scores)
        assert torch.equal(got, together[start : start + count])
        start += count


class Case:
    """Rows of 6 heads and 2 key heads over a cache that held garbage."""

    def __init__(self, dtype: torch.dtype, size: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(dim)
        blocks = sum(-(-context // size) for _, context in LENS) + 3
        order = torch.randperm(blocks, generator=generator).tolist()
        self.kv = cache_of(2, blocks, size, dim, dtype)
        self.scales = {"k_scale": 0.013, "v_scale": 0.007} if dtype in FLOAT8 else {}
        self.tables, self.rows, slots = [], [], []
        for _, context in LENS:
            self.tables.append([order.pop() for _ in range(-(-context // size))])
            slots += [self.tables[-1][p // size] * size + p % size for p in range(context)]
            self.rows.append(tuple(torch.randn(context, 2, dim, generator=generator) for _ in "kv"))
        k, v = (torch.cat(x) for x in zip(*self.rows, strict=True))
        write_cache(self.kv.k[0], self.kv.v[0], k, v, torch.tensor(slots), Scores(1.0, **self.scales))
        by = [self.scales.get(name, 1.0) for name in ("k_scale", "v_scale")]
        self.rows = [tuple(rounded(x, dtype, scale) for x, scale in zip(row, by, strict=True)) for row in self.rows]
        self.batch = batch_of(LENS, self.tables, size)
        self.q = torch.randn(len(self.batch.positions), 6, dim, generator=generator)

    def attend(self, attention, scores: Scores) -> torch.Tensor:
        return attention(self.q, self.kv.k[0], self.kv.v[0], self.batch, scores)

    def wanted(self, scores: Scores) -> torch.Tensor:
        more = scores.window, scores.softcap, scores.slopes, scores.sinks
        return definition(self.q, LENS, self.rows, scores.scale, *more)


@each_dtype
def test_the_program_computes_the_same(dtype, tmp_path):
    folder = tiny_models.make("qwen2-window", tmp_path)
    scales = scales_to_read(dtype, True)
    model = load_model(load_model_config(str(folder), 256), torch.float32, CPU, kv_scales=scales)
    set_scales(model, dtype, True, scales, 256)
    rig = ProgramRig(model)
    prompts = tiny_models.random_prompts(3, seed=5, shortest=40, longest=70)
    for row, prompt in enumerate(prompts):
        rig.admit(row, prompt)
    work = [(row, 0, len(prompt) - 1) for row, prompt in enumerate(prompts)]
    torch.testing.assert_close(rig.every(work), rig.by_torch(work), rtol=1e-4, atol=1e-4)
    work = [(row, len(prompt) - 1, 1) for row, prompt in enumerate(prompts)]
    torch.testing.assert_close(rig.every(work), rig.by_torch(work), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "share"), [(FLOAT8[0], 1 / 2), (FLOAT8[1], 1 / 2), (torch.int8, 68 / 128)], ids=str)
def test_a_block_takes_half_the_bytes_and_is_copied_whole(dtype, share):
    spec = types.SimpleNamespace(kv_heads=(2, 2, 1), head_dim=64)
    assert KVCache.block_bytes(spec, 16, dtype) == share * KVCache.block_bytes(spec, 16, torch.bfloat16)
    kv = KVCache(spec, 5, 16, dtype, CPU)
    assert all(cache.dtype == dtype for cache in kv.k + kv.v)
    held = sum(pool.numel() * pool.itemsize for pool in kv._pools)
    assert held == 5 * KVCache.block_bytes(spec, 16, dtype)
    slots = torch.arange(48)
    for cache in kv.k + kv.v:
        narrow.write(cache, torch.randn(48, cache.shape[2], 64), slots, 0.01)
    before = [narrow.read(cache, torch.arange(5)) for cache in kv.k + kv.v]
    kv.copy_blocks(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 4], dtype=torch.int32))
    for cache, was in zip(kv.k + kv.v, before, strict=True):
        assert torch.equal(narrow.read(cache, torch.arange(5)), was[[0, 0, 2, 3, 1]])
