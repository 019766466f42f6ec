"""A KV cache too small for the requests that run, against one that holds them all: what preemption costs."""

from __future__ import annotations

import argparse

from ..load import Load
from ..report import Report
from ..variants import run_variants


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and how many blocks."""
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--blocks", type=int, default=160, help="of 16 tokens; at least those of the longest request")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--turns", type=int, default=2)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each size and turn."""
    load = Load("127.0.0.1", 0, "", args.concurrency, seconds=args.seconds, outputs=(128, 256))
    small = [f"--num-gpu-blocks-override={args.blocks}", "--no-enable-prefix-caching"]
    variants = {"enough": ["--no-enable-prefix-caching"], f"{args.blocks} blocks": small}
    run_variants(report, args.model, args.dtype, variants, load, args.turns)
