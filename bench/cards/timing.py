"""Timing on the device, without the host in the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def seconds_each(calls: Sequence[Callable[[], object]], device: torch.device, budget_s: float = 0.25) -> float:
    """Median seconds of one of ``calls``, which are run in turn.

    On a GPU they are captured into one CUDA graph and its replays timed with events, so that launches cost nothing and
    calls over different memory find the second-level cache cold, as layers of a model do.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return replay_seconds(graph.replay, budget_s) / len(calls)


def replay_seconds(replay: Callable[[], object], budget_s: float = 0.25) -> float:
    """Median seconds of a replay, over about ``budget_s`` seconds of them."""
    once = _timed(replay, 3)
    groups = [_timed(replay, max(1, int(budget_s / 10 / once))) for _ in range(10)]
    return statistics.median(groups)


def _timed(replay: Callable[[], object], count: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count
