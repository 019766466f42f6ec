"""The decode step of a whole model with dummy weights, against its floor: the worker's own model, graphs and runner."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_floor import Ceilings, decode_floor, kv_bytes_per_token
from gpu_timing import seconds_each

from quire.gpu_worker.graphs import CudaRecorder, DecodeGraphs
from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.runner import Runner
from quire.gpu_worker.sampling.sample_batch import SampleBatch
from quire.gpu_worker.sampling.sampler import sample
from quire.gpu_worker.sampling.sampling_state import SamplingState
from quire.gpu_worker.state import RowState
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.codec import i32
from quire.proto.messages import Admit, Lease, StepPlan
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

PAGE = 16
LEASE = Lease(1, 0, 1)
STEPS = 48
"""Tokens that the runner decodes; contexts grow by as many, so the floor is taken at their middle."""


def run(
    config: dict, device: torch.device, ceilings: Ceilings, batches: tuple[int, ...], contexts: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """A row for each batch and context: the step on the GPU alone, and through the runner with the host's work."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        (Path(folder) / "config.json").write_text(json.dumps(config))
        dtype = getattr(torch, config["torch_dtype"])
        model = load_model(load_model_config(folder), dtype, device, "dummy", 0, False)
        for batch in batches:
            for context in contexts:
                if device.type == "cuda":
                    gc.collect()
                    torch.cuda.empty_cache()  # the last case's cache, so that what is free can be asked for
                need = batch * (context + STEPS + PAGE) * kv_bytes_per_token(config, dtype.itemsize)
                shape = {"batch": batch, "context": context}
                if device.type == "cuda" and need > 0.9 * torch.cuda.mem_get_info(device)[0]:
                    yield shape | {"left_out": f"{need / 1e9:.1f} GB of KV cache do not fit"}
                    continue
                floor = decode_floor(config, batch, context, ceilings, dtype.itemsize)
                step = graph_step(model, batch, context, dtype, device)
                middle = decode_floor(config, batch, context + STEPS // 2, ceilings, dtype.itemsize)
                served = runner_step(model, batch, context, dtype, device)
                yield shape | {
                    "floor_ms": floor * 1e3, "step_ms": step * 1e3, "share_of_floor": floor / step,
                    "runner_step_ms": served * 1e3, "runner_share_of_floor": middle / served,
                    "tokens_per_s": batch / served,
                }  # fmt: skip


def graph_step(model: Any, batch: int, context: int, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of forward (as the worker captures it), logits and greedy sampling, on the device alone."""
    pages = -(-context // PAGE)
    kv = KVCache(model.spec, batch * pages, PAGE, dtype, device)
    graphs = DecodeGraphs([batch], context, PAGE, device)
    static = graphs._static_batch(batch)
    static.context_lens.fill_(context)
    static.positions.fill_(context - 1)
    static.block_tables.copy_(torch.randperm(batch * pages).view(batch, pages))
    static.slots.copy_(static.block_tables[:, -1].long() * PAGE + (context - 1) % PAGE)
    if device.type != "cuda":  # the CPU's attention reads these on the host
        static.host_query_starts = list(range(batch + 1))
        static.host_context_lens = [context] * batch
    state = SamplingState(batch, model.spec.vocab_size, device)
    rows, host = torch.arange(batch, device=device), np.arange(batch)
    history = torch.zeros((batch, 1), dtype=torch.int32, device=device)
    slots = SampleBatch(rows, static.positions, host, host, history, state.needs(host, host))

    def step() -> torch.Tensor:
        logits = model.logits(model.forward(static, kv))
        return sample(logits, state, slots).tokens

    return seconds_each([step], device, 1.0)


def runner_step(model: Any, batch: int, context: int, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a step through the worker's runner, two plans in flight as in service; wall time, host included."""
    length = context + STEPS
    pages = -(-length // PAGE)
    kv = KVCache(model.spec, batch * pages, PAGE, dtype, device)
    state = RowState(batch, length, PAGE, model.spec.vocab_size, device)
    runner = Runner(model, state, kv, max(batch, 16))
    if device.type == "cuda":
        # One size of graph, where the runner would capture all.
        runner.graphs = DecodeGraphs([batch], length, PAGE, device)
        runner.graphs.capture(lambda b: model.forward(b, kv), CudaRecorder(), False)
    rows = np.arange(batch)
    ids = np.random.default_rng(0).integers(2, model.spec.vocab_size, context)
    work = Generate(SamplingParams(temperature=0.0), 0)
    admits = [Admit(int(r), int(r), 0, i32(ids.tolist()), context, work) for r in rows]
    tables = {
        "delta_rows": i32(np.repeat(rows, pages).tolist()),
        "delta_slots": i32(np.tile(np.arange(pages), batch).tolist()),
        "delta_blocks": i32(np.random.default_rng(1).permutation(batch * pages).tolist()),
    }
    names = i32(rows.tolist())
    ones = i32([1] * batch)

    def plan(step: int, **first: Any) -> StepPlan:
        starts = i32([context - 1 + step] * batch)
        return StepPlan(
            LEASE, step + 1, rows=names, starts=starts, counts=ones, sample_src=names, sample_rows=names, **first
        )

    waiting = [runner.launch(plan(0, admits=admits, **tables))]
    begin = time.perf_counter()
    for step in range(1, STEPS):
        waiting.append(runner.launch(plan(step)))
        waiting.pop(0).arrival.wait()
        if step == 8:
            begin = time.perf_counter()
    waiting.pop().arrival.wait()
    return (time.perf_counter() - begin) / (STEPS - 9)
