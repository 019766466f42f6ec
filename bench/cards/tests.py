"""The tests of the kernels and of the worker, compiled for this card; none is left out after a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from ..machine import ROOT
from .card import Card, Row

FILES = tuple(
    f"tests/gpu_worker/test_{name}.py"
    for name in (
        "worker_gpu", "kernels_attention", "kernels_layers", "kernels_sampling", "sampler_kernels", "sampler",
        "sampler_edits", "sampler_logprobs", "sampler_mixed", "threshold", "marks", "parallel_draw", "lora_kernels",
        "attention_launches", "batch_invariant", "linear_kernels", "moe_kernels", "coded_kernels", "w8a8_kernels",
        "narrow_kernels", "worker_memory",
    )
) + ("tests/models/test_moe.py",)  # fmt: skip
DRY = ("tests/gpu_worker/test_kernels_layers.py",)
PROCESSES = 8
"""That compile and run at a time; the card holds the small tensors of all of them."""


def rows(card: Card) -> Iterator[Row]:
    """One row of counts, and one for each test that failed."""
    files = card.few(DRY, FILES)
    with TemporaryDirectory() as folder:
        found = Path(folder) / "junit.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", f"--junitxml={found}", "--timeout=400", "-n",
            str(min(PROCESSES, os.cpu_count() or 1)), "--dist=worksteal", *files,
        ]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
        if not found.exists():
            yield {"tests": "did not run", "why": (done.stdout + done.stderr)[-1500:]}, {"failed": 1}
            return
        cases = list(ElementTree.parse(found).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    yield {"tests": "all"}, {"passed": passed, "failed": len(failed), "skipped": skipped, "seconds": seconds}
    for case in failed:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        why = (problem.get("message") or "") if problem is not None else ""
        yield {"tests": f"{case.get('classname')}::{case.get('name')}", "why": why[:300]}, {"failed": 1}
