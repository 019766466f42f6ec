"""Streams that speculate while their processes are killed: what comes is what comes when nothing happens."""

from __future__ import annotations

import asyncio
import json

from chaos.cluster import Shape
from chaos.faults import KILLS
from chaos.test_storm import SCHEDULER, check, run

DRAFTS = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4, "adapt": False,
    "disable_by_batch_size": 257,
}  # fmt: skip


def test_kills_of_workers_that_speculate() -> None:
    flags = ["--cpu-threads=1", f"--speculative-config={json.dumps(DRAFTS)}"]
    shape = Shape(fake=False, workers=2, scheduler_flags=SCHEDULER, worker_flags=flags)
    report = asyncio.run(run(shape, seed=41, seconds=5.0, kinds=KILLS))
    check(report)
    assert report.drafted >= report.kept > 0
