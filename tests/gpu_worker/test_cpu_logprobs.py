"""Logprobs in C, by every instruction set, against the numpy twins that define them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire.gpu_worker.kernels import columns, logprobs
from quire.gpu_worker.kernels.cpu.library import Library
from quire.gpu_worker.kernels.cpu.logprobs import Teller
from quire.gpu_worker.kernels.logprobs import Source

from ..support.cpu_kernels import VARIANTS, using

SLOTS = np.array([4, 1, 5, 0], np.int64)
SIZES = [1, 2, 63, 64, 65, 1025, 4099]


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    with using(request.param) as found:
        yield found


def logits_of(vocab: int, kind: str) -> np.ndarray:
    """Six rows [6, vocab], with other values between them."""
    logits = np.random.default_rng(vocab).standard_normal((6, vocab + 5), np.float32)[:, :vocab] * np.float32(5)
    if kind == "ties":
        np.round(logits, out=logits)  # which has zeros of either sign
    if kind == "equal":
        logits[:] = -1.5
    if kind == "masked":
        logits[:, vocab // 9 + 1 :] = -math.inf
    if kind == "no numbers":
        logits[1, ::3] = math.nan
        logits[4] = -math.inf
        logits[5, vocab // 2] = math.inf
        logits[0] = math.nan
    if kind == "first of chunks":  # which a bound is guessed from
        logits[:, ::64] = 50
    return logits


def params_of() -> np.ndarray:
    """Six rows of temperatures, the last but one greedy."""
    params = np.zeros((6, columns.COLUMNS), np.int32)
    params.view(np.float32)[:, columns.INV_T] = [1, 0.5, 1.25, 3, 0, 2]
    return params


def twin(source: Source, tokens: np.ndarray, k: int, softmax: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What ``Teller.tell`` returns, by numpy."""
    own, sums, ranks = (each.numpy() for each in logprobs.stats_numpy(source, torch.from_numpy(tokens)))
    ids, values = tokens.astype(np.int32)[:, None], own[:, None]
    if k:
        best = [each.numpy() for each in logprobs.best_numpy(source, k)]
        ids, values = np.concatenate([ids, best[0]], 1), np.concatenate([values, best[1]], 1)
    with np.errstate(invalid="ignore"):
        values = values - sums[:, None] if softmax else values
    return ids, np.where(np.isnan(values), -np.inf, values), ranks


def check(teller: Teller, logits: np.ndarray, processed: bool, k: int, softmax: bool) -> None:
    params, thresholds = params_of(), np.array([-2, -math.inf, 0.5, 1, -math.inf, -3], np.float32)
    tokens = np.random.default_rng(k).integers(0, logits.shape[1], len(SLOTS))
    given = (params, thresholds) if processed else (None, None)
    before = logits.copy()
    found = teller.tell(logits, SLOTS, *given, tokens, k, softmax)
    np.testing.assert_array_equal(before, logits)
    tensors = [None if each is None else torch.from_numpy(each) for each in given]
    want = twin(Source(torch.from_numpy(logits), torch.from_numpy(SLOTS), *tensors), tokens, k, softmax)
    np.testing.assert_array_equal(found[0], want[0])
    np.testing.assert_array_equal(found[2], want[2])
    if softmax:
        np.testing.assert_allclose(found[1], want[1], rtol=1e-6, atol=2e-6)
    else:
        np.testing.assert_array_equal(found[1], want[1])


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "masked", "no numbers", "first of chunks"])
def test_rows_of_every_kind(kernels: Library, vocab: int, kind: str) -> None:
    teller, logits = Teller(kernels, 2), logits_of(vocab, kind)
    for k in {0, 1, min(5, vocab), min(200, vocab), vocab}:
        for processed in (False, True):
            for softmax in (False, True):
                check(teller, logits, processed, k, softmax)


def test_sums_of_a_large_vocabulary(kernels: Library) -> None:
    """Flat rows, to which every token adds, and peaked ones, against float64."""
    logits = logits_of(70_001, "random")
    logits[1] *= np.float32(0.01)
    tokens = np.array([0, 5, 70_000, 64], np.int64)
    _, values, _ = Teller(kernels, 1).tell(logits, SLOTS, None, None, tokens, 0, True)
    want = torch.from_numpy(logits[SLOTS]).double().log_softmax(1).numpy()[np.arange(len(SLOTS)), tokens]
    np.testing.assert_allclose(values[:, 0], want, rtol=1e-6)


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_and_any_company_give_the_same_bits(kernels: Library, threads: int) -> None:
    logits, tokens = logits_of(30_000, "ties"), np.array([3, 29_999, 64, 128], np.int64)
    alone = Teller(kernels, 1).tell(logits, SLOTS, None, None, tokens, 7, True)
    teller = Teller(kernels, threads)
    together = teller.tell(logits, SLOTS, None, None, tokens, 7, True)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(alone, together, strict=True))
    for at in range(len(SLOTS)):
        one = teller.tell(logits, SLOTS[at : at + 1], None, None, tokens[at : at + 1], 7, True)
        assert all(a[at].tobytes() == b[0].tobytes() for a, b in zip(alone, one, strict=True))
