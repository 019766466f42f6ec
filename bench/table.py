"""The table of a comparison, in Markdown: both sides in every cell, the ratio of their throughputs, latencies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import BenchError
from .stats import geometric_mean, medians

LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
Cell = tuple[str, str, str]
"""model, dtype and name of a cell."""


def pairs(data: dict[str, Any]) -> dict[Cell, tuple[dict[str, float], dict[str, float]]]:
    """By cell the medians of both sides, quire's first; cells that one side lacks are left out."""
    ours, theirs = data["settings"]["sides"]
    found: dict[Cell, dict[str, dict[str, float]]] = {}
    for row in medians(data["samples"]):
        labels = row["labels"]
        cell = (labels["model"], labels["dtype"], labels["cell"])
        found.setdefault(cell, {})[labels["side"]] = row["values"]
    return {cell: (sides[ours], sides[theirs]) for cell, sides in found.items() if ours in sides and theirs in sides}


def ratio(pair: tuple[dict[str, float], dict[str, float]]) -> float:
    """Output tokens/s of quire's over those of the peer's."""
    return pair[0]["output_tokens_per_s"] / pair[1]["output_tokens_per_s"]


def worse_latencies(pair: tuple[dict[str, float], dict[str, float]]) -> list[str]:
    """Names of those latencies that are longer than the peer's."""
    ours, theirs = pair
    return [name for name in LATENCIES if name in ours and name in theirs and ours[name] > theirs[name]]


def markdown(data: dict[str, Any]) -> str:
    """The table, with geometric means and what the machine did below it."""
    found, sides = pairs(data), data["settings"]["sides"]
    head = ["model", "dtype", "cell", *(f"{side}, tokens/s" for side in sides), "ratio"]
    head += [f"{side}, {name} p50 / p99, ms" for name in ("TTFT", "ITL") for side in sides]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (model, dtype, cell), pair in found.items():
        columns = [model, "default" if dtype == "auto" else dtype, cell]
        columns += [*(shown(side["output_tokens_per_s"]) for side in pair), times(cell, pair)]
        columns += [latency(side, name) for name in ("ttft", "itl") for side in pair]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join([*lines, "", f"Medians of {counts(data)} samples.", *means(found), quiet(data), ""])


def times(cell: str, pair: tuple[dict[str, float], dict[str, float]]) -> str:
    """The ratio; at a given rate of arrivals throughput says nothing."""
    return "" if cell.startswith("rate-") else f"{ratio(pair):.2f}"


def latency(values: dict[str, float], name: str) -> str:
    """``p50 / p99``, where there are any."""
    if f"{name}_p50_ms" not in values:
        return ""
    return f"{shown(values[f'{name}_p50_ms'])} / {shown(values[f'{name}_p99_ms'])}"


def means(found: dict[Cell, tuple[dict[str, float], dict[str, float]]]) -> list[str]:
    """Lines with the geometric means of the ratios, and the latencies that are longer than the peer's."""
    closed = {cell: pair for cell, pair in found.items() if not cell[2].startswith("rate-")}
    if not closed:
        return []
    by_model = {model: geometric_mean(ratio(p) for c, p in closed.items() if c[0] == model) for model, *_ in closed}
    text = ", ".join(f"{model} {mean:.2f}" for model, mean in by_model.items())
    lines = [f"Geometric mean of the ratios: {geometric_mean(map(ratio, closed.values())):.2f} ({text})."]
    least = min(closed, key=lambda cell: ratio(closed[cell]))
    lines.append(f"The least: {ratio(closed[least]):.2f}, {' '.join(least)}.")
    worse = [f"{' '.join(cell)} {name.removesuffix('_ms')}" for cell, pair in closed.items()
             for name in worse_latencies(pair)]  # fmt: skip
    lines.append(f"Latencies longer than the peer's: {', '.join(worse) or 'none'}.")
    return lines


def counts(data: dict[str, Any]) -> str:
    """How many samples each median is of."""
    found = sorted({row["count"] for row in medians(data["samples"])})
    return f"{found[0]} to {found[-1]}" if len(found) > 1 else str(*found)


def quiet(data: dict[str, Any]) -> str:
    """A line on what else the machine did."""
    others, steal = (max(s["machine"][name] for s in data["samples"]) for name in ("others_pct", "steal_pct"))
    return f"Meanwhile other processes used at most {others:.0f}% of the cores, and {steal:.0f}% were stolen."


def shown(value: float) -> str:
    """Three significant digits, and no fraction from 100 up."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def put_into(page: Path, peer: str, text: str, pictures: Sequence[Path] = ()) -> None:
    """Put the table and the pictures between ``<!-- compare PEER -->`` and ``<!-- end -->`` of a page.

    Raises BenchError where it has no such marks.
    """
    before, begin, rest = page.read_text("utf-8").partition(f"<!-- compare {peer} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not begin or not end:
        raise BenchError(
            f"{page} has no lines <!-- compare {peer} --> and <!-- end -->; add them where the table goes."
        )
    links = [f"![{path.stem}]({os.path.relpath(path, page.parent)})\n" for path in pictures]
    page.write_text("".join([before, begin, "\n".join(["", text.rstrip("\n"), "", *links, end]), after]), "utf-8")
