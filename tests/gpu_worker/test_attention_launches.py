"""What attention launches in a step: which tiles, in which order, into how many splits; and how often that is chosen.

What it computes is in ``test_kernels_attention.py``.
"""

import math
from pathlib import Path

import pytest
import torch
from kernel_device import DEVICE

pytest.importorskip("triton")

from paged_cases import batch_of
from rows_alike import rows_alike  # noqa: F401  # a fixture

from quire.gpu_worker import main
from quire.gpu_worker.batch import StepShape, longest_first
from quire.gpu_worker.kernels import attention, attention_tiles, company
from quire.gpu_worker.kernels.attention import Scores
from quire.gpu_worker.kernels.attention_tiles import LayerShape, Tiles, Variant
from quire.gpu_worker.kernels.card import KIB, Card
from quire.proto.config import ConfigError, EngineArgs

CARDS = {
    "A100": Card("A100", "cuda", 80, 108, 163 * KIB, 164 * KIB),
    "3090": Card("RTX 3090", "cuda", 86, 82, 99 * KIB, 100 * KIB),
    "H100": Card("H100", "cuda", 90, 132, 227 * KIB, 228 * KIB),
    "B200": Card("B200", "cuda", 100, 148, 227 * KIB, 228 * KIB),
    "5090": Card("RTX 5090", "cuda", 120, 170, 99 * KIB, 100 * KIB),
    "MI300X": Card("MI300X", "hip", "gfx942", 304, 64 * KIB, 64 * KIB),
}
BF16 = torch.bfloat16


@pytest.fixture
def on(monkeypatch):
    """Choose as for this card."""

    def use(name):
        monkeypatch.setattr(attention_tiles, "card_of", lambda device: CARDS[name])

    return use


@pytest.fixture
def invariant():
    company.set_batch_invariant(True)
    yield
    company.set_batch_invariant(False)


def launches(shape, dim=128, window=None):
    return attention_tiles.launches(LayerShape(32, 8, dim, window, BF16, torch.device("cpu")), shape)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("decodes", [1, 100, 255])
def test_decodes_of_a_mixed_step_keep_their_own_tiles(card, decodes, on):
    """However many there are: in a prefill's tile of 128 rows a decode would use four."""
    on(card)
    step = launches(StepShape(decodes + 1, decodes, decodes + 1024, 1024, 4096))
    alone = launches(StepShape(decodes, decodes, decodes, 1, 4096))
    prompt = launches(StepShape(1, 0, 1024, 1024, 1024))
    assert step == [*alone, *prompt]
    assert [variant.decode for variant, _ in step] == [True, False]
    assert step[0][0].tiles.block_m == 16 and step[1][0].tiles.block_m == 128


@pytest.mark.parametrize("card", ["3090", "5090"])
def test_cards_of_99_kib_have_tiles_worth_having(card, on):
    """Queries lie in shared memory once, and one tile of keys and values beside them."""
    on(card)
    for dim, keys in ((64, 64), (128, 32), (256, 32)):
        assert launches(StepShape(1, 0, 512, 512, 512), dim)[0][0].tiles.block_n == keys
        assert launches(StepShape(4, 4, 4, 1, 512), dim)[0][0].tiles.block_n == 64


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("narrow", [False, True])
def test_tiles_fit_the_card(name, dim, dtype, narrow, on):
    on(name)
    card = CARDS[name]
    for group in (1, 4, 7, 16):
        layer = LayerShape(8 * group, 8, dim, None, dtype, torch.device("cpu"), narrow)
        for length in (2, 5, 17, 512):
            for variant, _ in attention_tiles.launches(layer, StepShape(5, 4, 4 + length, length, 4096)):
                assert attention_tiles.shared_bytes(dim, dtype, variant.tiles, card, narrow) <= card.shared
                assert variant.tiles.block_n >= 16 and variant.tiles.block_m >= group


COMPILED = Path(__file__).parent / "compiled" / "triton-3.9.txt"
DIMS = {"dim-256": 256, "dim-80": 80, "sinks": 64, "softcap": 64}


def test_the_estimate_of_shared_memory_is_what_compiled_kernels_take():
    """An upper bound, and at most probabilities above it, for every launch of attention in the table."""
    targets, seen = {f"sm_{card.arch}" if card.backend == "cuda" else card.arch: card for card in CARDS.values()}, 0
    for line in COMPILED.read_text().splitlines():
        target, launch, kernel, tile, _, warps, stages, _, _, shared, *_ = line.split()
        if kernel != "attention_kernel" or target not in targets:
            continue
        dim = next((dim for name, dim in DIMS.items() if name in launch), 128)
        dtype = torch.float32 if "fp32" in launch else BF16
        block_m, block_n = (int(size[1:]) for size in tile.split(",")[:2])
        tiles = Tiles(block_m, block_n, int(warps), int(stages))
        narrow = "e4m3" in launch or "e5m2" in launch
        estimate = attention_tiles.shared_bytes(dim, dtype, tiles, targets[target], narrow)
        assert int(shared) <= estimate <= 1.55 * int(shared), line
        seen += 1
    assert seen > 60


@pytest.mark.parametrize("card", CARDS)
def test_splits_fill_whole_waves(card, on):
    """Little of the card is left idle in the last wave."""
    on(card)
    for rows in range(1, 65):
        [(variant, splits)] = launches(StepShape(rows, rows, rows, 1, 8192))
        slots = CARDS[card].processors * attention_tiles.resident(128, BF16, variant.tiles, CARDS[card])
        waves = -(-rows * 8 * splits // slots)
        assert 1 <= splits <= attention_tiles.MAX_SPLITS
        if splits < attention_tiles.MAX_SPLITS:
            assert rows * 8 * splits / (waves * slots) > 0.7, (rows, splits, waves)
    [(_, few)] = launches(StepShape(1, 1, 1, 1, 8192))
    assert few >= min(attention_tiles.MAX_SPLITS, slots // 8) // 2
    assert launches(StepShape(4096, 4096, 4096, 1, 8192))[0][1] == 1
    for context in (1, 100, 255):
        assert launches(StepShape(1, 1, 1, 1, context))[0] == (Variant(True, variant.tiles, False), 1)


@pytest.mark.parametrize("card", CARDS)
def test_keys_that_are_widened_take_smaller_tiles(card, on):
    """As many rows and keys as are not widened would spill, or leave room for half of the programs."""
    on(card)
    for dim, keys in ((64, 64), (128, 32), (256, 32)):
        layer = LayerShape(32, 8, dim, None, BF16, torch.device("cpu"), narrow=True)
        [(decode, _), (prompt, _)] = attention_tiles.launches(layer, StepShape(5, 4, 1028, 1024, 4096))
        assert decode.tiles.block_n == (keys if CARDS[card].backend == "cuda" else 32)
        assert prompt.tiles.block_m == 64 and prompt.tiles.block_n <= (64 if dim < 256 else 32)


def test_a_window_bounds_the_splits(on):
    on("H100")
    assert launches(StepShape(1, 1, 1, 1, 100_000), window=128)[0][1] == 1


def test_one_tile_for_all_where_bits_must_not_hang_on_company(on, invariant):
    on("H100")
    shapes = [StepShape(1, 1, 1, 1, 9000), StepShape(9, 8, 8 + 1024, 1024, 9000), StepShape(1, 0, 3, 3, 3)]
    assert len({tuple(launches(shape)) for shape in shapes}) == 1
    assert launches(shapes[0])[0][1] == 1


@pytest.mark.parametrize("arch", [70, 75])
def test_cards_that_are_too_old_are_refused_in_a_line(arch, monkeypatch):
    card = Card("Tesla T4", "cuda", arch, 40, 64 * KIB, 64 * KIB)
    refused(card, monkeypatch, f"Tesla T4 has compute capability 7.{arch % 10}.*at least 8.0.*--device=cpu")


def test_amds_cards_without_matrix_instructions_are_refused(monkeypatch):
    card = Card("RX 6900", "hip", "gfx1030", 80, 64 * KIB, 64 * KIB)
    refused(card, monkeypatch, "RX 6900 is gfx1030.*--device=cpu")


def refused(card, monkeypatch, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        start_on(card, monkeypatch)
    assert "\n" not in str(refusal.value)


def start_on(card, monkeypatch, **flags):
    """As far as a worker's start asks what the card can do."""
    monkeypatch.setattr("quire.gpu_worker.kernels.card.card_of", lambda device: card)
    main._suit(EngineArgs(model="m", **flags), torch.device("cuda"))


@pytest.mark.parametrize("name", CARDS)
def test_cards_of_today_are_taken(name, monkeypatch):
    start_on(CARDS[name], monkeypatch)


def test_products_are_as_precise_as_the_backend_knows():
    assert CARDS["MI300X"].precision(torch.float32) == CARDS["MI300X"].precision(BF16) == "ieee"
    assert CARDS["H100"].precision(torch.float32) == "tf32x3"


class Step:
    """Rows of (query length, context length), decodes first, with keys and queries by chance."""

    def __init__(self, lens, heads=4, kv_heads=2, dim=16, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        pages, tables = 0, []
        for _, context in lens:
            tables.append(list(range(pages, pages - (-context // 16))))
            pages = tables[-1][-1] + 1 if tables[-1] else pages
        shape = (pages, 16, kv_heads, dim)
        self.k, self.v = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
        self.batch = batch_of(lens, tables, 16)
        for name in ("query_starts", "context_lens", "block_tables"):
            setattr(self.batch, name, getattr(self.batch, name).to(DEVICE))
        tokens = sum(count for count, _ in lens)
        self.q = torch.randn(tokens, heads, dim, generator=generator).to(DEVICE, dtype)

    def attend(self, **options):
        return attention.paged_attention(self.q, self.k, self.v, self.batch, Scores(0.3, **options))


def test_the_block_that_sees_most_keys_starts_first():
    """The first program of each head is run alone: of three prompts it takes the end of the longest."""
    step = Step([(1, 900), (40, 40), (8, 500), (60, 60)])
    plan = attention.launches_of(step.q, step.k, step.batch, Scores(0.3))[-1]
    tokens_a_block = plan.tiles.block_m // 2
    plan.grid = (2, 1)
    out = torch.full_like(step.q, float("nan"))
    attention.launch(step.q, step.k, step.v, out, step.batch, Scores(0.3), plan)
    written = torch.nonzero(out[:, 0, 0].isfinite()).flatten().tolist()
    longest = range(41, 49)  # the row whose context is 500
    assert tokens_a_block >= 8
    assert written == list(longest)


def test_blocks_of_a_prompt_come_from_its_end():
    step = Step([(70, 70)])
    plan = attention.launches_of(step.q, step.k, step.batch, Scores(0.3))[-1]
    plan.grid = (2, 1)
    out = torch.full_like(step.q, float("nan"))
    attention.launch(step.q, step.k, step.v, out, step.batch, Scores(0.3), plan)
    size = plan.tiles.block_m // 2
    assert torch.nonzero(out[:, 0, 0].isfinite()).flatten().tolist() == list(range(70 // size * size, 70))


def test_the_host_orders_rows_as_the_device_does():
    lens = [(1, 5), (1, 9), (3, 40), (8, 90), (2, 40), (5, 1000)]
    step = Step(lens)
    counts, ends = (torch.tensor(column).numpy() for column in zip(*lens, strict=True))
    order, starts = longest_first(counts, ends, 2)
    found = attention._order(step.batch, 2)
    assert order.tolist() == found[0].tolist() == [5, 3, 2, 4]
    assert starts.tolist() == found[1].tolist() == [0, 5, 13, 16]
    assert order.dtype == starts.dtype == "int32" and {each.dtype for each in found} == {torch.int32}


def test_layers_of_a_kind_share_what_a_step_launches(monkeypatch):
    """Tiles, grids and scratch are worked out by the first layer of each kind in a step."""
    step, asked, choose = Step([(1, 900), (5, 30)]), [], attention.launches
    monkeypatch.setattr(attention, "launches", lambda *args: asked.append(args) or choose(*args))
    for _ in range(3):
        step.attend()
        step.attend(window=8)
    assert len(asked) == 2
    first, again = (attention.launches_of(step.q, step.k, step.batch, Scores(0.3)) for _ in range(2))
    assert first is again and first[0].partial is not None
    other = Step([(1, 900), (5, 30)], seed=1)
    other.attend()
    assert len(asked) == 3


@pytest.mark.usefixtures("invariant", "rows_alike")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 5.0}], ids=["plain", "window", "softcap"])
def test_a_token_has_the_same_bits_in_any_company_and_as_a_decode(dtype, options):
    """A row of 130 tokens: as one prompt, in chunks, among others, and its last token as a decode."""
    whole = Step([(130, 130)], dtype=dtype)
    want = whole.attend(**options)
    for lens in ([(1, 130)], [(30, 130)], [(1, 130), (1, 130), (7, 130), (90, 130)]):
        step = Step([(130, 130)], dtype=dtype)
        step.batch = batch_of(lens, [list(range(9))] * len(lens), 16)
        for name in ("query_starts", "context_lens", "block_tables"):
            setattr(step.batch, name, getattr(step.batch, name).to(DEVICE))
        step.q = torch.cat([whole.q[130 - count :] for count, _ in lens])
        got, start = step.attend(**options), 0
        for count, _ in lens:
            assert torch.equal(got[start : start + count], want[130 - count :]), lens
            start += count


def test_tiles_of_a_launch_that_is_asked_for_are_kept():
    step = Step([(1, 300)])
    plan = attention.plan_launch(step.q, step.k, step.batch, Scores(0.3), Variant(True, Tiles(16, 16), True), 5)
    assert plan.grid == (2, 5) and plan.partial.shape == (1, 4, 5, 16)


def test_scale_and_log2_e_are_one_factor():
    """Of a capped score two: one within the sigmoid that stands for tanh, one behind it."""
    inner, outer = Scores(0.25).factors
    assert (inner, outer) == (0.25 * math.log2(math.e), 1.0)
    inner, outer = Scores(0.25, softcap=30.0).factors
    score = 17.0
    capped = outer * (2 / (1 + math.exp(-score * inner)) - 1)
    assert capped == pytest.approx(30.0 * math.tanh(score * 0.25 / 30.0) * math.log2(math.e))


def test_a_scale_that_is_not_above_0_is_refused():
    with pytest.raises(ValueError, match="above 0, got 0"):
        Scores(0.0)
