"""The CPU's paged attention in C, in every instruction set of this machine, against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cpu_kernels import VARIANTS, using
from support.paged_cases import batch_of, definition, native_cache
from torch.nn.functional import scaled_dot_product_attention

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


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


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

    def check(self, variant: str, scores: Scores) -> None:
        """Compare with the definition. Pairs of bfloat16 take queries and weights rounded: each weight is wrong by a
        512th at most, and so is their sum."""
        bound = 0.0
        if variant == "avx512bf16" and self.k_cache.dtype == torch.bfloat16 and self.q.shape[-1] % 2 == 0:
            self.q = self.q.bfloat16().float()
            exact, self.rows = self.rows, [(k, v.abs()) for k, v in self.rows]
            bound, self.rows = self.wanted(scores) / 256, exact
        error = (self.attend(scores) - (wanted := self.wanted(scores))).abs()
        assert (error <= bound + 1e-5 + 1e-5 * wanted.abs()).all(), f"wrong by {error.max()}"


@DTYPES
@pytest.mark.parametrize("feature", FEATURES)
def test_equals_the_definition(variant: str, feature: str, dtype: torch.dtype) -> None:
    Case(MIXED, 6, 2, 32, dtype=dtype).check(variant, scores_of(6, FEATURES[feature]))


@DTYPES
@pytest.mark.parametrize("size", [8, 16, 32, 48])
@pytest.mark.parametrize("dim", [4, 12, 20, 32, 33, 64, 72, 80, 96, 128, 256])
def test_head_dims_and_block_sizes(variant: str, dim: int, size: int, dtype: torch.dtype) -> None:
    Case([(1, 19), (1, 270), (20, 50)], 4, 2, dim, size, dtype).check(variant, Scores(dim**-0.5))


@DTYPES
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 71])
def test_groups(variant: str, group: int, dtype: torch.dtype) -> None:
    Case([(1, 90), (7, 40)], 2 * group, 2, 32, dtype=dtype).check(variant, Scores(0.2))


@DTYPES
@pytest.mark.parametrize("context", [15, 255, 256, 257, 511, 513, 2000])
def test_long_contexts(variant: str, context: int, dtype: torch.dtype) -> None:
    scores = Scores(0.2, window=None if context % 2 else 300)
    Case([(1, context), (9, context)], 3, 1, 32, dtype=dtype).check(variant, scores)


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_bfloat16_is_no_worse_than_torchs(variant: str, dim: int, spread: float) -> None:
    """Both get bfloat16 queries; the error is against float64, over scores that are spread differently."""
    case, scores = Case([(60, 500)], 4, 4, dim, dtype=torch.bfloat16), Scores(dim**-0.5)
    case.q = (case.q * spread).bfloat16()
    q, k, v = (x.transpose(0, 1)[None] for x in (case.q, *case.rows[0]))
    sees = torch.arange(500) <= torch.arange(440, 500)[:, None]
    torchs = scaled_dot_product_attention(q, k, v, attn_mask=sees)[0].transpose(0, 1)
    ours, torchs = ((x.float() - case.wanted(scores)).square().mean().sqrt() for x in (case.attend(scores), torchs))
    assert ours <= torchs


def in_chunks(case: Case, scores: Scores, chunks: list[int], threads: int = 1) -> torch.Tensor:
    """The attention of every token of a case of one row, whose prompt comes in steps of so many tokens."""
    before, done, out = torch.get_num_threads(), 0, []
    torch.set_num_threads(threads)
    for count in chunks:
        lens = [(count, done + count)]
        batch, q = batch_of(lens, case.tables, case.size), case.q[done : done + count]
        out.append(paged_attention(q, case.k_cache, case.v_cache, batch, scores))
        done += count
    torch.set_num_threads(before)
    return torch.cat(out)


@DTYPES
@pytest.mark.parametrize("feature", ["plain", "all"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size"),
    [(2, 2, 20, 16), (7, 1, 64, 16), (16, 1, 32, 32), (3, 1, 128, 8), (8, 4, 256, 16)],
)
def test_a_token_has_the_same_bits_however_its_prompt_comes(
    variant, heads, kv_heads, dim, size, feature, dtype
) -> None:
    """Decodes, tiles that begin anywhere, and chunks dealt to three threads."""
    tokens = 560
    case, scores = Case([(tokens, tokens)], heads, kv_heads, dim, size, dtype), scores_of(heads, FEATURES[feature])
    alone = in_chunks(case, scores, [1] * tokens)
    for chunks in ([tokens], [5, 300, 255], [250, 10, 300], [*[13] * 43, 1]):
        assert torch.equal(in_chunks(case, scores, chunks), alone)
    assert torch.equal(in_chunks(case, scores, [tokens - 20, 1, 2, 17], threads=2)[-20:], alone[-20:])
    assert torch.equal(in_chunks(case, scores, [tokens - 20, *[1] * 20], threads=3), alone)


def test_a_row_has_the_same_bits_in_any_batch(variant: str) -> None:
    case, scores = Case(MIXED, 6, 2, 64, dtype=torch.bfloat16), Scores(0.2)
    together, starts = case.attend(scores), case.batch.host_query_starts
    for row, lens in enumerate(MIXED):
        batch, tokens = batch_of([lens], [case.tables[row]], case.size), slice(starts[row], starts[row + 1])
        got = paged_attention(case.q[tokens], case.k_cache, case.v_cache, batch, scores)
        assert torch.equal(got, together[tokens])


@DTYPES
@pytest.mark.parametrize("size", [8, 16])
def test_what_lies_in_unused_slots_is_never_used(variant: str, size: int, dtype: torch.dtype) -> None:
    """Not even NaN, which a step that failed may have left there, behind a row's keys and before its window."""
    case, scores = Case([(1, 19), (3, 71), (1, 288)], 4, 2, 32, size, dtype), Scores(0.2, 31)
    wanted = case.attend(scores)
    for cache in (case.k_cache, case.v_cache):
        for table, (count, context) in zip(case.tables, case.lens, strict=True):
            cache[table[-1], (context - 1) % size + 1 :] = float("nan")
            for position in range(context - count - 31 + 1):
                cache[table[position // size], position % size] = float("nan")
    assert torch.equal(case.attend(scores), wanted)


@DTYPES
@pytest.mark.parametrize("which", ["q", "k_cache", "v_cache"])
def test_nan_comes_out_where_it_goes_in(variant: str, which: str, dtype: torch.dtype) -> None:
    case = Case([(1, 19), (1, 30)], 4, 2, 32, dtype=dtype)
    (case.q[0, 0] if which == "q" else getattr(case, which)[case.tables[0][0], 3, 0])[5] = float("nan")
    got = case.attend(Scores(0.2))
    assert got[0, 0].isnan().any() and not got[0, 2:].isnan().any() and not got[1].isnan().any()


def test_bfloat16_results_are_the_float32_ones_rounded(variant: str) -> None:
    case, scores = Case(MIXED, 4, 2, 20, dtype=torch.bfloat16), Scores(0.2)
    case.q = case.q.bfloat16().float()
    wide = case.attend(scores)
    case.q = case.q.bfloat16()
    assert torch.equal(case.attend(scores), wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_land_in_their_slots(variant: str, dtype: torch.dtype) -> None:
    k_cache, v_cache = native_cache(3, 5, 8, 12, 7.0, dtype)
    wanted = k_cache.clone(), v_cache.clone()
    k, v = torch.randn(4, 3 * 12, 2).view(4, 3, 12, 2).unbind(-1)
    slots = torch.tensor([39, 0, -1, 17])
    write_cache(k_cache, v_cache, k, v, slots)
    for cache, want, x in zip((k_cache, v_cache), wanted, (k, v), strict=True):
        for token in (0, 1, 3):
            want[slots[token] // 8, slots[token] % 8] = x[token].to(dtype)
        assert torch.equal(cache, want)


def test_rows_without_context_get_zeros(variant: str) -> None:
    case = Case([(1, 9), (1, 20)], 4, 2, 16)
    case.batch.host_context_lens[1] = 0
    got = case.attend(Scores(0.25))
    assert not got[1].any() and torch.equal(got[:1], case.attend(Scores(0.25))[:1]) and got[0].all()


def test_the_tiles_of_rows() -> None:
    tiles = tiles_of(np.array([0, 1, 1, 35]), np.array([9, 0, 40]))
    assert tiles.tolist() == [[0, 1, 8, 0], [1, 16, 6, 2], [17, 16, 22, 2], [33, 2, 38, 2]]


def test_a_cache_of_another_layout_is_not_taken(variant: str) -> None:
    k, v = native_cache(2, 3, 16, 32, 0.0)
    assert native_layout(k, v) and not native_layout(v, v) and not native_layout(k.contiguous(), v.contiguous())
    assert not native_layout(*native_cache(2, 3, 16, 32, 0.0, torch.float16))
