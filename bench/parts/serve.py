"""Serving over HTTP: TTFT, TPOT, ITL and tokens/s in closed loops, goodput at random arrivals.

One server is started for all loads. With --prompt and --output other lengths than the default ones are asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..load import Load
from ..models import find_model, prompt_ids
from ..report import Report, note_progress
from ..serving import measure_load, parse_slo
from ..sides import Server, Side, quire


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, which loads, how long."""
    parser.add_argument(
        "--model", default="tiny-llama", help="a folder, or one of bench/models.py's (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32], help="closed loops")
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="Poisson arrivals, requests a second")
    parser.add_argument("--prompt", type=int, nargs=2, default=(32, 256), metavar=("LOW", "HIGH"), help="tokens in")
    parser.add_argument("--output", type=int, nargs=2, default=(64, 128), metavar=("LOW", "HIGH"), help="tokens out")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each window")
    parser.add_argument("--repeats", type=int, default=3, help="windows of each load, all loads in turns")
    parser.add_argument("--slo", nargs="+", default=["ttft:500", "tpot:50"], help="milliseconds that goodput allows")
    parser.add_argument("--flag", action="append", default=[], help="of the server, such as --flag=--cpu-threads=1")


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each load and repeat."""
    slo, model = parse_slo(args.slo), find_model(args.model)
    side: Side = quire(args.flag)
    with Server(side, model, args.dtype) as server:
        note_progress(f"{model.name} is ready after {server.start_seconds:.1f} s")
        for repeat in range(args.repeats):
            for load in loads(args, server.port, model):
                labels: dict[str, Any] = {"side": side.name, "model": model.name, "dtype": args.dtype}
                labels |= {"rate": load.rate} if load.rate else {"concurrency": load.concurrency}
                with report.sample(**labels, repeat=repeat) as values:
                    values |= measure_load(load, server.pid, slo)


def loads(args: argparse.Namespace, port: int, model: Path) -> list[Load]:
    """The closed loops, then the open ones."""
    common: dict[str, Any] = {
        "host": "127.0.0.1", "port": port, "model": model.name, "ids": prompt_ids(model), "seconds": args.seconds,
        "inputs": tuple(args.prompt), "outputs": tuple(args.output),
    }  # fmt: skip
    closed = [Load(concurrency=width, **common) for width in args.concurrency]
    return closed + [Load(rate=rate, **common) for rate in args.rate]
