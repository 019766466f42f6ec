"""A server's ``/metrics`` as numbers, and what two readings say together: rates, shares and percentiles."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"(?:(?P<prefix>vllm|quire):)?(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_BOUND = re.compile(r"\+Inf|[0-9.]+(e[+-]?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass
class Reading:
    """Samples by name (without ``vllm:`` or ``quire:``) and labels, at a time in seconds."""

    at: float
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = field(default_factory=dict)

    def total(self, name: str) -> float | None:
        """Sum of a figure's samples; None where the server does not tell it, as while no scheduler answers."""
        found = self.samples.get(name)
        return None if found is None else sum(found.values())

    def by(self, name: str, label: str) -> dict[str, float]:
        """The same for each value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.samples.get(name, {}).items():
            sums[dict(labels).get(label, "")] += value
        return dict(sums)

    def label(self, name: str, label: str) -> str:
        """The value of a label of a figure's first sample; "" where there is none."""
        return next((dict(labels).get(label, "") for labels in self.samples.get(name, {})), "")


def parse(text: str, at: float) -> Reading:
    """A page in Prometheus' text format. A figure that is told under two prefixes counts once; lines that are no
    samples are left out."""
    found: dict[str, tuple[str | None, dict[tuple[tuple[str, str], ...], float]]] = {}
    for line in text.splitlines():
        if line.startswith("#") or (matched := _SAMPLE.fullmatch(line.strip())) is None:
            continue
        prefix, samples = found.setdefault(matched["name"], (matched["prefix"], {}))
        if prefix != matched["prefix"]:
            continue
        try:
            samples[tuple(_LABEL.findall(matched["labels"] or ""))] = float(matched["value"])
        except ValueError:
            continue
    return Reading(at, {name: samples for name, (_, samples) in found.items()})


def grown(name: str, old: Reading, new: Reading) -> float | None:
    """By how much a counter grew; from 0 where it began again. None where a reading lacks it."""
    before, after = old.total(name), new.total(name)
    if before is None or after is None:
        return None
    return after - before if after >= before else after


def rate(name: str, old: Reading, new: Reading) -> float | None:
    """The same a second."""
    growth = grown(name, old, new)
    return growth / (new.at - old.at) if growth is not None and new.at > old.at else None


def share(part: str, whole: str, old: Reading, new: Reading) -> float | None:
    """One counter's growth as a share of another's; None where neither grew."""
    some, everything = grown(part, old, new), grown(whole, old, new)
    return some / everything if some is not None and everything else None


def percentiles(name: str, old: Reading, new: Reading, shares: tuple[float, ...]) -> list[float] | None:
    """Percentiles of what a histogram took in between two readings, linear within a bucket as Prometheus' own; above
    the last bound, that bound. None where it took in nothing."""
    counts = _counts(name, new)
    before = _counts(name, old)
    if sum(before.values()) <= sum(counts.values()):
        counts = {bound: count - before.get(bound, 0.0) for bound, count in counts.items()}
    bounds = sorted(counts)
    whole = counts[bounds[-1]] if bounds else 0.0
    return [_percentile(bounds, counts, portion * whole) for portion in shares] if whole > 0 else None


def smallest(name: str, reading: Reading) -> float:
    """The first bound of a histogram, below which nothing is told apart; 0 where there is none."""
    return min(_counts(name, reading), default=0.0)


def _counts(name: str, reading: Reading) -> dict[float, float]:
    """Cumulative counts by upper bound."""
    found = reading.by(f"{name}_bucket", "le")
    return {float(bound): count for bound, count in found.items() if _BOUND.fullmatch(bound)}


def _percentile(bounds: list[float], counts: dict[float, float], rank: float) -> float:
    low = below = 0.0
    for bound in bounds:
        if counts[bound] >= rank and counts[bound] > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return low
