"""LLM.get_metrics: the scheduler's counts and what LLM's own requests took, under the names of /metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ...proto.messages import Stats, TierStats, WorkStats
from ...proto.messages.operators import BLOCK_SECONDS, REQUEST_PREEMPTIONS, SLEEP_STATES, STEP_TOKENS
from .outputs import PoolingRequestOutput, RequestOutput

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
            2560)  # fmt: skip
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


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


class Bins:
    """Counts by bucket; cheap enough for every token."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add ``value``, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, int]]:
        """Upper bounds, "+Inf" the last, and how many were not above each."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))

    def metric(self, name: str, labels: dict[str, str]) -> Histogram:
        """What LLM shows of it."""
        return Histogram(name, labels, sum(self.counts), self.sum, dict(self.buckets()))


def bins_of(bounds: Sequence[float], counts: Sequence[int], total: float) -> Bins:
    """Bins that another process has counted."""
    bins = Bins(bounds)
    bins.counts, bins.sum = list(counts), total
    return bins


def work_of(work: WorkStats) -> list[tuple[str, str, Bins]]:
    """The scheduler's histograms: (name, help, bins)."""
    found = [
        ("quire:iteration_tokens_total", "tokens computed in a step",
         bins_of(STEP_TOKENS, work.steps, work.step_tokens)),
        ("quire:request_num_preemptions", "times that sequences of a request were preempted, until its end",
         bins_of(REQUEST_PREEMPTIONS, work.requests, work.request_preemptions)),
    ]  # fmt: skip
    if (times := work.block_times) is not None:
        for name, help, bins in (
            ("lifetime", "a KV block's time from being handed out to being handed out again", times.lifetime),
            ("idle_before_evict", "a KV block's time from its last use to being handed out again", times.idle),
            ("reuse_gap", "time between two uses of a KV block", times.reuse_gap),
        ):
            found.append((f"quire:kv_block_{name}_seconds", help, bins_of(BLOCK_SECONDS, bins.counts, bins.sum)))
    return found


def labelled_of(stats: Stats, work: WorkStats) -> list[tuple[str, str, dict[str, str], float]]:
    """The scheduler's levels that have labels: (name, help, labels, value)."""
    reasons = {"capacity": stats.waiting - work.deferred, "deferred": work.deferred}
    cache = {
        "block_size": str(work.block_size),
        "enable_prefix_caching": str(work.prefix_caching),
        "num_gpu_blocks": str(stats.blocks),
    }
    return [
        *(
            ("quire:num_requests_waiting_by_reason", "sequences that wait, by reason", {"reason": reason}, float(count))
            for reason, count in reasons.items()
        ),
        ("quire:cache_config_info", "how the KV cache is set up; the value is 1", cache, 1.0),
        *(
            ("quire:engine_sleep_state", "1 at the state that the workers are in", {"sleep_state": state},
             float(work.sleep_state == state))
            for state in SLEEP_STATES
        ),
    ]  # fmt: skip


def gauges_of(stats: Stats) -> list[tuple[str, str, float]]:
    """The scheduler's levels: (name, help, value)."""
    usage = stats.blocks_used / stats.blocks if stats.blocks else 0.0
    return [
        ("quire:num_requests_running", "sequences in the present step", float(stats.running)),
        ("quire:num_requests_waiting", "sequences that wait", float(stats.waiting)),
        ("quire:kv_cache_usage_perc", "share of KV blocks in use; 1 is all", usage),
        ("quire:kv_blocks", "KV blocks there are", float(stats.blocks)),
        ("quire:kv_blocks_in_use", "KV blocks that running requests hold", float(stats.blocks_used)),
        ("quire:replicas", "replicas of the model", float(len(stats.replicas))),
    ]


def counters_of(stats: Stats) -> list[tuple[str, str, int]]:
    """What the scheduler has counted since it started: (name, help, count)."""
    return [
        ("quire:prompt_tokens", "prompt tokens of requests taken", stats.prompt_tokens),
        ("quire:generation_tokens", "tokens generated", stats.generation_tokens),
        ("quire:num_preemptions", "sequences put back for want of blocks", stats.preemptions),
        ("quire:prefix_cache_queries", "prompt tokens looked up in the prefix cache", stats.prefix_queries),
        ("quire:prefix_cache_hits", "prompt tokens found in the prefix cache", stats.prefix_hits),
        ("quire:kv_moves", "sequences that went on at another worker with their keys and values", stats.moves),
        ("quire:kv_moved_tokens", "their tokens, that were not computed again", stats.moved_tokens),
        ("quire:recomputed_tokens", "tokens of sequences that had run before, computed again", stats.recomputed_tokens),
        ("quire:scheduler_steps", "steps run", stats.steps),
        ("quire:kernel_compilations", "kernels compiled while requests were served; each held up a whole replica",
         stats.compilations),
        ("quire:bad_frames", "messages dropped because they did not decode", stats.bad_frames),
        ("quire:corrupted_requests", "requests that failed because what the model gave were not numbers",
         stats.work.corrupted if stats.work is not None else 0),
        *(_speculation(stats) if stats.accepted else ()),
        *(_of_tiers(stats.tiers) if stats.tiers is not None else ()),
    ]  # fmt: skip


def _speculation(stats: Stats) -> list[tuple[str, str, int]]:
    """The same of workers that draft."""
    return [
        ("quire:spec_decode_num_drafts", "drafts verified", stats.drafts),
        ("quire:spec_decode_num_draft_tokens", "tokens drafted", stats.draft_tokens),
        ("quire:spec_decode_num_accepted_tokens", "drafted tokens that were kept", sum(stats.accepted)),
    ]


def _of_tiers(tiers: TierStats) -> list[tuple[str, str, int]]:
    """Of blocks that are kept outside of devices' caches."""
    hits = tiers.host_hits + tiers.disk_hits
    return [
        ("quire:external_prefix_cache_queries", "prompt tokens looked up outside of devices' caches", tiers.queries),
        ("quire:external_prefix_cache_hits", "prompt tokens loaded in place of being computed", hits),
        ("quire:kv_offload_load_bytes", "bytes of blocks loaded into devices' caches",
         tiers.host_load_bytes + tiers.disk_load_bytes),
        ("quire:kv_offload_store_bytes", "bytes of blocks stored, in host memory and on disk",
         tiers.host_store_bytes + tiers.disk_store_bytes),
        ("quire:kv_offload_cpu_hits", "of these, from host memory", tiers.host_hits),
        ("quire:kv_offload_disk_hits", "of these, from disk", tiers.disk_hits),
        ("quire:kv_offload_cpu_load_bytes", "bytes of blocks loaded from host memory", tiers.host_load_bytes),
        ("quire:kv_offload_cpu_store_bytes", "bytes of blocks stored in host memory", tiers.host_store_bytes),
        ("quire:kv_offload_cpu_evictions", "blocks that made room in host memory", tiers.host_evictions),
        ("quire:kv_offload_disk_load_bytes", "bytes of blocks loaded from disk", tiers.disk_load_bytes),
        ("quire:kv_offload_disk_store_bytes", "bytes of blocks written to disk", tiers.disk_store_bytes),
        ("quire:kv_offload_disk_evictions", "blocks that made room on disk, or were lost there", tiers.disk_evictions),
        ("quire:kv_offload_failed_loads", "blocks that were to be loaded, could not be and are computed",
         tiers.failed_loads),
    ]  # fmt: skip


class Recorder:
    """What finished requests took. Not thread-safe: it belongs to the engine's loop."""

    def __init__(self, model: str):
        self._labels = {"model_name": model}
        self._finished = {"stop": 0, "length": 0, "abort": 0}
        self._bins = {
            "time_to_first_token_seconds": Bins(SECONDS),
            "request_time_per_output_token_seconds": Bins(SECONDS),
            "e2e_request_latency_seconds": Bins(SECONDS),
            "request_queue_time_seconds": Bins(SECONDS),
            "request_prompt_tokens": Bins(TOKENS),
            "request_generation_tokens": Bins(TOKENS),
        }

    def add(self, output: RequestOutput | PoolingRequestOutput[Any]) -> None:
        """A request has ended."""
        bins = self._bins
        if isinstance(output, PoolingRequestOutput):
            bins["request_prompt_tokens"].observe(len(output.prompt_token_ids))
            self._finished["stop"] += 1
            return
        times = output.metrics
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
        found: list[Metric] = [Gauge(name, self._labels, level) for name, _, level in gauges_of(stats)]
        found += [Counter(name, self._labels, count) for name, _, count in counters_of(stats)]
        if stats.work is not None:
            for name, _, labels, level in labelled_of(stats, stats.work):
                found.append(Gauge(name, {**self._labels, **labels}, level))
            found += [bins.metric(name, self._labels) for name, _, bins in work_of(stats.work)]
        for reason, count in self._finished.items():
            found.append(Counter("quire:request_success", {**self._labels, "finished_reason": reason}, count))
        found += [bins.metric("quire:" + name, self._labels) for name, bins in self._bins.items()]
        return found
