"""``quire bench sweep``: load a running server at several concurrencies and rates, and draw what came of it.

Each point is a run of ``quire bench serve`` and a JSON file of its results. With ``--resume`` a point whose file is
there is not run again; a file appears when its run is over, so an interrupted sweep goes on where it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..proto.config import ConfigError
from .bench_results import positive
from .bench_serve import add_load_flags, serve
from .errors import CommandError

_LOAD = ("endpoint", "num_prompts", "random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len",
         "ignore_eos", "temperature", "seed", "goodput")  # fmt: skip
"""What all points of one folder have in common."""


@dataclass(frozen=True)
class Point:
    """One run: ``kind`` is concurrency or rate, and ``value`` how many at once, or a second."""

    kind: str
    value: float
    run: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.kind}-{self.value:g}-run-{self.run}.json"

    def seed(self, first: int) -> int:
        """Of its prompts: no other point's, whose prefixes the server has cached."""
        return first + zlib.crc32(self.name.encode())


def add_sweep(kinds: Any) -> None:
    """Add the command."""
    help = "serve at several concurrencies and rates: a JSON file for each, and plots"
    parser = kinds.add_parser("sweep", help=help, description=help)
    add_load_flags(parser)
    parser.add_argument(
        "--max-concurrencies", nargs="+", type=positive, default=[], metavar="N", help="such as 1 4 16 64"
    )
    parser.add_argument(
        "--request-rates", nargs="+", type=float, default=[], metavar="R", help="requests/s, such as 1 2 4"
    )
    parser.add_argument(
        "--num-runs", type=positive, default=1, help="runs of each point; plots show the mean (default: 1)"
    )
    parser.add_argument("-o", "--output-dir", default="sweep", metavar="DIR", help="folder of results (default: sweep)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the results that are there, and run what is missing"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would run")
    parser.add_argument("--no-plots", action="store_true", help="write JSON alone")
    parser.set_defaults(run=sweep)


def sweep(args: argparse.Namespace) -> int:
    """Run every point that is missing, and draw. Raises ConfigError before anything is run, and CommandError where
    no request of a point succeeds."""
    folder, points = Path(args.output_dir), list(_points(args))
    if not args.no_plots and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots of a sweep need a package: pip install 'quire[bench]', or --no-plots for JSON alone.")
    there = [point for point in points if (folder / point.name).exists()]
    if there and not args.resume:
        raise ConfigError(f"{folder / there[0].name} exists; go on with --resume, or name another --output-dir.")
    for point in there:
        _check_same(args, point, folder / point.name)
    for number, point in enumerate(points, 1):
        state = "there already" if point in there else "would run" if args.dry_run else "runs"
        print(f"[{number}/{len(points)}] {point.kind} {point.value:g}, run {point.run}: {state}", flush=True)
        if state == "runs":
            _run(args, point, folder)
    if not args.dry_run and not args.no_plots:
        print(*(f"wrote {path}" for path in draw(folder, points)), sep="\n")
    return 0


def _points(args: argparse.Namespace) -> Iterator[Point]:
    if not args.max_concurrencies and not args.request_rates:
        raise ConfigError("a sweep needs --max-concurrencies, such as 1 4 16, or --request-rates, such as 1 2 4.")
    if wrong := [rate for rate in args.request_rates if not 0 < rate < float("inf")]:
        raise ConfigError(f"request_rates must be above 0 and finite, got {wrong[0]:g}.")
    for kind, values in (("concurrency", args.max_concurrencies), ("rate", args.request_rates)):
        for value in sorted(set(values)):
            for run in range(args.num_runs):
                yield Point(kind, value, run)


def _check_same(args: argparse.Namespace, point: Point, path: Path) -> None:
    """Raises ConfigError where the results in ``path`` are of another load."""
    had = _read(path).get("args", {})
    if "seed" in had:
        had["seed"] -= point.seed(0)
    for name in _LOAD:
        if had.get(name) != getattr(args, name):
            raise ConfigError(
                f"{path} was measured with {name} {had.get(name)}, and {getattr(args, name)} is asked for; use the "
                "same load, or another --output-dir."
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as results ({error}); remove it.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no results; remove it.")
    return found


def _run(args: argparse.Namespace, point: Point, folder: Path) -> None:
    """One point, whose file appears when all of it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}; name another --output-dir.") from error
    written = folder / f".{point.name}"
    ours = argparse.Namespace(**vars(args))
    ours.output_json, ours.seed = str(written), point.seed(args.seed)
    ours.max_concurrency = int(point.value) if point.kind == "concurrency" else None
    ours.request_rate = point.value if point.kind == "rate" else float("inf")
    if serve(ours):
        written.unlink(missing_ok=True)
        raise CommandError(f"no request succeeded at {point.kind} {point.value:g}; mend the server, then --resume.")
    os.replace(written, folder / point.name)


# ---------------------------------------------------------------- plots


PLOTS = (
    ("throughput", "concurrency", "requests at once", "output tokens/s", ("output_throughput",)),
    ("latency", "rate", "requests/s, random arrivals", "milliseconds",
     ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")),
    ("goodput-concurrency", "concurrency", "requests at once", "requests/s", ("request_throughput", "request_goodput")),
    ("goodput-rate", "rate", "requests/s, random arrivals", "requests/s", ("request_throughput", "request_goodput")),
)  # fmt: skip
"""Name of the file, kind of its points, titles of its axes, and its lines."""


def lines(folder: Path, points: list[Point], kind: str, names: tuple[str, ...]) -> dict[str, list[tuple[float, float]]]:
    """By name of a figure, (value of the point, mean of its runs), of the points of ``kind`` that have it."""
    found: dict[str, list[tuple[float, float]]] = {}
    results = [(point, _read(folder / point.name)) for point in points if point.kind == kind]
    for name in names:
        for value in sorted({point.value for point, _ in results}):
            runs = [result[name] for point, result in results if point.value == value and name in result]
            if runs:
                found.setdefault(name, []).append((value, sum(runs) / len(runs)))
    return found


def draw(folder: Path, points: list[Point]) -> list[Path]:
    """Write the plots that there are points for, as PNG; their files."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    written = []
    for name, kind, x, y, figures in PLOTS:
        found = lines(folder, points, kind, figures)
        if not found or (name.startswith("goodput") and "request_goodput" not in found):
            continue
        figure, axes = pyplot.subplots(figsize=(6, 4))
        for label, values in found.items():
            axes.plot(*zip(*values, strict=True), marker="o", label=label)
        axes.set(xlabel=x, ylabel=y, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(path := folder / f"{name}.png", dpi=110)
        pyplot.close(figure)
        written.append(path)
    return written
