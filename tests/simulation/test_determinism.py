"""A history is its seed's alone: neither the order of hashes, nor what the process did before, has a part in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
SEEDS = range(500, 520)
CODE = """
import sys, zlib
from simulation.draw import draw
from simulation.run import run_plan
for seed in map(int, sys.argv[1:]):
    lines = []
    record = run_plan(draw(seed), lines=lines)
    text = zlib.crc32(chr(10).join(lines).encode())
    print(seed, len(lines), text, record.events, record.virtual_s, record.failures, sorted(record.marks.items()))
"""


def histories(hash_seed: int, seeds: list[int]) -> dict[str, str]:
    """By seed: what became of each history in a process of its own, which ran them in this order."""
    path = os.pathsep.join([str(TESTS), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-P", "-c", CODE, *map(str, seeds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_a_seed_is_one_history_in_any_process_and_after_any_other() -> None:
    seeds = [*SEEDS]
    first, second = histories(1, seeds), histories(2, seeds[::-1])
    assert len(first) == len(seeds) and first == second
