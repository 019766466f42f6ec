"""Decode steps of a Llama-3-8B shape: on the card alone, and through the runner with the host's work.

Step (forward as it is captured, logits, greedy sampling) and runner stand beside the floor: bytes of weights and keys
over the copy bandwidth, or products over their ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.sampling.sample_batch import SampleBatch
from quire.gpu_worker.sampling.sampler import sample
from quire.gpu_worker.sampling.sampling_state import SamplingState

from .card import PAGE, Card, Row
from .floor import decode_floor
from .steps import STEPS, Steps, loaded, missing_bytes
from .timing import seconds_each


def rows(card: Card) -> Iterator[Row]:
    """Four batches at two contexts."""
    yield from decodes(card, card.config, card.few((2,), (1, 8, 64, 256)), card.few((40,), (512, 1024)))


def decodes(card: Card, config: dict[str, Any], batches: tuple[int, ...], contexts: tuple[int, ...]) -> Iterator[Row]:
    """A row for each batch and context of a model of ``config``."""
    item = card.dtype.itemsize
    with loaded(card, config) as model:
        for batch in batches:
            for context in contexts:
                labels = {"batch": batch, "context": context}
                if over := missing_bytes(card, config, batch, context):
                    yield labels | {"left_out": f"its KV cache is {over / 1e9:.1f} GB too large"}, {}
                    continue
                step = _on_card(card, model, batch, context)
                served = Steps(card, model, batch, context).seconds()
                floor = decode_floor(config, batch, context, card.ceilings, item)
                middle = decode_floor(config, batch, context + STEPS // 2, card.ceilings, item)
                yield labels, {
                    "floor_ms": floor * 1e3, "step_ms": step * 1e3, "share_of_floor": floor / step,
                    "runner_step_ms": served * 1e3, "runner_share_of_floor": middle / served,
                    "tokens_per_s": batch / served,
                }  # fmt: skip


def _on_card(card: Card, model: Any, rows: int, context: int) -> float:
    """Seconds of a step without the host."""
    batch, blocks = card.batch(rows, 1, context)
    kv = KVCache(model.spec, blocks, PAGE, card.dtype, card.device)
    state = SamplingState(rows, model.spec.vocab_size, card.device)
    at, host = torch.arange(rows, device=card.device), np.arange(rows)
    history = torch.zeros((rows, 1), dtype=torch.int32, device=card.device)
    slots = SampleBatch(at, batch.positions, host, host, history, state.needs(host, host))

    def step() -> torch.Tensor:
        logits = model.logits(model.forward(batch, kv))
        return sample(logits, state, slots).tokens

    return seconds_each([step], card.device, 1.0)
