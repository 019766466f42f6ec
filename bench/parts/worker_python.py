"""What the worker's Python costs a decode step: a model that costs nothing, plans of a real scheduler.

Microseconds from the bytes of a ``StepPlan`` to the bytes of its ``StepResult``, without sockets and threads, in a
steady state: every row decodes, and now and then one begins a new block. ``total`` and ``least`` (the median and the
first percentile) are of steps without a clock inside; the phases are medians of others, with a clock around each.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from quire.gpu_worker.outcome import Outcome
from quire.gpu_worker.runner import Runner
from quire.gpu_worker.state import RowState
from quire.gpu_worker.worker import Worker
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.codec import Decoder, encode, i32
from quire.proto.config import EngineArgs
from quire.proto.hashing import hash_blocks
from quire.proto.messages import Assign, Configure, Drain, FromSchedulerWorkers, Lease, StepFailed, StepResult, Submit
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler.core import Scheduler
from quire.scheduler.replica import Replica

from ..report import Report

BLOCK_SIZE, PROMPT, WARM_UP = 16, 128, 50
LEASE = Lease(1, 0, 1)
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "random": {"temperature": 0.8}}
PHASES: tuple[tuple[str, type, str], ...] = (
    ("apply", RowState, "apply"),
    ("check", RowState, "checked_run"),
    ("batch", Runner, "_batch"),
    ("model", Runner, "_hidden"),
    ("sample", Runner, "_sample"),
    ("write", Runner, "_write"),
    ("pack", Outcome, "result"),
)
"""A phase, and the method that it is. Beside them are ``decode`` and ``encode`` of messages, and ``rest``."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How many rows, and how their tokens are drawn."""
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--sampling", nargs="+", choices=["greedy", "random"], default=["greedy", "random"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each kind of sampling, number of rows, and repeat: microseconds, whole and by phase."""
    torch.set_num_threads(1)
    for repeat in range(args.repeats):
        for sampling in args.sampling:
            for rows in args.rows:
                with report.sample(rows=rows, sampling=sampling, repeat=repeat) as values:
                    found = run_steps(rows, args.steps, sampling=sampling)
                    values |= {f"{name}_us": value for name, value in found.items()}


def run_steps(rows: int, steps: int = 1000, vocab: int = 2048, sampling: str = "greedy") -> dict[str, float]:
    """Microseconds of a decode step of ``rows`` rows: ``total``, ``least``, and each phase."""
    seconds, _ = _run(rows, steps, vocab, SAMPLING[sampling])
    clocked, phases = _run(rows, steps, vocab, SAMPLING[sampling], phases=True)
    found = {"total": statistics.median(seconds), "least": sorted(seconds)[steps // 100]}
    medians = {name: statistics.median(spent) for name, spent in phases.items()}
    found |= medians | {"rest": statistics.median(clocked) - sum(medians.values())}
    return {name: round(1e6 * value, 1) for name, value in found.items()}


def _run(
    rows: int, steps: int, vocab: int, params: dict[str, Any], phases: bool = False
) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds of each step, and with ``phases`` those of each phase in each step."""
    length = PROMPT + WARM_UP + steps
    args = EngineArgs(
        block_size=BLOCK_SIZE, max_num_seqs=rows, max_num_batched_tokens=PROMPT * rows,
        num_gpu_blocks_override=rows * -(-length // BLOCK_SIZE),
    )  # fmt: skip
    wire = Wire(args, plans(args, length, vocab, SamplingParams(max_tokens=WARM_UP + steps, ignore_eos=True, **params)))
    worker = Worker(
        args, ModelConfig("", {}, length, vocab), FreeModel(rows, vocab), torch.float32, torch.device("cpu")
    )
    with ExitStack() as stack:
        for name, owner, method in PHASES if phases else ():
            stack.enter_context(patch.object(owner, method, _clocked(getattr(owner, method), name, wire.phases)))
        gc.collect()
        gc.freeze()
        worker.serve(wire)
        gc.unfreeze()
    return wire.seconds, wire.phases


def plans(args: EngineArgs, length: int, vocab: int, sampling: SamplingParams, prompt: int = PROMPT) -> list[bytes]:
    """Assign, Configure, and the plans of ``args.max_num_seqs`` requests of ``prompt`` tokens (or some fewer) that all
    run until ``length`` tokens."""
    rows, blocks = args.max_num_seqs, args.num_gpu_blocks_override or 0
    core = Scheduler(args, time.monotonic)
    replica = Replica(0, LEASE, "worker", rows, blocks, BLOCK_SIZE, length, vocab, caching=False)
    core.add_replica(replica)
    frames = [
        encode(Assign(LEASE, BLOCK_SIZE, rows, args.max_num_batched_tokens)), encode(Configure(LEASE, blocks))
    ]  # fmt: skip
    for uid in range(rows):
        # Prompts of different lengths, so that rows do not all begin a block in the same step.
        ids = i32([3 + at % (vocab - 3) for at in range(prompt - uid % BLOCK_SIZE)])
        work = Generate(sampling, seed=uid)
        core.submit("-", Submit(uid, 1, ids, b"".join(hash_blocks(ids, BLOCK_SIZE)), work, float(uid)))
    while (plan := core.plan(replica)) is not None:
        frames.append(encode(plan))
        core.commit(replica, StepResult(LEASE, plan.step, bytes(len(plan.sample_rows))))
        core.outbox.take()
    return frames


class Wire:
    """In place of the worker's link: messages that lie ready, and a clock."""

    def __init__(self, args: EngineArgs, frames: list[bytes]) -> None:
        self.last_step = 0
        self.phases: dict[str, list[float]] = defaultdict(list)
        self._steps = len(frames) - 2
        self._frames, self._decode = iter(frames), _clocked(Decoder(FromSchedulerWorkers), "decode", self.phases)
        self._encode = _clocked(encode, "encode", self.phases)
        self._marks: list[float] = []

    @property
    def seconds(self) -> list[float]:
        """Of each step but the first ones."""
        marks = self._marks[3 + WARM_UP :]  # Assign, Configure and the step of the prompts come first
        return [end - begin for begin, end in pairwise(marks)]

    def get(self, timeout: float | None = None) -> Any:
        """The next message. A step takes from one call of this to the next."""
        if len(self._marks) == 3 + WARM_UP:
            self.phases.clear()
        self._marks.append(time.perf_counter())
        frame = next(self._frames, None)
        return Drain() if frame is None else self._decode(frame)

    def send(self, message: Any) -> None:
        """Encode it."""
        if isinstance(message, StepFailed):
            raise RuntimeError(message.error)
        self._encode(message)


class FreeModel:
    """Gives every row logits that were made before."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.spec = SimpleNamespace(kv_heads=(), head_dim=8, hidden_size=8, intermediate_size=8, vocab_size=vocab)
        self._hidden = torch.zeros(rows, 8)
        self._logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))

    def forward(self, batch: Any, kv: Any) -> torch.Tensor:
        return self._hidden[: len(batch.outputs)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


def _clocked(call: Callable[..., Any], name: str, seconds: dict[str, list[float]]) -> Callable[..., Any]:
    """``call``, with the time that each call takes put into ``seconds[name]``."""

    def clocked(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[name].append(time.perf_counter() - began)

    return clocked
