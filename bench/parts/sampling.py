"""What each feature of the sampler costs a step, on all rows of a batch and on one row of it.

Milliseconds of ``sample`` alone, host included: the first quartile of several steps, each on fresh logits. ``all`` and
``one``: every row, or one row, uses the feature; ``extra`` is the time over the baseline of the same logits, in which
no row does. Last, a batch that uses nothing is traced beside rows that use everything but are not in the step: it must
run the same functions and operations as where no request ever used any, and take as long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.gpu_worker.sampling.sample_batch import SampleBatch
from quire.gpu_worker.sampling.sampler import sample
from quire.gpu_worker.sampling.sampling_state import SamplingState
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

from ..report import BenchError, Report

PROMPT, OUTPUT = 800, 200
GREEDY: dict[str, Any] = {"temperature": 0.0}
RANDOM: dict[str, Any] = {"temperature": 0.9}
WORDS = [[i] for i in range(10)] + [[i, i + 1, i + 2] for i in range(100, 120)]

# name -> (parameters, the baseline they are compared with, fields of Generate)
FEATURES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "repetition_penalty": (GREEDY | {"repetition_penalty": 1.1}, "greedy", {}),
    "presence and frequency": (GREEDY | {"presence_penalty": 0.5, "frequency_penalty": 0.5}, "greedy", {}),
    "logit_bias of 50": (GREEDY | {"logit_bias": {i * 7: 1.0 for i in range(50)}}, "greedy", {}),
    "allowed_token_ids, 1000": (GREEDY | {"allowed_token_ids": list(range(5, 5005, 5))}, "greedy", {}),
    "bad_words, 10 of one token and 20 of three": (GREEDY, "greedy", {"bad_words": WORDS}),
    "min_tokens": (GREEDY | {"min_tokens": 500, "max_tokens": None}, "greedy",
                   {"suppressed_ids": np.array([2, 3], np.int32).tobytes()}),
    "grammar mask": (GREEDY, "greedy", {}),
    "logprobs 0": (GREEDY | {"logprobs": 0}, "greedy", {}),
    "logprobs 5": (GREEDY | {"logprobs": 5}, "greedy", {}),
    "logprobs 20": (GREEDY | {"logprobs": 20}, "greedy", {}),
    "logprobs 5 and presence_penalty": (GREEDY | {"logprobs": 5, "presence_penalty": 0.5}, "greedy", {}),
    "beams of width 4": (GREEDY | {"use_beam_search": True, "n": 4}, "greedy", {}),
    "top_k 50": (RANDOM | {"top_k": 50}, "random", {}),
    "top_p 0.9": (RANDOM | {"top_p": 0.9}, "random", {}),
    "min_p 0.05": (RANDOM | {"min_p": 0.05}, "random", {}),
    "top_k, top_p and min_p": (RANDOM | {"top_k": 50, "top_p": 0.9, "min_p": 0.05}, "random", {}),
    "top_p 0.9, flat logits": (RANDOM | {"top_p": 0.9}, "random, flat logits", {}),
}  # fmt: skip
BASELINES = {"greedy": GREEDY, "random": RANDOM, "random, flat logits": RANDOM}


class Step:
    """One step of a batch: ``spare`` rows of the state use every feature but are not in it."""

    def __init__(self, bench: Bench, rows: list[tuple[dict[str, Any], dict[str, Any]]], spare: bool = False):
        self.bench, count = bench, len(rows)
        self.state = SamplingState(2 * count, bench.vocab, bench.device)
        generator = np.random.default_rng(0)
        history = np.zeros((2 * count, PROMPT + OUTPUT + 1), np.int32)
        everything = [(f[0], f[2]) for f in FEATURES.values()]
        extra = [everything[i % len(everything)] for i in range(count)] if spare else []
        for row, (fields, admitted) in enumerate(rows + extra):
            ids = generator.integers(0, bench.vocab, PROMPT + OUTPUT).astype(np.int32)
            history[row, : len(ids)] = ids
            self.state.admit(row, Generate(SamplingParams(**fields), row, **admitted), row, PROMPT, ids)
        self.rows, self.positions = np.arange(count), np.full(count, PROMPT + OUTPUT)
        self.device_rows, self.device_positions, self.history = (
            torch.from_numpy(x).to(bench.device) for x in (self.rows, self.positions, history)
        )

    def run(self, logits: torch.Tensor, mask: torch.Tensor | None) -> Any:
        """As the runner does it each step."""
        needs = self.state.needs(self.rows, self.positions)
        rows, positions = self.device_rows, self.device_positions
        batch = SampleBatch(rows, positions, self.rows, self.positions, self.history, needs, mask)
        return sample(logits, self.state, batch)


class Bench:
    """Logits of one size and how long steps over them take."""

    def __init__(self, batch: int, vocab: int, repeats: int, device: torch.device):
        self.batch, self.vocab, self.repeats, self.device = batch, vocab, repeats, device
        generator = torch.Generator().manual_seed(0)
        # As models give them: a wide body far below a few likely tokens.
        peaked = torch.randn(batch, vocab, generator=generator) * 2.2 - 3
        likely = torch.randint(0, vocab, (batch, 40), generator=generator)
        peaked.scatter_add_(1, likely, torch.rand(batch, 40, generator=generator) * 18)
        flat = torch.randn(batch, vocab, generator=generator) * 0.05
        self.logits = {"peaked": peaked.to(device), "flat": flat.to(device)}
        self.work = torch.empty_like(self.logits["peaked"])

    def mask(self, rows: int) -> torch.Tensor:
        """A grammar's mask that leaves half the vocabulary to ``rows`` rows and everything to the others."""
        words = np.full((self.batch, -(-self.vocab // 32)), -1, np.int32)
        words[:rows] = np.random.default_rng(0).integers(-(2**31), 2**31, words[:rows].shape)
        return torch.from_numpy(words).to(self.device)

    def milliseconds(self, *steps: Callable[[torch.Tensor], Any], flat: bool = False) -> list[float]:
        """First quartile of each, measured in turns so that what else the machine does falls on all alike."""
        times: list[list[float]] = [[] for _ in steps]
        for turn in range(-1, self.repeats):
            for step, found in zip(steps, times, strict=True):
                self.work.copy_(self.logits["flat" if flat else "peaked"])
                self.wait()
                start = time.perf_counter()
                step(self.work)
                self.wait()
                if turn >= 0:
                    found.append((time.perf_counter() - start) * 1e3)
        return [sorted(found)[len(found) // 4] for found in times]

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def feature(self, name: str) -> dict[str, float]:
        """Its cost on all rows and on one, next to its baseline's."""
        fields, baseline, admitted = FEATURES[name]
        plain = (BASELINES[baseline], {})
        counts = {"base": 0, "all": self.batch, "one": 1}
        runs = []
        for rows in counts.values():
            step = Step(self, [(fields, admitted)] * rows + [plain] * (self.batch - rows))
            mask = self.mask(rows) if name == "grammar mask" and rows else None
            runs.append(lambda logits, step=step, mask=mask: step.run(logits, mask))
        found = dict(zip(counts, self.milliseconds(*runs, flat="flat" in baseline), strict=True))
        return found | {"all_extra": found["all"] - found["base"], "one_extra": found["one"] - found["base"]}

    def unused(self, name: str) -> dict[str, Any]:
        """A batch of a baseline beside idle rows that use everything, against a state that never knew any."""
        rows = [(BASELINES[name], {})] * self.batch
        steps = [Step(self, rows, spare) for spare in (False, True)]
        traces = [trace(lambda step=step: step.run(self.work.copy_(self.logits["peaked"]), None)) for step in steps]
        without, beside = self.milliseconds(*(lambda logits, step=step: step.run(logits, None) for step in steps))
        same = traces[0] == traces[1]
        return {"same_operations": same, "operations": len(traces[0]), "without_ms": without, "beside_ms": beside,
                "ratio": beside / without}  # fmt: skip


def trace(run: Callable[[], Any]) -> list[str]:
    """Every function of the worker and every torch operation that ``run`` calls, in order; at its second call, for the
    first one finds out what is kept."""
    found: list[str] = []
    run()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "gpu_worker" in frame.f_code.co_filename:
            found.append(frame.f_code.co_qualname)

    with Operations():
        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(None)
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How large a batch, and which features."""
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=9, help="of which the first quartile is taken")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="*", choices=list(FEATURES), default=list(FEATURES))


@torch.inference_mode()
def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each feature, and one for each baseline beside rows that use everything. Raises BenchError where
    what is not used is not free."""
    torch.set_num_threads(args.threads)
    bench = Bench(args.batch, args.vocab, args.steps, torch.device(args.device))
    for repeat in range(args.repeats):
        for name in args.only:
            with report.sample(feature=name, batch=args.batch, repeat=repeat) as values:
                values |= {f"{key}_ms": value for key, value in bench.feature(name).items()}
        for name in ("greedy", "random"):
            with report.sample(unused=name, batch=args.batch, repeat=repeat) as values:
                values |= bench.unused(name)
    if not all(sample["values"].get("same_operations", True) for sample in report.samples):
        raise BenchError("a batch that uses no feature runs other operations beside rows that use some.")
