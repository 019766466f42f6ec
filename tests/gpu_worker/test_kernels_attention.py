"""Paged attention: Triton against the twin, the twin against plain attention. Compiled on a GPU, else interpreted."""

import pytest
import torch
from kernel_cases import DECODE, MIXED, PLAIN, PREFILL, make
from kernel_device import DEVICE

pytest.importorskip("triton")

from quire.gpu_worker.kernels import attention
from quire.gpu_worker.kernels.attention import Scores
from quire.gpu_worker.kernels.attention_tiles import Tiles, Variant

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
LAYOUTS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)]

pytestmark = pytest.mark.slow


def check(args, **options):
    """Kernel and twin agree, and padding comes out as zeros."""
    q, k_cache, v_cache, batch = args
    scale = q.shape[2] ** -0.5
    got = attention.paged_attention(q, k_cache, v_cache, batch, Scores(scale, **options))
    want = attention.paged_attention_torch(q, k_cache, v_cache, batch, Scores(scale, **options))
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads"),
    [(MIXED, 4, 4), (MIXED, 4, 1), (MIXED, 14, 2), (PREFILL, 6, 2), (DECODE, 2, 2), (DECODE, 14, 2)],
)
def test_rows_and_groups(rows, heads, kv_heads):
    check(make(rows, heads, kv_heads))


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_head_dims(dim):
    check(make([(1, 20), (1, 130), (9, 30)], heads=4, kv_heads=2, dim=dim))


@pytest.mark.parametrize(("page", "order"), [(8, LAYOUTS[0]), (32, LAYOUTS[1]), (16, LAYOUTS[2]), (16, LAYOUTS[0])])
def test_pages_and_layouts(page, order):
    check(make(MIXED, page=page, order=order))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
def test_dtypes(dtype, rows):
    check(make(rows, dim=64, dtype=dtype))


@pytest.mark.parametrize("window", [1, 16, 50])
@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
def test_sliding_window(window, rows):
    check(make(rows), window=window)


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"softcap": 30.0, "window": 20}])
def test_softcap(options):
    q, *rest = make(MIXED)
    check((q * 4, *rest), **options)


def per_head(heads, scale=1.0):
    """A number for each query head, of either sign."""
    return (torch.linspace(-0.7, 1.3, heads) * scale).to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    "options",
    [
        {"slopes": per_head(6, 0.2)},
        {"sinks": per_head(6, 4.0)},
        {"slopes": per_head(6, 0.2), "sinks": per_head(6, 4.0), "window": 20, "softcap": 3.0},
    ],
    ids=["slopes", "sinks", "all"],
)
def test_slopes_and_sinks(rows, options):
    check(make(rows, heads=6, kv_heads=2), **options)


def test_a_sink_that_dwarfs_the_scores_leaves_nothing():
    q, k_cache, v_cache, batch = make([(1, 40), (5, 20)], heads=2)
    sinks = torch.tensor([1e4, -1e4], device=DEVICE)
    got = attention.paged_attention(q, k_cache, v_cache, batch, Scores(0.3, sinks=sinks))
    assert got[:, 0].abs().max() == 0
    plain = attention.paged_attention(q, k_cache, v_cache, batch, Scores(0.3))
    torch.testing.assert_close(got[:, 1], plain[:, 1], rtol=TOLERANCE[PLAIN], atol=TOLERANCE[PLAIN])


@pytest.mark.slow
@pytest.mark.parametrize("splits", [2, 3, 11])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("more", [{}, {"slopes": per_head(4, 0.1), "sinks": per_head(4, 4.0)}], ids=["", "all"])
def test_splits(splits, window, more):
    """Any number of splits gives what one gives, also where some have no keys."""
    q, k_cache, v_cache, batch = make([(1, 500), (1, 1), (1, 0), (1, 165)], dim=48)
    want = attention.paged_attention_torch(q, k_cache, v_cache, batch, Scores(0.2, window, **more))
    out = torch.full_like(q, float("nan"))
    scores, variant = Scores(0.2, window, **more), Variant(True, Tiles(16, 32), True)
    plan = attention.plan_launch(q, k_cache, batch, scores, variant, splits)
    attention.launch(q, k_cache, v_cache, out, batch, scores, plan)
    torch.testing.assert_close(out, want, rtol=TOLERANCE[PLAIN], atol=TOLERANCE[PLAIN])


def test_graph_padding():
    """A batch that claims a long reach and holds padding rows reads nothing for them."""
    check(make([(1, 40), (1, 3), (1, 0), (1, 0)], reach=4096))


def test_queries_inside_a_fused_projection():
    q, k_cache, v_cache, batch = make(MIXED)
    fused = torch.cat([q, q, q], dim=1)
    got = attention.paged_attention(fused[:, :4], k_cache, v_cache, batch, Scores(0.3))
    assert got.is_contiguous()
    assert torch.equal(got, attention.paged_attention(q, k_cache, v_cache, batch, Scores(0.3)))


def test_no_tokens():
    q, k_cache, v_cache, batch = make([(1, 1)])
    assert attention.paged_attention(q[:0], k_cache, v_cache, batch, Scores(1.0)).shape == (0, 4, 32)


def test_twin_is_plain_attention():
    """One row, no pages in the way: torch's own attention."""
    q, k_cache, v_cache, batch = make([(40, 40)], heads=4, kv_heads=2)
    pages = batch.block_tables[0, :3].long()
    k, v = (c[pages].flatten(0, 1)[:40].transpose(0, 1)[None] for c in (k_cache, v_cache))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True
    )[0].transpose(0, 1)
    got = attention.paged_attention_torch(q, k_cache, v_cache, batch, Scores(32**-0.5))
    torch.testing.assert_close(got, want, rtol=TOLERANCE[PLAIN], atol=TOLERANCE[PLAIN])


@pytest.mark.parametrize("window", [None, 7])
def test_twin_of_slopes_and_sinks_is_the_definition(window):
    """Number by number: exp(score + slope * (key - query)) over their sum with exp(sink)."""
    q, k_cache, v_cache, batch = make([(1, 9), (6, 14)], heads=4, kv_heads=2, dim=16)
    slopes, sinks = per_head(4, 0.3), per_head(4, 2.0)
    want = torch.zeros_like(q, dtype=torch.float64)
    for row, (count, context) in enumerate([(1, 9), (6, 14)]):
        pages = batch.block_tables[row, : -(-context // 16)].long()
        k, v = (c[pages].flatten(0, 1)[:context].double() for c in (k_cache, v_cache))
        for token in range(count):
            at = context - count + token
            first = 0 if window is None else max(0, at - window + 1)
            for head in range(4):
                query = q[row + token, head].double()
                weights = [
                    torch.exp(query @ k[key, head // 2] * 0.3 + slopes[head] * (key - at))
                    for key in range(first, at + 1)
                ]
                total = sum(weights) + torch.exp(sinks[head].double())
                want[row + token, head] = sum(w * v[first + i, head // 2] / total for i, w in enumerate(weights))
    got = attention.paged_attention_torch(q, k_cache, v_cache, batch, Scores(0.3, window, slopes=slopes, sinks=sinks))
    torch.testing.assert_close(got, want.to(q.dtype), rtol=TOLERANCE[PLAIN], atol=TOLERANCE[PLAIN])
