"""Decode and prefill steps of a model in one worker, without the stack, by rows and context.

A real worker carries out the plans of a real scheduler: prompts of the context's length in chunks, then decodes of all
rows. A decode's bytes (every weight that a step reads, and the keys and values of its rows) and a prefill's operations
stand beside this machine's own read bandwidth and product peak, measured just before: a virtual machine's change by
the minute. A model that fits into the caches is read faster than memory is. Of a prefill only operations that are done
count: in the last layer all tokens have their keys and values made, and only those that are sampled from go on;
attention counts by the keys that a token sees.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..ceilings import ceilings
from ..models import find_model
from ..report import BenchError, Report

PEAKS = {"float32": "peak_f32_gflop_per_s", "bfloat16": "peak_bf16_gflop_per_s"}
WEIGHT_BYTES = {"int8": 1.0, "int4": 0.5 + 2 / 128}
"""Of a weight of the layers, with --quantization. The head has int8's with either."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which model in which type, how many rows with which contexts."""
    parser.add_argument("--model", default="small-llama")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--quantization", help="as of quire serve")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[200])
    parser.add_argument("--steps", type=int, default=24, help="decodes measured, of each repeat")
    parser.add_argument("--threads", type=int, help="default: what quire serve chooses")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--operations", action="store_true", help="where a step's time goes, and the products' own rate"
    )


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each dtype, context, number of rows, and repeat."""
    from quire.gpu_worker.device import choose_threads, parameter_estimate, usable_cores
    from quire.gpu_worker.early import set_environment
    from quire.proto.checkpoint.model_config import load_model_config

    folder = find_model(args.model)
    config = load_model_config(str(folder))
    threads = choose_threads(args.threads, usable_cores(), parameter_estimate(config))
    set_environment()  # before torch is imported
    for dtype in args.dtype:
        rig = Rig(folder, dtype, args.quantization, threads)
        for repeat in range(args.repeats):
            for context in args.context:
                for rows in args.rows:
                    labels = {"model": folder.name, "dtype": rig.dtype_name, "quantization": args.quantization}
                    limits = ceilings(threads)
                    with report.sample(**labels, threads=threads, rows=rows, context=context, repeat=repeat) as values:
                        values |= rig.measure(rows, context, args.steps, limits, args.operations) | limits


class Rig:
    """A loaded model, and the workers that run it."""

    def __init__(self, folder: Path, dtype: str, quantization: str | None, threads: int):
        import torch

        from quire.gpu_worker.models.dtypes import resolve_dtype
        from quire.gpu_worker.models.loader import load_model
        from quire.proto.checkpoint.model_config import load_model_config

        torch.set_num_threads(threads)
        self.device = torch.device("cpu")
        self.config = load_model_config(str(folder))
        self.dtype = resolve_dtype(dtype, self.config, self.device)
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        method = {"quantization": quantization} if quantization else {}
        self.model = load_model(self.config, self.dtype, self.device, **method)
        self.weights = multiplied(self.model.spec)
        body, _, head = self.weights
        size = self.dtype.itemsize
        self.weight_bytes = (body + head) * WEIGHT_BYTES.get(quantization or "", size)

    def measure(
        self, rows: int, context: int, steps: int, limits: dict[str, float], operations: bool = False
    ) -> dict[str, Any]:
        """Milliseconds of a decode, tokens/s of a prefill, and what share of the machine's ceilings they reach; with
        ``operations`` what of a step is theirs."""
        found, prefills = self._run(rows, context, steps, operations)
        decodes = [step.seconds for step in found]
        spec = self.model.spec
        kv = 2 * sum(spec.kv_heads) * spec.head_dim * self.dtype.itemsize * rows * (context + steps // 2)
        best = min(decodes)
        values = {
            "decode_ms": 1000 * statistics.median(decodes),
            "decode_min_ms": 1000 * best,
            "decode_tokens_per_s": rows / statistics.median(decodes),
            "decode_gb_per_s": (self.weight_bytes + kv) / best / 1e9,
            "decode_of_read_bandwidth": (self.weight_bytes + kv) / best / 1e9 / limits["read_gb_per_s"],
        }
        if operations:
            shares = shares_of(min(found, key=lambda step: step.seconds), "decode")
            read = self.weight_bytes / shares["decode_products_ms"] / 1e6
            values |= shares | {"decode_products_alone_gb_per_s": read}
        if prefills:
            values |= self._prefill(max(prefills), limits.get(PEAKS.get(self.dtype_name, "")))  # the largest chunk
        return values

    def _prefill(self, step: Step, peak: float | None) -> dict[str, Any]:
        """Tokens/s of a prefill, and its products with weights a second, without and with those of attention."""
        spec, (body, tail, _) = self.model.spec, self.weights
        products = 2 * (body * step.tokens - tail * (step.tokens - step.sampled))
        attention = 4 * (spec.num_layers - 1) * spec.heads * spec.head_dim * step.keys
        values = {
            "prefill_chunk": step.tokens,
            "prefill_tokens_per_s": step.tokens / step.seconds,
            "prefill_products_gflop_per_s": products / step.seconds / 1e9,
            "prefill_gflop_per_s": (products + attention) / step.seconds / 1e9,
        }
        if step.operations is not None:
            values |= (shares := shares_of(step, "prefill"))
            values["prefill_products_alone_gflop_per_s"] = products / shares["prefill_products_ms"] / 1e6
        if peak:
            values["prefill_products_of_peak"] = values["prefill_products_gflop_per_s"] / peak
            values["prefill_of_peak"] = values["prefill_gflop_per_s"] / peak
        return values

    def _run(self, rows: int, context: int, steps: int, operations: bool) -> tuple[list[Step], list[Step]]:
        """The decodes, and the prefills."""
        from quire.gpu_worker.worker import Worker
        from quire.proto.config import EngineArgs
        from quire.proto.params import SamplingParams

        from .worker_python import BLOCK_SIZE, plans

        warm_up = 3
        length = context + warm_up + steps
        args = EngineArgs(
            block_size=BLOCK_SIZE, max_num_seqs=rows, max_num_batched_tokens=max(2048, rows), enforce_eager=True,
            num_gpu_blocks_override=rows * (-(-length // BLOCK_SIZE) + 1),
        )  # fmt: skip
        sampling = SamplingParams(temperature=0.0, max_tokens=warm_up + steps, ignore_eos=True)
        wire = Wire(plans(args, length, min(self.config.vocab_size, 4000), sampling, context))
        config = dataclasses.replace(self.config, max_model_len=length)
        worker = Worker(args, config, self.model, self.dtype, self.device)
        if operations:
            wire.profile(lambda: worker._runner.program if worker._runner else None)
        gc.collect()
        worker.serve(wire)
        decodes = [step for step in wire.steps if not step.prefill]
        return decodes[warm_up:], [step for step in wire.steps if step.prefill]


class Step(NamedTuple):
    """A step that was done: ``keys`` are those that its tokens see, added up."""

    tokens: int
    seconds: float
    keys: int
    sampled: int
    prefill: bool
    operations: Any = None  # nanoseconds of each kind of operation, as the native program counts them


class Wire:
    """In place of the worker's link: plans that lie ready, and a clock."""

    def __init__(self, frames: list[bytes]):
        from quire.proto.codec import Decoder
        from quire.proto.messages import FromSchedulerWorkers

        self.last_step = 0
        self.steps: list[Step] = []
        self._decode = Decoder(FromSchedulerWorkers)
        self._frames = iter(frames)
        self._plan: Any = None
        self._began = 0.0
        self._program: Callable[[], Any] = lambda: None

    def profile(self, program: Callable[[], Any]) -> None:
        """Have the native program that this names, once there is one, count what its operations take."""
        self._program = program

    def get(self, timeout: float | None = None) -> Any:
        """The next message. A step takes from one call of this to the next."""
        from quire.proto.codec import from_i32
        from quire.proto.messages import Drain, StepPlan

        if self._plan is not None:
            seconds = time.perf_counter() - self._began
            counts, starts = from_i32(self._plan.counts), from_i32(self._plan.starts)
            keys = sum(count * start + count * (count + 1) // 2 for start, count in zip(starts, counts, strict=True))
            sampled = len(from_i32(self._plan.sample_src))
            spent = None if (program := self._program()) is None else program.nanoseconds
            self.steps.append(Step(sum(counts), seconds, keys, sampled, max(counts, default=0) > 1, spent))
        frame = next(self._frames, None)
        message = Drain() if frame is None else self._decode(frame)
        self._plan = message if isinstance(message, StepPlan) else None
        if (program := self._program()) is not None:
            from quire.gpu_worker.kernels.cpu.program import KINDS

            program.nanoseconds = np.zeros(len(KINDS), np.int64)
        self._began = time.perf_counter()
        return message

    def send(self, message: Any) -> None:
        """Pass over answers. Raises RuntimeError where a step failed."""
        from quire.proto.messages import StepFailed

        if isinstance(message, StepFailed):
            raise RuntimeError(message.error)


def shares_of(step: Step, name: str) -> dict[str, float]:
    """Milliseconds of a step in products with weights, in attention, in its other operations, and outside of them: the
    sampler, the plan and the result. Raises BenchError where no native program runs the model."""
    from quire.gpu_worker.kernels.cpu.program import KINDS, Attend, Experts, Linear

    if step.operations is None:
        raise BenchError("--operations needs the native kernels, and a model that is wholly a program.")
    spent = dict(zip(KINDS, (step.operations / 1e6).tolist(), strict=True))
    products, attention, total = spent[Linear] + spent[Experts], spent[Attend], sum(spent.values())
    parts = {"products": products, "attention": attention, "others": total - products - attention}
    parts["outside"] = 1000 * step.seconds - total
    return {f"{name}_{part}_ms": milliseconds for part, milliseconds in parts.items()}


def multiplied(spec: Any) -> tuple[int, int, int]:
    """How many weights a token is multiplied with: in the layers; of these, behind the last attention, where only
    tokens come that are sampled from; and in the head, where they alone come too.

    Raises BenchError where a layer has experts, of which each token sees others.
    """
    if spec.moe is not None:
        raise BenchError(f"{spec.architecture} has experts; steps counts the weights of dense models alone.")
    heads = spec.hidden_size * spec.head_dim
    mlp = (3 if spec.gated else 2) * spec.hidden_size * spec.intermediate_size
    attention = sum(heads * (2 * spec.heads + 2 * kv) for kv in spec.kv_heads)
    return attention + spec.num_layers * mlp, heads * spec.heads + mlp, spec.hidden_size * spec.vocab_size
