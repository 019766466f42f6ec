"""The compile matrix, and the table that it is held to: registers, spills, shared memory, programs of a processor.

The table is tests/gpu_worker/compiled/triton-X.Y.txt. What fails: a launch that does not compile or fit, a spill, fewer
programs on a processor than the table says, a launch that the table does not have. A version without a table is held
to the nearest one's, and may keep half of the programs.

A spill is counted in bytes of a thread's stack: cuobjdump's STACK, AMD's scratch and spilled registers. Programs are
computed from registers, shared memory and warps (``cards.occupancy``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

from ..machine import ROOT

TABLES = ROOT / "tests" / "gpu_worker" / "compiled"


@dataclass(frozen=True)
class Row:
    """One kernel of one launch on one card."""

    card: str
    launch: str
    kernel: str
    tile: str
    grid: str
    warps: int
    stages: int
    registers: int
    spills: int  # bytes
    shared: int  # bytes
    programs: int
    limit: str  # what keeps a processor from holding more
    products: str  # the instruction that multiplies matrices, or "-"

    @property
    def key(self) -> tuple[str, str, str]:
        """What a row is found by."""
        return self.card, self.launch, self.kernel


def compile_cards(cards: list[str], only: str = "", short: bool = False) -> Iterator[dict]:
    """Every wanted launch for the cards, in a process in which Triton does not interpret: a row as a dict, or a dict
    with the ``error`` of a launch that failed. Where the compiler itself ends, another process goes on behind it."""
    command = [sys.executable, "-m", "bench.compile.compiler", only, "short" if short else "all", *cards]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done: list[str] = []
    code = 1
    while code:
        # An empty cache: a row says what this compiler makes of it now.
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
            env |= {"TRITON_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            ended = len(done)
            with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
                process.stdin.write(json.dumps(done))
                process.stdin.close()
                for row in (json.loads(line[1:]) for line in process.stdout if line.startswith("\t")):
                    if "begin" in row:
                        done.append(row["begin"])
                    else:
                        yield row
            code = process.returncode
            if code:
                errors.seek(0)
                said = (errors.read().strip() or "it said nothing").splitlines()[-1][-300:]
                began = (done[-1] if len(done) > ended else "- - -").split()
                yield {**dict(zip(("card", "launch", "kernel"), began, strict=True)), "error": f"{code}: {said}"}
                if len(done) == ended:
                    return


def rows_of(found: Iterable[dict]) -> tuple[list[Row], list[str]]:
    """The rows, and a line for each launch that failed."""
    rows, wrong = [], []
    for one in found:
        if "error" in one:
            wrong.append(f"{one['card']} {one['launch']} {one['kernel']}: {one['error']}")
        else:
            rows.append(Row(**one))
    return rows, wrong


def judge(rows: Iterable[Row], table: dict[tuple[str, str, str], Row], exact: bool = True) -> list[str]:
    """A line for each row that is worse than the table's."""
    wrong = []
    for row in rows:
        name, known = " ".join(row.key), table.get(row.key)
        if row.programs < 1:
            wrong.append(f"{name}: does not fit ({row.shared} bytes of shared memory, {row.registers} registers)")
        if known is None:
            wrong.append(f"{name}: not in the table; run python -m bench gpu --compile --rewrite and look at its row")
            continue
        if row.spills > known.spills:
            wrong.append(f"{name}: spills {row.spills} bytes, {known.spills} in the table; a smaller tile is needed")
        if row.programs * (1 if exact else 2) < known.programs:
            wrong.append(
                f"{name}: {row.programs} programs a processor, {known.programs} in the table, for want of {row.limit} "
                f"({row.tile}, {row.registers} registers, {row.shared} bytes)"
            )
    return wrong


def save(rows: Iterable[Row], path: Path) -> None:
    """The table as text: a head, then a line for each row, columns lined up."""
    names = [field.name for field in fields(Row)]
    cells = [names, *([str(value) for value in asdict(row).values()] for row in sorted(rows, key=lambda r: r.key))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def load(path: Path) -> dict[tuple[str, str, str], Row]:
    """The rows of a table, by key."""
    names, *lines = path.read_text("utf-8").splitlines()
    kinds = [int if field.type == "int" else str for field in fields(Row)]
    rows = [Row(*(kind(cell) for kind, cell in zip(kinds, line.split(), strict=True))) for line in lines]
    return {row.key: row for row in rows} if names.split() == [f.name for f in fields(Row)] else {}


def table_path(of: str) -> Path:
    """The table of a Triton version, which may not be there."""
    return TABLES / f"triton-{'.'.join(of.split('.')[:2])}.txt"


def nearest(of: str) -> Path | None:
    """The table of the version, else of the nearest one."""
    there = sorted(TABLES.glob("triton-*.txt"))
    want = int(of.split(".")[1])
    return min(there, key=lambda path: abs(int(path.stem.split(".")[1]) - want), default=None)


def compare(rows: list[Row], of: str) -> list[str]:
    """What is worse than the nearest table says."""
    path = nearest(of)
    return judge(rows, load(path) if path else {}, exact=path == table_path(of))


def triton_version() -> str:
    """Of the Triton that is installed, which is not imported here: it would decide whether it interprets."""
    return version("triton")


def run(cards: list[str], only: str, rewrite: bool) -> int:
    """Compile, print and compare (or write); exit code 0 where nothing is worse than the table."""
    found = []
    for one in compile_cards(cards, only):
        found.append(one)
        print("  ".join(str(value) for value in one.values()), flush=True)
    rows, wrong = rows_of(found)
    if rewrite:
        put(rows, whole=not only)
    wrong += compare(rows, triton_version())
    print("\n".join(wrong) or f"{len(rows)} kernels compiled; none is worse than the table")
    return 1 if wrong else 0


def put(rows: list[Row], whole: bool) -> None:
    """Put ``rows`` into the table of this version; ``whole``: instead of all that it has of these cards."""
    path, cards = table_path(triton_version()), {row.card for row in rows}
    known = load(path) if path.exists() else {}
    if whole:
        known = {key: row for key, row in known.items() if row.card not in cards}
    save((known | {row.key: row for row in rows}).values(), path)
