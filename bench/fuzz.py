"""A hundred thousand inputs for every ZeroMQ socket, for the HTTP port, and heads of GGUF files.

    python bench/fuzz.py --count 100000 --output-json bench/results/fuzz.json

What is sent and what must hold is in `tests/fuzz/`. Ends with code 1 at the first process that dies or grows without
bound, sound request that is not served right, or answer that the API does not know; the seed repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

import gguf_heads  # noqa: E402
from chaos.cluster import Cluster  # noqa: E402
from fuzz import sockets, targets, web  # noqa: E402

SOCKETS = ("scheduler_front", "scheduler_workers", "detokenizer_router")
DEALERS = ("engine_dealers", "worker_dealer", "detokenizer_dealer")
ALL = (*SOCKETS, *DEALERS, "http", "gguf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="inputs for each")
    parser.add_argument("--only", choices=ALL, action="append")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # the Engine here says of each bad frame that it is one
    found: dict[str, Any] = {"when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "seed": args.seed}
    sound = True
    for name in args.only or ALL:
        began = time.monotonic()
        try:
            found[name] = asyncio.run(campaign(name, args.count, args.seed))
        except (AssertionError, TimeoutError) as error:
            found[name] = {"failed": str(error) or type(error).__name__}
            sound = False
        found[name]["seconds"] = round(time.monotonic() - began, 1)
        print(name, json.dumps(found[name]), flush=True)
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if sound else 1


async def campaign(name: str, count: int, seed: int) -> dict[str, Any]:
    """One of ALL; of processes, in a cluster of its own."""
    rng = random.Random(seed)
    if name == "gguf":
        with tempfile.TemporaryDirectory() as folder:
            return gguf_heads.fuzz(count, seed, Path(folder))
    if name in DEALERS:
        return described(await getattr(sockets, name)(count, rng))
    async with Cluster(targets.shape(), rng) as cluster:
        valid = targets.Valid(cluster, rng)
        try:
            await valid.start()
            if name == "http":
                result, statuses = await web.routes(cluster, valid, count, rng)
                return described(result) | {"statuses": {str(k): v for k, v in sorted(statuses.items())}}
            result = await getattr(sockets, name)(cluster, valid, count, rng)
            stats = await valid.engine.stats(10.0)
            return described(result) | {"bad frames counted": stats.bad_frames}
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            await valid.engine.close()


def described(result: sockets.Result) -> dict[str, Any]:
    return {"sent": result.sent, "sound requests served right": result.served, "MiB grown": result.grown >> 20}


if __name__ == "__main__":
    sys.exit(main())
