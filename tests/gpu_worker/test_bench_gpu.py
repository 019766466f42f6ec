"""bench/gpu.py without a GPU: its arithmetic, its command line, its file, and a dry run of the whole path."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import gpu  # noqa: E402
import gpu_floor  # noqa: E402

H200 = gpu_floor.Ceilings(bandwidth=4.3e12, products=788e12)


@pytest.mark.parametrize(
    ("batch", "context", "ms"),
    [(1, 512, 3.51), (8, 512, 3.62), (64, 512, 4.49), (64, 1024, 5.49), (256, 512, 8.9), (256, 1024, 12.9)],
)
def test_floor_of_the_reference(batch, context, ms):
    assert gpu_floor.decode_floor(gpu_floor.LLAMA_3_8B, batch, context, H200) * 1e3 == pytest.approx(ms, rel=0.01)


def test_bytes_of_a_step():
    assert gpu_floor.product_weights(gpu_floor.LLAMA_3_8B) * 2 == pytest.approx(15.01e9, rel=1e-3)
    assert gpu_floor.kv_bytes_per_token(gpu_floor.LLAMA_3_8B) == 131_072
    assert gpu_floor.decode_bytes(64, 1024, 8, 128) * 32 == 64 * 1024 * 131_072
    assert gpu_floor.prefill_flops(2, 1, 1) == 12


def test_command_line():
    args = gpu.parse(["--out", "x.json", "--only", "decode", "--batches", "1", "2"])
    assert args.out == Path("x.json") and args.only == ["decode"] and args.batches == [1, 2]
    assert gpu.parse([]).only == list(gpu.PARTS) and not gpu.parse([]).sweep
    with pytest.raises(SystemExit):
        gpu.parse(["--only", "nothing"])


def test_report_is_written_after_every_row(tmp_path):
    out = tmp_path / "sub" / "x.json"
    report = gpu.Report(out, {"device": "d"})
    report.add("kernels", {"us": 1.5})
    assert json.loads(out.read_text()) == {"device": "d", "kernels": [{"us": 1.5}]}
    report.set("ceilings", {"a": 1})
    assert json.loads(out.read_text())["ceilings"] == {"a": 1}
    assert list(out.parent.iterdir()) == [out]


def test_head_says_where_numbers_come_from():
    head = gpu.head("card", ["--sweep"])
    assert head["device"] == "card" and head["command"] == "python bench/gpu.py --sweep"
    assert head["commit"] and head["date"].endswith("+00:00")


def start(*argv):
    """Run the command in a process without any GPU."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(BENCH / "gpu.py"), *argv],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
        check=False,
    )


@pytest.mark.slow
def test_without_a_gpu_it_says_so():
    done = start()
    assert done.returncode != 0 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "no CUDA device" in done.stderr


@pytest.mark.slow
def test_dry_run(tmp_path):
    """Every part runs, with tiny shapes, from the command to the file."""
    pytest.importorskip("triton")
    out = tmp_path / "dry.json"
    done = start("--dry-run", "--sweep", "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    data = json.loads(out.read_text())
    assert "dry run" in data["device"]
    kernels = {row["kernel"] for row in data["kernels"]}
    assert {"decode attention", "prefill attention", "rms_norm + residual", "sampler all"} <= kernels
    assert len(data["sweep"]) == 2 and data["decode"][0]["step_ms"] > 0
