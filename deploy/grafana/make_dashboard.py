"""The dashboard of Grafana: ``python deploy/grafana/make_dashboard.py`` writes quire.json beside this file anew.

``ROWS`` below is the dashboard; the rest is Grafana's form of it. What the scheduler counts is told by every frontend,
so queries take the maximum of those. What frontends count is their own, so queries add it up. docs/metrics.md has every
name. Queries ask for ``vllm:`` and ``quire:``, which ``--metrics-prefix both`` (the default) exports.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("quire.json")
OF = '{job=~"$job",model_name=~"$model"}'
"""Picks what the dashboard's variables say; figures of HTTP have no label model_name."""
HTTP = '{job=~"$job"}'
OVER = "[$__rate_interval]"
QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
COLUMNS, HEIGHT = 24, 8


@dataclass(frozen=True)
class Panel:
    """``queries`` maps a legend to its query. ``kind`` is Grafana's; a heatmap has one query, of buckets."""

    title: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = 8
    said: str = ""
    stacked: bool = False


def told(name: str, by: str = "") -> str:
    """A level that the scheduler tells."""
    return f"max by (model_name{by}) ({name}{OF})"


def told_rate(name: str, by: str = "") -> str:
    """What the scheduler counts, a second."""
    return f"max by (model_name{by}) (rate({name}{OF}{OVER}))"


def own_rate(name: str, by: str = "", of: str = OF) -> str:
    """What frontends count, a second."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({name}{of}{OVER}))"


def share(part: str, whole: str) -> str:
    """The one by the other; 0 where there was nothing."""
    return f"({part}) / clamp_min({whole}, 1e-9)"


def mean(name: str) -> str:
    """Of a frontends' histogram."""
    return share(own_rate(f"{name}_sum"), own_rate(f"{name}_count"))


def percentiles(title: str, name: str, unit: str = "s", by: str = "", of: str = OF, said: str = "") -> Panel:
    """Of a frontends' histogram. With ``by``, a label, the 90th of each of its values."""
    buckets = own_rate(f"{name}_bucket", f"le, {by}" if by else "le", of)
    if by:
        return Panel(title, unit, {"{{" + by + "}}": f"histogram_quantile(0.9, {buckets})"}, said=said)
    return Panel(title, unit, {label: f"histogram_quantile({q}, {buckets})" for label, q in QUANTILES}, said=said)


def heat(title: str, name: str, unit: str = "s", scheduler: bool = False, said: str = "") -> Panel:
    """All buckets of a histogram over time."""
    rate = f"rate({name}_bucket{OF}{OVER})"
    return Panel(title, unit, {"{{le}}": f"{'max' if scheduler else 'sum'} by (le) ({rate})"}, "heatmap", said=said)


ROWS: dict[str, list[Panel]] = {
    "Traffic": [
        Panel("Requests ended", "reqps", {
            "{{finished_reason}}": own_rate("vllm:request_success_total", "finished_reason")}, stacked=True),
        Panel("Tokens a second", "none", {"prompt": told_rate("vllm:prompt_tokens_total"),
                                          "generated": told_rate("vllm:generation_tokens_total")}),
        Panel("Sequences", "none", {"running": told("vllm:num_requests_running"),
                                    "waiting": told("vllm:num_requests_waiting")}),
        heat("Prompt tokens of a request", "vllm:request_prompt_tokens", "none"),
        heat("Output tokens of a request", "vllm:request_generation_tokens", "none"),
        Panel("What requests ask for, mean", "none", {"max_tokens": mean("vllm:request_params_max_tokens"),
                                                      "n": mean("vllm:request_params_n")}),
    ],
    "Latency": [
        percentiles("Time to first token", "vllm:time_to_first_token_seconds"),
        percentiles("Time between tokens", "vllm:inter_token_latency_seconds"),
        percentiles("Arrival to end", "vllm:e2e_request_latency_seconds"),
        heat("Time to first token", "vllm:time_to_first_token_seconds"),
        heat("Time between tokens", "vllm:inter_token_latency_seconds"),
        heat("Arrival to end", "vllm:e2e_request_latency_seconds"),
        Panel("Where a request's time goes, mean", "s", {
            "queue": mean("vllm:request_queue_time_seconds"), "prefill": mean("vllm:request_prefill_time_seconds"),
            "decode": mean("vllm:request_decode_time_seconds")}, stacked=True),
        percentiles("Time in the queue", "vllm:request_queue_time_seconds"),
        percentiles("Time a token of a request, after its first", "vllm:request_time_per_output_token_seconds"),
    ],
    "Scheduler": [
        Panel("Waiting, by reason", "none", {"{{reason}}": told("vllm:num_requests_waiting_by_reason", ", reason")},
              stacked=True, said="capacity: for room. deferred: asleep, for another's prompt, after losses."),
        Panel("Steps a second", "none", {"steps": told_rate("quire:scheduler_steps_total")}),
        heat("Tokens in a step", "vllm:iteration_tokens_total", "none", scheduler=True),
        Panel("Preemptions a second", "none", {"sequences": told_rate("vllm:num_preemptions_total")},
              said="Above 0 for long: the KV cache is too small for so many sequences."),
        Panel("Tokens computed again, a second", "none", {"tokens": told_rate("quire:recomputed_tokens_total")},
              said="After preemptions, and after the loss of a worker."),
        Panel("Requests that were preempted", "percentunit", {"share": "1 - " + share(
            'max(rate(vllm:request_num_preemptions_bucket{job=~"$job",model_name=~"$model",le="0.0"}' + OVER + "))",
            f"max(rate(vllm:request_num_preemptions_count{OF}{OVER}))")}),
    ],
    "KV cache": [
        Panel("Blocks in use", "percentunit", {"{{model_name}}": told("vllm:kv_cache_usage_perc")}),
        Panel("Blocks", "none", {"there are": told("quire:kv_blocks"), "in use": told("quire:kv_blocks_in_use")}),
        Panel("Set up as", "none", {"{{block_size}} tokens a block, {{num_gpu_blocks}} blocks, prefix caching "
                                    "{{enable_prefix_caching}}": f"max by (block_size, num_gpu_blocks, "
                                    f"enable_prefix_caching) (vllm:cache_config_info{OF})"}, "stat"),
        Panel("Prompt tokens found in the prefix cache", "percentunit", {"share": share(
            told_rate("vllm:prefix_cache_hits_total"), told_rate("vllm:prefix_cache_queries_total"))}),
        Panel("Of the rest, loaded from memory or disk", "percentunit", {"share": share(
            told_rate("vllm:external_prefix_cache_hits_total"), told_rate("vllm:external_prefix_cache_queries_total"))},
            said="Where blocks are kept outside of devices (--swap-space, --kv-disk-path)."),
        Panel("Prompt tokens loaded a second, by tier", "none", {
            "memory": told_rate("quire:kv_offload_cpu_hits_total"),
            "disk": told_rate("quire:kv_offload_disk_hits_total")}),
        Panel("Blocks moved", "Bps", {
            "loaded": told_rate("vllm:kv_offload_load_bytes_total"),
            "stored": told_rate("vllm:kv_offload_store_bytes_total"),
            "loaded from disk": told_rate("quire:kv_offload_disk_load_bytes_total"),
            "stored on disk": told_rate("quire:kv_offload_disk_store_bytes_total")}),
        Panel("Blocks evicted a second, by tier", "none", {
            "memory": told_rate("quire:kv_offload_cpu_evictions_total"),
            "disk": told_rate("quire:kv_offload_disk_evictions_total")}),
        Panel("Prompt tokens a second, by source", "none", {
            "{{source}}": own_rate("vllm:prompt_tokens_by_source_total", "source")}, stacked=True),
        heat("Prompt tokens of a request that no cache had", "vllm:request_prefill_kv_computed_tokens", "none"),
        heat("Life of a block, until it makes room", "vllm:kv_block_lifetime_seconds", scheduler=True,
             said="With --kv-cache-metrics."),
        heat("Time a block lies idle before it makes room", "vllm:kv_block_idle_before_evict_seconds", scheduler=True,
             said="With --kv-cache-metrics."),
        heat("Time between two uses of a block", "vllm:kv_block_reuse_gap_seconds", scheduler=True,
             said="With --kv-cache-metrics."),
        Panel("Blocks that could not be loaded, a second", "none", {
            "blocks": told_rate("quire:kv_offload_failed_loads_total")}, said="They are computed."),
    ],
    "Workers": [
        Panel("Replicas", "none", {"{{model_name}}": told("quire:replicas")}, said="Those that serve or drain."),
        Panel("Sequences that went on at another worker, a second", "none", {
            "sequences": told_rate("quire:kv_moves_total")}),
        Panel("Asleep", "none", {"{{sleep_state}}": told("vllm:engine_sleep_state", ", sleep_state")}, stacked=True),
        Panel("Kernels compiled while serving, a second", "none", {
            "kernels": told_rate("quire:kernel_compilations_total")}, said="Each holds up its replica."),
    ],
    "Speculation": [
        Panel("Drafted tokens that were kept", "percentunit", {"share": share(
            told_rate("vllm:spec_decode_num_accepted_tokens_total"),
            told_rate("vllm:spec_decode_num_draft_tokens_total"))}),
        Panel("Tokens that a verification gives", "none", {"tokens": "1 + " + share(
            told_rate("vllm:spec_decode_num_accepted_tokens_total"), told_rate("vllm:spec_decode_num_drafts_total"))}),
        Panel("Kept tokens a second, by place in the draft", "none", {
            "{{position}}": told_rate("vllm:spec_decode_num_accepted_tokens_per_pos_total", ", position")}),
    ],
    "Adapters": [
        Panel("Adapters that run and wait", "dateTimeFromNow", {
            "running {{running_lora_adapters}}, waiting {{waiting_lora_adapters}}":
            'max by (running_lora_adapters, waiting_lora_adapters) (vllm:lora_requests_info{job=~"$job"}) * 1000'},
            "stat", COLUMNS, "When so many were seen. Where there is --enable-lora."),
    ],
    "HTTP": [
        Panel("Answers a second, by class", "reqps", {"{{status}}": own_rate("http_requests_total", "status", HTTP)},
              stacked=True),
        Panel("Answers a second, by route", "reqps", {"{{handler}}": own_rate("http_requests_total", "handler", HTTP)}),
        percentiles("Time to answer, p90 by route", "http_request_duration_seconds", by="handler", of=HTTP),
    ],
    "Errors": [
        Panel("Requests refused or failed, by status", "reqps", {
            "{{status}}": own_rate("quire:http_errors_total", "status")}),
        Panel("Answers that are 5xx", "percentunit", {"share": share(
            '(sum(rate(http_requests_total{job=~"$job",status="5xx"}[$__rate_interval])) or vector(0))',
            own_rate("http_requests_total", "", HTTP))}),
        Panel("Requests whose logits were no numbers, a second", "reqps", {
            "requests": told_rate("vllm:corrupted_requests_total")}, said="Weights or dtype are wrong."),
        Panel("Messages that did not decode, a second", "none", {"messages": told_rate("quire:bad_frames_total")},
              said="Above 0: processes of two versions, or something else that speaks on quire's sockets."),
    ],
}  # fmt: skip


def _variable(name: str, metric: str, label: str) -> dict[str, Any]:
    return {
        "name": name, "type": "query", "datasource": {"type": "prometheus", "uid": "${datasource}"}, "refresh": 2,
        "query": {"query": f"label_values({metric}, {label})", "refId": name}, "includeAll": True, "multi": True,
        "allValue": ".*", "current": {"selected": True, "text": ["All"], "value": ["$__all"]}, "sort": 1,
    }  # fmt: skip


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    heatmap, source = panel.kind == "heatmap", {"type": "prometheus", "uid": "${datasource}"}
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if panel.stacked:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    if heatmap:
        custom = {"scaleDistribution": {"type": "linear"}}
        options = {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Oranges"}}
    elif panel.kind == "stat":
        custom, options = {}, {"textMode": "name", "reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none"}
    return {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.said, "datasource": source,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT if panel.kind != "stat" else HEIGHT // 2},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": source, "expr": query, "legendFormat": legend,
             "format": "heatmap" if heatmap else "time_series"}
            for at, (legend, query) in enumerate(panel.queries.items())
        ],
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The whole of it, as Grafana 10 and later import it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})  # fmt: skip
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x += panel.width
        y += HEIGHT
    return {
        "uid": "quire", "title": "quire", "tags": ["quire"], "schemaVersion": 39, "version": 1, "editable": True,
        "graphTooltip": 1, "refresh": "10s", "time": {"from": "now-30m", "to": "now"}, "timezone": "browser",
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "data source"},
            _variable("job", "vllm:num_requests_running", "job"),
            _variable("model", "vllm:num_requests_running", "model_name"),
        ]},
        "panels": panels,
    }  # fmt: skip


def text() -> str:
    """What quire.json holds."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
    print(f"wrote {FILE}", file=sys.stderr)
