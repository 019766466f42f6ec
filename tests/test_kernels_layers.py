"""RMSNorm, rope + cache write and gated activation: Triton against the twins.

Compiled where there is a GPU, else under Triton's interpreter.
"""

import pytest
import torch
from kernel_device import DEVICE

pytest.importorskip("triton")

from quire.gpu_worker.kernels import activation, norm, rope

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


def close(got, want, dtype):
    torch.testing.assert_close(got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 80, 896, 1000])
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(dtype, width, plus_one):
    x, weight = randn(5, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    got = norm.rms_norm(x, weight, 1e-5, plus_one=plus_one)
    close(got, norm.rms_norm_torch(x, weight, 1e-5, plus_one=plus_one), dtype)
    residual = randn(5, width, dtype=dtype, seed=2)
    before = residual.clone()
    got, total = norm.rms_norm(x, weight, 1e-5, residual, plus_one)
    want, want_total = norm.rms_norm_torch(x, weight, 1e-5, residual, plus_one)
    assert torch.equal(residual, before)
    close(total, want_total, dtype)  # the interpreter does not round bfloat16 to nearest
    close(got, want, dtype)


def test_rms_norm_of_heads_inside_a_projection():
    """Query-key norms run on views [T, heads, D]; a strided slice of rows works too."""
    x, weight = randn(3, 7, 64), randn(64, seed=1)
    got = norm.rms_norm(x[:, :4], weight, 1e-6)
    assert got.shape == (3, 4, 64)
    close(got, norm.rms_norm_torch(x[:, :4], weight, 1e-6), torch.float32)
    rows = randn(5, 256)
    close(norm.rms_norm(rows[:, 64:128], weight, 1e-6), norm.rms_norm_torch(rows[:, 64:128], weight, 1e-6), x.dtype)
    assert norm.rms_norm(rows[:0, :64], weight, 1e-6).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("width", [7, 1024, 1500])
def test_gated_activation(dtype, kind, width):
    gate_up = randn(3, 2 * width, dtype=dtype) * 3
    close(activation.gated_activation(gate_up, kind), activation.gated_activation_torch(gate_up, kind), dtype)


def test_unknown_activation_is_named():
    for call in (activation.gated_activation, activation.gated_activation_torch):
        with pytest.raises(ValueError, match="swish"):
            call(torch.zeros(1, 2), "swish")


def caches(blocks, size, heads, dim, dtype, order):
    """Two caches of one logical shape whose memory is laid out in ``order``."""
    shape = (blocks, size, heads, dim)
    back = [order.index(i) for i in range(4)]
    return [torch.zeros([shape[i] for i in order], dtype=dtype, device=DEVICE).permute(back) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (80, 80), (96, 64), (64, 32)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3), (0, 2, 1, 3)])
def test_rope_write(dtype, dim, rotary, order):
    tokens, heads, kv_heads, size = 6, 4, 2, 8
    fused = randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    angles = torch.outer(torch.arange(50.0), 10000 ** -(torch.arange(0, rotary, 2) / rotary)).to(DEVICE)
    positions = torch.tensor([0, 1, 49, 7, 8, 3], device=DEVICE)
    slots = torch.tensor([5, -1, 31, 8, 0, 23], device=DEVICE)
    results = []
    for write in (rope.rope_write, rope.rope_write_torch):
        q, k, v = fused.clone().split([heads, kv_heads, kv_heads], dim=1)
        k_cache, v_cache = caches(4, size, kv_heads, dim, dtype, order)
        write(q, k, v, angles.cos(), angles.sin(), positions, slots, k_cache, v_cache)
        results.append((q, k, v, k_cache, v_cache))
    for got, want in zip(*results, strict=True):
        close(got, want, dtype)
    k, v, k_cache, v_cache = results[0][1:]
    assert torch.equal(k_cache[3, 7], k[2]) and torch.equal(v_cache[3, 7], v[2])
    assert torch.equal(v, fused[:, heads + kv_heads :]) and v_cache[1, 1].abs().sum() == 0


def test_rope_of_no_tokens():
    q = torch.zeros(0, 2, 16, device=DEVICE)
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    cache = torch.zeros(1, 8, 2, 16, device=DEVICE)
    table = torch.zeros(4, 8, device=DEVICE)
    rope.rope_write(q, q, q, table, table, empty, empty, cache, cache)
    assert cache.abs().sum() == 0
