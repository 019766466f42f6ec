"""HTTP streaming through scheduler, detokenizer and frontend, with a worker that has no model.

Tokens a second say what this machine does with all processes at once; tokens per CPU second of a process say what one
core does for it. The goal is 150,000 in the slowest process.
"""

from __future__ import annotations

import argparse

from .. import chain
from ..report import Report


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How many streams."""
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256], help="completions open at a time")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured, of each repeat")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="what a step of the worker takes")
    parser.add_argument("--repeats", type=int, default=3)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each number of streams and repeat."""
    for repeat in range(args.repeats):
        for streams in args.streams:
            with report.sample(streams=streams, delay_ms=args.delay_ms, repeat=repeat) as values:
                found = chain.measure(streams, args.seconds, delay_ms=args.delay_ms)
                values["output_tokens_per_s"] = found["tokens_per_second"]
                for name, speed in found["tokens_per_cpu_second"].items():
                    values[f"{name}_tokens_per_cpu_s"] = speed
                for name in ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms"):
                    values[name] = found[name]
