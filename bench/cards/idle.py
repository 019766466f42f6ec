"""The share of decoding time in which the card has nothing to do, from a trace of what ran on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from .card import Card, Row
from .steps import Steps, loaded


def rows(card: Card) -> Iterator[Row]:
    """Decodes at three batches, and decodes with a chunk of a prompt."""
    on_card = card.device.type == "cuda"
    kind = torch.autograd.DeviceType.CUDA if on_card else torch.autograd.DeviceType.CPU
    activities = [ProfilerActivity.CUDA] if on_card else [ProfilerActivity.CPU]
    with loaded(card, card.config) as model:
        for batch, chunk in card.few(((2, 0), (2, 24)), ((1, 0), (64, 0), (256, 0), (64, 512))):
            steps = Steps(card, model, batch, card.few(40, 512), chunk)
            steps.seconds(card.few(10, 16))
            with profile(activities=activities) as trace:
                seconds = steps.seconds(card.few(12, 40))
            spans = [(e.time_range.start, e.time_range.end) for e in trace.events() if e.device_type == kind]
            busy, whole = covered(spans)
            idle = 100 * (1 - busy / whole) if whole else None
            yield {"batch": batch, "chunk": chunk}, {"step_ms": seconds * 1e3, "kernels": len(spans), "idle_pct": idle}


def covered(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """How long one span or another lasted, and the time from the first beginning to the last end."""
    busy = begin = end = 0.0
    for number, (low, high) in enumerate(sorted(spans)):
        if not number:
            begin = end = low
        busy += max(0.0, high - max(low, end))
        end = max(end, high)
    return busy, end - begin
