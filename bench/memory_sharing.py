"""What paging and sharing save of a KV cache, as in the paper on PagedAttention: the real scheduler and block pool.

    python bench/memory_sharing.py --output-json bench/results/memory-sharing.json

The pool is OPT-13B's on 40 GB: 15.7k slots, which are 981 blocks of 16, and at most 2048 tokens a sequence. The queue
is never empty; after a warm-up every step counts, so each number is a mean over time, as the paper's are.

Lengths: prompts and outputs are lognormal with the data set's mean and ``--sigma`` (0.7 unless told otherwise, a
standard deviation of 0.8 means), independent, and cut to 2048 together. So that few requests stand for many, every 64
of them hold each 64th of both distributions once, in random order. Every child of a request has the request's output
length, and nobody ends early. Of the data sets only the means are given here, and what sharing saves depends on the
spread: the longer the longest outputs, the less of all memory is prompt. ``--sigma`` shows how much.

- share: of the pool's slots, those that hold a token's keys and values. The other policies reserve one contiguous
  stretch for each request (first fit): the longest possible, prompt + the next power of two of the output, or prompt +
  the output exactly, which only an oracle knows.
- parallel: blocks saved of those that n children would hold without sharing. Prompts are never alike.
- beams: the same for beam search, with log-probs of random logits (normal, standard deviation 3, 256 tokens). A real
  model's beams part later or earlier than these, so here the paper's own numbers are a comparison, no more.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from quire.proto.codec import from_i32, i32
from quire.proto.config import EngineArgs
from quire.proto.messages import Lease, Logprobs, StepPlan, StepResult, Submit
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler.core import Scheduler
from quire.scheduler.replica import Replica

ROOT = Path(__file__).resolve().parent.parent
BLOCK_SIZE, BLOCKS, MAX_LEN = 16, 981, 2048
SLOTS = BLOCKS * BLOCK_SIZE
STRATA = 64
VOCAB, SPREAD = 256, 3.0
MEANS = {"ShareGPT": (161, 338), "Alpaca": (19, 58)}
REFERENCE = {  # paper; our earlier simulation of the policy
    "share": {"max": (20.4, 22.0), "powers of two": (26.8, 38.2), "oracle": (38.2, 53.1), "paged": (96.3, 95.9)},
    "parallel Alpaca": {2: ("6.1", 6.4), 4: ("to", 9.6), 6: ("9.8", 10.6)},
    "parallel ShareGPT": {2: ("16.2", 17.2), 4: ("to", 25.8), 6: ("30.5", 28.7)},
    "beams Alpaca": {2: ("37.6", 41), 4: ("to", 61), 6: ("55.2", 67)},
    "beams ShareGPT": {2: ("44.3", 48), 4: ("to", 73), 6: ("66.3", 81)},
}


class Lengths:
    """Draws (prompt, output) lengths, ``STRATA`` at a time: one from the middle of each stratum of both."""

    def __init__(self, data: str, sigma: float, seed: int):
        normal = NormalDist()
        middles = [normal.inv_cdf((i + 0.5) / STRATA) for i in range(STRATA)]
        self.kinds = []
        for mean in MEANS[data]:
            raw = [math.exp(sigma * z) for z in middles]
            scale = mean * STRATA / sum(raw)  # the tails beyond the last middles are lost; the mean is kept
            self.kinds.append([max(1, round(scale * x)) for x in raw])
        self.rng, self.ready = random.Random(seed), list[tuple[int, int]]()

    def draw(self) -> tuple[int, int]:
        if not self.ready:
            prompts, outputs = (self.rng.sample(kind, STRATA) for kind in self.kinds)
            self.ready = list(zip(prompts, outputs, strict=True))
        prompt, output = self.ready.pop()
        prompt = min(prompt, MAX_LEN - 1)
        return prompt, min(output, MAX_LEN - prompt)


# ---------------------------------------------------------------- paged, with and without sharing


class World:
    """The scheduler, a queue that is never empty, and a worker that draws token 1, or random log-probs for beams."""

    def __init__(self, lengths: Lengths, n: int, beams: bool, seed: int):
        config = EngineArgs(
            block_size=BLOCK_SIZE, max_num_seqs=1024, max_num_batched_tokens=4096, max_num_queued_reqs=10**6
        )
        self.core = Scheduler(config, time.monotonic)
        self.replica = Replica(0, Lease(1, 0, 1), "worker", 1024, BLOCKS, BLOCK_SIZE, MAX_LEN, VOCAB)
        self.core.add_replica(self.replica)
        self.lengths, self.n, self.beams, self.uid = lengths, n, beams, 0
        self.rng, self.logits = random.Random(seed), np.random.default_rng(seed)
        self.plans: deque[StepPlan] = deque()

    def step(self) -> None:
        """Keep the queue filled, plan as far as allowed, and answer the oldest plan."""
        while len(self.core.queue) < 8 * self.n:
            self._arrive()
        while (plan := self.core.plan(self.replica)) is not None:
            self.plans.append(plan)
        plan = self.plans.popleft()
        slots = len(from_i32(plan.sample_rows))
        result = StepResult(plan.lease, plan.step, i32([1] * slots))
        if self.beams and slots:
            result.logprob_slots, result.logprobs = i32(range(slots)), self._log_probs(slots)
        self.core.commit(self.replica, result)
        self.core.outbox.take()

    def _arrive(self) -> None:
        self.uid += 1
        prompt, output = self.lengths.draw()
        search: dict[str, Any] = {"use_beam_search": True, "temperature": 0.0} if self.beams else {}
        params = SamplingParams(n=self.n, max_tokens=output, **search)
        ids = i32(self.rng.randrange(2, VOCAB) for _ in range(prompt))
        self.core.submit("detokenizer", Submit(self.uid, 0, ids, b"", Generate(params, self.uid), float(self.uid)))

    def _log_probs(self, slots: int) -> list[Logprobs]:
        k = 2 * self.n
        logits = self.logits.normal(scale=SPREAD, size=(slots, VOCAB)).astype(np.float32)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        best = np.argsort(-logits, axis=1)[:, :k].astype(np.int32)
        values = np.take_along_axis(logits, best, axis=1)
        ids, values = (np.concatenate([column[:, :1], column], axis=1) for column in (best, values))
        return [Logprobs(ids[slot].tobytes(), values[slot].tobytes(), i32([1])) for slot in range(slots)]


def paged(data: str, n: int, beams: bool, sigma: float, steps: int, seed: int = 0) -> dict[str, float]:
    """Means over ``steps`` steps: percent of slots that hold tokens, percent of blocks saved, sequences running."""
    world = World(Lengths(data, sigma, seed), n, beams, seed)
    for _ in range(steps // 4):
        world.step()
    held = tokens = alone = running = 0
    for _ in range(steps):
        world.step()
        tables = [(seq, table) for seq in world.replica.sequences() for table in seq.holdings().tables if table]
        held += world.replica.pool.used
        alone += sum(len(table) * _copies(world, seq) for seq, table in tables)
        tokens += sum(seq.scheduled for seq, _ in tables)
        running += len(tables)
    return {"share": 100 * tokens / steps / SLOTS, "saved": 100 * (1 - held / alone), "running": running / steps}


def _copies(world: World, seq: Any) -> int:
    """While it prefills, a beam search has one table where beams without sharing would have one each."""
    return world.n if world.beams and not seq.beams else 1


# ---------------------------------------------------------------- the policies that reserve


def reserved(data: str, policy: str, sigma: float, steps: int, seed: int = 0) -> float:
    """Mean percent of slots that hold tokens, where each request reserves one contiguous stretch for its whole life."""
    lengths, held = Lengths(data, sigma, seed), list[list[int]]()  # start, reserved, tokens, end
    waiting = lengths.draw()
    total = 0
    for step in range(steps + steps // 4):
        while (start := _first_fit(held, size := _size(policy, *waiting))) is not None:
            held.append([start, size, waiting[0], sum(waiting)])
            held.sort()
            waiting = lengths.draw()
        for one in held:
            one[2] += 1
        total += sum(one[2] for one in held) if step >= steps // 4 else 0
        held = [one for one in held if one[2] < one[3]]
    return 100 * total / steps / SLOTS


def _size(policy: str, prompt: int, output: int) -> int:
    if policy == "max":
        return MAX_LEN
    return prompt + output if policy == "oracle" else min(prompt + (1 << (output - 1).bit_length()), MAX_LEN)


def _first_fit(held: list[list[int]], size: int) -> int | None:
    """The lowest start of a free stretch of ``size`` slots between those held (in order), or None."""
    start = 0
    for begin, length, _, _ in held:
        if begin - start >= size:
            return start
        start = begin + length
    return start if SLOTS - start >= size else None


# ---------------------------------------------------------------- the table


def measure(sigma: float, steps: int) -> dict[str, dict[Any, float]]:
    """Every row, in percent."""
    rows: dict[str, dict[Any, float]] = {"share": {}}
    for policy in ("max", "powers of two", "oracle"):
        rows["share"][policy] = reserved("ShareGPT", policy, sigma, 10 * steps)
    rows["share"]["paged"] = paged("ShareGPT", 1, False, sigma, 2 * steps)["share"]
    for name, beams in (("parallel", False), ("beams", True)):
        for data in ("Alpaca", "ShareGPT"):
            found = {n: paged(data, n, beams, sigma, steps // 3 if beams else 4 * steps) for n in (2, 4, 6)}
            rows[f"{name} {data}"] = {n: result["saved"] for n, result in found.items()}
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sigma", type=float, default=0.7, help="spread of the lognormal lengths (default: 0.7)")
    parser.add_argument("--steps", type=int, default=4000, help="steps measured for each row, about")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    rows = measure(args.sigma, args.steps)
    print(f"{'percent':<20}{'':<15}{'here':>8}{'earlier simulation':>20}{'paper':>8}")
    for row, cells in rows.items():
        for key, value in cells.items():
            paper, earlier = REFERENCE[row][key]
            print(f"{row:<20}{key!s:<15}{value:>8.1f}{earlier:>20}{paper:>8}")
    if args.output_json:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        record = {
            "benchmark": "memory-sharing",
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "device": f"none: bookkeeping alone, on a {platform.machine()} CPU",
            "commit": git.stdout.strip(),
            "command": " ".join(["python", "bench/memory_sharing.py", *sys.argv[1:]]),
            "lengths": f"lognormal, sigma {args.sigma}, means of {MEANS}, one output length for all of a request",
            "slots": SLOTS,
            "block_size": BLOCK_SIZE,
            "percent": rows,
        }
        args.output_json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
