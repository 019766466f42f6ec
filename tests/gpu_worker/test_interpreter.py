"""What tests do to Triton's interpreter: bfloat16 values are computed with as such, not as their bits."""

import numpy as np
import pytest
import torch
from kernel_device import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl
from interpreter_bf16 import narrowed, widened

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="compiled, not interpreted")


@triton.jit
def products(a, b, c, out, SIZE: tl.constexpr):
    """a @ b, then sums, comparisons and conversions of bfloat16 with c."""
    at = tl.arange(0, SIZE)
    place = at[:, None] * SIZE + at[None, :]
    x, y, z = tl.load(a + place), tl.load(b + place), tl.load(c + place)
    product = tl.dot(x, y)
    tl.store(out + place, product.to(tl.bfloat16))
    out += SIZE * SIZE
    tl.store(out + place, x + z)
    out += SIZE * SIZE
    tl.store(out + place, tl.where(x < z, -x, y * z))
    out += SIZE * SIZE
    tl.store(out + place, x.to(tl.int32).to(tl.bfloat16))


def test_bfloat16_is_computed_as_such():
    draw = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(16, 16, generator=draw).bfloat16() * 3 for _ in range(3))
    out = torch.zeros(4, 16, 16, dtype=torch.bfloat16)
    products[(1,)](a, b, c, out, SIZE=16)
    torch.testing.assert_close(out[0], (a.float() @ b.float()).bfloat16(), rtol=1e-2, atol=1e-5)
    assert torch.equal(out[1], a + c)
    assert torch.equal(out[2], torch.where(a < c, -a, b * c))
    assert torch.equal(out[3], a.int().bfloat16())


def test_conversions_are_torchs():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wide = torch.from_numpy(widened(every.view(torch.int16).numpy().view(np.uint16)))
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    draw = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (50_000,), generator=draw)
    # Some half-way between two, where the even one is taken.
    values = torch.cat([bits.int(), (bits // 2**16 * 2**16 + 2**15).int()]).view(torch.float32)
    got = torch.from_numpy(narrowed(values.numpy()).view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(got, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
