"""Twice as much as the server can do: the queue and memory must be bounded, who is let in served in time, and who is
not told when to come again.

    python bench/overload.py --minutes 5 --output-json bench/results/overload.json

Three phases, each with requests of one kind over HTTP:

1. capacity: as many requests at a time as there are rows, each followed by the next; C is the number a second.
2. 0.9 x C, arrivals at random (Poisson), the default queue: T is the 99th percentile of the time to first token.
3. 2 x C on a server started with --max-num-queued-reqs = 3/4 x C x T (at least 2): with so many in line, the last one
   waits somewhat less than T in the mean. The 99th percentile of the time to first token of those let in must be at
   most 2 T.
4. The same twofold load with few rows and long answers, so that a place in line becomes free only every few seconds and
   Retry-After (whole seconds, at least 1) has something to say.

What a refusal's Retry-After is compared with: the time from the refusal until the next request was let in, which is
when one that came again would have been; a second where that is less. Of places that become free at random nobody can
tell each time, so the means must agree within a factor of 2; how many single ones do is reported beside it. Every
refused client comes again once, when it was told to, in competition with all others.

Ends with code 1 where any of it does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from chaos.cluster import Cluster, Shape  # noqa: E402
from chaos.storm import percentile  # noqa: E402
from chaos.web import Answer, Cut, post  # noqa: E402

from quire.client.engine import Engine  # noqa: E402

FLAGS = {"fake": ["--delay-ms", "20", "20", "--vocab-size=2048"], "real": ["--cpu-threads=1"]}
ROWS = 16
TOKENS = 24
SLOW_ROWS, SLOW_TOKENS = 2, 200
SHARE = 0.75
"""Of what is served in T, so many may be in line: the rest is for a request's own first step and for slower moments."""
WORDS = ["once", "upon", "a", "time", "there", "was", "river"]


@dataclass
class Load:
    """What one phase saw. ``waits``: (sent, time to first token) of those let in; ``refusals``: (when, told)."""

    waits: list[tuple[float, float]] = field(default_factory=list)
    refusals: list[tuple[float, float | None]] = field(default_factory=list)
    again: list[bool] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    most_waiting: int = 0
    resident: list[dict[str, int]] = field(default_factory=list)

    def ttft(self, share: float) -> float:
        return percentile([wait for _, wait in self.waits], share)


class Phase:
    """Sends requests to one cluster and notes what comes of them."""

    def __init__(self, cluster: Cluster, rng: random.Random, tokens: int = TOKENS):
        self.cluster, self.rng, self.tokens, self.load = cluster, rng, tokens, Load()

    async def one(self, again: bool = False) -> None:
        """One request; a refused one comes again once, when it was told to."""
        prompt = " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randrange(5, 30)))
        body = {"prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, "temperature": 1.0, "stream": True,
                "return_token_ids": True}  # fmt: skip
        answer, sent, first, tokens = Answer(), time.monotonic(), 0.0, 0
        try:
            async for event in post(self.cluster.port, "/v1/completions", body, answer):
                if answer.status == 200:
                    if "error" in event:
                        self.load.wrong.append(str(event["error"]))
                        return
                    tokens += sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
                    first = first or (time.monotonic() if tokens else 0.0)
        except Cut as error:
            self.load.wrong.append(f"cut: {error}")
            return
        if answer.status == 200 and tokens == self.tokens:
            self.load.waits.append((sent, first - sent))
        elif answer.status not in (429, 503):
            self.load.wrong.append(f"status {answer.status}, {tokens} tokens")
            return
        if again:
            self.load.again.append(answer.status == 200)
        elif answer.status != 200:
            told = answer.headers.get("retry-after")
            self.load.refusals.append((sent, float(told) if told else None))
            if told:
                await asyncio.sleep(float(told))
                await self.one(again=True)

    async def closed(self, width: int, seconds: float) -> float:
        """``width`` at a time; how many a second end, once all rows are in use."""
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.one()

        await asyncio.gather(*(client() for _ in range(width)))
        ended = sorted(sent + wait for sent, wait in self.load.waits)
        window = [at for at in ended if end - seconds * 0.8 <= at <= end]
        return len(window) / (seconds * 0.8)

    async def opened(self, rate: float, seconds: float) -> None:
        """Arrivals at ``rate``, whatever becomes of them."""
        watching = asyncio.ensure_future(self._watch())
        tasks, end = set(), time.monotonic() + seconds
        next_at = time.monotonic()
        while (now := time.monotonic()) < end:
            if now >= next_at:
                next_at += self.rng.expovariate(rate)
                task = asyncio.ensure_future(self.one())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            else:
                await asyncio.sleep(min(next_at - now, 0.05))
        await asyncio.gather(*tasks)
        watching.cancel()

    async def _watch(self) -> None:
        engine = Engine(self.cluster.address)
        await engine.start()
        try:
            await engine.wait_ready(30.0)
            while True:
                stats = await engine.stats(30.0)
                self.load.most_waiting = max(self.load.most_waiting, stats.waiting)
                self.load.resident.append(self.cluster.resident())
                await asyncio.sleep(0.5)
        finally:
            await engine.close()


def judged(load: Load) -> list[tuple[float, float]]:
    """For each refusal, what it was told, and how long it was until the next request was let in."""
    sent = sorted(at for at, _ in load.waits)
    pairs = []
    for at, told in load.refusals:
        place = bisect_left(sent, at)
        if told is not None and place < len(sent):
            pairs.append((told, max(1.0, sent[place] - at)))
    return pairs


async def start(args: argparse.Namespace, queue: int | None, rows: int = ROWS) -> Cluster:
    flags = [f"--max-num-seqs={rows}", "--max-num-batched-tokens=512"]
    flags += [f"--max-num-queued-reqs={queue}"] if queue else []
    flags += [f"--queue-timeout={args.queue_timeout}"] if args.queue_timeout else []
    shape = Shape(fake=args.workers == "fake", workers=1, detokenizers=1, frontends=1, scheduler_flags=flags,
                  worker_flags=FLAGS[args.workers])  # fmt: skip
    cluster = Cluster(shape, random.Random(args.seed))
    await cluster.__aenter__()
    engine = Engine(cluster.address)
    await engine.start()
    await engine.wait_ready(120)
    await engine.close()
    phase = Phase(cluster, random.Random(0))
    while not phase.load.waits:
        await phase.one(again=True)
        await asyncio.sleep(0.1)
    return cluster


async def overload(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    rng, seconds = random.Random(args.seed), args.minutes * 60
    cluster = await start(args, None)
    try:
        capacity = await Phase(cluster, rng).closed(ROWS, max(8.0, seconds / 5))
        calm = Phase(cluster, rng)
        await calm.opened(0.9 * capacity, max(10.0, seconds / 2))
    finally:
        await cluster.close()
    limit = calm.load.ttft(0.99)
    queue = args.max_num_queued_reqs or max(2, int(SHARE * capacity * limit))
    short, short_sound = await twice(args, rng, 2 * capacity, queue, seconds, ROWS, TOKENS)
    slow = capacity * TOKENS / ROWS * SLOW_ROWS / SLOW_TOKENS  # if a step takes as long
    long, long_sound = await twice(args, rng, 2 * slow, 2, max(30.0, seconds), SLOW_ROWS, SLOW_TOKENS)
    found = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "settings": {"workers": args.workers, "minutes": args.minutes, "rows": ROWS, "tokens a request": TOKENS},
        "capacity, requests a second": round(capacity, 2),
        "0.9x": {"TTFT p50, p99 in s": [round(calm.load.ttft(0.5), 3), round(limit, 3)],
                 "let in": len(calm.load.waits), "refused": len(calm.load.refusals), "wrong": calm.load.wrong[:20]},
        "2x": short,
        f"2x with {SLOW_ROWS} rows and answers of {SLOW_TOKENS} tokens": long,
    }  # fmt: skip
    in_time = short["TTFT p50, p99 in s"][1] <= 2 * limit
    return found, short_sound and long_sound and in_time and not calm.load.wrong


async def twice(
    args: argparse.Namespace, rng: random.Random, rate: float, queue: int, seconds: float, rows: int, tokens: int
) -> tuple[dict[str, Any], bool]:
    """Two times the capacity with a bounded line; what was seen, and whether it is as it should be."""
    cluster = await start(args, queue, rows)
    try:
        storm = Phase(cluster, rng, tokens)
        await storm.opened(rate, seconds)
    finally:
        await cluster.close()
    load = storm.load
    pairs = judged(load)
    right = sum(0.5 <= told / waited <= 2.0 for told, waited in pairs)
    means = [round(mean(pair[place] for pair in pairs), 2) if pairs else 0.0 for place in (0, 1)]
    halves = [load.resident[len(load.resident) // 2], load.resident[-1]]
    growth = {name: round(halves[1][name] / size - 1, 4) for name, size in halves[0].items()}
    told = [told for _, told in load.refusals]
    found = {
        "--max-num-queued-reqs": queue,
        "TTFT p50, p99 in s": [round(load.ttft(0.5), 3), round(load.ttft(0.99), 3)],
        "let in": len(load.waits),
        "refused": len(load.refusals),
        "most waiting": load.most_waiting,
        "refusals without Retry-After": told.count(None),
        "Retry-After in s, least, median, most": [percentile([x for x in told if x], q) for q in (0, 0.5, 1)],
        "mean seconds told, mean until the next was let in": means,
        "of single refusals within a factor of 2": f"{right} of {len(pairs)}",
        "let in when they came again as told": f"{sum(load.again)} of {len(load.again)}",
        "growth of resident memory over the second half": growth,
        "wrong": load.wrong[:20],
    }
    sound = (
        bool(load.refusals) and not load.wrong and None not in told and load.most_waiting <= queue
        and means[0] <= 2 * means[1] and means[1] <= 2 * means[0] and all(share <= 0.05 for share in growth.values())
    )  # fmt: skip
    return found, sound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of the third phase; the second takes half as long")
    parser.add_argument("--workers", choices=("fake", "real"), default="real")
    parser.add_argument("--max-num-queued-reqs", type=int, help="in place of 3/4 x capacity x T")
    parser.add_argument("--queue-timeout", type=float, help="the scheduler's flag")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-json")
    args = parser.parse_args()
    found, sound = asyncio.run(overload(args))
    print(json.dumps(found, indent=1))
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(found, indent=1) + "\n")
    print("bounded, in time, and truly told" if sound else "NOT as it should be; see above")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
