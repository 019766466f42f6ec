"""LLM, offline: tokens/s of one batch of 64 requests, with its engine loaded once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..models import find_model, prompt_ids
from ..report import Report, note_progress
from ..sides import OfflineBatch, quire

JOB: dict[str, Any] = {"requests": 64, "inputs": [32, 256], "outputs": [64, 128], "seed": 11}
"""The batch: how many requests, and tokens in and out of each, both ends included."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which model and how many requests."""
    parser.add_argument(
        "--model", default="tiny-llama", help="a folder, or one of bench/models.py's (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=JOB["requests"])
    parser.add_argument("--repeats", type=int, default=3)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each batch."""
    model, side = find_model(args.model), quire()
    job = {**job_of(model, args.dtype), "requests": args.requests}
    with OfflineBatch(side, job) as batch:
        note_progress(f"{model.name} is loaded after {batch.start_seconds:.1f} s")
        for repeat in range(args.repeats):
            labels = {"side": side.name, "model": model.name, "dtype": args.dtype, "requests": args.requests}
            with report.sample(**labels, repeat=repeat) as values:
                values |= offline_figures(batch.run())


def job_of(model: Path, dtype: str) -> dict[str, Any]:
    """What `offline_run.py` is asked to do."""
    return {**JOB, "model": str(model), "dtype": dtype, "ids": prompt_ids(model), "options": {}}


def offline_figures(done: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second out of what a batch reports."""
    return {
        "output_tokens_per_s": done["output_tokens"] / done["seconds"],
        "total_tokens_per_s": (done["input_tokens"] + done["output_tokens"]) / done["seconds"],
        "seconds": done["seconds"],
        "output_tokens": done["output_tokens"],
    }
