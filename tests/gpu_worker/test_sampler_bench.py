"""bench/sampling.py runs, and what it checks holds: a batch that uses no feature runs as if there were none."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "sampling.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_sampling", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_small_run(bench, tmp_path, monkeypatch, capsys):
    out = tmp_path / "x.json"
    monkeypatch.setattr(
        "sys.argv", ["sampling.py", "--batch", "4", "--vocab", "6000", "--repeats", "1", "--json", str(out)]
    )
    assert bench.main() == 0
    data = json.loads(out.read_text())
    assert set(data["features"]) == set(bench.FEATURES) and data["commit"] and data["device"]
    assert all(row["same_operations"] for row in data["unused"].values())
    assert "greedy, beside" in capsys.readouterr().out


def test_a_trace_tells_steps_apart(bench):
    import torch

    small = bench.Bench(2, 300, 1, torch.device("cpu"))
    plain, biased = (
        bench.Step(small, [(fields, {})] * 2) for fields in (bench.GREEDY, bench.GREEDY | {"logit_bias": {1: 1.0}})
    )
    traces = [bench.trace(lambda step=step: step.run(small.work.zero_(), None)) for step in (plain, plain, biased)]
    assert traces[0] == traces[1] != traces[2]
