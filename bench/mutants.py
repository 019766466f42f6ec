"""Mutation testing: small faults put into a module one by one, and which of them no test sees.

    python -m bench mutants scheduler/books.py

A score is the share that some test sees, crashes and endless loops included. What survives is in the result with its
line; bench/results/mutants-survivors.md says why each may."""

from __future__ import annotations

import argparse
import json
import shlex
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from .machine import commit
from .mutations import Mutant, mutants_of
from .report import BenchError

SLOW = "not (histories or sockets or flight or rooms or address or scheduler_keys)"
OTHERS = {
    "client": "test_client_launch or test_launch_deaths or test_client_engine",
    "detokenizer": "test_detokenizer_process or test_grammar_check or slow_tokenizers",
    "proto": "test_proto_keys or test_proto_unread or test_proto_wire",
}
TESTS = {
    "scheduler": ["tests/scheduler", "-k", SLOW],
    **{room: [f"tests/{room}", "-m", "not slow", "-k", f"not ({others})"] for room, others in OTHERS.items()},
}
"""Of each room the arguments for pytest that choose the tests, where the command line names none: those that are quick
and start no process."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("files", nargs="+", type=Path, help="modules of one room")
    parser.add_argument("--tests", nargs="*", default=[], help="files and folders, where not the room's")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--every", type=int, default=1, help="take one mutant of so many, by a hash of its name")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--longest", type=float, default=3.0, help="leave out tests that take over so many seconds")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for a mutant, the likeliest first")
    parser.add_argument("--verbose", action="store_true", help="say of each mutant which test saw it")
    parser.add_argument("--again", action="store_true", help="of modules in --out, only what survived")


def run(args: argparse.Namespace, out: Path, argv: list[str]) -> int:
    """Try all mutants of the files. What is known of other files stays in ``out``; each file is written when it is
    done."""
    import quire  # the checkout is the package, and its functions name their files by way of it

    from .mutant_runner import run as run_all

    head = commit()
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"schema": 1, "modules": {}}
    files: list[_File] = []
    for name in map(str, args.files):
        path = Path(quire.__path__[0]) / name
        files.append(_File(name, path, mutants_of(path), args, found["modules"].get(name), argv))
    of = {file.path: file for file in files}
    fates: Counter[str] = Counter()
    total = sum(len(file.mutants) for file in files)
    began = time.monotonic()

    def done(mutant: Mutant, fate: str, test: str) -> None:
        """Count one, and show it."""
        fates[fate] += 1
        file = of[mutant.file]
        if file.take(mutant, fate):
            print(f"{file.name}:{mutant.line}: {fate}: {mutant.name}", flush=True)
        elif args.verbose:
            print(f"{file.name}:{mutant.line}: {fate} by {test}: {mutant.name}", flush=True)
        if sum(fates.values()) % 50 == 0:
            print(f"{sum(fates.values())} of {total}, {time.monotonic() - began:.0f} s: {dict(fates)}", flush=True)
        if not file.open:
            result = file.result(head)
            print(f"{file.name}: {result['mutants']} mutants, {result['killed']} seen: {result['score_percent']} %")
            if not args.only:
                found["modules"][file.name] = result
                out.write_text(json.dumps(found, indent=1) + "\n")

    room = args.files[0].parts[0]
    code = run_all(args.tests or TESTS.get(room, [f"tests/{room}"]), [one for file in files for one in file.mutants],
                   args.jobs, args.longest, args.budget, done)  # fmt: skip
    if code or sum(fates.values()) != total:
        raise BenchError(f"the tests did not run: pytest ended with code {code}")
    return 0


class _File:
    """A file, those of its mutants that are tried, and what became of them. ``before`` is what is known of it."""

    def __init__(
        self, name: str, path: Path, every: list[Mutant], args: argparse.Namespace, before: Any, argv: list[str]
    ):
        self.name, self.path, self.before = name, path, before if args.again else None
        self.share = self.before["every"] if self.before else args.every
        chosen = [mutant for mutant in every if zlib.crc32(mutant.name.encode()) % self.share == 0]
        if self.before and self.before["mutants"] != len(chosen):
            raise BenchError(f"{name}: {len(chosen)} mutants, and {self.before['mutants']} the last time: the file is "
                             "another since, try them all, without --again")  # fmt: skip
        self.count = len(chosen)
        known = {one["mutant"] for one in self.before["survivors"]} if self.before else None
        self.mutants = [one for one in chosen if args.only in one.name and (known is None or one.name in known)]
        self.open = len(self.mutants)
        self.left: list[dict[str, Any]] = []
        others = {str(file) for file in args.files} - {name}
        gone = {at + step for at, word in enumerate(argv) if word == "--out" for step in (0, 1)}
        self.command = shlex.join(
            ["python", "-m", "bench", *(word for at, word in enumerate(argv) if at not in gone and word not in others)]
        )

    def take(self, mutant: Mutant, fate: str) -> bool:
        """Count one; True where no test saw it."""
        from .mutant_runner import KILLED, TIMEOUT

        self.open -= 1
        if fate in (KILLED, TIMEOUT):
            return False
        self.left.append({"line": mutant.line, "mutant": mutant.name, "fate": fate})
        return True

    def result(self, head: str) -> dict[str, Any]:
        """What is kept of it; ``head`` is the commit that was tried."""
        count = self.count if self.before else len(self.mutants)
        commands = {"command": self.command}
        if self.before:
            commands = {"command": self.before["command"], "again": self.command}
        return {
            "score_percent": round(100 * (1 - len(self.left) / max(1, count)), 1), "mutants": count,
            "killed": count - len(self.left), "every": self.share,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": head, **commands,
            "survivors": sorted(self.left, key=lambda one: one["line"]),
        }  # fmt: skip
