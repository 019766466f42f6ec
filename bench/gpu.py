"""quire on one GPU, in parts of at most eight minutes each: tests, kernels, steps of whole models, serving.

    python -m bench gpu                     # every part, each in a process of its own
    python -m bench gpu decode serve        # some of them
    python -m bench gpu --dry-run           # the same code with tiny shapes on the CPU; its numbers mean nothing
    python -m bench gpu --compile           # without a GPU: compile every kernel for every card, as the table says

Each part writes bench/results/gpu-PART.json (or into the folder of --out) as it goes, so one that is cut short keeps
what it has. Every part first measures the card's ceilings, which floors are computed from.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from .cards import PARTS
from .compile import pages, table
from .compile.cards import CARDS
from .machine import ROOT, Watch
from .report import RESULTS, BenchError, Report, note_progress

LIMIT_S = 480.0
DRY = "dry run: the numbers mean nothing"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which parts, how long, and whether it is a rehearsal."""
    parser.add_argument("parts", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)} (default: all but sweep)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a part begins nothing new")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU: does it run at all")
    parser.add_argument("--compile", action="store_true", help="compile for every card, and compare with the table")
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS), help="for --compile: targets")
    parser.add_argument("--only", default="", help="for --compile: launches whose name begins so")
    parser.add_argument(
        "--rewrite", action="store_true", help="for --compile: write the table, and what the documents say of it"
    )


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Exit code 0 where every part ran and no test failed. Raises BenchError."""
    if args.compile:
        code = table.run(args.cards, args.only, args.rewrite)
        if args.rewrite:
            pages.write()
        return code
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        raise BenchError(f"unknown part {unknown[0]!r} of gpu; there are {', '.join(PARTS)}.")
    parts = args.parts or [name for name in PARTS if name != "sweep"]
    if len(parts) == 1:
        return _run_part(parts[0], args, argv)
    codes = [_spawn(name, args) for name in parts]
    return max(codes)


def _spawn(name: str, args: argparse.Namespace) -> int:
    """One part in a process of its own: what a kernel breaks there is broken for that part alone."""
    note_progress(f"gpu {name}")
    command = [sys.executable, "-m", "bench", "gpu", name, f"--limit={args.limit}"]
    command += ["--dry-run"] * args.dry_run + ([f"--out={args.out.resolve()}"] if args.out else [])
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        note_progress(f"gpu {name} ended with code {code}")
    return abs(code)


def _run_part(name: str, args: argparse.Namespace, argv: list[str]) -> int:
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        raise BenchError("no CUDA device here; run `python -m bench gpu` on a machine with a GPU, or with --dry-run.")
    from .cards.card import Card, measure_ceilings

    device = torch.device("cpu" if args.dry_run else "cuda")
    settings = {
        "card": DRY if args.dry_run else torch.cuda.get_device_name(), "cuda": torch.version.cuda, "limit_s": args.limit
    }  # fmt: skip
    report = Report(f"gpu-{name}", (args.out or RESULTS) / f"gpu-{name}.json", settings, argv)
    with torch.inference_mode():
        card = Card(device, args.dry_run, measure_ceilings(device, args.dry_run))
        settings |= {"copy_bytes_per_s": card.ceilings.bandwidth, "product_flops_per_s": card.ceilings.products}
        keep_rows(report, importlib.import_module(f".cards.{name}", __package__).rows(card), args.limit)
    print(f"written to {report.out}")
    return int(any(sample["values"].get("failed", 0) for sample in report.samples))


def keep_rows(report: Report, rows: Iterator[tuple[dict[str, Any], dict[str, Any]]], limit: float) -> None:
    """Keep each row when it is made, until none is left or ``limit`` seconds are over."""
    end = time.monotonic() + limit
    while True:
        watch = Watch()
        if time.monotonic() >= end:
            report.add({"left_out": f"what was left after {limit:g} s; raise --limit"}, {}, watch.stop())
            return
        row = next(rows, None)
        if row is None:
            return
        report.add(*row, watch.stop())
