"""Norms, rope + cache write and activations: Triton and the CPU's layers against the twins and the definitions.

Compiled where there is a GPU, else under Triton's interpreter.
"""

import pytest
import torch
from kernel_device import DEVICE

pytest.importorskip("triton")

from quire.gpu_worker.kernels import activation, norm, rope
from quire.gpu_worker.layers import activation as layers
from quire.gpu_worker.layers.norm import LayerNorm, RMSNorm
from quire.gpu_worker.layers.rope import rotate

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)

pytestmark = pytest.mark.slow


def close(got, want, dtype):
    torch.testing.assert_close(got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.slow
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
    assert torch.equal(total, want_total)
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


def test_rms_norm_with_a_weight_for_each_head():
    x, weight = randn(3, 7, 40), randn(4, 40, seed=1)
    want = torch.stack([norm.rms_norm_torch(x[:, head], weight[head], 1e-6) for head in range(4)], dim=1)
    close(norm.rms_norm(x[:, :4], weight, 1e-6), want, x.dtype)
    close(norm.rms_norm_torch(x[:, :4], weight, 1e-6), want, x.dtype)
    close(RMSNorm(weight, 1e-6)(x[:, :4]), want, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [80, 1000])
@pytest.mark.parametrize(("has_weight", "has_bias"), [(False, False), (True, False), (True, True)])
def test_layer_norm(dtype, width, has_weight, has_bias):
    """Far from zero too, where the mean must go before the squares are summed."""
    x, residual = randn(5, width, dtype=dtype) + 8, randn(5, width, dtype=dtype, seed=2)
    weight = randn(width, dtype=dtype, seed=1) if has_weight else None
    bias = randn(width, dtype=dtype, seed=3) if has_bias else None
    want = torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-5)
    close(norm.layer_norm_torch(x, weight, bias, 1e-5), want, dtype)
    close(norm.layer_norm(x, weight, bias, 1e-5), want, dtype)
    got, total = norm.layer_norm(x, weight, bias, 1e-5, residual)
    close(total, x + residual, dtype)
    close(got, norm.layer_norm_torch(total, weight, bias, 1e-5), dtype)
    close(LayerNorm(weight, bias, 1e-5)(x), want, dtype)
    got, total = LayerNorm(weight, bias, 1e-5).add(x, residual.clone())
    want, want_total = norm.layer_norm_torch(x, weight, bias, 1e-5, residual)
    close(total, want_total, dtype)
    close(got, want, dtype)


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_with_weights_for_each_head(has_bias):
    x, weight, bias = randn(3, 7, 40), randn(4, 40, seed=1), randn(4, 40, seed=2) if has_bias else None
    want = torch.stack(
        [
            torch.nn.functional.layer_norm(x[:, head], (40,), weight[head], bias[head] if has_bias else None, 1e-5)
            for head in range(4)
        ],
        dim=1,
    )
    close(norm.layer_norm(x[:, :4], weight, bias, 1e-5), want, x.dtype)
    close(norm.layer_norm_torch(x[:, :4], weight, bias, 1e-5), want, x.dtype)
    close(LayerNorm(weight, bias, 1e-5)(x[:, :4]), want, x.dtype)


DEFINITIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: (x * (x > 0)) ** 2,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
}


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_activation(kind):
    x = randn(3, 1500) * 2
    want = DEFINITIONS[kind](x.double()).float()
    for got in (
        activation.activation(x, kind),
        activation.activation_torch(x, kind),
        layers.activation(x.clone(), kind),
    ):
        close(got, want, x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*DEFINITIONS, "swiglu_oai"])
def test_gated_activation(dtype, kind):
    for width in (7, 1500):
        gate_up = randn(3, 2 * width, dtype=dtype) * 2.5  # some beyond swiglu_oai's limits
        gate, up = gate_up.double().chunk(2, dim=-1)
        if kind == "swiglu_oai":
            want = DEFINITIONS["quick_gelu"](gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
        else:
            want = DEFINITIONS[kind](gate) * up
        close(activation.gated_activation(gate_up, kind), want, dtype)
        close(activation.gated_activation_torch(gate_up, kind), want, dtype)
        if dtype == torch.float32:
            close(layers.gated_activation(gate_up.clone(), kind), want, dtype)


def test_unknown_activation_is_named():
    for call in (activation.gated_activation, activation.activation_torch, layers.activation, layers.gated_activation):
        with pytest.raises(ValueError, match="swish"):
            call(torch.zeros(1, 2), "swish")


def caches(blocks, size, heads, dim, dtype, order):
    """Two caches of one logical shape whose memory is laid out in ``order``."""
    shape = (blocks, size, heads, dim)
    back = [order.index(i) for i in range(4)]
    return [torch.zeros([shape[i] for i in order], dtype=dtype, device=DEVICE).permute(back) for _ in range(2)]


@pytest.mark.slow
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
    assert torch.equal(v_cache[3, 7], v[2]) and v_cache[1, 1].abs().sum() == 0
    assert torch.equal(k, fused[:, heads : heads + kv_heads]) and torch.equal(v, fused[:, heads + kv_heads :])


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 24), (16, 2)])
def test_rope_of_pairs(dim, rotary):
    """Dims 2i and 2i + 1 turn as one complex number does; the kernel, its twin and the CPU's agree."""
    fused, slots = randn(5, 7, dim), torch.tensor([5, -1, 15, 8, 0], device=DEVICE)
    angles = torch.outer(torch.arange(50.0), 10000 ** -(torch.arange(0, rotary, 2) / rotary)).to(DEVICE)
    cos, sin, positions = angles.cos(), angles.sin(), torch.tensor([0, 1, 49, 7, 8], device=DEVICE)
    want = fused.clone()
    pairs = torch.view_as_complex(fused[:, :5, :rotary].unflatten(-1, (-1, 2)).contiguous())
    turn = torch.polar(torch.ones_like(angles), angles)[positions, None]
    want[:, :5, :rotary] = torch.view_as_real(pairs * turn).flatten(-2)
    for write in (rope.rope_write, rope.rope_write_torch):
        got = fused.clone()
        q, k, v = got.split([3, 2, 2], dim=1)
        k_cache, v_cache = caches(2, 8, 2, dim, torch.float32, (0, 2, 1, 3))
        write(q, k, v, cos, sin, positions, slots, k_cache, v_cache, interleaved=True)
        close(q, want[:, :3], torch.float32)
        assert torch.equal(got[:, 3:], fused[:, 3:])  # rotated keys are in the cache alone
        close(k_cache[1, 7], want[2, 3:5], torch.float32)
        close(k_cache[0, 5], want[0, 3:5], torch.float32)
        assert torch.equal(v_cache[1, 7], v[2]) and k_cache[0, 1].abs().sum() == 0
    got = fused.clone()
    rotate(got[:, :5], cos[positions, None], sin[positions, None], interleaved=True)
    close(got, want, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_without_rope(dtype):
    fused, slots = randn(3, 8, 40, dtype=dtype), torch.tensor([9, -1, 3], device=DEVICE)
    for write in (rope.rope_write, rope.rope_write_torch):
        given = fused.clone()
        q, k, v = given.split([4, 2, 2], dim=1)
        k_cache, v_cache = caches(2, 8, 2, 40, dtype, (0, 2, 1, 3))
        write(q, k, v, None, None, slots, slots, k_cache, v_cache)
        assert torch.equal(given, fused)
        for cache, x in ((k_cache, k), (v_cache, v)):
            assert torch.equal(cache[1, 1], x[0]) and torch.equal(cache[0, 3], x[2])
            assert int((cache != 0).sum()) == int((x[[0, 2]] != 0).sum())


def test_rope_of_no_tokens():
    q = torch.zeros(0, 2, 16, device=DEVICE)
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    cache = torch.zeros(1, 8, 2, 16, device=DEVICE)
    table = torch.zeros(4, 8, device=DEVICE)
    rope.rope_write(q, q, q, table, table, empty, empty, cache, cache)
    assert cache.abs().sum() == 0
