"""CPU time of a server that has nothing to do, as a whole and by process.

The server answers some requests first, so that what they leave awake shows. The goal is 1% of a core.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from ..load import Load
from ..machine import cpu_seconds
from ..models import find_model, prompt_ids
from ..report import Report
from ..serving import run_load
from ..sides import Server, quire

SETTLE_S = 3.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and how long."""
    parser.add_argument("--model", default="tiny-llama", help="a folder, or a name of bench/models.py's")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=1)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each repeat, of one server."""
    model = find_model(args.model)
    with Server(quire(), model, args.dtype) as server:
        run_load(Load("127.0.0.1", server.port, model.name, concurrency=4, seconds=2.0, ids=prompt_ids(model)))
        time.sleep(SETTLE_S)
        for repeat in range(args.repeats):
            with report.sample(model=model.name, repeat=repeat) as values:
                processes = {service_of(pid): pid for pid in descendants(server.pid)}
                before = {name: cpu_seconds(pid) for name, pid in {"whole": server.pid, **processes}.items()}
                time.sleep(args.seconds)
                for name, pid in {"whole": server.pid, **processes}.items():
                    values[f"{name}_pct_of_a_core"] = 100 * (cpu_seconds(pid) - before[name]) / args.seconds


def descendants(pid: int) -> list[int]:
    """The processes that a server started."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        found += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def service_of(pid: int) -> str:
    """``gpu_worker`` of ``python -m quire.gpu_worker --flags``."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return next((word.removeprefix("quire.") for word in words if word.startswith("quire.")), "other")
