"""/metrics: what the scheduler counts, and what this process measures at the HTTP end.

Names are vLLM's with the prefix ``quire:``. Times are measured here, in seconds; they are this frontend's own, so
with several frontends on one port a scrape sees the one it happened to reach. Histograms are two list operations an
observation, because one is made for every token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..client.offline.metrics import SECONDS, TOKENS, Bins, counters_of, gauges_of
from ..client.results import RequestMetrics
from ..proto.messages import AdapterStats, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_OWN = ", at the frontend process that answers this scrape"

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


class Metrics(Collector):
    """This process's measurements; ``render`` adds the scheduler's."""

    def __init__(self, model: str):
        self.model = model
        self.stats: Stats | None = None
        self.first_token = Histogram("quire:time_to_first_token_seconds", "arrival to first token", SECONDS)
        self.inter_token = Histogram("quire:inter_token_latency_seconds", "time between tokens of a sequence", _ITL)
        self.per_token = Histogram(
            "quire:request_time_per_output_token_seconds", "mean time a token of a request, after its first", _ITL
        )
        self.end_to_end = Histogram("quire:e2e_request_latency_seconds", "arrival to the end of a request", _E2E)
        self.queue = Histogram("quire:request_queue_time_seconds", "arrival to the first step", _E2E)
        self.prompt = Histogram("quire:request_prompt_tokens", "prompt tokens of a request", TOKENS)
        self.generation = Histogram("quire:request_generation_tokens", "output tokens of a request", TOKENS)
        self.longest = Histogram(
            "quire:request_max_num_generation_tokens", "output tokens of a request's longest sequence", TOKENS
        )
        self.n = Histogram("quire:request_params_n", "n of a request", _CHOICES)
        self.width = Histogram("quire:request_params_best_of", "sequences run: beams, best_of or n", _CHOICES)
        self.max_tokens = Histogram("quire:request_params_max_tokens", "max_tokens of a request", TOKENS)
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        self._errors: dict[str, int] = {}

    def finished(self, reason: str) -> None:
        """A sequence ended."""
        self._finished[reason] = self._finished.get(reason, 0) + 1

    def failed(self, status: int) -> None:
        """A request was answered with an error."""
        self._errors[str(status)] = self._errors.get(str(status), 0) + 1

    def request(self, times: RequestMetrics, prompt: int, outputs: list[int], streamed: bool) -> None:
        """A request ended with ``outputs`` tokens of each of its sequences."""
        self.prompt.observe(prompt)
        self.generation.observe(sum(outputs))
        self.longest.observe(max(outputs, default=0))
        first, last = times.first_token_time, times.last_token_time
        if times.finished_time is not None:
            self.end_to_end.observe(times.finished_time - times.arrival_time)
        if times.time_in_queue is not None:
            self.queue.observe(max(0.0, times.time_in_queue))
        if first is None or last is None:
            return
        self.first_token.observe(first - times.arrival_time)
        if (steps := max(outputs, default=0) - 1) > 0:
            mean = (last - first) / steps
            self.per_token.observe(mean)
            if not streamed:  # nobody watched its tokens come, so each counts as the mean
                self.inter_token.observe(mean, steps)

    def pooled(self, prompt: int, seconds: float) -> None:
        """A prompt of so many tokens has been pooled."""
        self.finished("stop")
        self.prompt.observe(prompt)
        self.end_to_end.observe(seconds)

    def parameters(self, n: int, width: int, max_tokens: int) -> None:
        """What a request that ended had asked for."""
        self.n.observe(n)
        self.width.observe(width)
        self.max_tokens.observe(max_tokens)

    def render(self, stats: Stats | None) -> bytes:
        """The text of /metrics. Without ``stats`` (no scheduler answers) it holds this process's own only."""
        self.stats = stats
        return generate_latest(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        if self.stats is not None:
            yield from self._of_scheduler(self.stats)
        success = CounterMetricFamily(
            "quire:request_success", "sequences ended, by reason" + _OWN, labels=["model_name", "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([self.model, reason], count)
        yield success
        errors = CounterMetricFamily(
            "quire:http_errors", "requests refused or failed" + _OWN, labels=["model_name", "status"]
        )
        for status, count in sorted(self._errors.items()):
            errors.add_metric([self.model, status], count)
        yield errors
        for histogram in (self.first_token, self.inter_token, self.per_token, self.end_to_end, self.queue,
                          self.prompt, self.generation, self.longest, self.n, self.width, self.max_tokens):  # fmt: skip
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
