"""Mutation testing: small faults put into a module one by one, and which of them no test sees.

    python -m bench mutants scheduler/books.py

A score is the share that some test sees, crashes and endless loops included. What survives is in the result with its
line; bench/results/mutants-survivors.md says why each may."""

from __future__ import annotations

import argparse
import itertools
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
    """Try all mutants of the files; what is known of other files stays in ``out``."""
    import quire  # the checkout is the package, and its functions name their files by way of it

    from .mutant_runner import KILLED, TIMEOUT
    from .mutant_runner import run as run_all

    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"schema": 1, "modules": {}}
    modules = found["modules"]
    room = args.files[0].parts[0]
    mutants: dict[str, list[Mutant]] = {}
    for file in map(str, args.files):
        known = {one["mutant"] for one in modules.get(file, {}).get("survivors", [])}
        mutants[file] = [
            mutant
            for mutant in mutants_of(Path(quire.__path__[0]) / file)
            if args.only in mutant.name
            and zlib.crc32(mutant.name.encode()) % args.every == 0
            and (mutant.name in known or file not in modules or not args.again)
        ]
    fates: Counter[str] = Counter()
    survivors: dict[str, list[dict[str, Any]]] = {file: [] for file in mutants}
    began = time.monotonic()

    def done(mutant: Mutant, fate: str, test: str) -> None:
        """Show one."""
        fates[fate] += 1
        if fate not in (KILLED, TIMEOUT):
            file = mutant.file.relative_to(quire.__path__[0]).as_posix()
            survivors[file].append({"line": mutant.line, "mutant": mutant.name, "fate": fate})
            print(f"{file}:{mutant.line}: {fate}: {mutant.name}", flush=True)
        elif args.verbose:
            print(f"{mutant.file.name}:{mutant.line}: {fate} by {test}: {mutant.name}", flush=True)
        if sum(fates.values()) % 50 == 0:
            print(f"{sum(fates.values())} of {total}, {time.monotonic() - began:.0f} s: {dict(fates)}", flush=True)

    total = sum(map(len, mutants.values()))
    code = run_all(args.tests or TESTS.get(room, [f"tests/{room}"]), [*itertools.chain(*mutants.values())], args.jobs,
                   args.longest, args.budget, done)  # fmt: skip
    if code or sum(fates.values()) != total:
        raise BenchError(f"the tests did not run: pytest ended with code {code}")
    for file, tried in mutants.items():
        count = modules[file]["mutants"] if args.again and file in modules else len(tried)
        left = sorted(survivors[file], key=lambda one: one["line"])
        score = round(100 * (1 - len(left) / max(1, count)), 1)
        print(f"{file}: {count} mutants, {count - len(left)} seen: {score} %")
        if not args.only:
            modules[file] = {
                "score_percent": score, "mutants": count, "killed": count - len(left), "every": args.every,
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit(),
                "command": shlex.join(["python", "-m", "bench", *argv]), "survivors": left,
            }  # fmt: skip
    if not args.only:
        out.write_text(json.dumps(found, indent=1) + "\n")
    return 0
