"""What one plan + commit costs, in process, with a worker that answers at once and keeps no pages.

``python -m quire.scheduler.fake.bench`` prints it; ``quire bench control-plane`` calls ``run_control_plane``.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections import deque

from ...proto.codec import Decoder, encode, from_i8, i32
from ...proto.config import EngineArgs
from ...proto.hashing import hash_blocks
from ...proto.messages import (
    FromSchedulerFront,
    FromSchedulerWorkers,
    Lease,
    Submit,
    TokenBatch,
    ToSchedulerWorkers,
)
from ...proto.params import SamplingParams
from ...proto.work import Generate
from ..core import Scheduler
from ..replica import Replica
from .page_store import PageStore

BLOCK_SIZE = 16
VOCAB = 32_000
EOS = 2


def run_control_plane(
    num_seqs: int = 256, steps: int = 2000, prompt_len: int = 128, output_len: int = 256, seed: int = 0
) -> dict[str, float]:
    """Keep ``num_seqs`` sequences running for ``steps`` steps; microseconds of CPU of plan + commit for each step.

    A sequence that ends is replaced at once by a new request, so arrivals, prefill chunks, block allocation, hashing
    and ends are all in the measure; output lengths are spread around ``output_len``. Two plans are in flight, as in
    life. ``codec_*`` is what encoding the plan and tokens and decoding the result cost besides.
    """
    world = _World(num_seqs, prompt_len, output_len, seed)
    world.warm_up()
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        world.turn()
    gc.unfreeze()
    total = [plan + commit for plan, commit in zip(world.plan_us, world.commit_us, strict=True)]
    ordered = sorted(total)
    return {
        "num_seqs": num_seqs,
        "steps": steps,
        "prompt_len": prompt_len,
        "output_len": output_len,
        "mean_us": statistics.fmean(total),
        "p50_us": statistics.median(total),
        "p99_us": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "plan_mean_us": statistics.fmean(world.plan_us),
        "commit_mean_us": statistics.fmean(world.commit_us),
        "codec_mean_us": statistics.fmean(world.codec_us),
        "submit_mean_us": statistics.fmean(world.submit_us) if world.submit_us else 0.0,
        "mean_running": statistics.fmean(world.running),
        "requests_started": float(world.arrivals),
    }


class _World:
    """The scheduler, its worker, and clients that replace each request that ends."""

    def __init__(self, num_seqs: int, prompt_len: int, output_len: int, seed: int):
        self.rng = random.Random(seed)
        self.num_seqs, self.prompt_len, self.output_len = num_seqs, prompt_len, output_len
        max_len = prompt_len + 2 * output_len
        blocks = num_seqs * (max_len // BLOCK_SIZE + 2)
        config = EngineArgs(block_size=BLOCK_SIZE, max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs))
        self.core = Scheduler(config, time.monotonic)
        lease = Lease(1, 0, 1)
        self.replica = Replica(0, lease, "worker", num_seqs, blocks, BLOCK_SIZE, max_len, VOCAB)
        self.core.add_replica(self.replica)
        self.store = PageStore(num_seqs, blocks, BLOCK_SIZE, VOCAB, pages=False)
        self.decoders: list[Decoder] = [
            Decoder(u) for u in (FromSchedulerWorkers, ToSchedulerWorkers, FromSchedulerFront)
        ]
        self.sent: deque[bytes] = deque()
        self.arrivals = 0
        self.plan_us: list[float] = []
        self.commit_us: list[float] = []
        self.codec_us: list[float] = []
        self.submit_us: list[float] = []
        self.running: list[int] = []

    def warm_up(self) -> None:
        """Fill every row; lengths are such that ends come evenly from then on."""
        for i in range(self.num_seqs):
            self._arrive(1 + i * self.output_len // self.num_seqs)
        for _ in range(self.output_len // 4 + self.num_seqs * self.prompt_len // 2048 + 4):
            self.turn()
        for times in (self.plan_us, self.commit_us, self.codec_us, self.submit_us, self.running):
            times.clear()

    def turn(self) -> None:
        """One step, as in the loop: a result comes back, the next plan is made, tokens and plan go out."""
        frame = self._next_result()
        clock = time.thread_time_ns
        begin = clock()
        result = self.decoders[1](frame) if frame else None
        decoded = clock()
        if result is not None:
            self.core.commit(self.replica, result)
        committed = clock()
        plans = []
        while (plan := self.core.plan(self.replica)) is not None:
            plans.append(plan)
        planned = clock()
        messages = self.core.outbox.take()
        taken = clock()
        self.sent.extend(encode(plan) for plan in plans)
        frames = [encode(message) for _, message in messages]
        done = clock()

        self.commit_us.append((committed - decoded + taken - planned) / 1000)
        self.plan_us.append((planned - committed) / 1000)
        self.codec_us.append((decoded - begin + done - taken) / 1000)
        self.running.append(self.replica.running)
        for frame in frames:
            self._replace_ended(frame)

    def _next_result(self) -> bytes:
        """The worker runs its oldest plan; nothing where it has none."""
        if not self.sent:
            return b""
        plan = self.decoders[0](self.sent.popleft())
        return encode(self.store.run(plan))

    def _replace_ended(self, frame: bytes) -> None:
        batch = self.decoders[2](frame)
        if isinstance(batch, TokenBatch):
            for _ in range(sum(map(bool, from_i8(batch.finishes)))):
                self._arrive(self.rng.randint(self.output_len // 2, self.output_len * 3 // 2))

    def _arrive(self, max_tokens: int) -> None:
        self.arrivals += 1
        shared = [7] * (self.prompt_len // 4)  # a system prompt, found in the prefix cache
        prompt = shared + [self.rng.randrange(3, VOCAB) for _ in range(self.prompt_len - len(shared))]
        ids = i32(prompt)
        work = Generate(SamplingParams(max_tokens=max_tokens), self.arrivals, [EOS])
        hashes = b"".join(hash_blocks(ids, BLOCK_SIZE))
        message = Submit(self.arrivals, 1, ids, hashes, work, float(self.arrivals))
        start = time.thread_time_ns()
        self.core.submit("detokenizer", message)
        self.submit_us.append((time.thread_time_ns() - start) / 1000)


if __name__ == "__main__":
    print(json.dumps({name: round(value, 1) for name, value in run_control_plane().items()}, indent=1))
