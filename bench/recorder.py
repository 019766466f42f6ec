"""What the flight recorder costs: the scheduler's whole turn but for the sockets, with it and without, in turns.

    python bench/recorder.py --output-json bench/results/flight-recorder.json

1, 32 or 256 sequences decode, and each that ends is replaced, as in `quire bench control-plane`; a turn takes a
result's frame, commits, plans, and encodes what goes out. One scheduler runs a few steps with its recorder, a few
without, and so on. CPU time of this thread.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from quire.proto.codec import Decoder, encode, from_i8, i32
from quire.proto.config import EngineArgs
from quire.proto.hashing import hash_block, hash_blocks
from quire.proto.messages import (
    PROTOCOL,
    FromSchedulerWorkers,
    Hello,
    StepPlan,
    Submit,
    TokenBatch,
    ToSchedulerFront,
    ToSchedulerWorkers,
)
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler import request
from quire.scheduler.core import Scheduler
from quire.scheduler.fake.fake_worker import FakeWorker
from quire.scheduler.inputs import Inputs
from quire.scheduler.membership import Membership
from quire.scheduler.recorder import Recorder, TurnClock
from quire.scheduler.recording import Ring

VOCAB, BLOCK, EOS = 32_000, 16, [2, 1, 9]
from_worker: Decoder[Any] = Decoder(ToSchedulerWorkers)
from_front: Decoder[Any] = Decoder(ToSchedulerFront)
to_worker: Decoder[Any] = Decoder(FromSchedulerWorkers)


class Times(NamedTuple):
    """Microseconds of a turn, and of commit and plan in it."""

    turn: float
    core: float


class World:
    """A scheduler, a worker that answers at once, and clients that replace each request that ends."""

    def __init__(self, rows: int, path: str | None, tokens: bool, megabytes: float):
        self.rng, self.rows, self.output = random.Random(0), rows, 256
        config = EngineArgs(block_size=BLOCK, max_num_seqs=rows, max_num_batched_tokens=max(2048, rows))
        clock = TurnClock(time.monotonic) if path else None
        core = Scheduler(config, clock or time.monotonic)
        members = Membership(core, 1)
        self.inputs = Inputs(members)
        if path and clock:
            self.inputs = Recorder(members, Ring(path, megabytes, tokens), clock, tokens)
        self.worker = FakeWorker(rows * 42, 1024, VOCAB, pages=False)
        self.inputs.front("detokenizer", Hello("detokenizer", "detokenizer", PROTOCOL, 1))
        self.inputs.worker("worker", self.worker.hello("worker"))
        self.waiting: deque[bytes] = deque()
        self.arrivals: list[bytes] = []
        self.results: deque[bytes] = deque()
        self.count, self.seconds, self.core_seconds = 0, 0.0, 0.0
        for i in range(rows):
            self.arrive(1 + i * self.output // rows)

    def arrive(self, max_tokens: int) -> None:
        self.count += 1
        prompt = [7] * 32 + [self.rng.randrange(3, VOCAB) for _ in range(96)]
        ids = i32(prompt)
        work = Generate(SamplingParams(max_tokens=max_tokens), self.count, EOS)
        hashes = b"".join(hash_blocks(ids, BLOCK))
        self.arrivals.append(encode(Submit(self.count, 0, ids, hashes, work, float(self.count))))

    def turn(self) -> None:
        """One turn of the loop; what others do is not counted."""
        arrivals, self.arrivals = self.arrivals, []
        inputs, frames = self.inputs, [self.results.popleft()] if self.results else []
        begin = time.thread_time()
        inputs.notice()
        results = [from_worker(frame) for frame in frames]
        commit = time.thread_time()
        for result in results:
            inputs.worker("worker", result)
        committed = time.thread_time()
        for frame in arrivals:
            inputs.front("detokenizer", from_front(frame))
        inputs.notice()
        inputs.tick()
        plan = time.thread_time()
        inputs.plans()
        self.core_seconds += committed - commit + time.thread_time() - plan
        to_workers = [encode(message) for _, message in inputs.to_workers()]
        messages = inputs.to_front()
        for _, message in messages:
            encode(message)
        self.seconds += time.thread_time() - begin
        for frame in to_workers:
            message = to_worker(frame)
            answers = self.worker.handle(message)
            for answer in answers:
                if isinstance(message, StepPlan) and self.count:
                    size = len(answer.tokens) // 4
                    answer.tokens = i32([self.rng.randrange(16, VOCAB) for _ in range(size)])
                self.results.append(encode(answer))
        for _, message in messages:
            if isinstance(message, TokenBatch):
                for _ in range(sum(map(bool, from_i8(message.finishes)))):
                    self.arrive(self.rng.randint(self.output // 2, self.output * 3 // 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10, help="with the recorder and without, in each round")
    parser.add_argument("--size", type=float, default=64, help="--flight-recorder-size")
    parser.add_argument("--output-json")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "pairs": args.rounds,
    }
    with tempfile.TemporaryDirectory() as folder:
        for rows in args.rows:
            for name, tokens in (("lengths", False), ("tokens", True)):
                world = World(rows, f"{folder}/{rows}-{name}", tokens, args.size)
                report[f"{rows} rows, {name}"] = summarise(*measure(world, args.rounds, args.steps))
                world.inputs.close()
    print(json.dumps(report, indent=1))
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(report, indent=1) + "\n")


def summarise(off: list[Times], on: list[Times]) -> dict[str, float]:
    """Medians over the pairs. The cost is that of the pairs' quieter half: the rest is what else the machine does."""
    pairs = sorted(zip(off, on, strict=True), key=lambda pair: pair[0].turn + pair[1].turn)
    quiet = pairs[: len(pairs) // 2]
    cost = statistics.median(b.turn - a.turn for a, b in quiet)
    turn, core = (statistics.median(getattr(a, name) for a, _ in quiet) for name in ("turn", "core"))
    return {
        "turn_us": round(turn, 1),
        "plan_commit_us": round(core, 1),
        "cost_us": round(cost, 1),
        "percent_of_turn": round(100 * cost / turn, 1),
        "percent_of_plan_commit": round(100 * cost / core, 1),
        "percent_of_a_core_at_200_turns_a_second": round(cost * 200 / 1e4, 2),
        "median_ratio_all_pairs": round(statistics.median(b.turn / a.turn for a, b in pairs), 3),
    }


def measure(world: World, rounds: int, steps: int) -> tuple[list[Times], list[Times]]:
    """Microseconds of a turn in each round, first without the recorder, then with it, over the same scheduler. (What
    is recorded then has gaps, which costs nothing.)"""
    recorder, plain = world.inputs, Inputs(world.inputs.membership)
    recording = request.hash_block
    off: list[Times] = []
    on: list[Times] = []
    for number in range(-20, rounds):
        for times in (off, on) if number % 2 else (on, off):
            world.inputs = recorder if times is on else plain
            setattr(request, "hash_block", recording if times is on else hash_block)  # noqa: B010
            world.seconds = world.core_seconds = 0.0
            for _ in range(steps):
                world.turn()
            if number >= 0:
                times.append(Times(world.seconds / steps * 1e6, world.core_seconds / steps * 1e6))
        if number == -1:
            gc.collect()
            gc.freeze()
    world.inputs, request.hash_block = recorder, recording
    return off, on


if __name__ == "__main__":
    main()
