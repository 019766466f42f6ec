"""Prefix caching on and off, for requests that share most of their prompt."""

from __future__ import annotations

import argparse

from ..load import Load
from ..report import Report
from ..variants import run_variants


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and how much is shared."""
    parser.add_argument("--model", default="small-llama")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shared", type=int, default=768, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=64, help="tokens of each prompt's own, at most")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=2)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each of on and off, and turn."""
    load = Load(
        "127.0.0.1", 0, "", args.concurrency, seconds=args.seconds, shared=args.shared,
        inputs=(args.shared + 1, args.shared + args.own), outputs=(16, 32),
    )  # fmt: skip
    variants = {"on": [], "off": ["--no-enable-prefix-caching"]}
    run_variants(report, args.model, args.dtype, variants, load, args.turns)
