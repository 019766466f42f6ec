"""The CPU's paged attention in C, in every instruction set of this machine, against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cpu_kernels import VARIANTS, using
from support.paged_cases import batch_of, definition, native_cache

from quire.gpu_worker.kernels.attention import Scores
from quire.gpu_worker.kernels.cpu.attention import native_layout, paged_attention, tiles_of, write_cache

MIXED = [(1, 1), (1, 7), (1, 130), (1, 256), (1, 300), (5, 5), (3, 77), (40, 300), (17, 17), (33, 265)]
FEATURES = {
    "plain": {},
    "window": {"window": 20},
    "softcap": {"softcap": 2.0},
    "ALiBi": {"slopes": 0.1},
    "sinks": {"sinks": 4.0},
    "all": {"window": 270, "softcap": 2.0, "slopes": 0.1, "sinks": 4.0},
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest):
    with using(request.param):
        yield request.param


def scores_of(heads: int, feature: dict[str, float]) -> Scores:
    """Slopes and sinks of a feature are a number for each head, of either sign."""
    heads_of = {
        name: torch.linspace(-0.7, 1.3, heads) * feature[name] for name in ("slopes", "sinks") if name in feature
    }
    return Scores(0.3, feature.get("window"), feature.get("softcap", 0.0), **heads_of)


class Case:
    """Rows of (query length, context length) with random keys and values, written to a cache that held garbage."""

    def __init__(self, lens, heads: int, kv_heads: int, dim: int, size: int = 16, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(len(lens) + dim)
        self.lens, self.size = lens, size
        tables, slots, blocks = [], [], sum(-(-context // size) for _, context in lens) + 3
        order = torch.randperm(blocks, generator=generator).tolist()
        self.k_cache, self.v_cache = native_cache(kv_heads, blocks, size, dim, 1e4, dtype)
        self.rows = []
        for _, context in lens:
            tables.append([order.pop() for _ in range(-(-context // size))])
            slots += [tables[-1][p // size] * size + p % size for p in range(context)]
            shape = (context, kv_heads, dim)
            self.rows.append(tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)))
        self.tables, self.batch = tables, batch_of(lens, tables, size)
        k, v = (torch.cat(x) for x in zip(*self.rows, strict=True))
        write_cache(self.k_cache, self.v_cache, k, v, torch.tensor(slots))
        self.q = torch.randn(len(self.batch.positions), heads, dim, generator=generator)

    def attend(self, scores: Scores) -> torch.Tensor:
        return paged_attention(self.q, self.k_cache, self.v_cache, self.batch, scores)

    def wanted(self, scores: Scores) -> torch.Tensor:
        more = scores.window, scores.softcap, scores.slopes, scores.sinks
        return definition(self.q, self.lens, self.rows, scores.scale, *more)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_definition(variant: str, feature: str, dtype: torch.dtype) -> None:
    case, scores = Case(MIXED, 6, 2, 32, dtype=dtype), scores_of(6, FEATURES[feature])
    torch.testing.assert_close(case.attend(scores), case.wanted(scores), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [8, 16, 32])
@pytest.mark.parametrize("dim", [4, 12, 20, 32, 64, 72, 80, 96, 128, 256])
def test_head_dims_and_block_sizes(variant: str, dim: int, size: int) -> None:
    case, scores = Case([(1, 19), (1, 270), (20, 50)], 4, 2, dim, size), Scores(dim**-0.5)
    torch.testing.assert_close(case.attend(scores), case.wanted(scores), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 71])
def test_groups(variant: str, group: int) -> None:
    case, scores = Case([(1, 90), (7, 40)], 2 * group, 2, 32), Scores(0.2)
    torch.testing.assert_close(case.attend(scores), case.wanted(scores), atol=1e-5, rtol=1e-5)


def test_the_tiles_of_rows() -> None:
    tiles = tiles_of(np.array([0, 1, 1, 35]), np.array([9, 0, 40]))
    assert tiles.tolist() == [[0, 1, 8, 0], [1, 16, 6, 2], [17, 16, 22, 2], [33, 2, 38, 2]]


def test_a_cache_of_another_layout_is_not_taken() -> None:
    k, v = native_cache(2, 3, 16, 32, 0.0)
    assert native_layout(k, v) and not native_layout(v, v) and not native_layout(k.contiguous(), v.contiguous())
    assert not native_layout(*native_cache(2, 3, 16, 32, 0.0, torch.float16))
