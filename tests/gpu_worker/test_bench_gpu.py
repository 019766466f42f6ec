"""``python -m bench gpu`` without a GPU: its arithmetic, its command line, its files, and a dry run of each part."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from bench import gpu  # noqa: E402
from bench.__main__ import main, summary  # noqa: E402
from bench.cards import PARTS, floor, idle  # noqa: E402
from bench.report import Report, load  # noqa: E402

H200 = floor.Ceilings(bandwidth=4.3e12, products=788e12)


@pytest.mark.parametrize(
    ("batch", "context", "ms"),
    [(1, 512, 3.51), (8, 512, 3.62), (64, 512, 4.49), (64, 1024, 5.49), (256, 512, 8.9), (256, 1024, 12.9)],
)
def test_floor_of_the_reference(batch, context, ms):
    assert floor.decode_floor(floor.LLAMA_3_8B, batch, context, H200) * 1e3 == pytest.approx(ms, rel=0.01)


def test_bytes_of_a_step():
    assert floor.product_weights(floor.LLAMA_3_8B) * 2 == pytest.approx(15.01e9, rel=1e-3)
    assert floor.kv_bytes_per_token(floor.LLAMA_3_8B) == 131_072
    assert floor.decode_bytes(64, 1024, 8, 128) * 32 == 64 * 1024 * 131_072
    assert floor.prefill_flops(2, 1, 1) == 12


def test_weights_of_experts_are_those_that_a_batch_hits():
    """One token hits the experts it chooses, two at most twice as many, and very many tokens hit all."""
    one, two, many = (floor.product_weights(floor.QWEN3_MOE, batch) for batch in (1, 2, 10_000))
    assert one == floor.product_weights(floor.QWEN3_MOE)
    expert = 3 * 2048 * 768 * 8  # of each of eight layers
    assert two - one == pytest.approx(expert * 8 * (1 - 8 / 128))
    assert many - one == pytest.approx(expert * 120)


def test_busy_time_is_counted_once():
    """Kernels that overlap are busy together, and gaps count for nothing."""
    assert idle.covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == (4.0, 6.0)
    assert idle.covered([]) == (0.0, 0.0)


def test_a_part_that_is_out_of_time_keeps_what_it_has_and_says_so(tmp_path):
    def rows():
        yield {"shape": "small"}, {"us": 1.5}
        yield {"shape": "large"}, {"us": 2.5}

    report = Report("gpu-x", tmp_path / "x.json", {}, [])
    gpu.keep_rows(report, rows(), 100.0)
    assert [sample["values"] for sample in load(tmp_path / "x.json")["samples"]] == [{"us": 1.5}, {"us": 2.5}]
    gpu.keep_rows(report, rows(), 0.0)
    assert "left_out" in load(tmp_path / "x.json")["samples"][-1]["labels"]


def test_parts_have_a_summary_and_unknown_ones_are_refused(capsys):
    for name in PARTS:
        assert (ROOT / "bench" / "cards" / f"{name}.py").exists()
    assert summary("gpu")
    assert main(["gpu", "nothing"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing" in line and "decode" in line


def start(*argv):
    """Run the command in a process without any GPU."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench", "gpu", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=env, check=False)


@pytest.mark.slow
def test_without_a_gpu_it_says_so():
    done = start("decode")
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "no CUDA device" in done.stderr


FIGURES = {
    "tests": "passed", "decode": "runner_share_of_floor", "serve": "ttft_p50_ms", "kernels": "share_of_floor",
    "quantized": "bytes_per_s",
    "prefill": "us", "mixed": "added_us_per_token", "sampler": "us", "moe": "step_ms_per_layer", "idle": "idle_pct",
    "sweep": "us",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_dry_run(part, tmp_path):
    """Each part runs, with tiny shapes, from the command to the file."""
    pytest.importorskip("triton")
    done = start(part, "--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    data = json.loads((tmp_path / f"gpu-{part}.json").read_text())
    assert "dry run" in data["settings"]["card"] and data["part"] == f"gpu-{part}"
    assert any(FIGURES[part] in sample["values"] for sample in data["samples"]), data["samples"]
