"""LLM.get_metrics: the scheduler's counts and what LLM's own requests took, under the names of /metrics."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from ..proto.messages import Stats
from .outputs import RequestOutput

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
            2560)  # fmt: skip
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


@dataclass(slots=True)
class Metric:
    """One figure. ``labels`` tell figures of one name apart."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """It only rises."""

    value: int


@dataclass(slots=True)
class Vector(Metric):
    """Several counters in order."""

    values: list[int]


@dataclass(slots=True)
class Gauge(Metric):
    """It goes up and down."""

    value: float


@dataclass(slots=True)
class Histogram(Metric):
    """Observations: ``buckets`` maps an upper bound ("+Inf" is the last) to how many were not above it."""

    count: int
    sum: float
    buckets: dict[str, int]


class _Bins:
    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def metric(self, name: str, labels: dict[str, str]) -> Histogram:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        buckets = dict(zip(names, accumulate(self.counts), strict=True))
        return Histogram(name, labels, sum(self.counts), self.sum, buckets)


class Recorder:
    """What finished requests took. Not thread-safe: it belongs to the engine's loop."""

    def __init__(self, model: str):
        self._labels = {"model_name": model}
        self._finished = {"stop": 0, "length": 0, "abort": 0}
        self._bins = {
            "time_to_first_token_seconds": _Bins(_SECONDS),
            "request_time_per_output_token_seconds": _Bins(_SECONDS),
            "e2e_request_latency_seconds": _Bins(_SECONDS),
            "request_queue_time_seconds": _Bins(_SECONDS),
            "request_prompt_tokens": _Bins(_TOKENS),
            "request_generation_tokens": _Bins(_TOKENS),
        }

    def add(self, output: RequestOutput) -> None:
        """A request has ended."""
        bins, times = self._bins, output.metrics
        lengths = [len(each.token_ids) for each in output.outputs]
        bins["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        bins["request_generation_tokens"].observe(sum(lengths))
        for each in output.outputs:
            if each.finish_reason is not None:
                self._finished[each.finish_reason] = self._finished.get(each.finish_reason, 0) + 1
        if times is None:
            return
        if times.finished_time is not None:
            bins["e2e_request_latency_seconds"].observe(times.finished_time - times.arrival_time)
        if times.time_in_queue is not None:
            bins["request_queue_time_seconds"].observe(times.time_in_queue)
        if times.first_token_time is not None and times.last_token_time is not None:
            bins["time_to_first_token_seconds"].observe(times.first_token_time - times.arrival_time)
            if (steps := max(lengths) - 1) > 0:
                took = times.last_token_time - times.first_token_time
                bins["request_time_per_output_token_seconds"].observe(took / steps)

    def metrics(self, stats: Stats) -> list[Metric]:
        """All there is, the scheduler's first."""
        found: list[Metric] = []
        for name, level in (
            ("num_requests_running", stats.running), ("num_requests_waiting", stats.waiting),
            ("kv_cache_usage_perc", stats.blocks_used / stats.blocks if stats.blocks else 0.0),
            ("kv_blocks", stats.blocks), ("kv_blocks_in_use", stats.blocks_used), ("replicas", len(stats.replicas)),
        ):  # fmt: skip
            found.append(Gauge("quire:" + name, self._labels, float(level)))
        for name, count in (
            ("prompt_tokens", stats.prompt_tokens), ("generation_tokens", stats.generation_tokens),
            ("num_preemptions", stats.preemptions), ("prefix_cache_queries", stats.prefix_queries),
            ("prefix_cache_hits", stats.prefix_hits), ("scheduler_steps", stats.steps),
            ("bad_frames", stats.bad_frames),
        ):  # fmt: skip
            found.append(Counter("quire:" + name, self._labels, count))
        for reason, count in self._finished.items():
            found.append(Counter("quire:request_success", {**self._labels, "finished_reason": reason}, count))
        found += [bins.metric("quire:" + name, self._labels) for name, bins in self._bins.items()]
        return found
