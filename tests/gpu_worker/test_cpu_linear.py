"""The native kernels' linear layers against torch, in every instruction set that this processor runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cpu_kernels import VARIANTS, using

from quire.gpu_worker.kernels.activation import gated_activation_torch
from quire.gpu_worker.kernels.cpu.library import I4, I8
from quire.gpu_worker.kernels.cpu.linear import ADD, GATED, GROUP, multiply, pack, pack_int8

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((96, 64), (100, 70), (33, 1), (1, 200), (160, 896), (72, 333))
"""(outputs, inputs): whole panels, and panels and inputs that are filled up with zeros."""
ROWS = (1, 2, 3, 4, 6, 7, 11, 12, 13, 25, 64, 100, 240, 241, 300)
SILU = 0


@pytest.fixture(params=VARIANTS, autouse=True)
def variant(request: pytest.FixtureRequest):
    with using(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def operands(shape, dtype, rows=300):
    outputs, inputs = shape
    return torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)


def close(got, x, weight, bias=None):
    """``got`` is the product within the rounding of its sum."""
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    room = x.double().abs() @ weight.double().abs().T + 1
    assert ((got.double() - want).abs() / room).max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_product(shape, gated, dtype):
    shape = (2 * shape[0], shape[1]) if gated else shape
    x, weight, bias = operands(shape, dtype)
    packed = pack(weight, gated=gated)
    for rows in (1, 5, 300):
        close(multiply(x[:rows], packed, torch.empty(rows, shape[0])), x[:rows], weight)
    packed.set_bias(bias)
    close(multiply(x, packed, torch.empty(300, shape[0])), x, weight, bias)
    assert torch.equal(multiply(x, packed), multiply(x, packed, torch.empty(300, shape[0])).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(100, 70), (160, 1100)])
def test_a_row_has_the_same_bits_in_any_company(shape, dtype):
    """Whatever the rows beside it, the tile that it falls into, and the number of threads."""
    x, weight, bias = operands(shape, dtype)
    packed = pack(weight)
    packed.set_bias(bias)
    alone = torch.cat([multiply(row[None], packed, torch.empty(1, shape[0])) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in ROWS:
            assert torch.equal(multiply(x[:rows], packed, torch.empty(rows, shape[0])), alone[:rows])
            assert torch.equal(multiply(x[-rows:], packed, torch.empty(rows, shape[0])), alone[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogues(dtype):
    x, weight, bias = operands((2 * 56, 192), dtype, 30)
    packed = pack(weight, gated=True)
    packed.set_bias(bias)
    plain = multiply(x, packed, torch.empty(30, 112))
    gated = multiply(x, packed, torch.empty(30, 56), GATED, SILU)
    torch.testing.assert_close(gated, gated_activation_torch(plain, "silu"), rtol=1e-5, atol=1e-5)
    before = torch.randn(30, 112)
    assert torch.equal(multiply(x, packed, before.clone(), ADD, scale=0.5), before + plain * 0.5)


def test_a_value_that_is_not_finite_stays_in_its_row():
    x, weight, _ = operands((64, 128), torch.float32, 8)
    x[3, 5], x[6, 0] = float("nan"), float("inf")
    found = multiply(x, pack(weight))
    assert found[3].isnan().all() and not found[6].isfinite().any()
    assert found[[0, 1, 2, 4, 5, 7]].isfinite().all()


def test_a_part_of_a_row_is_no_copy():
    """Rows that lie further apart than they are long, in and out."""
    x, weight, _ = operands((64, 128), torch.float32, 8)
    wide, out = torch.randn(8, 256), torch.zeros(8, 96)
    wide[:, :128] = x
    multiply(wide[:, :128], pack(weight), out[:, :64])
    assert torch.equal(out[:, :64], multiply(x, pack(weight))) and not out[:, 64:].any()


# --- int8 and int4 ---


def by_groups(values: torch.Tensor, group: int) -> torch.Tensor:
    """[rows, inputs] -> [rows, groups, group], filled up with zeros."""
    return F.pad(values, (0, -values.shape[1] % group)).unflatten(1, (-1, group))


def quantized(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 of groups of each row, and the groups' scales: the largest magnitude is 127."""
    groups = by_groups(values, group)
    largest = groups.abs().amax(2)
    inverse = torch.where(largest > 0, torch.tensor(127.0) / largest, 0)  # 127 / largest would round twice
    return (groups * inverse[..., None]).round(), largest / 127


def int8_twin(x, weight):
    (a, a_scale), (b, b_scale) = quantized(x, x.shape[1]), quantized(weight, x.shape[1])
    return (a[:, 0].double() @ b[:, 0].double().T) * a_scale.double() * b_scale.double().T


def int4_twin(x, weight):
    a, a_scale = quantized(x, GROUP)
    groups = by_groups(weight, GROUP)
    at = torch.sort(groups.abs(), dim=2, descending=True, stable=True)[1][..., :1]  # the first of equal ones
    b, scale = groups, at[..., 0]
    least = torch.full(scale.shape, torch.inf)
    for share in (1.0, 0.95, 0.9, 0.85):
        other = (groups.gather(2, at)[..., 0] * share / -8).bfloat16().float()
        values = (groups * torch.where(other != 0, 1 / other, 0)[..., None]).round().clamp(-8, 7)
        lost = (values * other[..., None] - groups).square().sum(2)
        better = lost < least
        b, scale = torch.where(better[..., None], values, b), torch.where(better, other, scale)
        least = torch.where(better, lost, least)
    sums = torch.einsum("tgi,ogi->tog", a.double(), b.double())
    return (sums * a_scale.double()[:, None] * scale.double()).sum(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "twin"), [(I8, int8_twin), (I4, int4_twin)])
def test_quantized_product(kind, twin, shape, gated, dtype):
    shape = (2 * shape[0], shape[1]) if gated else shape
    x, weight, bias = operands(shape, dtype)
    packed = pack(weight, kind, gated)
    packed.set_bias(bias)
    want = twin(x.float(), weight.float()) + bias.double()
    for rows in (1, 5, 300):
        got = multiply(x[:rows], packed, torch.empty(rows, shape[0]))
        torch.testing.assert_close(got.double(), want[:rows], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(100, 70), (66, 128)])
def test_int8_that_a_checkpoint_has(shape, gated):
    values, scales = torch.randint(-128, 128, shape, dtype=torch.int8), torch.rand(shape[0]) + 0.1
    x, bias = torch.randn(9, shape[1]), torch.randn(shape[0])
    packed = pack_int8(values, scales, gated)
    packed.set_bias(bias)
    a, a_scale = quantized(x, shape[1])
    want = (a[:, 0].double() @ values.double().T) * a_scale.double() * scales.double() + bias.double()
    torch.testing.assert_close(multiply(x, packed).double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", [I8, I4])
def test_a_quantized_row_has_the_same_bits_in_any_company(kind):
    x, weight, _ = operands((160, 1100), torch.float32)
    packed = pack(weight, kind)
    alone = torch.cat([multiply(row[None], packed) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in ROWS:
            assert torch.equal(multiply(x[:rows], packed), alone[:rows])
            assert torch.equal(multiply(x[-rows:], packed), alone[-rows:])


@pytest.mark.parametrize("kind", [I8, I4])
def test_quantized_rows_of_zeros_and_of_no_numbers(kind):
    x, weight, _ = operands((64, 200), torch.float32, 5)
    x[1], x[3, 150], x[4, 0] = 0, float("nan"), float("inf")
    weight[7] = 0
    found = multiply(x, pack(weight, kind))
    assert not found[1].any() and not found[:3, 7].any() and found[[0, 2]].isfinite().all()
    assert found[3].isnan().all() and not found[4].isfinite().any()
