"""Decode and prefill steps of a model in one worker, without the stack, by rows and context.

A real worker carries out the plans of a real scheduler: prompts of the context's length in chunks, then decodes of all
rows. A decode's bytes (every weight that a step reads, and the keys and values of its rows) and a prefill's operations
stand beside this machine's own read bandwidth and product peak. A model that fits into the caches is read faster than
memory is.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from pathlib import Path
from typing import Any

from ..ceilings import ceilings
from ..models import find_model
from ..report import BenchError, Report

PEAKS = {"float32": "peak_f32_gflop_per_s", "bfloat16": "peak_bf16_gflop_per_s"}
WEIGHT_BYTES: dict[str | None, float] = {"int8": 1.0, "int4": 0.5 + 2 / 128}
"""Of a weight of the layers, with --quantization; the head is counted in the model's own type."""


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


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each dtype, context, number of rows, and repeat."""
    from quire.gpu_worker.device import choose_threads, parameter_estimate, usable_cores
    from quire.gpu_worker.early import set_environment
    from quire.proto.checkpoint.model_config import load_model_config

    folder = find_model(args.model)
    config = load_model_config(str(folder))
    threads = choose_threads(args.threads, usable_cores(), parameter_estimate(config))
    limits = ceilings(threads)
    with report.sample(threads=threads) as values:
        values |= limits
    set_environment()  # before torch is imported
    for dtype in args.dtype:
        rig = Rig(folder, dtype, args.quantization, threads)
        for repeat in range(args.repeats):
            for context in args.context:
                for rows in args.rows:
                    labels = {"model": folder.name, "dtype": rig.dtype_name, "quantization": args.quantization}
                    with report.sample(**labels, rows=rows, context=context, repeat=repeat) as values:
                        values |= rig.measure(rows, context, args.steps, limits)


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
        self.body, head = multiplied(self.model.spec)
        self.weight_bytes = self.body * WEIGHT_BYTES.get(quantization, self.dtype.itemsize) + head * self.dtype.itemsize

    def measure(self, rows: int, context: int, steps: int, limits: dict[str, float]) -> dict[str, Any]:
        """Milliseconds of a decode, tokens/s of a prefill, and what share of the machine's ceilings they reach."""
        decodes, prefills = self._run(rows, context, steps)
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
        if prefills:
            tokens, seconds = max(prefills)  # the largest chunk
            gflop = 2 * self.body * tokens / 1e9  # without attention's own products
            values |= {"prefill_chunk": tokens, "prefill_tokens_per_s": tokens / seconds,
                       "prefill_gflop_per_s": gflop / seconds}  # fmt: skip
            if peak := limits.get(PEAKS.get(self.dtype_name, "")):
                values["prefill_of_peak"] = gflop / seconds / peak
        return values

    def _run(self, rows: int, context: int, steps: int) -> tuple[list[float], list[tuple[int, float]]]:
        """Seconds of each decode, and (tokens, seconds) of each prefill."""
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
        gc.collect()
        worker.serve(wire)
        decodes = [seconds for tokens, prefill, seconds in wire.steps if not prefill]
        return decodes[warm_up:], [(tokens, seconds) for tokens, prefill, seconds in wire.steps if prefill]


class Wire:
    """In place of the worker's link: plans that lie ready, and a clock. ``steps``: (tokens, prefill, seconds)."""

    def __init__(self, frames: list[bytes]):
        from quire.proto.codec import Decoder
        from quire.proto.messages import FromSchedulerWorkers

        self.last_step = 0
        self.steps: list[tuple[int, bool, float]] = []
        self._decode = Decoder(FromSchedulerWorkers)
        self._frames = iter(frames)
        self._plan: Any = None
        self._began = 0.0

    def get(self, timeout: float | None = None) -> Any:
        """The next message. A step takes from one call of this to the next."""
        from quire.proto.codec import from_i32
        from quire.proto.messages import Drain, StepPlan

        if self._plan is not None:
            seconds = time.perf_counter() - self._began
            counts = from_i32(self._plan.counts)
            self.steps.append((sum(counts), max(counts, default=0) > 1, seconds))
        frame = next(self._frames, None)
        message = Drain() if frame is None else self._decode(frame)
        self._plan = message if isinstance(message, StepPlan) else None
        self._began = time.perf_counter()
        return message

    def send(self, message: Any) -> None:
        """Pass over answers. Raises RuntimeError where a step failed."""
        from quire.proto.messages import StepFailed

        if isinstance(message, StepFailed):
            raise RuntimeError(message.error)


def multiplied(spec: Any) -> tuple[int, int]:
    """How many weights a token is multiplied with: in the layers, and in the head, which only tokens that are sampled
    go through. Raises BenchError where a layer has experts, of which each token sees others."""
    if spec.moe is not None:
        raise BenchError(f"{spec.architecture} has experts; steps counts the weights of dense models alone.")
    matrices = 3 if spec.gated else 2
    attention = sum(spec.hidden_size * spec.head_dim * (2 * spec.heads + 2 * kv) for kv in spec.kv_heads)
    return attention + spec.num_layers * matrices * spec.hidden_size * spec.intermediate_size, (
        spec.hidden_size * spec.vocab_size
    )
