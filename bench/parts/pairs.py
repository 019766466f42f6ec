"""This checkout against an earlier commit where nothing that came between them is asked for: in turns, side by side.

What is off adds nothing: so messages have as many bytes as before, and plans, commits and steps take as long. The other
commit gets a folder of its own for the run, with its native kernels; both sides run the same parts of the bench, and
its figures of the two runs of a turn are neighbours in time. ``*_ratio`` is this checkout's over the other's; its
median over the turns is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from ..machine import ROOT
from ..report import BenchError, Report

BEFORE = "c9ddd9f~1"
"""The last commit without adapters, speculation and tiers."""
BYTES = """
import json
from quire.scheduler.fake import bench
count, real = {}, bench.encode
def encode(message):
    data = real(message)
    seen = count.setdefault(type(message).__name__, [0, 0])
    seen[0] += 1
    seen[1] += len(data)
    return data
bench.encode = encode
bench.run_control_plane(32, 300)
print(json.dumps(count))
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Against what, and how often."""
    parser.add_argument("--against", default=BEFORE, help="the other commit")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 256], help="of plan and commit")
    parser.add_argument("--model", help="of the steps (default: the demo model)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="of the steps")


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each turn, number of sequences, and number of rows; one for the bytes of messages."""
    with tempfile.TemporaryDirectory(prefix="quire-pairs-") as folder:
        other = _checkout(args.against, Path(folder))
        sides = {"this": _links(Path(folder) / "this", ROOT), "other": other}
        with report.sample(of="bytes") as values:
            found = {name: json.loads(_run(side, "-c", BYTES)) for name, side in sides.items()}
            for kind in sorted(found["this"]):
                for name in sides:
                    values[f"{kind}_{name}"] = found[name].get(kind)
        model = args.model or str(ROOT / "demo_model")
        steps = ["steps", "--model", model, "--rows", *map(str, args.rows), "--context", "100", "--repeats", "1"]
        plans = ["control-plane", "--sequences", *map(str, args.sequences), "--repeats", "1", "--steps", "600"]
        for turn in range(args.turns):
            order = list(sides) if turn % 2 else list(sides)[::-1]
            for command, label, figure in (
                (plans, "sequences", "plan_commit_p50_us"),
                (steps, "rows", "decode_min_ms"),
            ):
                taken = {name: dict(_figures(sides[name], command, label, figure)) for name in order}
                for size, mine in taken["this"].items():
                    with report.sample(of=command[0], **{label: size}, turn=turn) as values:
                        values[f"{figure}_this"], values[f"{figure}_other"] = mine, taken["other"][size]
                        values[f"{figure}_ratio"] = mine / taken["other"][size]
    for part in ("control-plane", "steps"):
        ratios: dict[int, list[float]] = {}
        for each in report.samples:
            if each["labels"]["of"] == part:
                size = each["labels"].get("sequences", each["labels"].get("rows"))
                ratios.setdefault(size, []).append(next(v for k, v in each["values"].items() if k.endswith("_ratio")))
        print(f"{part}: median ratios " + ", ".join(f"{size}: {median(each):.3f}" for size, each in ratios.items()))


def _checkout(commit: str, folder: Path) -> Path:
    """``commit`` as a package that can be imported from the folder that is returned."""
    side = folder / "other"
    (side / "quire").mkdir(parents=True)
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True)
    if packed.returncode:
        raise BenchError(f"--against {commit} is no commit here: {packed.stderr.decode().strip()[:200]}")
    subprocess.run(["tar", "-x", "-C", str(side / "quire")], input=packed.stdout, check=True)
    _run(side, str(side / "quire" / "gpu_worker" / "kernels" / "cpu" / "build.py"))
    return side


def _links(side: Path, root: Path) -> Path:
    side.mkdir()
    (side / "quire").symlink_to(root)
    return side


def _figures(side: Path, command: list[str], label: str, figure: str) -> Iterator[tuple[int, float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        _run(side, "-m", "bench", *command, "--out", str(out))
        for sample in json.loads(out.read_text())["samples"]:
            yield sample["labels"][label], sample["values"][figure]


def _run(side: Path, *command: str) -> str:
    """What Python prints with the package of ``side``. Raises BenchError."""
    environment = dict(os.environ, PYTHONPATH=str(side))
    done = subprocess.run([sys.executable, *command], cwd=side / "quire", env=environment, capture_output=True)
    if done.returncode:
        raise BenchError(f"{command[0]} of {side.name} ended with {done.returncode}: {done.stderr.decode()[-300:]}")
    return done.stdout.decode()
