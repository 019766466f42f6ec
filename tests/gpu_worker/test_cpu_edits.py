"""Masks and penalties in C, by every instruction set, against the numpy twins: the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire.gpu_worker.kernels import columns, masks, penalties
from quire.gpu_worker.kernels.cpu.edits import Editor
from quire.gpu_worker.kernels.cpu.library import Library

from ..support.cpu_kernels import VARIANTS, using

SIZES = [1, 5, 31, 32, 33, 100, 4099]
ROWS = np.array([4, 1, 5, 0, 2], np.int64)


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    with using(request.param) as found:
        yield found


def step_of(vocab: int, bit: int) -> tuple[torch.Tensor, np.ndarray]:
    """Logits [5, vocab] that lie apart, with all that is not finite, and parameters: one row in three has no use."""
    generator = np.random.default_rng(vocab)
    logits = generator.standard_normal((len(ROWS), vocab + 9), np.float32) * 4
    logits[0, : vocab // 2 : 3] = -np.inf
    logits[1, : vocab // 2 : 5] = np.nan
    logits[2, : vocab // 2 : 7] = np.inf
    logits[4, ::2] = 0
    params = np.zeros((len(ROWS), columns.COLUMNS), np.int32)
    params[:, columns.USES] = [bit, bit | columns.RANDOM, columns.RANDOM, bit, bit]
    floats = params.view(np.float32)
    floats[:, columns.REPETITION] = [1.3, 0.7, 2, 1, 1.1]
    floats[:, columns.FREQUENCY] = [0.3, -0.5, 2, 0, 0.1]
    floats[:, columns.PRESENCE] = [0, 0.25, 2, -1.5, 0.7]
    return torch.from_numpy(logits), params


def check(wide: torch.Tensor, edited: torch.Tensor, twin: torch.Tensor, vocab: int) -> None:
    """The same bits, something changed, and nothing between the rows."""
    assert edited[:, :vocab].numpy().tobytes() == twin[:, :vocab].numpy().tobytes()
    assert edited[:, vocab:].numpy().tobytes() == wide[:, vocab:].numpy().tobytes()
    assert edited.numpy().tobytes() != wide.numpy().tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("vocab", SIZES)
def test_masks(kernels: Library, vocab: int, threads: int) -> None:
    wide, params = step_of(vocab, columns.ALLOWED)
    bits = np.random.default_rng(1).integers(-(2**31), 2**31, (6, -(-vocab // 32) + 1)).astype(np.int32)
    bits[1], bits[4] = -1, 0
    for rows, given in ((None, None), (ROWS, params)):
        edited, twin = wide.clone(), wide.clone()
        Editor(kernels, threads).mask_bits(edited[:, :vocab].numpy(), bits, rows, given)
        tensors = [None if x is None else torch.from_numpy(x) for x in (rows, given)]
        own = torch.from_numpy(bits if rows is not None else bits[: len(ROWS)])
        masks.mask_bits_numpy(twin[:, :vocab], own, *tensors)
        check(wide, edited, twin, vocab)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("vocab", SIZES)
def test_penalties(kernels: Library, vocab: int, threads: int) -> None:
    wide, params = step_of(vocab, columns.PENALTIES)
    generator = np.random.default_rng(2)
    counts = (generator.random((6, vocab)) < 0.1) * generator.integers(1, 50, (6, vocab))
    counts += (generator.random((6, vocab)) < 0.2) * penalties.SEEN
    counts = counts.astype(np.int32)
    counts[ROWS, 0] = 2
    edited, twin = wide.clone(), wide.clone()
    Editor(kernels, threads).penalise(edited[:, :vocab].numpy(), counts, ROWS, params)
    penalties.penalise_numpy(
        twin[:, :vocab], torch.from_numpy(counts), torch.from_numpy(ROWS), torch.from_numpy(params)
    )
    check(wide, edited, twin, vocab)
