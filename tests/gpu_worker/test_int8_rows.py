"""W8A8 in int8 on a CPU: a file's own numbers, -128 among them, times rows that become int8 as the file says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.gpu_worker.kernels.codes import Activations, Codes, PerGroup, pack
from quire.gpu_worker.kernels.cpu.library import library
from quire.gpu_worker.layers.formats import int8_rows
from quire.gpu_worker.layers.formats.base import Weight, whole
from quire.gpu_worker.layers.formats.coded import experts_of, product_of
from quire.gpu_worker.layers.formats.native import NativeRun

CPU = torch.device("cpu")
ROWS = {
    "dynamic": Activations("int8"),
    "dynamic with zeros": Activations("int8", symmetric=False),
    "static": Activations("int8", scale=torch.tensor([0.02])),
    "static with a zero": Activations("int8", scale=torch.tensor([0.02]), zero=torch.tensor([5], dtype=torch.int32)),
}


def codes_of(shape: tuple[int, ...], rows: Activations) -> Codes:
    random = torch.Generator().manual_seed(sum(shape))
    values = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
    scales = torch.rand(*shape[:-1], 1, generator=random) * 0.01
    return Codes(pack(values, 8), 8, shape[-1], shape[-1], PerGroup(scales), signed=True, activations=rows)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("rows", "columns", "gated"), [(50, 70, False), (96, 128, True), (40, 64, True)])
@pytest.mark.parametrize("kind", ROWS)
def test_the_product_is_that_of_the_rounded_rows(
    kind: str, rows: int, columns: int, gated: bool, native: bool, monkeypatch: Any
) -> None:
    if not native:
        monkeypatch.setattr(int8_rows, "library", lambda: None)
    codes, weight = codes_of((rows, columns), ROWS[kind]), Weight((whole(rows),), whole(columns), torch.float32, CPU)
    run = product_of(codes, replace(weight, gated=gated))
    assert isinstance(run, NativeRun) == (native and kind == "dynamic" and library() is not None)
    x, bias = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)), torch.arange(float(rows))
    if isinstance(run, NativeRun):
        run.packed.set_bias(bias)
    want = ROWS[kind].rounded(x).double() @ codes.values().double().T + bias
    torch.testing.assert_close(run(x, bias).double(), want, atol=1e-5, rtol=1e-5)
    assert run(x.bfloat16(), bias).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_are_no_numbers_stay_so_and_fail_alone(kind: str) -> None:
    codes, weight = codes_of((40, 64), ROWS[kind]), Weight((whole(40),), whole(64), torch.float32, CPU)
    run, x = product_of(codes, weight), torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    want = run(x, None)
    x[1], x[2, 5] = float("nan"), float("nan")
    got = run(x, None)
    assert got[1:3].isnan().all()
    assert torch.equal(got[::3], want[::3])


@pytest.mark.parametrize("kind", ["dynamic", "static with a zero"])
def test_experts_have_scales_of_their_own(kind: str) -> None:
    rows = ROWS[kind]
    if rows.scale is not None and rows.zero is not None:
        rows = replace(rows, scale=torch.tensor([[0.02], [0.03]]), zero=torch.tensor([[5], [-7]]))
    codes = codes_of((2, 40, 64), rows)
    products = experts_of(codes, Weight((whole(40),), whole(64), torch.float32, CPU, experts=2))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    for expert in range(2):
        one = codes.expert(expert)
        assert one.activations is not None
        want = one.activations.rounded(x).double() @ one.values().double().T
        torch.testing.assert_close(products.one(x, None, expert).double(), want, atol=1e-5, rtol=1e-5)


def test_rows_of_zeros_and_of_one_sign_are_kept() -> None:
    for rows in ROWS.values():
        assert torch.equal(rows.rounded(torch.zeros(1, 8)), torch.zeros(1, 8))
    high = torch.full((1, 8), 3.0)
    torch.testing.assert_close(ROWS["dynamic with zeros"].rounded(high), high, atol=0.02, rtol=0)
    torch.testing.assert_close(Activations("fp8").rounded(high), high, atol=0, rtol=1e-6)
    halves = torch.tensor([[1.0, 0.5, 1000.0, 500.0]])
    assert torch.equal(Activations("fp8", group=2).rounded(halves), halves)
