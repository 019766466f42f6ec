"""Long storms: processes killed, stopped and cut off while 64 streams are open, each compared with its calm run.

    python bench/chaos.py --kills 200 --output-json bench/results/chaos-real-workers.json

Two storms, one over workers with a page store in place of a model (`scheduler/fake/fake_worker.py`) and one over the
demo model in float32; each takes half of the kills. With --adapters most requests have one of that many.
`tests/chaos/storm.py` says what is done and what is compared. The code that runs is the one that `import quire` finds.
Ends with code 1 where anything was lost, doubled or left over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from adapter_folders import demo_adapter  # noqa: E402
from chaos.cluster import Cluster, Shape  # noqa: E402
from chaos.faults import KILLS, PAUSES, SOCKETS, WORKERS  # noqa: E402
from chaos.storm import Report, Storm, summary  # noqa: E402

from quire.client.adapter_folders import AdapterFolders  # noqa: E402
from quire.proto.work import Adapter  # noqa: E402
from quire.scheduler.recording import RecordingError  # noqa: E402
from quire.scheduler.replay import Replay  # noqa: E402

FAKE = ["--delay-ms", "0.5", "3", "--vocab-size=2048", "--num-blocks=1500"]
REAL = ["--cpu-threads=1"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of both storms together")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each storm at most")
    parser.add_argument("--workers", choices=("fake", "real", "both"), default="both")
    parser.add_argument("--ranks", type=int, default=1, help="processes among which a real worker's model is split")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--longest-pause", type=float, default=20.0, help="of a stopped process, in seconds")
    parser.add_argument("--worker-timeout", type=float, default=5.0, help="the scheduler's flag")
    parser.add_argument("--gap", type=float, default=0.5, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters that nine of ten requests have")
    parser.add_argument("--max-loras", type=int, default=8, help="slots of each worker for them")
    parser.add_argument(
        "--record", type=Path, help="a folder for flight recordings of every scheduler, each replayed afterwards"
    )
    parser.add_argument("--logs", action="store_true", help="print the ends of all logs where something failed")
    parser.add_argument("--output-json")
    args = parser.parse_args()
    kinds = ["fake", "real"] if args.workers == "both" else [args.workers]
    shown = {name: value for name, value in vars(args).items() if name not in ("output_json", "record")}
    found: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "machine": _machine(), "commit": _commit(),
        "settings": shown, "storms": {},
    }  # fmt: skip
    sound = True
    for kind in kinds:
        report = asyncio.run(_storm(args, kind == "fake", -(-args.kills // len(kinds))))
        found["storms"][kind] = summary(report)
        sound = sound and _sound(report)
        if args.record is not None:
            found["replays"] = replays = replay_all(args.record)
            sound = sound and not replays["different"]
            print(f"replays: {json.dumps(replays)}", flush=True)
        print(f"{kind} workers: {json.dumps(summary(report), indent=1)}", flush=True)
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(found, indent=1) + "\n")
    print("nothing lost, nothing twice, nothing left" if sound else "NOT as it should be; see above")
    return 0 if sound else 1


async def _storm(args: argparse.Namespace, fake: bool, kills: int) -> Report:
    # Kills come more often than the rest: they are what is counted.
    kinds = (*KILLS, *KILLS, *PAUSES, *SOCKETS, *WORKERS)
    scheduler = [f"--worker-timeout={args.worker_timeout}", "--max-num-seqs=256"]
    with tempfile.TemporaryDirectory(prefix="quire-adapters-") as folder:
        adapters = _adapters(args.adapters, Path(folder))
        worker, frontend = FAKE if fake else REAL, []
        if adapters:
            worker = [*worker, f"--max-loras={args.max_loras}", *([] if fake else ["--enable-lora"])]
            frontend = ["--enable-lora", "--lora-modules", *(f"{each.name}={each.path}" for each in adapters)]
        shape = Shape(
            fake=fake, tcp=True, ranks=1 if fake else args.ranks, scheduler_flags=scheduler, worker_flags=worker,
            frontend_flags=frontend, record=args.record,
        )  # fmt: skip
        return await _rage(args, shape, adapters, kinds, kills)


def _adapters(count: int, folder: Path) -> list[Adapter]:
    """So many of the demo model, each of its own."""
    folders = AdapterFolders(8)
    return [folders.adapter(f"a{n}", str(demo_adapter(folder / f"a{n}", n, rank=1 + n % 8))) for n in range(count)]


async def _rage(
    args: argparse.Namespace, shape: Shape, adapters: list[Adapter], kinds: tuple[str, ...], kills: int
) -> Report:
    most, asks = args.longest_pause, max(72, len(adapters))
    async with Cluster(shape, random.Random(args.seed)) as cluster:
        async with Storm(cluster, args.seed, args.streams, 60, asks, most, adapters=adapters) as storm:
            await storm.ready()
            await storm.calm()
            print(f"{'fake' if shape.fake else 'real'} workers: calm runs done, now {kills} kills", flush=True)
            report = await storm.rage(args.minutes * 60, args.gap, kinds, kills)
        if args.logs and not _sound(report):
            print(cluster.logs(100))
        return report


def replay_all(folder: Path) -> dict[str, Any]:
    """Run each recording in ``folder`` again. ``different``: what did not come out as it was recorded."""
    counts = {"recordings": 0, "turns": 0, "plans": 0}
    different = []
    for path in sorted(folder.glob("*.rec")):
        counts["recordings"] += 1
        try:
            for turn in Replay(str(path)).turns():
                counts["turns"] += 1
                counts["plans"] += len(turn.plans)
                if turn.different:
                    different.append(f"{path.name}: {turn.different}")
                    break
        except RecordingError as error:
            different.append(str(error))
    return {**counts, "different": different}


def _sound(report: Report) -> bool:
    left = {name: report.left.get(name, 1) for name in ("open in Engine", "running", "waiting", "blocks used")}
    tracebacks = [line for line in report.log_errors if "dropped a" not in line]
    return not (report.failures or report.surprises or tracebacks or any(left.values()))


def _machine() -> str:
    return f"{platform.machine()}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
