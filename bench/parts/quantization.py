"""bfloat16, int8, int4 and GPTQ weights with one request at a time: tokens/s, and the gap between two."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ..load import Load
from ..models import find_model
from ..quantized import GPTQ, write_gptq
from ..report import Report
from ..variants import run_variants


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which model and which methods."""
    parser.add_argument("--model", default="half-b-qwen2")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["none", "int8", "int4"],
        help=f"none: --dtype alone; {', '.join(GPTQ)}: a checkpoint, written first; else --quantization",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--turns", type=int, default=3)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each method and turn."""
    off = ["--no-enable-prefix-caching"]
    variants = {
        name if name != "none" else args.dtype: off
        + ([f"--quantization={name}"] if name != "none" and name not in GPTQ else [])
        for name in args.methods
    }
    load = Load("127.0.0.1", 0, "", args.concurrency, seconds=args.seconds, inputs=(32, 64))
    model = find_model(args.model)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        coded = {name: write_gptq(name, model, Path(folder, name)) for name in args.methods if name in GPTQ}
        run_variants(report, args.model, args.dtype, variants, load, args.turns, coded)
