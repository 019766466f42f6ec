"""The CPU's paged attention against the plain definition, over shapes that are multiples of nothing."""

from __future__ import annotations

import pytest
import torch

from quire.gpu_worker.batch import StepBatch
from quire.gpu_worker.kernels.attention import Scores
from quire.gpu_worker.layers import attention_cpu
from quire.gpu_worker.layers.attention_cpu import paged_attention


def make_case(lens: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, size: int, seed: int = 0):
    """Rows of (query length, context length), decodes first, over a shuffled cache with garbage in unused slots."""
    generator = torch.Generator().manual_seed(seed)
    blocks = sum(-(-context // size) for _, context in lens) + 3
    order = torch.randperm(blocks, generator=generator).tolist()
    k_cache = torch.full((kv_heads, blocks, size, dim), 1e4).permute(1, 2, 0, 3)
    v_cache = torch.full((kv_heads, blocks, size, dim), -1e4).permute(1, 2, 0, 3)
    tables, starts, positions, rows = [], [0], [], []
    for count, context in lens:
        table = [order.pop() for _ in range(-(-context // size))]
        tables.append(table)
        k, v = (torch.randn(context, kv_heads, dim, generator=generator) for _ in range(2))
        rows.append((k, v))
        for p in range(context):
            k_cache[table[p // size], p % size] = k[p]
            v_cache[table[p // size], p % size] = v[p]
        starts.append(starts[-1] + count)
        positions += range(context - count, context)
    width = max(map(len, tables))
    contexts = [context for _, context in lens]
    batch = StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64), positions=torch.tensor(positions),
        slots=torch.zeros(len(positions), dtype=torch.int64), query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        num_decodes=sum(count == 1 for count, _ in lens), max_query_len=max(c for c, _ in lens),
        max_context_len=max(contexts), block_size=size, host_query_starts=starts, host_context_lens=contexts,
    )  # fmt: skip
    q = torch.randn(len(positions), heads, dim, generator=generator)
    return q, k_cache, v_cache, batch, rows


def plain(q, batch, rows, scale, window, softcap, slopes=None, sinks=None):
    """The definition, row by row in float64."""
    out = []
    for row, (k, v) in enumerate(rows):
        start, stop = batch.host_query_starts[row : row + 2]
        group = q.shape[1] // k.shape[1]
        keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].double(), keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        position = batch.positions[start:stop][:, None]
        key = torch.arange(len(k))[None]
        if slopes is not None:
            scores += slopes.double()[:, None, None] * (key - position)
        hidden = key > position
        if window:
            hidden |= key <= position - window
        weights = scores.masked_fill(hidden, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total += sinks.double().exp()[:, None, None]
        weights /= total
        out.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(out).float()


MIXED = [(1, 1), (1, 7), (1, 130), (1, 64), (1, 33), (1, 300), (5, 5), (3, 77), (140, 300), (17, 17), (129, 129)]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 10, 50, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), [(6, 2, 16, 16), (4, 4, 24, 8), (5, 1, 32, 32)])
def test_equals_the_definition(heads: int, kv_heads: int, dim: int, size: int, window: int | None) -> None:
    q, k, v, batch, rows = make_case(MIXED, heads, kv_heads, dim, size)
    got = paged_attention(q, k, v, batch, Scores(0.3, window))
    torch.testing.assert_close(got, plain(q, batch, rows, 0.3, window, 0.0), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_softcap(window: int | None) -> None:
    q, k, v, batch, rows = make_case(MIXED, 4, 2, 16, 16)
    got = paged_attention(q, k, v, batch, Scores(0.5, window, 2.0))
    torch.testing.assert_close(got, plain(q, batch, rows, 0.5, window, 2.0), atol=2e-5, rtol=1e-5)


def per_head(heads: int, scale: float) -> torch.Tensor:
    """A number for each query head, of either sign."""
    return torch.linspace(-0.7, 1.3, heads) * scale


@pytest.mark.slow
@pytest.mark.parametrize("cap", [1 << 21, 1 << 10], ids=["wide tiles", "narrow tiles"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("slopes", "sinks", "softcap"), [(0.1, None, 0.0), (None, 4.0, 0.0), (0.1, 4.0, 0.0), (0.1, 4.0, 2.0)]
)
def test_slopes_and_sinks(monkeypatch, slopes, sinks, softcap, window, cap) -> None:
    monkeypatch.setattr(attention_cpu, "_SCORES", cap)
    q, k, v, batch, rows = make_case(MIXED, 6, 2, 16, 16)
    more = {
        "slopes": None if slopes is None else per_head(6, slopes),
        "sinks": None if sinks is None else per_head(6, sinks),
    }
    got = paged_attention(q, k, v, batch, Scores(0.3, window, softcap, **more))
    torch.testing.assert_close(got, plain(q, batch, rows, 0.3, window, softcap, **more), atol=2e-5, rtol=1e-5)


def test_one_plan_serves_layers_with_and_without_slopes() -> None:
    q, k, v, batch, rows = make_case(MIXED, 4, 2, 16, 16)
    plan = attention_cpu.AttentionPlan(batch, None, q.dtype, 2 * 16 * 16)
    for slopes in (per_head(4, 0.1), None, per_head(4, -0.2)):
        got = paged_attention(q, k, v, batch, Scores(0.3, slopes=slopes), plan)
        torch.testing.assert_close(got, plain(q, batch, rows, 0.3, None, 0.0, slopes), atol=2e-5, rtol=1e-5)


def test_other_memory_orders_and_no_host_lists() -> None:
    q, k, v, batch, rows = make_case(MIXED, 4, 2, 16, 16)
    batch.host_query_starts, batch.host_context_lens = [], []
    got = paged_attention(q, k.contiguous(), v.contiguous(), batch, Scores(0.25))
    batch.host_query_starts = batch.query_starts.tolist()
    torch.testing.assert_close(got, plain(q, batch, rows, 0.25, None, 0.0), atol=2e-5, rtol=1e-5)


def test_decodes_in_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cpu, "_GATHER", 4096)
    lens = [(1, n) for n in (3, 500, 20, 90, 91, 92, 17, 260, 500, 1, 40)]
    q, k, v, batch, rows = make_case(lens, 4, 2, 16, 16)
    got = paged_attention(q, k, v, batch, Scores(0.25))
    torch.testing.assert_close(got, plain(q, batch, rows, 0.25, None, 0.0), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("more", [{}, {"slopes": per_head(4, 0.1)}, {"sinks": per_head(4, 4.0)}])
def test_bfloat16(more: dict[str, torch.Tensor]) -> None:
    q, k, v, batch, rows = make_case(MIXED, 4, 2, 16, 16)
    got = paged_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), batch, Scores(0.25, 40, **more))
    torch.testing.assert_close(got.float(), plain(q, batch, rows, 0.25, 40, 0.0, **more), atol=0.05, rtol=0.05)


def test_slopes_keep_their_precision_far_from_the_first_key_in_bfloat16() -> None:
    """Distances above 256 are no bfloat16 numbers: neighbouring keys would get one bias."""
    q, k, v, batch, rows = make_case([(1, 900), (40, 700)], 2, 2, 16, 16)
    q, slopes = q * 0, torch.tensor([0.01, -0.01])
    got = paged_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), batch, Scores(0.25, slopes=slopes))
    want = plain(q, batch, [(a.bfloat16(), b.bfloat16()) for a, b in rows], 0.25, None, 0.0, slopes)
    torch.testing.assert_close(got.float(), want, atol=3e-3, rtol=1e-2)


def test_rows_without_context_are_left_out() -> None:
    q, k, v, batch, rows = make_case([(1, 9), (1, 20)], 4, 2, 16, 16)
    batch.context_lens[1] = batch.host_context_lens[1] = 0
    got = paged_attention(q, k, v, batch, Scores(0.25))
    assert torch.isfinite(got[0]).all()
    torch.testing.assert_close(got[:1], plain(q, batch, rows, 0.25, None, 0.0)[:1], atol=2e-5, rtol=1e-5)
