"""Products of narrow rows (int8, fp8) with narrow weights, against ``Activations.rounded`` times ``Codes.values``.

Kernels are compiled where there is a GPU, else run under Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE

pytest.importorskip("triton")

from quire.gpu_worker.kernels import w8a8
from quire.gpu_worker.kernels.activation import gated_activation_torch
from quire.gpu_worker.kernels.card import INTERPRETER, KIB, Card
from quire.gpu_worker.kernels.codes import Activations, Codes, PerGroup, float_table, pack
from quire.gpu_worker.kernels.linear import Tiles
from quire.gpu_worker.kernels.w8a8 import HeldNarrow, narrowed, product, takes
from quire.gpu_worker.layers.formats.cuda_coded import CudaCoded, CudaNarrow, cuda_product

SMALL = Tiles(16, 32, 32, 1, 4, 2)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weight(kind, columns=90, rows=40, **how):
    """Codes of int8, or of e4m3, with a scale for each row (or, with ``group``, each 128 columns)."""
    group = how.get("group") or columns
    scales = PerGroup(randn(rows, -(-columns // group), seed=1).abs() * 1e-2 + 1e-3)
    generator = torch.Generator().manual_seed(2)
    if kind == "int8":
        codes, more = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8), {"signed": True}
    else:
        codes = torch.randint(0, 127, (rows, columns), generator=generator) + 128 * torch.randint(2, (rows, columns))
        more = {"table": float_table("e4m3", DEVICE), "floats": "e4m3"}
    planes = pack(codes.to(torch.int8 if kind == "int8" else torch.uint8).to(DEVICE), 8)
    return Codes(planes, 8, columns, group, scales, activations=Activations(kind, **how), **more)


def given(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


HOW = {
    "int8": ("int8", {}),
    "int8 with zeros of rows": ("int8", {"symmetric": False}),
    "int8 by the file's scale": ("int8", {"scale": given(0.02)}),
    "int8 by the file's scale and zero": ("int8", {"scale": given(0.02), "zero": given(-7, dtype=torch.int32)}),
    "int8 of groups": ("int8", {"group": 128}),
    "fp8": ("fp8", {}),
    "fp8 by the file's scale": ("fp8", {"scale": given(0.005)}),
    "fp8 of groups": ("fp8", {"group": 128}),
}


@pytest.mark.parametrize("name", HOW)
def test_rows_are_made_narrow_as_the_definition_says(name):
    kind, how = HOW[name]
    rows, x = Activations(kind, **how), randn(3, 300)
    x[1] = 0.0
    q, scales, zeros = narrowed(x, rows)
    want, want_scales, want_zeros = rows.narrowed(x)
    found = q.view(torch.float8_e4m3fn) if kind == "fp8" else q
    assert torch.equal(found.float(), want)
    wide = scales.repeat_interleave(rows.group or 300, 1)[:, :300]
    torch.testing.assert_close(wide, want_scales.expand(3, 300), rtol=1e-6, atol=0)
    assert (zeros is None) == (want_zeros is None)
    if zeros is not None:
        assert torch.equal(zeros[:, None].expand(3, 300), want_zeros.expand(3, 300))


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize(("activation", "splits"), [("", 1), ("", 2), ("silu", 2)])
def test_products_are_those_of_the_rounded_rows(name, activation, splits):
    kind, how = HOW[name]
    codes = weight(kind, columns=290 if how.get("group") else 90, **how)
    tiles = SMALL._replace(splits=splits, block_k=128 if how.get("group") else 32)
    x, bias = randn(5, codes.columns), randn(40, seed=3)
    got = product(x, HeldNarrow.of(codes), bias, tiles, activation)
    want = codes.activations.rounded(x) @ codes.values().T + bias
    want = gated_activation_torch(want, activation) if activation else want
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("wrong", [[float("nan")] * 290, [0.0, float("nan")]])
def test_rows_that_are_no_numbers_stay_so_and_fail_alone(name, wrong):
    kind, how = HOW[name]
    codes = weight(kind, columns=290, **how)
    tiles, x = SMALL._replace(block_k=128 if how.get("group") else 32), randn(3, 290)
    want = product(x, HeldNarrow.of(codes), None, tiles)
    x[1, : len(wrong)] = given(*wrong)
    got = product(x, HeldNarrow.of(codes), None, tiles)
    assert got[1].isnan().all()
    assert torch.equal(got[::2], want[::2])


AMPERE = Card("a", "cuda", 86, 82, 99 * KIB, 100 * KIB)
HOPPER = Card("b", "cuda", 90, 132, 227 * KIB, 228 * KIB)


def test_cards_multiply_what_their_units_have():
    int8, fp8 = weight("int8"), weight("fp8")
    assert takes(int8, AMPERE) and takes(int8, HOPPER)
    assert not takes(fp8, AMPERE) and takes(fp8, HOPPER)
    assert not takes(fp8, Card("c", "hip", "gfx942", 304, 64 * KIB, 64 * KIB))
    assert not takes(replace(int8, activations=None), HOPPER)
    assert not takes(replace(int8, zeros=128), HOPPER)
    assert not takes(replace(weight("fp8"), activations=Activations("fp8", 128)), HOPPER)  # of other groups
    assert takes(weight("fp8", columns=256, group=128), HOPPER)


def test_what_a_card_does_not_multiply_keeps_its_rows(monkeypatch):
    codes, x = weight("fp8"), randn(3, 90)
    assert isinstance(cuda_product(codes, x.device), CudaNarrow)
    monkeypatch.setattr(w8a8, "takes", lambda codes, card: False)
    run = cuda_product(codes, x.device)
    assert isinstance(run, CudaCoded)
    torch.testing.assert_close(run(x, None), x @ codes.values().T, rtol=1e-4, atol=1e-4)


def test_tiles_fit_small_and_large_cards():
    held = HeldNarrow.of(weight("int8"))
    for card in (INTERPRETER, AMPERE, HOPPER):
        for activation in ("", "silu"):
            found = [w8a8.tiles_of(held, tokens, card, activation) for tokens in (1, 17, 200, 2000)]
            for tiles in [*found, w8a8.invariant_tiles(held, card, activation)]:
                rows = tiles.block_m + tiles.block_n * (2 if activation else 1)
                assert rows * tiles.block_k * tiles.stages <= card.shared


def test_a_layer_has_the_same_bits_for_all_rows_of_a_kind():
    """A long step's rows and a short one's, where one tile is for both."""
    run, x = CudaNarrow(HeldNarrow.of(weight("int8"))), randn(30, 90)
    assert torch.equal(run(x, None)[17:20], run(x[17:20].repeat(7, 1), None)[:3])
