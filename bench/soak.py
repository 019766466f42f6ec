"""A soak: random requests, aborts and faults for a long time; then nothing may be in use, and memory must be flat.

    python bench/soak.py --minutes 30 --output-json bench/results/soak.json

One worker, one detokenizer and one frontend are spared all faults, and so is the scheduler in the second half; over
that half their resident memory is taken every second. It is flat where the mean of the last quarter of the run is at
most 5% over that of the quarter before. (Others are killed and start anew, which says nothing about growth; this
process, which plays the clients and holds the record of the run, is shown beside them and not judged.) At the end
blocks, rows and queues must be empty. Ends with code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from chaos.cluster import Cluster, Shape  # noqa: E402
from chaos.faults import KILLS, PAUSES, SOCKETS, WORKERS  # noqa: E402
from chaos.storm import Storm, summary  # noqa: E402

from quire.proto.process import resident_bytes  # noqa: E402

FLAGS = {"fake": ["--delay-ms", "0.5", "3", "--vocab-size=2048", "--num-blocks=1500"], "real": ["--cpu-threads=1"]}
SAMPLE_S = 1.0
GROWTH = 0.05
THIS = "this process"


class Memory:
    """Resident bytes of the spared members, and of this process for comparison, over time."""

    def __init__(self, cluster: Cluster, names: set[str]):
        self._cluster, self._names = cluster, names
        self.samples: list[tuple[float, dict[str, int]]] = []

    async def watch(self) -> None:
        while True:
            found = {name: size for name, size in self._cluster.resident().items() if name in self._names}
            self.samples.append((time.monotonic(), {**found, THIS: resident_bytes()}))
            await asyncio.sleep(SAMPLE_S)

    def growth(self) -> dict[str, dict[str, float]]:
        """Of each, from the third quarter to the fourth: MiB in both, and the growth as a share."""
        quarter = len(self.samples) // 4
        third, last = self.samples[2 * quarter : 3 * quarter], self.samples[3 * quarter :]
        out = {}
        for name in self.samples[-1][1] if quarter else ():
            before, after = (mean(sample[name] for _, sample in part if name in sample) for part in (third, last))
            out[name] = {"MiB before": round(before / 2**20, 1), "MiB after": round(after / 2**20, 1),
                         "growth": round(after / before - 1, 4)}  # fmt: skip
        return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", choices=("fake", "real"), default="real")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--gap", type=float, default=4.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-json")
    args = parser.parse_args()
    found, sound = asyncio.run(soak(args))
    print(json.dumps(found, indent=1))
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(found, indent=1) + "\n")
    print("flat and empty" if sound else "NOT as it should be; see above")
    return 0 if sound else 1


async def soak(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    shape = Shape(
        fake=args.workers == "fake", tcp=True, scheduler_flags=["--worker-timeout=5", "--max-num-seqs=256"],
        worker_flags=FLAGS[args.workers],
    )  # fmt: skip
    half = args.minutes * 60 / 2
    async with Cluster(shape, random.Random(args.seed)) as cluster:
        spared = {cluster.of(service)[0].name for service in ("worker", "detokenizer", "frontend")}
        scheduler = cluster.of("scheduler")[0].name
        async with Storm(cluster, args.seed, args.streams, 60, kinds=48, pause=10.0, aborts=0.2) as storm:
            storm.faults.spared = set(spared)
            await storm.ready()
            await storm.calm()
            memory = Memory(cluster, {*spared, scheduler})
            watching = asyncio.ensure_future(memory.watch())
            kinds = (*KILLS, *PAUSES, *SOCKETS, *WORKERS)
            spare_later = asyncio.get_running_loop().call_later(half, storm.faults.spared.add, scheduler)
            report = await storm.rage(2 * half, args.gap, kinds)
            watching.cancel()
            spare_later.cancel()
        growth = memory.growth()
    left = {name: report.left.get(name, 1) for name in ("open in Engine", "running", "waiting", "blocks used")}
    flat = bool(growth) and all(each["growth"] <= GROWTH for name, each in growth.items() if name != THIS)
    settings = {name: value for name, value in vars(args).items() if name != "output_json"}
    found = {"when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "settings": settings, "flat": flat,
             "memory": growth, **summary(report)}  # fmt: skip
    return found, flat and not any(left.values()) and not report.failures and not report.surprises


if __name__ == "__main__":
    sys.exit(main())
