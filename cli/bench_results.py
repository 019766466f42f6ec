"""What the benchmarks share: flags' types, random prompts, percentiles, and the file of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from typing import Any

from ..proto.config import ConfigError


def positive(text: str) -> int:
    """An int of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def random_ids(draw: random.Random, length: int, vocab: int) -> list[int]:
    """Token ids of a prompt; the first few ids, often special, are left out where there are enough others."""
    low = min(100, vocab // 4)
    return [draw.randrange(low, vocab) for _ in range(length)]


def spread(draw: random.Random, length: int, ratio: float) -> int:
    """A length around ``length``."""
    return max(1, draw.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def percentile(values: list[float], p: float) -> float:
    """Linear interpolation between closest ranks; 0 for no values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def save(args: argparse.Namespace, kind: str, result: dict[str, Any]) -> None:
    """Write results, flags and the machine as JSON where ``--output-json`` says."""
    if not args.output_json:
        return
    plain = (str, int, float, bool, list, type(None))
    flags = {k: v for k, v in vars(args).items() if isinstance(v, plain) and k != "api_key"}
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    record = {"benchmark": kind, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **machine, "args": flags, **result}
    try:
        with open(args.output_json, "w") as out:
            json.dump(record, out, indent=2)
            out.write("\n")
    except OSError as error:
        raise ConfigError(f"cannot write {args.output_json}: {error}") from error
