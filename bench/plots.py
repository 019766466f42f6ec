"""Plots of a comparison, as PNG: throughput over concurrency, latency over the rate of arrivals."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .report import BenchError
from .stats import medians

Points = dict[str, list[tuple[float, float]]]
"""By the name of a line, (x, y)."""


def check_installed() -> None:
    """Raises BenchError where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("plots need matplotlib; pip install 'quire[bench]', or give --no-plots.")


def draw(data: dict[str, Any], out: Path) -> list[Path]:
    """Write the plots that there are samples for beside ``out``; their files."""
    written = []
    for name, prefix, value, titles in (
        ("throughput", "online-", "output_tokens_per_s", ("requests open at a time", "output tokens/s")),
        ("ttft", "rate-", "ttft_p50_ms", ("requests/s, random arrivals", "time to first token, median, ms")),
        ("itl", "rate-", "itl_p50_ms", ("requests/s, random arrivals", "gap between tokens, median, ms")),
    ):
        panels = lines(data, prefix, value)
        if panels:
            path = out.with_name(f"{out.stem}-{name}.png")
            _figure(panels, titles, path)
            written.append(path)
    return written


def lines(data: dict[str, Any], prefix: str, value: str) -> dict[str, Points]:
    """By panel (model and dtype) a line for each side. The number after ``prefix`` in a cell's name is x."""
    panels: dict[str, Points] = {}
    for row in medians(data["samples"]):
        labels = row["labels"]
        if labels["cell"].startswith(prefix) and value in row["values"]:
            dtype = "default dtype" if labels["dtype"] == "auto" else labels["dtype"]
            panel = panels.setdefault(f"{labels['model']}, {dtype}", {})
            point = (float(labels["cell"].removeprefix(prefix)), row["values"][value])
            panel.setdefault(labels["side"], []).append(point)
    return panels


def _figure(panels: dict[str, Points], titles: tuple[str, str], path: Path) -> None:
    """One panel beside the other, in one row for each two."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.4 * rows), squeeze=False)
    for axes, (name, points) in zip(grid.flat, panels.items(), strict=False):
        for side, found in points.items():
            axes.plot(*zip(*sorted(found), strict=True), marker="o", label=side)
        axes.set(title=name, xlabel=titles[0], ylabel=titles[1], ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
