"""What the worker's Python costs a decode step: a model that costs nothing, plans of a real scheduler."""

from __future__ import annotations

import argparse

from ..report import Report


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How many rows, and how their tokens are drawn."""
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--sampling", nargs="+", choices=["greedy", "random"], default=["greedy", "random"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each kind of sampling, number of rows, and repeat: microseconds, whole and by phase."""
    import torch

    from .. import worker_step

    torch.set_num_threads(1)
    for repeat in range(args.repeats):
        for sampling in args.sampling:
            for rows in args.rows:
                with report.sample(rows=rows, sampling=sampling, repeat=repeat) as values:
                    found = worker_step.measure(rows, args.steps, sampling=sampling)
                    values |= {f"{name}_us": value for name, value in found.items()}
