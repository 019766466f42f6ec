"""Histories as tests: none of them may fail, and none may go a way that ``tables.py`` does not know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .run import run_seed
from .tables import unknown

FIXED = 2000
"""Histories that every run of the suite tries, from seed 0 on."""
PIECES = 20
"""Tests among which they are divided."""


def check(seeds: Iterable[int], tables: bool = True) -> None:
    """Run them all. The error names the seeds that fail, and how each is looked at. ``tables``: what they reach must be
    there. (Of seeds that nobody has seen, a rare transition is news and no failure.)"""
    failed, marks = [], Counter[str]()
    for seed in seeds:
        record = run_seed(seed)
        marks.update(record.marks)
        if record.failures:
            failed.append(f"seed {seed}: {record.failures[0]}\n    python -m bench simulation --shrink {seed}")
    assert not failed, "\n" + "\n".join(failed)
    news = unknown(marks) if tables else []
    assert not news, news
