"""The native kernels' products of codes against ``Codes.values()``, in every instruction set that runs here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_kernels import VARIANTS, using

from quire.gpu_worker.kernels.activation import gated_activation_torch
from quire.gpu_worker.kernels.codes import COLUMN_UNIT, Codes, PerGroup, pack
from quire.gpu_worker.kernels.cpu.codes import can_pack, pack_codes
from quire.gpu_worker.kernels.cpu.linear import GATED, multiply

ROWS = (1, 2, 3, 4, 7, 13, 40)
NF4 = torch.tensor(
    [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
     0.7230, 1.0]
)  # fmt: skip


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


def codes_of(bits: int, outputs: int = 100, columns: int = 320, group: int = 64, **more) -> Codes:
    values = torch.randint(0, 1 << bits, (outputs, columns), dtype=torch.uint8)
    groups = -(-columns // group)
    scales = PerGroup((torch.rand(outputs, groups) * 0.05 + 0.01).half())
    return replace(Codes(pack(values, bits), bits, columns, group, scales, 1 << (bits - 1)), **more)


def per_output_zeros(bits: int) -> Codes:
    return codes_of(bits, zeros=torch.randint(0, 1 << bits, (100, 5), dtype=torch.uint8))


def two_levels(bits: int) -> Codes:
    """As the K-quants of GGUF: a scale and a minimum of each 32 values, by a float16 of each 256."""
    outputs, columns = 100, 512
    fine = [torch.randint(0, 64, (outputs, columns // 32), dtype=torch.uint8) for _ in range(2)]
    base = [(torch.rand(outputs, columns // 256) * 0.01).half() for _ in range(2)]
    scales, mins = (PerGroup(*pair, 8) for pair in zip(base, fine, strict=True))
    return codes_of(bits, outputs, columns, 32, scales=scales, mins=mins, zeros=0)


def signed_levels(bits: int) -> Codes:
    """As Q6_K and Q3_K: signed fine scales of 16 values."""
    fine = torch.randint(-128, 128, (100, 32), dtype=torch.int8)
    base = (torch.rand(100, 2) * 0.001).half()
    return codes_of(bits, 100, 512, 16, scales=PerGroup(base, fine, 16))


def shared_table(bits: int) -> Codes:
    table = NF4 if bits == 4 else torch.randn(1 << bits)
    return codes_of(bits, group=64, zeros=0, table=table, scales=PerGroup(torch.rand(100, 5)))


def steps(bits: int = 4) -> Codes:
    """As MXFP4, of which all entries are multiples of a half."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scales = PerGroup(torch.rand(100, 10))
    return codes_of(bits, group=32, zeros=0, table=torch.cat([table, -table]), scales=scales)


def many_steps(bits: int = 4) -> Codes:
    """As IQ4_NL: whole numbers of which the largest is more than 127 above the smallest."""
    table = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
    return codes_of(bits, group=32, zeros=0, table=table, scales=PerGroup((torch.rand(100, 10) * 0.01).half()))


def own_tables(bits: int) -> Codes:
    return codes_of(bits, group=320, zeros=0, table=torch.randn(100, 1 << bits), scales=PerGroup(torch.ones(1, 1)))


def ordered(bits: int) -> Codes:
    """Columns in an order of their own, some of nothing."""
    order = torch.cat([torch.randperm(300), torch.full((20,), 300)])[torch.randperm(320)].int()
    zeros = torch.randint(0, 1 << bits, (100, 5), dtype=torch.uint8)
    return replace(codes_of(bits, zeros=zeros, order=order), columns=300)


def one_scale(bits: int) -> Codes:
    """A column that fills no unit, one group, and a bfloat16 scale for all."""
    return codes_of(bits, 33, 45, 45, scales=PerGroup(torch.tensor([[0.03]]).bfloat16()))


def short_group(bits: int) -> Codes:
    """The last group is shorter, and the last unit belongs to none."""
    return codes_of(bits, 40, 200, 48, scales=PerGroup(torch.rand(40, 5).bfloat16()))


def e4m3(bits: int = 8) -> Codes:
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.randn(100, 320).to(torch.float8_e4m3fn).view(torch.uint8)
    values[0, :9] = torch.arange(9)  # the smallest
    return codes_of(8, zeros=0, table=table, planes=pack(values, 8), scales=PerGroup(torch.rand(100, 5)))


def int8(bits: int = 8) -> Codes:
    values = torch.randint(-128, 128, (100, 320), dtype=torch.int8)
    return codes_of(8, zeros=0, signed=True, planes=pack(values, 8))


KINDS = [
    (make, bits)
    for make, widths in (
        (codes_of, range(2, 9)), (per_output_zeros, range(2, 9)), (two_levels, range(2, 9)), (signed_levels, (3, 6)),
        (shared_table, range(2, 9)), (own_tables, range(2, 9)), (ordered, range(2, 9)), (one_scale, range(2, 9)),
        (short_group, (3, 4, 8)), (e4m3, (8,)), (int8, (8,)), (steps, (4,)), (many_steps, (4,)),
    )
    for bits in widths
]  # fmt: skip


def check(got: torch.Tensor, x: torch.Tensor, codes: Codes, bias: torch.Tensor | None = None) -> None:
    """``got`` is the product with ``Codes.values()`` within the rounding of sums of codes."""
    weight = codes.values().double()
    want = x.double() @ weight.T + (0 if bias is None else bias.double())
    largest = x.double().abs() @ weight.abs().amax(1, keepdim=True).T.expand(x.shape[1], -1)
    assert ((got.double() - want).abs() / (largest + 1)).max() < 2e-6


@pytest.mark.parametrize(("make", "bits"), KINDS)
def test_products_are_those_of_the_values(make, bits):
    codes = make(bits)
    packed, x, bias = pack_codes(codes), torch.randn(40, codes.columns), torch.randn(codes.rows)
    packed.set_bias(bias)
    check(multiply(x, packed), x, codes, bias)
    alone = torch.cat([multiply(row[None], packed) for row in x])
    check(alone, x, codes, bias)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in ROWS:
            assert torch.equal(multiply(x[-rows:], packed), alone[-rows:])


@pytest.mark.parametrize("make", [codes_of, two_levels, own_tables])
def test_a_gated_epilogue(make):
    codes = make(4)
    packed, x = pack_codes(codes, gated=True), torch.randn(9, codes.columns)
    plain = multiply(x, packed)
    check(plain, x, codes)
    gated = multiply(x, packed, torch.empty(9, codes.rows // 2), GATED, 0)
    torch.testing.assert_close(gated, gated_activation_torch(plain, "silu"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("columns", "rows"), [(1600, 5), (1600, 130), (896, 1)])
def test_inputs_of_several_blocks_and_rows_of_several_parts(columns, rows):
    for codes in (codes_of(4, 70, columns, 320), codes_of(5, 70, columns, columns)):
        packed, x = pack_codes(codes), torch.randn(rows, columns)
        found = multiply(x, packed)
        check(found, x, codes)
        assert torch.equal(multiply(x[:1], packed), found[:1])


def test_packed_codes_take_little_more_than_the_codes():
    for bits in range(2, 9):
        codes = codes_of(bits, 320, 1024, 128, zeros=torch.zeros(320, 8, dtype=torch.uint8))
        assert pack_codes(codes).nbytes < 1.1 * codes.nbytes


def test_rows_of_other_dtypes_give_their_own():
    codes, x = codes_of(4), torch.randn(3, 320)
    packed = pack_codes(codes)
    for dtype in (torch.bfloat16, torch.float16):
        got = multiply(x.to(dtype), packed)
        assert got.dtype == dtype and torch.equal(got, multiply(x.to(dtype).float(), packed).to(dtype))


def test_a_value_that_is_not_finite_stays_in_its_row():
    codes, x = codes_of(4), torch.randn(6, 320)
    x[1, 5], x[4, 0] = float("nan"), float("inf")
    found = multiply(x, pack_codes(codes))
    assert not found[[1, 4]].isfinite().any() and found[[0, 2, 3, 5]].isfinite().all()


def test_what_cannot_be_packed_is_known():
    assert COLUMN_UNIT % 32 == 0
    assert not can_pack(codes_of(4, group=40))  # groups that end within a run
    assert can_pack(codes_of(4, columns=40, group=40))
    experts = codes_of(4, order=torch.arange(320)[None].int())
    assert not can_pack(experts)
