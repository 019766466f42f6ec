"""Damaged quantized checkpoints: each loads and gives numbers, or is refused in one line that names the file.

A seeded draw of what ``damage`` lists; QUIRE_DAMAGE_SHARE=1 tries all of it.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import damage
import pytest
import torch

Case = tuple[str, tuple[str, ...], Callable[[], None]]
SHARE = float(os.environ.get("QUIRE_DAMAGE_SHARE", "0.03"))
LEAST, MOST_GROWN = 12, 200 << 10  # cases; KiB


def cases(made: damage.Checkpoint) -> list[Case]:
    """All that is tried of one checkpoint, from the kinds of damage that its files can have."""
    if made.name == "gguf":
        return [(what, (), change) for what, change in damage.gguf_damage(made, 40, 1)]
    whole = [*damage.config_damage(made), *damage.file_damage(made, 20, 1)]
    return [*((what, (), change) for what, change in whole), *damage.tensor_damage(made)]


def drawn(found: list[Case], seed: str) -> list[Case]:
    count = min(len(found), max(LEAST, round(len(found) * SHARE)))
    return random.Random(seed).sample(found, count)


@pytest.mark.parametrize("name", damage.CHECKPOINTS)
def test_each_loads_or_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    made = damage.checkpoint(name, tmp_path)
    assert damage.outcome(made, "nothing") == ""
    kept = tmp_path / "kept"
    shutil.copytree(made.folder, kept)
    before, outcomes = damage.resident(), []
    for what, hints, change in drawn(cases(made), name):
        change()
        outcomes.append(damage.outcome(made, what, hints))
        shutil.rmtree(made.folder)
        shutil.copytree(kept, made.folder)
    assert any(outcomes)
    assert damage.resident() - before < MOST_GROWN


def _spoiled(made: damage.Checkpoint, suffix: str, value: object) -> None:
    tensors = torch.load(made.weights, weights_only=True)
    name = next(name for name in tensors if name.endswith(suffix))
    torch.save(tensors | {name: value}, made.weights)


def test_a_hostile_pickle_is_refused(tmp_path: Path) -> None:
    """A few bytes that say to be 2^40 numbers, types that are none, and more than tensors."""
    made = damage.checkpoint("squeezellm", tmp_path)
    whole = made.weights.read_bytes()
    for suffix, value, said in (
        ("q_proj.cols", torch.zeros(1, dtype=torch.int32).expand(1 << 40), "more values than the file holds"),
        ("q_proj.vals", torch.zeros(1).expand(1 << 40), "more values than the file holds"),
        ("q_proj.vals", torch.zeros(4, dtype=torch.complex64), "hold no plain numbers"),
        ("q_proj.vals", torch.eye(4).to_sparse(), "hold no plain numbers"),
        ("q_proj.vals", [1.0], "is no table of tensors"),
        ("q_proj.vals", Path("x"), "holds more than tensors"),
    ):
        _spoiled(made, suffix, value)
        assert said in damage.outcome(made, f"{suffix} = {value!r:.40}")
        made.weights.write_bytes(whole)
