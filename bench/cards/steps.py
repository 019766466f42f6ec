"""Steps of a whole model with dummy weights, through the worker's own runner, graphs and sampler."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.runner import Runner
from quire.gpu_worker.state import RowState
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.codec import i32
from quire.proto.messages import Admit, Lease, StepPlan
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

from .card import PAGE, Card
from .floor import kv_bytes_per_token

LEASE = Lease(1, 0, 1)
STEPS = 48
"""Tokens that each row decodes; contexts grow by as many, so a floor is taken at their middle."""
WARM = 8
"""Of these, the steps before the clock starts."""


@contextlib.contextmanager
def loaded(card: Card, config: dict[str, Any]) -> Iterator[Any]:
    """The model of ``config`` with dummy weights, on the card."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield load_model(load_model_config(folder), card.dtype, card.device, "dummy")


def missing_bytes(card: Card, config: dict[str, Any], rows: int, context: int) -> float:
    """By how many bytes a cache for so many tokens is over what is free; 0 where it fits."""
    if card.device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()  # the last case's cache, so that what is free can be asked for
    need = rows * (context + STEPS + PAGE) * kv_bytes_per_token(config, card.dtype.itemsize)
    return max(0.0, need - 0.8 * torch.cuda.mem_get_info(card.device)[0])


class Steps:
    """``rows`` rows that decode from ``context`` tokens on, and, with ``chunk``, one more that prefills as many tokens
    in each step (the same ones again, from its beginning)."""

    def __init__(self, card: Card, model: Any, rows: int, context: int, chunk: int = 0):
        self.card, self.rows, self.context, self.chunk = card, rows, context, chunk
        length = max(context + STEPS, chunk)
        self.pages, every = -(-length // PAGE), rows + (1 if chunk else 0)
        kv = KVCache(model.spec, every * self.pages, PAGE, card.dtype, card.device)
        vocab = model.spec.vocab_size
        self.runner = Runner(model, RowState(every, length, PAGE, vocab, card.device), kv, max(16, rows + chunk))
        if card.device.type == "cuda":
            self.runner.capture(length, progress=False)
        self._first = self._opening(every, vocab)
        self._names, self._compute = i32(range(rows)), i32(range(every))
        self._counts = i32([1] * rows + [chunk] * (every - rows))

    def _opening(self, every: int, vocab: int) -> dict[str, Any]:
        """What the first plan brings: every row, and blocks in random order."""
        draw = np.random.default_rng(0)
        work = Generate(SamplingParams(temperature=0.0), 0)
        lengths = [self.context] * self.rows + [self.chunk] * (every - self.rows)
        ids = draw.integers(2, vocab, max(lengths)).tolist()
        return {
            "admits": [Admit(row, row, 0, i32(ids[:n]), n, work) for row, n in enumerate(lengths)],
            "delta_rows": i32(np.repeat(np.arange(every), self.pages).tolist()),
            "delta_slots": i32(list(range(self.pages)) * every),
            "delta_blocks": i32(draw.permutation(every * self.pages).tolist()),
        }

    def _plan(self, step: int) -> StepPlan:
        starts = [self.context - 1 + step] * self.rows + [0] * (1 if self.chunk else 0)
        return StepPlan(
            LEASE, step + 1, rows=self._compute, starts=i32(starts), counts=self._counts,
            sample_src=self._names, sample_rows=self._names, **({} if step else self._first),
        )  # fmt: skip

    def seconds(self, steps: int = STEPS) -> float:
        """Mean wall time of a step with two plans in flight, as in service; the host's work is in it."""
        waiting = [self.runner.launch(self._plan(0))]
        begin = time.perf_counter()
        for step in range(1, steps):
            waiting.append(self.runner.launch(self._plan(step)))
            waiting.pop(0).arrival.wait()
            if step == WARM:
                begin = time.perf_counter()
        waiting.pop().arrival.wait()
        if self.card.device.type == "cuda":
            torch.cuda.synchronize()  # steps that draw nothing have nothing to wait for
        return (time.perf_counter() - begin) / (steps - 1 - WARM)
