"""/metrics: what the scheduler counts, and what this process measures at the HTTP end.

Figures that vLLM has too are told under its names, with the prefix ``vllm:``, ``quire:`` or both; they are written
once, and the second prefix is put into a copy of the text. ``OWN`` has only ``quire:``. Times are measured here, in
seconds; they are this frontend's own, and with several on one port ``shared_figures.py`` adds the others' up.
Histograms are two list operations an observation, because one is made for every token. docs/metrics.md
explains every name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..client.offline.metrics import SECONDS, TOKENS, Bins, counters_of, gauges_of, labelled_of, work_of
from ..client.results import RequestMetrics
from ..proto.messages import AdapterStats, Stats, WorkStats
from ..proto.restarts import read_restarts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PREFIXES = ("vllm", "quire", "both")
OWN = frozenset(
    "quire:" + name
    for name in (
        "kv_blocks", "kv_blocks_in_use", "replicas", "kv_moves", "kv_moved_tokens", "recomputed_tokens",
        "scheduler_steps", "kernel_compilations", "bad_frames", "http_errors", "kv_offload_cpu_hits",
        "kv_offload_disk_hits", "kv_offload_cpu_load_bytes", "kv_offload_cpu_store_bytes", "kv_offload_cpu_evictions",
        "kv_offload_disk_load_bytes", "kv_offload_disk_store_bytes", "kv_offload_disk_evictions",
        "kv_offload_failed_loads", "process_restarts", "processes_failing",
    )
)  # fmt: skip
"""Figures that vLLM has not."""
_PREFIX = re.compile(rb"^(# HELP |# TYPE |)quire:", re.M)
_METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))
_UNCOUNTED = frozenset(("/metrics", "/health", "/health/live", "/health/ready", "/health/generate", "/load", "/ping",
                        "/version", "/server_info"))  # fmt: skip

_OWN = ", at the frontends that share this port"

_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
        80)  # fmt: skip
_E2E = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_CHOICES = (1, 2, 5, 10, 20)


class Histogram(Bins):
    """One that prometheus_client can write."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]):
        super().__init__(bounds)
        self.name, self.help = name, help

    def family(self, model: str) -> Metric:
        """As prometheus_client writes it: cumulative buckets."""
        family = HistogramMetricFamily(self.name, self.help + _OWN, labels=["model_name"])
        family.add_metric([model], self.buckets(), self.sum)
        return family


class _Chosen(Collector):
    """Some families, for prometheus_client to write."""

    def __init__(self, families: list[Metric]):
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


class Counted(msgspec.Struct):
    """Bins as other processes read them; ``counts`` are not cumulative."""

    counts: list[int]
    sum: float

    def into(self, bins: Bins) -> None:
        """Add this to ``bins``; what another version made with other buckets is left aside."""
        if len(self.counts) == len(bins.counts):
            bins.counts = [mine + theirs for mine, theirs in zip(bins.counts, self.counts, strict=True)]
            bins.sum += self.sum


class Measured(msgspec.Struct):
    """What one frontend has measured since its start."""

    histograms: dict[str, Counted] = {}
    finished: dict[str, int] = {}
    errors: dict[str, int] = {}
    answers: list[tuple[str, str, str, int]] = []  # handler, method, status, how many
    took: list[tuple[str, str, Counted]] = []


class HttpFigures:
    """Answers by route, method and class of status, and how long they took: names and labels of vLLM's server.

    Labels hold no text of a client's: a path without a route is "none", a method that HTTP does not name "other".
    What watchers ask all the time is not counted, as in vLLM.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}
        self._took: dict[tuple[str, str], Bins] = {}

    def answered(self, handler: str | None, method: str, status: int, seconds: float) -> None:
        """A request to the route ``handler`` (None: there is no such) ended with ``status``."""
        if handler in _UNCOUNTED:
            return
        at = (handler or "none", method if method in _METHODS else "other")
        key = (*at, f"{status // 100}xx")
        self._counts[key] = self._counts.get(key, 0) + 1
        if (bins := self._took.get(at)) is None:
            bins = self._took[at] = Bins(_E2E)
        bins.observe(seconds)

    def measured(self, into: Measured) -> None:
        """Write both figures ``into`` what others read."""
        into.answers = [(*key, count) for key, count in self._counts.items()]
        into.took = [(*at, Counted(list(bins.counts), bins.sum)) for at, bins in self._took.items()]

    def add(self, other: Measured) -> None:
        """Add another frontend's."""
        for *key, count in other.answers:
            at = (str(key[0]), str(key[1]), str(key[2]))
            self._counts[at] = self._counts.get(at, 0) + int(count)
        for handler, method, counted in other.took:
            counted.into(self._took.setdefault((handler, method), Bins(_E2E)))

    def families(self) -> Iterator[Metric]:
        """Both figures."""
        counts = CounterMetricFamily(
            "http_requests", "requests answered, by route and class of status" + _OWN,
            labels=["handler", "method", "status"],
        )  # fmt: skip
        for key, count in sorted(self._counts.items()):
            counts.add_metric(key, count)
        yield counts
        took = HistogramMetricFamily(
            "http_request_duration_seconds", "arrival to the end of an answer" + _OWN, labels=["handler", "method"]
        )
        for at, bins in sorted(self._took.items()):
            took.add_metric(at, bins.buckets(), bins.sum)
        yield took


def _of_launcher() -> Iterator[Metric]:
    """What `quire serve` tells of its processes; nothing where others started them."""
    if (told := read_restarts()) is None:
        return
    restarts, failing, _ = told
    again = CounterMetricFamily(
        "quire:process_restarts", "processes started in place of others that had ended", labels=["service"]
    )
    bad = GaugeMetricFamily(
        "quire:processes_failing", "places in which no process can be kept running", labels=["service"]
    )
    for service in ("gpu_worker", "scheduler", "detokenizer", "frontend"):
        again.add_metric([service], restarts.get(service, 0))
        bad.add_metric([service], failing.get(service, 0))
    yield again
    yield bad


class Metrics:
    """This process's measurements; ``render`` adds the scheduler's. ``prefix`` is vllm, quire or both."""

    def __init__(self, model: str, prefix: str = "both"):
        self.model, self._prefix = model, prefix
        self.http = HttpFigures()
        self.first_token = Histogram("quire:time_to_first_token_seconds", "arrival to first token", SECONDS)
        self.inter_token = Histogram("quire:inter_token_latency_seconds", "time between tokens of a sequence", _ITL)
        self.per_token = Histogram(
            "quire:request_time_per_output_token_seconds", "mean time a token of a request, after its first", _ITL
        )
        self.end_to_end = Histogram("quire:e2e_request_latency_seconds", "arrival to the end of a request", _E2E)
        self.queue = Histogram("quire:request_queue_time_seconds", "arrival to the first step", _E2E)
        self.prefill = Histogram("quire:request_prefill_time_seconds", "first step to first token", _E2E)
        self.decode = Histogram("quire:request_decode_time_seconds", "first token to last token", _E2E)
        self.inference = Histogram("quire:request_inference_time_seconds", "first step to last token", _E2E)
        self.prompt = Histogram("quire:request_prompt_tokens", "prompt tokens of a request", TOKENS)
        self.computed = Histogram(
            "quire:request_prefill_kv_computed_tokens", "prompt tokens of a request that no cache had", TOKENS
        )
        self.generation = Histogram("quire:request_generation_tokens", "output tokens of a request", TOKENS)
        self.longest = Histogram(
            "quire:request_max_num_generation_tokens", "output tokens of a request's longest sequence", TOKENS
        )
        self.n = Histogram("quire:request_params_n", "n of a request", _CHOICES)
        self.width = Histogram("quire:request_params_best_of", "sequences run: beams, best_of or n", _CHOICES)
        self.max_tokens = Histogram("quire:request_params_max_tokens", "max_tokens of a request", TOKENS)
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        self._errors: dict[str, int] = {}
        self._histograms = (
            self.first_token, self.inter_token, self.per_token, self.end_to_end, self.queue, self.prefill, self.decode,
            self.inference, self.prompt, self.computed, self.generation, self.longest, self.n, self.width,
            self.max_tokens,
        )  # fmt: skip

    def finished(self, reason: str) -> None:
        """A sequence ended."""
        self._finished[reason] = self._finished.get(reason, 0) + 1

    def failed(self, status: int) -> None:
        """A request was answered with an error."""
        self._errors[str(status)] = self._errors.get(str(status), 0) + 1

    def request(
        self, times: RequestMetrics, prompt: int, outputs: list[int], streamed: bool, cached: int = 0
    ) -> None:  # fmt: skip
        """A request ended with ``outputs`` tokens of each of its sequences; caches had ``cached`` of its prompt. One
        that was dropped ends now."""
        self.prompt.observe(prompt)
        self.computed.observe(prompt - cached)
        self.generation.observe(sum(outputs))
        self.longest.observe(max(outputs, default=0))
        first, last = times.first_token_time, times.last_token_time
        ended = time.monotonic() if times.finished_time is None else times.finished_time
        self.end_to_end.observe(ended - times.arrival_time)
        if times.time_in_queue is not None:
            self.queue.observe(max(0.0, times.time_in_queue))
        if first is None or last is None:
            return
        self.first_token.observe(first - times.arrival_time)
        self.decode.observe(last - first)
        if (began := times.first_scheduled_time) is not None:
            self.prefill.observe(max(0.0, first - began))
            self.inference.observe(max(0.0, last - began))
        if (steps := max(outputs, default=0) - 1) > 0:
            mean = (last - first) / steps
            self.per_token.observe(mean)
            if not streamed:  # nobody watched its tokens come, so each counts as the mean
                self.inter_token.observe(mean, steps)

    def pooled(self, prompt: int, seconds: float, cached: int = 0) -> None:
        """A prompt of so many tokens has been pooled; caches had ``cached`` of them."""
        self.finished("stop")
        self.prompt.observe(prompt)
        self.computed.observe(prompt - cached)
        self.end_to_end.observe(seconds)

    def withdrawn(self, seconds: float) -> None:
        """Nobody waits any more for a prompt that was to be pooled."""
        self.finished("abort")
        self.end_to_end.observe(seconds)

    def parameters(self, n: int, width: int, max_tokens: int) -> None:
        """What a request that ended had asked for."""
        self.n.observe(n)
        self.width.observe(width)
        self.max_tokens.observe(max_tokens)

    def measured(self) -> Measured:
        """All of it, a copy."""
        found = Measured(
            {each.name: Counted(list(each.counts), each.sum) for each in self._histograms},
            dict(self._finished), dict(self._errors),
        )  # fmt: skip
        self.http.measured(found)
        return found

    def add(self, other: Measured) -> None:
        """Add what another frontend has measured."""
        for histogram in self._histograms:
            if (counted := other.histograms.get(histogram.name)) is not None:
                counted.into(histogram)
        for mine, theirs in ((self._finished, other.finished), (self._errors, other.errors)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        self.http.add(other)

    def with_others(self, others: Iterable[Measured]) -> Metrics:
        """The sum of this process's and what ``others`` have measured; nothing here changes."""
        total = Metrics(self.model, self._prefix)
        for each in (self.measured(), *others):
            total.add(each)
        return total

    def render(self, stats: Stats | None) -> bytes:
        """The text of /metrics. Without ``stats`` (no scheduler answers) it holds this process's own only."""
        shared: list[Metric] = []
        own: list[Metric] = []
        for family in self._families(stats):
            (own if family.name in OWN else shared).append(family)
        own += [*_of_launcher(), *self.http.families()]
        text = generate_latest(_Chosen(shared))  # type: ignore[arg-type]
        quire = text if self._prefix != "vllm" else b""
        vllm = _PREFIX.sub(rb"\1vllm:", text) if self._prefix != "quire" else b""
        return vllm + quire + generate_latest(_Chosen(own))  # type: ignore[arg-type]

    def _families(self, stats: Stats | None) -> Iterator[Metric]:
        """All but what has no prefix, as quire's."""
        if stats is not None:
            yield from self._of_scheduler(stats)
        success = CounterMetricFamily(
            "quire:request_success", "sequences ended, by reason" + _OWN, labels=["model_name", "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([self.model, reason], count)
        yield success
        found, computed = self.prompt.sum - self.computed.sum, self.computed.sum
        cached = CounterMetricFamily(
            "quire:prompt_tokens_cached", "prompt tokens that a cache had" + _OWN, labels=["model_name"]
        )
        cached.add_metric([self.model], found)
        yield cached
        sources = CounterMetricFamily(
            "quire:prompt_tokens_by_source", "prompt tokens, by where their keys and values came from" + _OWN,
            labels=["model_name", "source"],
        )  # fmt: skip
        sources.add_metric([self.model, "local_compute"], computed)
        sources.add_metric([self.model, "local_cache_hit"], found)
        yield sources
        errors = CounterMetricFamily(
            "quire:http_errors", "requests refused or failed" + _OWN, labels=["model_name", "status"]
        )
        for status, count in sorted(self._errors.items()):
            errors.add_metric([self.model, status], count)
        yield errors
        for histogram in self._histograms:
            yield histogram.family(self.model)

    def _of_scheduler(self, stats: Stats) -> Iterator[Metric]:
        for name, help, level in gauges_of(stats):
            gauge = GaugeMetricFamily(name, help, labels=["model_name"])
            gauge.add_metric([self.model], level)
            yield gauge
        for name, help, count in counters_of(stats):
            counter = CounterMetricFamily(name, help, labels=["model_name"])
            counter.add_metric([self.model], count)
            yield counter
        if stats.work is not None:
            yield from self._of_work(stats, stats.work)
        if stats.accepted:
            places = CounterMetricFamily(
                "quire:spec_decode_num_accepted_tokens_per_pos", "drafted tokens that were kept, by place in the draft",
                labels=["model_name", "position"],
            )  # fmt: skip
            for place, count in enumerate(stats.accepted):
                places.add_metric([self.model, str(place)], count)
            yield places
        if isinstance(stats, AdapterStats):
            labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
            gauge = GaugeMetricFamily(
                "quire:lora_requests_info", "adapters asked for; the value is the time", labels=labels
            )
            names = [",".join(stats.waiting_adapters), ",".join(stats.running_adapters)]
            gauge.add_metric([str(stats.max_loras), *names], time.time())
            yield gauge

    def _of_work(self, stats: Stats, work: WorkStats) -> Iterator[Metric]:
        gauges: dict[str, GaugeMetricFamily] = {}
        for name, help, labels, level in labelled_of(stats, work):
            if (gauge := gauges.get(name)) is None:
                gauge = gauges[name] = GaugeMetricFamily(name, help, labels=["model_name", *labels])
            gauge.add_metric([self.model, *labels.values()], level)
        yield from gauges.values()
        for name, help, bins in work_of(work):
            family = HistogramMetricFamily(name, help, labels=["model_name"])
            family.add_metric([self.model], bins.buckets(), bins.sum)
            yield family
