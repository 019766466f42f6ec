"""``python -m bench PART``: measure a part and keep the result; ``python -m bench compare``: quire and a peer in turns;
``python -m bench gpu``: everything on a GPU; ``python -m bench mutants``: how many faults the tests see.

Run it in a checkout of the repository. Results go to bench/results/PART.json, or where --out says.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

from . import compare, gpu, mutants
from .parts import PARTS
from .report import RESULTS, BenchError, Report

OTHERS = {"compare": compare, "gpu": gpu, "mutants": mutants}
"""Commands with reports of their own."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line; its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser(argv[0] if argv and argv[0] in PARTS else None).parse_args(argv)
    if args.list or args.part is None:
        print("\n".join(f"{name:16s}{summary(name)}" for name in (*PARTS, *OTHERS)))
        return 0
    try:
        return run(args, argv)
    except BenchError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Run one part."""
    settings = {name: value for name, value in vars(args).items() if name not in ("part", "list", "out", "merge")}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    if args.part == "compare":
        return compare.run(args, args.out or RESULTS / f"compare-{args.peer}.json", settings, argv)
    if args.part == "gpu":
        return gpu.run(args, argv)
    if args.part == "mutants":
        return mutants.run(args, args.out or RESULTS / "mutants.json", argv)
    out = args.out or RESULTS / f"{args.part}.json"
    report = Report(args.part, out, settings, argv)
    importlib.import_module(f".parts.{module_of(args.part)}", __package__).measure(report, args)
    if report.out is not None:
        print(f"written to {out}")
    return 0


def make_parser(part: str | None) -> argparse.ArgumentParser:
    """The parser; of the parts, only ``part`` is imported for its flags."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--list", action="store_true", help="what can be measured")
    parts = parser.add_subparsers(dest="part", metavar="PART")
    for name in (*PARTS, *OTHERS):
        one = parts.add_parser(name, help=summary(name), formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        one.add_argument("--out", type=Path, help="file for the results; a folder for those of gpu")
        if name in OTHERS:
            OTHERS[name].add_flags(one)
        elif name == part:
            importlib.import_module(f".parts.{module_of(name)}", __package__).add_flags(one)
    return parser


def module_of(part: str) -> str:
    """The module of a part."""
    return part.replace("-", "_")


def summary(part: str) -> str:
    """The first line of a part's docstring, read without importing it."""
    folder = Path(__file__).parent
    path = (folder if part in OTHERS else folder / "parts") / f"{module_of(part)}.py"
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
