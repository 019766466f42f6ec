"""The sampling part runs, and what it checks holds: a batch that uses no feature runs as if there were none."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.__main__ import main
from bench.parts import sampling


@pytest.mark.slow
def test_small_run(tmp_path, capsys):
    out = tmp_path / "x.json"
    assert main(["sampling", "--batch", "4", "--vocab", "2000", "--steps", "1", "--out", str(out)]) == 0
    samples = json.loads(out.read_text())["samples"]
    assert [s["labels"]["feature"] for s in samples if "feature" in s["labels"]] == list(sampling.FEATURES)
    assert [s["values"]["same_operations"] for s in samples if "unused" in s["labels"]] == [True, True]
    assert "unused=greedy" in capsys.readouterr().out


def test_a_trace_tells_steps_apart():
    small = sampling.Bench(2, 300, 1, torch.device("cpu"))
    plain, biased = (
        sampling.Step(small, [(fields, {})] * 2)
        for fields in (sampling.GREEDY, sampling.GREEDY | {"logit_bias": {1: 1.0}})
    )
    traces = [sampling.trace(lambda step=step: step.run(small.work.zero_(), None)) for step in (plain, plain, biased)]
    assert traces[0] == traces[1] != traces[2]
