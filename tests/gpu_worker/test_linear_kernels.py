"""Products beside the vendor's library: the kernel against its twin, the same bits in any company, and the choice by
measurement.

Kernels are compiled where there is a GPU, else run under Triton's interpreter. Times are given by the tests.
"""

import itertools
import json

import pytest
import torch
from kernel_device import DEVICE
from rows_alike import rows_alike  # noqa: F401  # a fixture

pytest.importorskip("triton")

from quire.gpu_worker.kernels import linear
from quire.gpu_worker.kernels.card import INTERPRETER
from quire.gpu_worker.kernels.linear import Tiles, invariant_tiles, product, product_torch
from quire.gpu_worker.layers.formats import cuda, measured
from quire.gpu_worker.layers.formats.base import CHOOSING, Weight, whole
from quire.gpu_worker.layers.formats.cuda import CUDA, InvariantProduct, MeasuredProduct
from quire.gpu_worker.layers.linear import Linear, weight_of
from quire.gpu_worker.models.parameters import Parameter

DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = Tiles(16, 32, 32, 1, 4, 2)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def agree(got, want, dtype):
    assert got.dtype == want.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), rtol=DTYPES[dtype], atol=DTYPES[dtype])


# --- the product ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "width", "inner", "splits", "bias", "activation"),
    [
        (1, 40, 64, 1, False, ""),
        (16, 64, 200, 4, True, ""),
        (3, 33, 96, 2, True, "silu"),
        (5, 24, 136, 4, False, "swiglu_oai"),
        (40, 1, 70, 2, True, ""),
    ],
)
def test_products_agree_with_their_twin(dtype, tokens, width, inner, splits, bias, activation):
    rows = width * 2 if activation else width
    weight = (randn(rows, inner, seed=1) * inner**-0.5).to(dtype)
    shift = randn(rows, dtype=dtype, seed=2) if bias else None
    # Rows of x and of the weight that lie apart in memory.
    x, tiles = randn(tokens, inner + 8, dtype=dtype)[:, :inner], SMALL._replace(splits=splits)
    want = product_torch(x, weight, shift, tiles, activation)
    agree(product(x, weight, shift, tiles, activation), want, dtype)
    agree(product(x, torch.cat((weight, weight), 1)[:, :inner], shift, tiles, activation), want, dtype)


def test_sums_of_parts_have_one_order_however_they_are_added(monkeypatch):
    """By a second kernel or by the program that made them: the same bits."""
    x, weight, bias = randn(7, 160), randn(48, 160, seed=1), randn(48, seed=2)
    for activation in ("", "gelu"):
        monkeypatch.setattr(linear, "APART_ROWS", 7)
        apart = product(x, weight, bias, SMALL._replace(splits=4), activation)
        monkeypatch.setattr(linear, "APART_ROWS", 6)
        assert torch.equal(product(x, weight, bias, SMALL._replace(splits=4), activation), apart)


def test_no_rows_and_an_unknown_activation():
    assert product(randn(0, 32), randn(8, 32), None, SMALL).shape == (0, 8)
    with pytest.raises(ValueError, match="swish"):
        product(randn(1, 32), randn(8, 32), None, SMALL, "swish")


# --- the same bits in any company ---


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "inner"), [(80, 1000), (300, 72)])
def test_a_row_has_the_same_bits_in_any_company(dtype, width, inner, monkeypatch):
    monkeypatch.setattr(linear, "APART_ROWS", 40)
    run, bias = InvariantProduct(randn(width, inner, dtype=dtype, seed=1)), randn(width, dtype=dtype, seed=2)
    x = randn(150, inner, dtype=dtype)
    whole_batch = run(x, bias)
    for rows in (slice(0, 1), slice(3, 5), slice(70, 71), slice(10, 43), slice(149, 150)):
        assert torch.equal(run(x[rows], bias), whole_batch[rows]), rows


def test_the_tile_of_a_weight_does_not_follow_from_the_rows(monkeypatch):
    """Which launches there are is what the bits hang on, and on a GPU the instructions too."""
    seen, real = set(), linear.product

    def record(x, matrix, bias, tiles, activation=""):
        seen.add(tiles)
        return real(x, matrix, bias, tiles, activation)

    monkeypatch.setattr(cuda, "product", record)
    run = InvariantProduct(randn(64, 512, seed=1))
    for rows in (1, 17, 65):
        run(randn(rows, 512), None)
    assert len(seen) == 1
    assert seen.pop().splits > 1  # or nothing would be shown


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_fit_small_and_large_cards(dtype):
    for card in (
        INTERPRETER,
        measured_card(64 * 1024, 304),
        measured_card(99 * 1024, 82),
        measured_card(227 * 1024, 132),
    ):
        for width, inner in ((1, 64), (128, 2048), (4096, 14336), (28672, 4096), (151936, 1024)):
            tiles = [invariant_tiles(width, inner, dtype, card)]
            tiles += linear.few_rows_tiles(width, inner, dtype, "silu", card)
            for each in tiles:
                rows = each.block_m + 2 * each.block_n
                if each is tiles[0]:
                    rows = each.block_m + each.block_n
                assert rows * each.block_k * each.stages * dtype.itemsize <= card.shared
                assert each.splits == 1 or inner // each.splits >= each.block_k


def measured_card(shared, processors):
    return type(INTERPRETER)("a card", "cuda", 90, processors, shared, shared)


# --- the choice ---


class Times:
    """A timer that tells of each call what it ran, and takes as long as the test says."""

    def __init__(self, monkeypatch, of):
        self.calls, self._of, self._ran = [], of, None
        monkeypatch.setattr(measured, "library", lambda x, *rest: self._note(("library", len(x))))
        monkeypatch.setattr(measured, "product", lambda x, matrix, bias, tiles, kind: self._note((tiles, len(x))))

    def _note(self, what):
        self._ran = what

    def __call__(self, call):
        call()
        self.calls.append(self._ran)
        return self._of(*self._ran)


def test_the_fastest_is_chosen_for_each_number_of_rows(monkeypatch):
    """At one row the library, at up to four the second of the tiles, at more the first that is clearly faster."""
    matrix = randn(64, 256, dtype=torch.float16)
    first, second, *_ = linear.few_rows_tiles(64, 256, torch.float16, "", INTERPRETER)

    def took(what, rows):
        if what == "library":
            return 1.0
        return {1: 0.99, 4: 0.5 if what == second else 0.6, 16: 0.9 if what == first else 0.95}[rows]

    table = measured.Table(INTERPRETER, times := Times(monkeypatch, took), None)
    assert table.few_rows(matrix) == [None] + [second] * 3 + [first] * 12
    measurements = len(times.calls)
    assert table.few_rows(matrix.clone()) == table.few_rows(matrix) and len(times.calls) == measurements
    table.few_rows(matrix[:32])
    table.few_rows(matrix, "silu")
    assert len(times.calls) > measurements


def test_a_tile_that_does_not_compile_is_not_chosen(monkeypatch):
    def took(what, rows):
        if what != "library":
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    table = measured.Table(INTERPRETER, Times(monkeypatch, took), None)
    assert table.few_rows(randn(64, 256)) == [None] * 16


def test_what_was_measured_is_kept_for_the_next_start(monkeypatch, tmp_path):
    file, matrix = tmp_path / "products" / "card.json", randn(64, 256)
    times = Times(monkeypatch, lambda what, rows: 1.0 if what == "library" or rows == 4 else 0.1)
    found = measured.Table(INTERPRETER, times, file).few_rows(matrix)
    assert None in found and any(found) and times.calls
    times.calls.clear()
    assert measured.Table(INTERPRETER, times, file).few_rows(matrix) == found and not times.calls
    # Another process's are kept beside them, and no half-written file is left.
    measured.Table(INTERPRETER, times, file).few_rows(randn(32, 256))
    measured.keep(file, "of another", None, [])
    assert len(measured.read(file)) == 7
    assert sorted(each.name for each in file.parent.iterdir()) == ["card.json", "card.lock"]


@pytest.mark.parametrize("steps", [(1, -1), (-1, 1)])
def test_of_workers_that_measure_at_once_all_take_what_the_first_kept(tmp_path, steps):
    """Both have read the file before either wrote it. To one the library is the fastest, to the other a tile."""

    def table(step, file):
        times = itertools.count(0, step)
        return measured.Table(INTERPRETER, lambda call: next(times), file)

    matrix = randn(64, 256)
    tables = [table(step, tmp_path / "card.json") for step in steps]
    want = table(steps[0], None).few_rows(matrix)
    assert want != table(steps[1], None).few_rows(matrix)
    assert [each.few_rows(matrix) for each in (*tables, table(1, tmp_path / "card.json"))] == [want] * 3


def test_a_file_that_may_not_be_read_is_told_of_once_at_most(monkeypatch, tmp_path, caplog):
    def refuse(self, *args):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(measured.Path, "read_text", refuse)
    times = Times(monkeypatch, lambda what, rows: 1.0)
    measured.Table(INTERPRETER, times, tmp_path / "card.json").few_rows(randn(64, 256))
    assert times.calls and len([each for each in caplog.records if each.levelname == "WARNING"]) <= 1


def test_a_call_is_timed_without_the_hosts_launches(monkeypatch):
    """The host takes ten times as long to launch a call as the device to run it."""
    host = device = 0.0

    def ran(launched, took):
        nonlocal host, device
        host += launched
        device = max(host, device) + took

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = max(host, device)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(measured, "WASH_BYTES", 1)
    for name, value in {
        "Event": Event,
        "_sleep": lambda cycles: ran(0.005, cycles / 2e6),  # milliseconds at 2 GHz
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    timer = measured._gpu_timer(torch.device("cpu"))
    assert timer(lambda: ran(0.1, 0.01)) == pytest.approx(0.01)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 3}', '{"a": [1, 2]}'])
def test_a_file_that_is_not_whole_is_ignored_and_mended(monkeypatch, tmp_path, caplog, text):
    file, times = tmp_path / "card.json", Times(monkeypatch, lambda what, rows: 1.0)
    file.write_text(text)
    measured.Table(INTERPRETER, times, file).few_rows(randn(64, 256))
    assert times.calls and "card.json" in caplog.text
    assert len(json.loads(file.read_text())) == len(linear.STEPS)


def test_tiles_that_this_version_does_not_know_are_measured_anew(monkeypatch, tmp_path):
    """Of another version, or of nobody: a launch of them could fail in the middle of serving."""
    file, matrix = tmp_path / "card.json", randn(64, 256)
    times = Times(monkeypatch, lambda what, rows: 1.0)
    measured.Table(INTERPRETER, times, file).few_rows(matrix)
    kept = dict.fromkeys(measured.read(file), Tiles(16, 48, 32, 1, 4, 2))
    for first in (Tiles(16, 48, 32, 1, 4, 2), "abcdef", [None] * 6):
        file.write_text(json.dumps(kept | {next(iter(kept)): first}))
        times.calls.clear()
        assert measured.Table(INTERPRETER, times, file).few_rows(matrix) == [None] * 16 and times.calls


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    times = Times(monkeypatch, lambda what, rows: 1.0)
    measured.Table(INTERPRETER, times, tmp_path / "file" / "card.json").few_rows(randn(64, 256))


def test_the_file_is_of_the_card_and_the_versions(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = measured.cache_file(INTERPRETER)
    assert file.parent == tmp_path / "quire" / "products" and torch.__version__ in file.name
    assert file != measured.cache_file(measured_card(1, 1))


# --- layers ---


class Known:
    """A table that has an answer for every shape."""

    def __init__(self, tiles):
        self.tiles, self.asked = tiles, []

    def few_rows(self, matrix, activation=""):
        self.asked.append(activation)
        return [self.tiles] * 16


@pytest.fixture
def on_gpu(monkeypatch):
    """Linears as a GPU's, where there is none."""
    known = Known(SMALL)
    monkeypatch.setattr(cuda, "table_of", lambda device: known)
    monkeypatch.setattr(measured, "gated_activation", linear.gated_activation_torch)
    return known


def linear_of(matrix, gated=False):
    weight = Weight((whole(matrix.shape[0]),), whole(matrix.shape[1]), matrix.dtype, matrix.device, gated=gated)
    return Linear(CUDA, {"weight": matrix}, weight)


def test_few_rows_take_the_tile_and_many_the_library(on_gpu, monkeypatch):
    launched = []
    real = product
    monkeypatch.setattr(cuda, "product", lambda x, *rest: launched.append(len(x)) or real(x, *rest))
    matrix, bias = randn(48, 64, seed=1), randn(48, seed=2)
    run = CUDA.linear({"weight": matrix}, weight_of(matrix))
    for rows in (0, 1, 16, 17):
        x = randn(rows, 64)
        agree(run(x, bias), x @ matrix.T + bias, torch.float32)
    assert launched == [1, 16]


def test_a_gate_is_joined_by_the_product_itself(on_gpu):
    layer = linear_of(randn(48, 64, seed=1), gated=True)
    assert on_gpu.asked == []  # what is never multiplied so is not measured
    joined = layer.joined("silu")
    assert on_gpu.asked == ["silu"]
    layer.bias = randn(48, seed=2)  # later than the layer was joined
    for rows in (3, 20):
        x = randn(rows, 64)
        agree(joined(x), linear.gated_activation_torch(layer(x), "silu"), torch.float32)


@pytest.mark.parametrize("name", CHOOSING)
def test_a_router_is_multiplied_alike_on_every_rank(on_gpu, name):
    """What each process measures for itself may differ; logits of routers that do would choose different experts."""
    matrix, x = randn(48, 64, seed=1), randn(3, 64)
    asked = []
    for each in (name, "o.weight"):
        weight = Parameter(f"layers.0.{each}", "linear", (whole(48),), whole(64)).as_weight(matrix.dtype, matrix.device)
        run = CUDA.linear({"weight": matrix}, weight)
        asked.append(len(on_gpu.asked))
        assert each != name or torch.equal(run(x, None), measured.library(x, matrix, None))
    assert asked == [0, 1]


def test_no_library_multiplies_where_bits_must_not_depend_on_company(on_gpu, monkeypatch):
    def refuse(*args):
        raise AssertionError("the library was called")

    monkeypatch.setattr(cuda, "batch_invariant", lambda: True)
    monkeypatch.setattr(torch.nn.functional, "linear", refuse)
    matrix = randn(48, 64, seed=1)
    layer = linear_of(matrix, gated=True)
    for rows in (4, 40):
        agree(layer(randn(rows, 64)), randn(rows, 64) @ matrix.T, torch.float32)
    assert layer.joined("silu") is None and on_gpu.asked == []


def test_measured_products_are_the_library_without_a_tile():
    run = MeasuredProduct(randn(8, 32, seed=1), Known(None))
    assert torch.equal(run(randn(2, 32), None), measured.library(randn(2, 32), randn(8, 32, seed=1), None))
