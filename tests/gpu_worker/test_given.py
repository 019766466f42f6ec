"""Embeddings that prompts bring along: which tokens of a step they are put into, by torch and by the program in C."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from program_rig import ProgramRig

from quire.gpu_worker.models.given import Given
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import demo_model_path, load_model_config
from quire.proto.work import Embeds

SIZE = 3
CPU = torch.device("cpu")


def embeds(count: int, first: int = 0, size: int = SIZE) -> Embeds:
    """Token t has size numbers, all of them t + 1."""
    values = torch.arange(first + 1, count + 1, dtype=torch.float32)[:, None].expand(-1, size)
    return Embeds("float32", size, count, b"", values.contiguous().numpy().tobytes(), first)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def filled(given: Given, tokens: int, step: int) -> list[float]:
    x = torch.zeros(tokens, SIZE)
    for part in x.split(step):
        given.fill(part)
    assert torch.equal(x, x[:, :1].expand(-1, SIZE))
    return x[:, 0].tolist()


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_each_token_gets_its_own_in_any_passes(step: int) -> None:
    given = Given(SIZE, torch.float32, CPU)
    given.admit(5, embeds(4))
    given.admit(2, embeds(6, first=3))
    rows = column(1, 5, 2)
    given.begin(rows, column(0, 1, 2), column(2, 5, 3))  # row 5 from 1 to 6, of which 1 to 4; row 2 from 2 to 5
    assert given.active
    assert filled(given, 10, step) == [0, 0, 2, 3, 4, 0, 0, 0, 4, 5]
    given.begin(rows, column(9, 4, 6), column(1, 1, 1))
    assert not given.active and filled(given, 3, step) == [0, 0, 0]
    given.begin(column(5), column(3), column(1))
    given.drop([5])
    assert filled(given, 1, step) == [4]  # the step that had begun goes on
    given.begin(column(5), column(3), column(1))
    assert not given.active


def test_what_does_not_fit_the_model_is_refused() -> None:
    given = Given(SIZE, torch.float32, CPU)
    for odd in (embeds(2, size=4), Embeds("float64", SIZE, 1, b"", bytes(24))):
        with pytest.raises(ValueError, match="this model's have 3"):
            given.admit(0, odd)


def test_the_program_and_torch_compute_what_ids_would_have() -> None:
    config = load_model_config(demo_model_path())
    model = load_model(config, torch.float32, CPU)
    model.given = given = Given(model.spec.hidden_size, torch.float32, CPU)
    rig = ProgramRig(model)
    ids = [(7 * n) % 2000 + 3 for n in range(150)]  # more than one pass of the program
    rig.admit(0, ids)
    rig.admit(1, [0] * len(ids))
    rig.admit(2, ids[:40])
    table = model.embed
    vectors = table[torch.tensor(ids)].float() * model.embed_scale
    given.admit(1, Embeds("float32", vectors.shape[1], len(ids), b"", vectors.numpy().tobytes()))

    def run(work: list[tuple[int, int, int]], by_torch: bool = False) -> torch.Tensor:
        given.begin(*rig.columns(work))
        return rig.by_torch(work) if by_torch else rig.every(work)

    whole = run([(0, 0, 150)])
    assert torch.equal(run([(1, 0, 150)]), whole)
    beside = run([(2, 0, 40), (1, 0, 70)])  # beside a row that has none, in chunks
    assert torch.equal(beside[40:], whole[:70]) and torch.equal(run([(1, 70, 80)]), whole[70:])
    assert torch.equal(beside[:40], whole[:40])
    torch.testing.assert_close(run([(1, 0, 150)], by_torch=True), whole, atol=1e-3, rtol=1e-3)
