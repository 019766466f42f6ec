"""Start-up by phase: from the command until processes listen, the model is loaded, and the first token has come.

Every figure is seconds since the command. ``scheduler``, ``detokenizer`` and ``frontend`` listen; ``imported`` is when
the worker has torch, ``loaded`` when it has the weights, ``ready`` the line that `quire serve` prints.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from ..models import find_model
from ..report import BenchError, Report
from ..sides import STOP_S, free_port, quire

MARKS = {
    "scheduler": ("scheduler[", "listening on"),
    "detokenizer": ("detokenizer[", "listening on"),
    "frontend": ("listening on http",),
    "imported": ("gpu_worker[", " on cpu, "),
    "loaded": ("gpu_worker[", "started: "),
    "ready": ("quire is ready",),
}
"""A phase has ended with the first line of the server's that has all of these words."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which models."""
    parser.add_argument("--models", nargs="+", default=["tiny-llama", "small-llama"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=5)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each model and repeat; the first finds files that the system may not have cached yet."""
    models = [find_model(name) for name in args.models]
    for repeat in range(args.repeats):
        for model in models:
            with report.sample(model=model.name, dtype=args.dtype, repeat=repeat) as values:
                values |= {f"{phase}_s": seconds for phase, seconds in start_once(model, args.dtype).items()}


def start_once(model: Path, dtype: str) -> dict[str, float]:
    """Seconds from the command to the end of each phase. Raises BenchError where the server ends before."""
    side, port = quire(), free_port()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        began = time.monotonic()
        process = subprocess.Popen(
            side.serve_command(model, port, dtype, False), env={**os.environ, **side.env}, cwd=folder, text=True,
            errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            found = read_marks(process, began)
            first_token(port, model.name)
            return {**found, "first_token": time.monotonic() - began}
        finally:
            process.terminate()
            process.communicate(timeout=STOP_S)


def read_marks(process: subprocess.Popen[str], began: float) -> dict[str, float]:
    """When each phase ended."""
    found: dict[str, float] = {}
    lines = []
    for line in process.stdout or ():
        lines.append(line.rstrip())
        for phase, words in MARKS.items():
            if phase not in found and all(word in line for word in words):
                found[phase] = time.monotonic() - began
        if "ready" in found:
            return found
    raise BenchError(f"the server ended before it was ready: {lines[-1] if lines else 'it said nothing'}")


def first_token(port: int, model: str) -> None:
    """Ask for one token of a short prompt."""
    body = json.dumps({"model": model, "prompt": [5, 6, 7], "max_tokens": 1, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=STOP_S).close()
