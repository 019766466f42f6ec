"""The scheduler's plan + commit by number of sequences, with a worker that answers at once and has no model.

Arrivals, ends, prefill chunks, block allocation and hashing are in the measure: a sequence that ends is replaced at
once, and the length of outputs says how often that is. CPU time of one thread; the goals are 150 us at 256 sequences
and 500 us at 1,024.
"""

from __future__ import annotations

import argparse
from itertools import product

from ..report import Report


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How many sequences and steps."""
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--output-len", type=int, nargs="+", default=[256], help="tokens, on average")
    parser.add_argument("--steps", type=int, default=1000, help="measured, of each repeat")
    parser.add_argument("--repeats", type=int, default=5)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each number of sequences and repeat."""
    from quire.scheduler.fake.bench import run_control_plane

    for repeat in range(args.repeats):
        for sequences, output_len in product(args.sequences, args.output_len):
            with report.sample(sequences=sequences, output_len=output_len, repeat=repeat) as values:
                found = run_control_plane(sequences, args.steps, output_len=output_len)
                values["plan_commit_us"] = found["mean_us"]
                values["plan_commit_p50_us"] = found["p50_us"]
                values["plan_commit_p99_us"] = found["p99_us"]
                values["plan_us"] = found["plan_mean_us"]
                values["commit_us"] = found["commit_mean_us"]
                values["codec_us"] = found["codec_mean_us"]
