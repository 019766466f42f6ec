"""A model in several processes gives the tokens of one process: layers shared out, layers in stages, both."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import parallel_rank
import pytest
import tiny_models

from quire.proto.checkpoint.model_config import load_model_config

TABLES: dict = {}
for module in ("tiny_models", "tiny_gpt", "tiny_modern", "tiny_moe", "tiny_remote"):
    TABLES |= importlib.import_module(module).ROWS
ROWS: dict[str, dict] = {  # and what differs: an odd vocabulary, shared unequally; fewer experts than ranks
    "llama": {"vocab_size": 319}, "llama-bias-tied": {}, "mistral-full": {}, "falcon-7b": {},
    "mixtral": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "falcon-40b": {}, "bloom": {}, "chatglm": {}, "gemma2": {}, "opt-350m": {}, "olmo2": {}, "gpt-oss": {},
    "deepseek-moe": {}, "mpt": {},
}  # fmt: skip
LAYOUTS = ["2x1", "1x2"]
BOTH = "llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and what four processes saw of them."""
    folder = tmp_path_factory.mktemp("parallel")
    jobs = {layout: [] for layout in [*LAYOUTS, "2x2"]}
    for row, changes in ROWS.items():
        (folder / row).mkdir()
        kind, values = TABLES[row][:2]
        tiny_models.write(kind, folder / row, 3, {**values, **changes})
        vocab = load_model_config(str(folder / row)).vocab_size
        for layout in LAYOUTS + ["2x2"] * (row == BOTH):
            jobs[layout].append((row, vocab))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "parallel_rank.py"), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, str(number)], env=env) for number in range(4)]
    try:
        assert [rank.wait(280) for rank in ranks] == [0, 0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return folder


def seen_by(folder, number):
    return json.loads((folder / f"{number}.json").read_text())


@pytest.fixture(scope="module")
def alone(folder):
    """What one process sees."""

    def see(row):
        if row not in seen:
            model = parallel_rank.load(folder / row)
            seen[row] = parallel_rank.script(parallel_rank.hand_of(model, model.spec.vocab_size))
        return seen[row]

    seen = {}
    return see


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", ROWS)
def test_tokens_are_those_of_one_process(folder, alone, row, layout):
    check(folder, alone(row), row, layout, 2)


@pytest.mark.slow
def test_shares_of_layers_in_stages(folder, alone):
    check(folder, alone(BOTH), BOTH, "2x2", 4)


def check(folder, expected, row, layout, count):
    size, stages = map(int, layout.split("x"))
    for number in range(count):
        seen = seen_by(folder, number)[f"{layout} {row}"]
        assert seen["tokens"] == expected["tokens"], (number, row)
        if number == (stages - 1) * size:  # the leader, which tells
            for mine, theirs in zip(seen["told"], expected["told"], strict=True):
                for values, others in zip(mine, theirs, strict=True):
                    for one, other in zip(values, others, strict=True):
                        np.testing.assert_allclose(one, other, atol=1e-4)
    tokens = [token for row in expected["tokens"] for token in row]
    assert len(set(tokens)) > 20, "the model says always the same"
