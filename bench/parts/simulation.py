"""Histories of a whole cluster in one process, on a simulated clock and network: how many a minute, and which fail.

``--show SEED`` prints what happens in one history, ``--shrink SEED`` the smallest plan that fails in the same way, and
``--broken`` puts faults into the code by hand, one after another, and says at which seed each is found. A run of many
seeds may be cut short: with ``--resume`` the next one does only what is missing. docs/simulation.md has the rest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..machine import ROOT
from ..report import BenchError, Report, note_progress
from ..report import load as load_results

sys.path[:0] = [path for path in (str(ROOT / "tests"), str(ROOT / "tests" / "support")) if path not in sys.path]

SLICE = 5000
"""Histories of one sample, after which the file is written."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which histories, and what to do with them."""
    parser.add_argument("--seeds", default="0-9999", metavar="A-B", help="first and last seed, or one")
    parser.add_argument("--fresh", type=int, metavar="N", help="N seeds that nobody chose instead; they are printed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of processor time for one history")
    parser.add_argument("--resume", action="store_true", help="go on where the file of results ends")
    parser.add_argument("--show", type=int, metavar="SEED", help="print what happens in this history")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="print the smallest plan that fails like it")
    parser.add_argument("--plan", type=Path, help="for --show and --shrink, a plan's file of JSON in place of a seed's")
    parser.add_argument("--keep", type=Path, help="write what --shrink finds to this file, for --plan and as a test")
    parser.add_argument("--tries", type=int, default=3000, help="histories that --shrink runs at most")
    parser.add_argument("--broken", nargs="*", metavar="NAME", help="put these faults into the code, or all")


def measure(report: Report, args: argparse.Namespace) -> None:
    """What the flags ask for."""
    if args.show is not None or args.shrink is not None or args.plan is not None:
        report.out = None
        _one(args)
    elif args.broken is not None:
        _broken(report, args)
    elif args.fresh:
        from simulation.run import fresh_seeds

        seeds = fresh_seeds(args.fresh)
        print("seeds: " + " ".join(map(str, seeds)))
        _many(report, args, [("fresh", seeds)])
    else:
        _many(report, args, _slices(report, args))


# -- many


def _slices(report: Report, args: argparse.Namespace) -> list[tuple[str, Sequence[int]]]:
    """Of ``--seeds``, what the file of results does not have already."""
    first, _, last = args.seeds.partition("-")
    try:
        seeds = range(int(first), int(last or first) + 1)
    except ValueError:
        raise BenchError(f"--seeds {args.seeds} must look like 0-99999, or like 17.") from None
    pieces = [seeds[at : at + SLICE] for at in range(0, len(seeds), SLICE)]
    slices = [(f"{piece[0]}-{piece[-1]}", piece) for piece in pieces]
    if args.resume and report.out is not None and report.out.exists():
        before = load_results(report.out)
        if before["commit"] != report.data["commit"]:
            raise BenchError(f"{report.out} is of commit {before['commit']}; --resume goes on with the same code only.")
        for name in ("samples", "failures", "coverage", "not_reached", "in_no_table", "date"):
            report.data[name] = before[name]
    done = {sample["labels"].get("seeds") for sample in report.samples}
    return [(name, piece) for name, piece in slices if name not in done]


def _many(report: Report, args: argparse.Namespace, slices: Sequence[tuple[str, Sequence[int]]]) -> None:
    """A sample for each slice; failing seeds are listed at the end, and are an error."""
    from simulation.run import run_many
    from simulation.tables import not_reached, unknown

    failures = report.data.setdefault("failures", [])
    marks = Counter(report.data.get("coverage", {}))
    total = sum(len(seeds) for _, seeds in slices)
    with tqdm(total=total, unit="history", smoothing=0.1, mininterval=1.0, file=sys.stderr) as bar:
        for name, seeds in slices:
            counts: Counter[str] = Counter()
            began = time.monotonic()
            with report.sample(seeds=name) as values:
                for record in run_many(seeds, args.jobs, args.limit):
                    bar.update()
                    marks.update(record.marks)
                    counts += Counter(
                        histories=1, failures=bool(record.failures), requests=record.requests, faults=record.faults,
                        events=record.events,
                    )  # fmt: skip
                    values["virtual_hours"] = values.get("virtual_hours", 0.0) + record.virtual_s / 3600
                    values["cpu_s"] = values.get("cpu_s", 0.0) + record.seconds
                    if record.failures:
                        failures.append({"seed": record.seed, "failures": record.failures[:5]})
                        bar.set_postfix(failing=len(failures))
                        bar.write(f"seed {record.seed}: {record.failures[0]}", file=sys.stderr)
                values.update(
                    {name: counts[name] for name in ("histories", "failures", "requests", "faults", "events")}
                )
                values["histories_per_minute"] = counts["histories"] * 60 / (time.monotonic() - began)
                report.data["coverage"] = dict(sorted(marks.items()))
                report.data["not_reached"] = not_reached(marks)
                report.data["in_no_table"] = unknown(marks)
    for mark, reason in report.data.get("not_reached", {}).items():
        print(f"not reached: {mark}" + (f" ({reason})" if reason else ""))
    report.save()
    if failures:
        raise BenchError(f"{len(failures)} histories failed: seeds {' '.join(str(f['seed']) for f in failures[:20])}")


# -- one


def _one(args: argparse.Namespace) -> None:
    """Print one history, or the smallest that fails as it does."""
    from simulation.draw import draw
    from simulation.kept import Kept, load, save
    from simulation.show import transcript
    from simulation.shrink import size

    if args.plan is not None:
        plan = load(args.plan).plan
    else:
        plan = draw(args.show if args.show is not None else args.shrink)
    if args.shrink is not None:
        smallest, rule = shrunk(plan, args.limit, args.tries)
        note_progress(f"of {size(plan)} values, {size(smallest)} are left")
        plan = smallest
        if args.keep is not None:
            save(args.keep, Kept("", rule, plan))
    print("\n".join(transcript(plan, args.limit)[0]))


def shrunk(plan: Any, limit_s: float, tries: int) -> tuple[Any, str]:
    """The smallest plan that fails by the same rule, and that rule. BenchError where the plan does not fail."""
    from simulation.run import run_plan
    from simulation.shrink import shrink

    rule = run_plan(plan, limit_s).rule
    if not rule:
        raise BenchError(f"the history of seed {plan.seed} does not fail, so there is nothing to make smaller.")
    with tqdm(total=tries, unit="try", mininterval=1.0, file=sys.stderr, leave=False) as bar:

        def fails(smaller: Any) -> bool:
            bar.update()
            return run_plan(smaller, limit_s).rule == rule

        return shrink(plan, fails, tries), rule


# -- faults put in by hand


def _broken(report: Report, args: argparse.Namespace) -> None:
    """A sample for each fault: the seed at which it is found, and how small the plan gets."""
    from simulation.broken import BROKEN
    from simulation.draw import draw
    from simulation.kept import Kept, file_of, save
    from simulation.show import transcript
    from simulation.shrink import size

    unknown = set(args.broken) - BROKEN.keys()
    if unknown:
        raise BenchError(f"there is no fault {sorted(unknown)[0]!r}; there are {', '.join(map(repr, BROKEN))}.")
    missed = []
    for name in args.broken or BROKEN:
        with report.sample(broken=name) as values:
            seed, tried = _find(name, args)
            values["histories"] = tried
            if seed is None:
                missed.append(name)
                continue
            with BROKEN[name].put_in():
                plan = draw(seed)
                smallest, rule = shrunk(plan, args.limit, args.tries)
                lines, _ = transcript(smallest, args.limit)
            values |= {"seed": seed, "rule": rule, "size": size(plan), "shrunk_size": size(smallest),
                       "shrunk_lines": len(lines)}  # fmt: skip
            if args.keep is not None:
                save(args.keep / file_of(name).name, Kept(name, rule, smallest))
    if missed:
        raise BenchError(f"not found: {', '.join(missed)}")


def _find(name: str, args: argparse.Namespace) -> tuple[int | None, int]:
    """The first seed whose history fails with this fault and does not without it, and how many were run."""
    from simulation.run import run_many, run_seed

    first, _, last = args.seeds.partition("-")
    found: list[int] = []

    def seeds() -> Iterator[int]:
        for seed in range(int(first), int(last or first) + 1):
            if found:
                return
            yield seed

    tried = 0
    with tqdm(desc=name, unit="history", mininterval=1.0, file=sys.stderr, leave=False) as bar:
        for record in run_many(seeds(), args.jobs, args.limit, name):
            tried += 1
            bar.update()
            if record.failures and not run_seed(record.seed, args.limit).failures:
                found.append(record.seed)
    return min(found, default=None), tried
