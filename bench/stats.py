"""Percentiles, medians and means, and what many samples of the same thing come to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any


def percentile(values: Sequence[float], p: float) -> float | None:
    """The ``p``-th percentile by linear interpolation between closest ranks; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def geometric_mean(values: Iterable[float]) -> float | None:
    """The mean of ratios: exp of the mean logarithm; None for no values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


def medians(samples: Iterable[dict[str, Any]], apart: Sequence[str] = ("repeat", "turn")) -> list[dict[str, Any]]:
    """One row for each set of labels, in the order of first appearance: the median of each value over its samples.

    ``apart`` names the labels by which repeats of one measurement differ. A value that some samples lack is the median
    of those that have it. ``count`` is the number of samples.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    labels_of: dict[str, dict[str, Any]] = {}
    for sample in samples:
        labels = {name: value for name, value in sample["labels"].items() if name not in apart}
        key = json.dumps(labels, sort_keys=True)
        labels_of.setdefault(key, labels)
        groups.setdefault(key, []).append(sample)
    rows = []
    for key, group in groups.items():
        names = dict.fromkeys(name for sample in group for name in sample["values"])
        values = {}
        for name in names:
            found = [v for s in group if isinstance(v := s["values"].get(name), int | float)]
            if found:
                values[name] = statistics.median(found)
        rows.append({"labels": labels_of[key], "values": values, "count": len(group)})
    return rows
