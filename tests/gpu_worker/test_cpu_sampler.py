"""A step's choice in C, by every instruction set, against the numpy twins that define it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.gpu_worker.kernels import columns, sampling
from quire.gpu_worker.kernels.cpu import library as cpu
from quire.gpu_worker.kernels.cpu.library import Library
from quire.gpu_worker.kernels.cpu.sampling import Chooser

from ..support.cpu_kernels import VARIANTS, using

FILTERS = [
    {}, {"temperature": 0.0}, {"top_k": 1}, {"top_k": 50}, {"top_k": 3000}, {"top_p": 0.3}, {"top_p": 0.95},
    {"top_p": 0.9999}, {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1e-4}, {"temperature": 30.0, "top_p": 0.5}, {"temperature": 0.7, "top_k": 7},
]  # fmt: skip
SIZES = [1, 2, 3, 31, 63, 64, 65, 257, 2048, 4099, 40_003]


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    with using(request.param) as found:
        yield found


def params_of(fields: list[dict[str, float]]) -> np.ndarray:
    """int32 [S, COLUMNS] as SamplingState packs them."""
    ints = np.zeros((len(fields), columns.COLUMNS), np.int32)
    floats = ints.view(np.float32)
    for row, given in enumerate(fields):
        temperature, min_p = given.get("temperature", 1.0), given.get("min_p", 0.0)
        floats[row, columns.INV_T] = 1 / temperature if temperature else 0
        floats[row, columns.LOG_MIN_P] = math.log(min_p) if min_p else -math.inf
        floats[row, columns.TOP_P] = given.get("top_p", 1.0)
        ints[row, columns.TOP_K] = given.get("top_k", 0)
        ints[row, columns.SEED_LOW], ints[row, columns.SEED_HIGH] = row * 7919 - 3, -row
    return ints


class Choice:
    """What C chose for every row."""

    def __init__(
        self, library: Library, logits: np.ndarray, params: np.ndarray | None, threads: int = 1, first: int = 0
    ):
        count = len(logits)
        self.positions = np.arange(count, dtype=np.int64) * 1000 + 5
        self.tokens, self.chosen = np.full(count, -1, np.int32), np.empty(count, np.float32)
        self.values, self.thresholds = np.empty(count, np.float32), np.empty(count, np.float32)
        before = logits.copy()
        Chooser(library, threads).choose(
            logits, params, None, self.positions, self.tokens, self.chosen, self.values, self.thresholds, first
        )
        np.testing.assert_array_equal(before, logits)
        np.testing.assert_array_equal(self.chosen, logits[np.arange(count), self.tokens - first])

    def same_as(self, other: Choice) -> bool:
        return all(
            getattr(self, name).tobytes() == getattr(other, name).tobytes()
            for name in ("tokens", "values", "thresholds")
        )


def noise_of(params: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Of one token of each row."""
    keys = params[:, columns.SEED_LOW : columns.SEED_HIGH + 1].astype(np.uint64) & 0xFFFFFFFF
    return sampling._noise_of(keys, positions, tokens)


def check_draw(found: Choice, logits: np.ndarray, params: np.ndarray) -> None:
    """The numpy twin's tokens; where it has another, the two sums tie to the last bits of the noise."""
    want = sampling.draw_numpy(
        torch.from_numpy(logits), torch.from_numpy(params), torch.from_numpy(found.positions),
        torch.from_numpy(found.thresholds),
    ).numpy()  # fmt: skip
    for slot in np.flatnonzero(want != found.tokens):
        at = [slot, slot]
        scaled = logits[slot, [want[slot], found.tokens[slot]]] * params.view(np.float32)[slot, columns.INV_T]
        assert (scaled >= found.thresholds[slot]).all()
        sums = scaled + noise_of(params[at], found.positions[at], np.array([want[slot], found.tokens[slot]]))
        assert abs(sums[0] - sums[1]) <= 2e-6 + 1e-6 * abs(scaled[0]), slot


def check_thresholds(found: Choice, logits: np.ndarray, params: np.ndarray) -> None:
    """The numpy twin's, but that top_p may end where the mass is within 1e-6 of it."""
    want = sampling.threshold_numpy(torch.from_numpy(logits), torch.from_numpy(params), True, True, True).numpy()
    floats = params.view(np.float32)
    for slot in np.flatnonzero(want != found.thresholds):
        top_p, lowest = float(floats[slot, columns.TOP_P]), found.thresholds[slot]
        assert top_p < 1 and floats[slot, columns.INV_T]
        without = params[slot : slot + 1].copy()
        without.view(np.float32)[0, columns.TOP_P] = 1
        row = torch.from_numpy(logits[slot : slot + 1])
        left = sampling.threshold_numpy(row, torch.from_numpy(without), True, True, False).numpy()[0]
        scaled = logits[slot] * floats[slot, columns.INV_T]
        assert lowest in scaled and lowest >= left
        mass = np.where(scaled >= left, np.exp(scaled.astype(np.float64) - scaled.max()), 0)
        assert mass[scaled > lowest].sum() <= (top_p + 1e-6) * mass.sum()
        assert mass[scaled >= lowest].sum() >= (top_p - 1e-6) * mass.sum()


def check(library: Library, logits: np.ndarray, params: np.ndarray) -> None:
    found = Choice(library, logits, params)
    check_thresholds(found, logits, params)
    check_draw(found, logits, params)


def rows_of(vocab: int, spread: float, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed + vocab)
    return generator.standard_normal((len(FILTERS), vocab), np.float32) * np.float32(spread)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_random_rows(kernels: Library, vocab: int, spread: float) -> None:
    check(kernels, rows_of(vocab, spread), params_of(FILTERS))


@pytest.mark.parametrize("vocab", [5, 200, 40_003])
@pytest.mark.parametrize(
    "kind",
    ["ties", "equal", "peaked", "mostly masked", "one left", "far apart", "close together", "bands", "first of chunks"],
)
def test_adversarial_rows(kernels: Library, vocab: int, kind: str) -> None:
    logits, generator = rows_of(vocab, 3.0), np.random.default_rng(1)
    if kind == "ties":
        logits = logits.round()
    if kind == "equal":
        logits[:] = 2.5
    if kind == "peaked":
        logits[:, vocab // 2] = 60
    if kind == "mostly masked":
        logits[generator.random(logits.shape) < 0.99] = -np.inf
        logits[:, 0] = 0
    if kind == "one left":
        logits[:, : vocab - 1] = -np.inf
    if kind == "far apart":
        logits = logits * np.float32(1e9)
    if kind == "close together":
        logits = logits * np.float32(1e-38)
    if kind == "bands":
        logits = logits * np.float32(1e-4) + generator.integers(0, 3, logits.shape).astype(np.float32) * 8
    if kind == "first of chunks":  # which top_k guesses from
        logits[:, ::64] = 50
    check(kernels, logits, params_of(FILTERS))


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_and_any_company_give_the_same_bits(kernels: Library, threads: int) -> None:
    logits, params = rows_of(12_000, 4.0), params_of(FILTERS)
    alone = Choice(kernels, logits, params)
    assert alone.same_as(Choice(kernels, logits, params, threads))
    for slot in range(len(FILTERS)):
        tokens, chosen = np.empty(1, np.int32), np.empty(1, np.float32)
        row, place = np.array([slot], np.int64), alone.positions[slot : slot + 1]
        Chooser(kernels, threads).choose(logits[slot : slot + 1], params, row, place, tokens, chosen)
        assert (tokens[0], chosen[0]) == (alone.tokens[slot], alone.chosen[slot])


@pytest.mark.parametrize("vocab", [1, 70, 5000])
def test_rows_that_are_not_finite(kernels: Library, vocab: int) -> None:
    """The first NaN, else the first of the largest, as numpy's argmax has it."""
    for filled in (math.nan, -math.inf, math.inf):
        logits = rows_of(vocab, 3.0)
        logits[:, vocab // 2 :] = filled
        if filled < 0:
            logits[:] = filled
        found = Choice(kernels, logits, params_of(FILTERS))
        assert found.tokens.tolist() == logits.argmax(1).tolist()
        assert found.tokens.tolist() == Choice(kernels, logits, None).tokens.tolist()


def test_overflow_of_a_tiny_temperature_takes_the_most_likely(kernels: Library) -> None:
    logits = rows_of(300, 1e3)
    params = params_of([{"temperature": 1e-38, "top_p": 0.5, "top_k": 5}] * len(logits))
    assert Choice(kernels, logits, params).tokens.tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("cuts", [[0, 5, 6, 71, 1000, 4099], [0, 1, 2, 3, 4099], [0, 2050, 4099]])
def test_the_best_of_all_parts_is_the_draw_of_the_whole(kernels: Library, cuts: list[int]) -> None:
    logits = rows_of(4099, 2.0)
    params = params_of([{"temperature": given.get("temperature", 1.0)} for given in FILTERS])
    whole = Choice(kernels, logits, params)
    parts = [Choice(kernels, logits[:, start:end], params, first=start) for start, end in pairwise(cuts)]
    best = np.argmax([part.values for part in parts], axis=0)
    assert whole.tokens.tolist() == [parts[p].tokens[slot] for slot, p in enumerate(best)]
    assert np.array_equal(whole.values, np.max([part.values for part in parts], axis=0))


def test_the_sum_is_of_the_noise_that_numpy_has(kernels: Library) -> None:
    """Of as many seeds as it takes to see words from every part of their range."""
    params = params_of([{}] * 4000)
    found = Choice(kernels, np.zeros((4000, 1), np.float32), params)
    np.testing.assert_allclose(
        found.values, noise_of(params, found.positions, np.zeros(4000, np.int64)), rtol=1e-6, atol=1e-6
    )


def test_the_columns_are_those_of_python() -> None:
    text = Path(cpu.__file__).with_name("src").joinpath("choose.h").read_text()
    found = re.search(r"enum \{ Q_INV_T = 0, (.*?), Q_COLUMNS = (\d+) \};", text)
    assert found is not None and int(found[2]) == columns.COLUMNS
    names = [name.removeprefix("Q_") for name in found[1].split(", ")]
    assert [getattr(columns, name) for name in ["INV_T", *names]] == list(range(6))
