"""64 streams while processes are killed, stopped and cut off: what comes is what comes when nothing happens.

Short storms; `python bench/chaos.py` runs long ones.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

from chaos.cluster import Cluster, Shape
from chaos.faults import KILLS, PAUSES, SOCKETS, WORKERS
from chaos.storm import Report, Storm, summary

STREAMS = 64
FAKE = ["--delay-ms", "0.2", "1", "--vocab-size=2048", "--num-blocks=1500"]
SCHEDULER = ["--worker-timeout=2", "--max-num-seqs=256"]


async def run(shape: Shape, seed: int, seconds: float, kinds: Sequence[str]) -> Report:
    rng = random.Random(seed)
    async with Cluster(shape, rng) as cluster:
        try:
            async with Storm(cluster, seed, STREAMS, longest=45, kinds=24, pause=3.0) as storm:
                await storm.ready()
                await storm.calm()
                return await storm.rage(seconds, gap=0.3, kinds=kinds)
        except BaseException:
            print(cluster.logs())
            raise


def check(report: Report) -> None:
    print(json.dumps(summary(report), indent=1))
    assert not report.failures, report.failures
    assert not report.surprises, report.surprises
    assert report.faults and report.streams >= STREAMS
    left = {name: report.left.get(name) for name in ("open in Engine", "running", "waiting", "blocks used")}
    assert not any(left.values()) and None not in left.values(), left
    assert not any(report.drain_codes), "a drained worker ends with code 0"
    assert not [line for line in report.log_errors if "dropped a" not in line], report.log_errors


def test_kills_over_workers_with_a_page_store() -> None:
    shape = Shape(scheduler_flags=SCHEDULER, worker_flags=FAKE)
    check(asyncio.run(run(shape, seed=11, seconds=8.0, kinds=KILLS)))


def test_stops_and_cuts_over_workers_with_a_page_store() -> None:
    shape = Shape(tcp=True, scheduler_flags=SCHEDULER, worker_flags=FAKE)
    check(asyncio.run(run(shape, seed=12, seconds=8.0, kinds=(*PAUSES, *SOCKETS, *WORKERS))))


def test_kills_of_workers_that_share_a_model() -> None:
    shape = Shape(fake=False, workers=1, ranks=2, scheduler_flags=SCHEDULER, worker_flags=["--cpu-threads=1"])
    check(asyncio.run(run(shape, seed=31, seconds=5.0, kinds=("kill worker", "kill scheduler"))))


def test_everything_over_the_demo_model_with_keys_and_tiers(tmp_path: Path) -> None:
    """The caches hold a part of what is asked again and again; the rest is loaded from host memory and from disk."""
    tiers = ["--swap-space=0.01", f"--kv-disk-path={tmp_path}", "--kv-disk-size=0.02"]
    flags = ["--cpu-threads=1", "--max-model-len=512", "--num-gpu-blocks-override=120", *tiers]
    shape = Shape(fake=False, tcp=True, scheduler_flags=SCHEDULER, worker_flags=flags)
    report = asyncio.run(run(shape, seed=21, seconds=12.0, kinds=(*KILLS, *PAUSES, *SOCKETS, *WORKERS)))
    check(report)
    assert report.loaded
