"""Products with codes against ``Codes.values``: every width, and every way in which values are made of codes.

Kernels are compiled where there is a GPU, else run under Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE
from rows_alike import rows_alike  # noqa: F401  # a fixture

pytest.importorskip("triton")

from quire.gpu_worker.kernels import coded, linear, moe
from quire.gpu_worker.kernels.card import INTERPRETER, KIB, Card, check_card
from quire.gpu_worker.kernels.coded import Held, product, product_torch
from quire.gpu_worker.kernels.coded_experts import grouped_product, grouped_tiles
from quire.gpu_worker.kernels.codes import Codes, PerGroup, float_table, pack
from quire.gpu_worker.kernels.linear import Tiles
from quire.gpu_worker.layers.formats import cuda_coded
from quire.gpu_worker.layers.formats.cuda_coded import CudaCoded
from quire.proto.config import ConfigError

DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = Tiles(16, 32, 32, 1, 4, 2)


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def whole(*shape, most, seed=0, least=0, dtype=torch.uint8):
    found = torch.randint(least, most, shape, generator=torch.Generator().manual_seed(seed))
    return found.to(DEVICE, dtype)


def weight(rows=40, columns=96, bits=4, group=32, lead=(), **more):
    """Codes of ``rows`` and ``columns`` with a scale for each group, and what ``more`` says."""
    codes = whole(*lead, rows, columns, most=1 << bits)
    count = -(-columns // group)
    scales = PerGroup((rand(*lead, rows, count, seed=1) * 0.02 + 0.01).half())
    return Codes(pack(codes, bits), bits, columns, group, **({"scales": scales} | more))


def fine(*lead, rows=40, groups=6, ratio=2, seed=3, dtype=torch.uint8, least=0):
    """Scales in two steps."""
    base = (rand(*lead, rows, groups // ratio, seed=seed) * 1e-3).half()
    return PerGroup(base, whole(*lead, rows, groups, most=64, least=least, seed=seed + 1, dtype=dtype), ratio)


def order(columns, padded):
    """Columns in another order, with some of nothing among them."""
    places = torch.cat([torch.arange(columns), torch.full((padded - columns,), columns)])
    return places[torch.randperm(padded, generator=torch.Generator().manual_seed(5))].int().to(DEVICE)


def signed(rows=40, columns=96):
    codes = whole(rows, columns, most=128, least=-128, dtype=torch.int8)
    return Codes(pack(codes, 8), 8, columns, columns, PerGroup(rand(rows, 1, seed=1) * 1e-3), signed=True)


def small_floats(kind, bits, group):
    codes = whole(40, 96, most=(1 << bits) - (129 if bits == 8 else 0))  # no NaN among them
    scales = PerGroup(rand(40, -(-96 // group), seed=1).bfloat16() * 0.01)
    return Codes(pack(codes, bits), bits, 96, group, scales, table=float_table(kind, DEVICE), floats=kind)


WEIGHTS = {
    **{f"{bits} bits": lambda bits=bits: weight(bits=bits, zeros=1 << (bits - 1)) for bits in range(2, 9)},
    "zeros of groups": lambda: weight(zeros=whole(40, 3, most=16, seed=2)),
    "a zero for each row": lambda: weight(zeros=whole(40, 1, most=16, seed=2)),
    "one scale for all": lambda: weight(scales=PerGroup(rand(1, 1)), zeros=8),
    "a scale for each row": lambda: weight(bits=8, group=96, scales=PerGroup(rand(40, 1) * 0.01), zeros=128),
    "int8": signed,
    "mins": lambda: weight(mins=PerGroup(rand(40, 3, seed=2))),
    "mins of short groups": lambda: weight(group=16, mins=PerGroup(rand(40, 6, seed=2))),
    "a min of all columns": lambda: weight(group=96, mins=PerGroup(rand(40, 1, seed=2))),
    "scales and mins in two steps": lambda: weight(group=16, scales=fine(), mins=fine(seed=7)),
    "signed fine scales": lambda: weight(bits=6, group=16, scales=fine(dtype=torch.int8, least=-64), zeros=32),
    "groups that tear tiles": lambda: weight(group=24, zeros=whole(40, 4, most=16, seed=2)),
    "a last group that is short": lambda: weight(columns=80, group=64, zeros=8),
    "columns of half a word": lambda: weight(bits=3, columns=77, group=77, zeros=4),
    "a table": lambda: weight(table=randn(16, seed=4), group=64),
    "a table of 256": lambda: weight(bits=8, table=randn(256, seed=4)),
    "tables of rows": lambda: weight(bits=3, table=randn(40, 8, seed=4), scales=PerGroup(torch.ones(1, 1).to(DEVICE))),
    "e4m3": lambda: small_floats("e4m3", 8, 32),
    "e2m1": lambda: small_floats("e2m1", 4, 32),
    "another order": lambda: replace(weight(zeros=8), order=order(96, 96)),
    "another order, and columns of nothing": lambda: replace(weight(zeros=8), columns=83, order=order(83, 96)),
}


def agree(got, want, dtype):
    assert got.dtype == want.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_agree_with_the_values(name):
    codes = WEIGHTS[name]()
    held, bias = Held.of(codes), randn(codes.rows, seed=8)
    x = randn(5, codes.columns + 8)[:, : codes.columns]
    agree(product(x, held, bias, SMALL._replace(splits=2)), product_torch(x, codes, bias), torch.float32)


@pytest.mark.parametrize("name", WEIGHTS)
def test_values_are_those_of_the_codes(name):
    codes = WEIGHTS[name]()
    found = coded.values(Held.of(codes), torch.float32)
    torch.testing.assert_close(found, codes.values(), rtol=1e-6, atol=1e-6 if codes.mins is not None else 0)
    assert torch.equal(coded.values(Held.of(codes), torch.float32, 7, 39), found[7:39])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "name", "activation"),
    [
        (1, "zeros of groups", ""),
        (16, "mins", "silu"),
        (33, "int8", "swiglu_oai"),
        (3, "e4m3", ""),
        (20, "a table", ""),
    ],
)
def test_products_of_every_type(dtype, tokens, name, activation):
    codes = WEIGHTS[name]()
    held, bias, x = Held.of(codes), randn(40, seed=8, dtype=dtype), randn(tokens, 96, dtype=dtype)
    for splits in (1, 2):
        got = product(x, held, bias, SMALL._replace(splits=splits), activation)
        agree(got, product_torch(x, codes, bias, activation), dtype)


@pytest.mark.parametrize("block_k", [32, 64, 128])
@pytest.mark.parametrize(
    "name", ["zeros of groups", "scales and mins in two steps", "a last group that is short", "7 bits"]
)
def test_tiles_of_one_group_and_of_several(name, block_k):
    codes = WEIGHTS[name]()
    x, tiles = randn(5, codes.columns), SMALL._replace(block_k=block_k)
    agree(product(x, Held.of(codes), None, tiles), product_torch(x, codes, None), torch.float32)


def test_small_floats_are_made_of_their_bits():
    """All there are but NaN, subnormal ones and both zeros among them."""
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)[None].repeat(2, 1)
    every[every & 127 == 127] = 0
    one = PerGroup(torch.ones(1, 1, device=DEVICE))
    for codes, bits, kind in ((every, 8, "e4m3"), (every % 16, 4, "e2m1")):
        plain = Codes(pack(codes, bits), bits, 256, 256, one, table=float_table(kind, DEVICE), floats=kind)
        assert torch.equal(coded.values(Held.of(plain), torch.float32), plain.values())


def test_sums_of_parts_have_one_order_however_they_are_added(monkeypatch):
    x, held, bias = randn(7, 96), Held.of(weight(zeros=8)), randn(40, seed=2)
    for activation in ("", "gelu"):
        monkeypatch.setattr(coded, "APART_ROWS", 7)
        apart = product(x, held, bias, SMALL._replace(splits=2), activation)
        monkeypatch.setattr(coded, "APART_ROWS", 6)
        assert torch.equal(product(x, held, bias, SMALL._replace(splits=2), activation), apart)


def test_no_rows_and_an_unknown_activation():
    held = Held.of(weight())
    assert product(randn(0, 96), held, None, SMALL).shape == (0, 40)
    with pytest.raises(ValueError, match="swish"):
        product(randn(1, 96), held, None, SMALL, "swish")


# --- experts ---


def experts_of(name):
    """Three experts' codes as one weight."""
    return {
        "zeros": lambda: weight(lead=(3,), zeros=whole(3, 40, 3, most=16, seed=2)),
        "planes": lambda: weight(lead=(3,), bits=7, zeros=64),
        "mins in two steps": lambda: weight(lead=(3,), group=16, scales=fine(3), mins=fine(3, seed=7)),
        "one scale for each": lambda: weight(lead=(3,), bits=8, scales=PerGroup(rand(3, 1, 1) * 0.01), zeros=128),
        "a table for all": lambda: weight(lead=(3,), table=float_table("e2m1", DEVICE)),
        "e2m1": lambda: weight(lead=(3,), table=float_table("e2m1", DEVICE), floats="e2m1"),
        "a table for each": lambda: weight(lead=(3,), table=randn(3, 16, seed=4)),
        "tables of rows": lambda: weight(lead=(3,), table=randn(3, 40, 16, seed=4)),
        "orders": lambda: replace(
            weight(lead=(3,), zeros=8), columns=83, order=torch.stack([order(83, 96).roll(n) for n in range(3)])
        ),
        "one order": lambda: replace(weight(lead=(3,), zeros=8), order=order(96, 96)),
    }[name]()


@pytest.mark.parametrize(
    ("name", "activation"),
    [("zeros", ""), ("zeros", "silu"), ("planes", ""), ("mins in two steps", "gelu"), ("one scale for each", ""),
     ("a table for all", ""), ("e2m1", "swiglu_oai"), ("a table for each", ""), ("tables of rows", ""), ("orders", ""),
     ("one order", "")],
)  # fmt: skip
def test_each_slot_is_multiplied_by_its_own_expert(name, activation):
    """Of four experts this rank has the last three, and a token chooses two."""
    codes, ids = experts_of(name), torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [1, 2]], device=DEVICE)
    blocks = moe.align_torch(ids, 1, 3, 16)
    bias = randn(3, 40, seed=3)
    x, weights = randn(5, codes.columns), rand(5, 2, seed=4)
    got = grouped_product(x, Held.of(codes), bias, blocks, activation, weights)
    want = moe.grouped_product_torch(x, codes.values(), bias, blocks, activation, weights)
    mine = ids.flatten() > 0
    agree(got[mine], want[mine], torch.float32)


# --- the choice ---


@pytest.mark.parametrize(("arch", "has"), [(70, "7.0"), (75, "7.5")])
def test_an_older_card_is_refused_in_one_line(arch, has):
    with pytest.raises(ConfigError, match=rf"old has compute capability {has}, .*at least 8\.0 .*--device=cpu") as told:
        check_card(Card("old", "cuda", arch, 80, 64 * KIB, 64 * KIB))
    assert "\n" not in str(told.value)
    check_card(Card("new", "cuda", 80, 108, 163 * KIB, 164 * KIB))


CARDS = [
    INTERPRETER,
    Card("small", "hip", "gfx942", 304, 64 * KIB, 64 * KIB),
    Card("a", "cuda", 86, 82, 99 * KIB, 100 * KIB),
    Card("b", "cuda", 90, 132, 227 * KIB, 228 * KIB),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_fit_small_and_large_cards(dtype):
    for name, make in WEIGHTS.items():
        held = Held.of(make())
        for shape in ((40, 96), (4096, 14336), (28672, 4096), (151936, 1024)):
            of = replace(held, rows=shape[0], columns=shape[1], padded=shape[1])
            for card in CARDS:
                found = [coded.tiles_of(of, tokens, dtype, card, "silu") for tokens in (1, 17, 200)]
                found += [coded.invariant_tiles(of, dtype, card), grouped_tiles(of, 16, dtype, card)]
                for tiles in found:
                    assert tiles.block_n * tiles.block_k * 4 < card.shared and tiles.stages >= 1
                    assert held.group < 32 or held.group % 32 or of.sub(tiles.block_k) == 1, (name, tiles)
                    assert tiles.splits == 1 or shape[1] // tiles.splits >= tiles.block_k


def test_a_step_of_any_rows_takes_what_the_warm_up_has_run():
    """``ByRows`` has another value wherever something else is launched."""
    held, seen = Held.of(weight(zeros=8)), {}
    for tokens in range(1, 600):
        (value,) = coded.ByRows()(linear_shape(tokens))
        if tokens > coded.LIBRARY_ROWS:
            launched = "library"
        else:
            launched = coded.tiles_of(held, tokens, torch.float16, CARDS[3]), tokens <= coded.APART_ROWS
        assert seen.setdefault(value, launched) == launched
    assert len(seen) == len(set(seen.values())) == 4


def linear_shape(tokens):
    return coded.StepShape(1, 0, tokens, tokens, tokens)


@pytest.mark.usefixtures("rows_alike")
def test_a_row_has_the_same_bits_in_any_company(monkeypatch):
    monkeypatch.setattr(cuda_coded, "batch_invariant", lambda: True)
    monkeypatch.setattr(coded, "APART_ROWS", 40)
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    codes = weight(rows=40, columns=256, zeros=8)
    run, bias, x = CudaCoded(Held.of(codes)), randn(40, seed=2), randn(110, 256)
    whole_batch = run(x, bias)
    agree(whole_batch, product_torch(x, codes, bias), torch.float32)
    for rows in (slice(0, 1), slice(3, 5), slice(70, 71), slice(10, 43), slice(109, 110)):
        assert torch.equal(run(x[rows], bias), whole_batch[rows]), rows


@pytest.mark.parametrize("piece", [1 << 27, 100 * 96 * 4])
def test_many_rows_are_multiplied_by_the_library_a_piece_at_a_time(monkeypatch, piece):
    monkeypatch.setattr(coded, "PIECE_BYTES", piece)
    monkeypatch.setattr(cuda_coded, "gated_activation", linear.gated_activation_torch)
    made, values = [], coded.values
    monkeypatch.setattr(coded, "values", lambda *args: made.append(args[2:]) or values(*args))
    codes = weight(rows=150, zeros=8)
    run, bias = CudaCoded(Held.of(codes)), randn(150, seed=2)
    # A piece of 100 rows would make the library write at addresses that its fast kernels do not take.
    cut = [(0, 64), (64, 128), (128, 150)] if piece < 1 << 20 else [()]
    for rows, pieces in ((256, []), (257, cut)):
        x = randn(rows, 96)
        agree(run(x, bias), product_torch(x, codes, bias), torch.float32)
        assert made == pieces
    agree(run.joined("silu")(x, bias), product_torch(x, codes, bias, "silu"), torch.float32)
