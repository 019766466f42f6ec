"""/metrics: names, prefixes and docs/metrics.md, and what is measured of answers over HTTP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from http_asks import HI, ask, post

from quire.client.results import RequestMetrics
from quire.frontend.access import access_of
from quire.frontend.fake import FakeServer
from quire.frontend.metrics import Metrics
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.messages import AdapterStats, Stats, TierStats, WorkStats
from quire.proto.messages.operators import Binned, BlockTimes
from quire.proto.restarts import PROCESSES, TOLD, Restarts

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def everything() -> Stats:
    """What a scheduler says that has all there is."""
    return AdapterStats(
        token=0, running=1, waiting=2, blocks=10, blocks_used=5, preemptions=3, prefix_queries=4, prefix_hits=5,
        prompt_tokens=6, generation_tokens=7, steps=8, bad_frames=9, replicas=[], accepted=[2, 1], tiers=TierStats(),
        max_loras=2, work=WorkStats(
            16, True, 1, [0] * 9 + [3] + [0] * 4, 4000, [5, 0, 0, 1, 0, 0, 0, 0], 4, 2, "discard_all",
            BlockTimes(Binned([0] * 9 + [3] + [0] * 12, 2.5), Binned([0] * 22), Binned([0] * 22)),
        ),
    )  # fmt: skip


def kinds(text: str) -> dict[str, str]:
    """Names of figures, a counter's with _total, and their kinds."""
    found = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M)
    assert len(found) == len(dict(found))  # Prometheus refuses a name that is told twice
    return dict(found)


def documented(part: str) -> dict[str, str]:
    section = PAGE.read_text("utf-8").partition(f"\n## {part}")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.M))


@pytest.mark.parametrize(("prefix", "shared"), [("vllm", ["vllm"]), ("quire", ["quire"]), ("both", ["quire", "vllm"])])
def test_the_page_has_every_name_and_no_other(
    prefix: str, shared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROCESSES, str(tmp_path / TOLD))
    Restarts().tell(str(tmp_path), {}, {}, False)
    told = kinds(Metrics("m", prefix).render(everything()).decode())
    expected = documented("HTTP")
    expected |= {f"quire:{name}": kind for name, kind in documented("Figures of quire").items()}
    for each in shared:
        expected |= {f"{each}:{name}": kind for name, kind in documented("Figures of vLLM").items()}
    assert len(expected) > 40 and told == expected


def test_one_value_under_two_names() -> None:
    figures = Metrics('a "vllm:" \n# HELP quire:x')  # a model's name is nothing but a label
    figures.request(RequestMetrics(1.0, 9.0, 2.0, 5.0, 1.0, 9.5), 4, [3], False)
    lines = figures.render(everything()).decode().splitlines()
    of = {name: sorted(x[6:] if name == "quire" else x[5:] for x in lines if x.startswith(name + ":")) for name in
          ("vllm", "quire")}  # fmt: skip
    assert of["vllm"] and set(of["vllm"]) < set(of["quire"])
    assert all("quire:x" in x for x in of["quire"] if "model_name" in x)


def test_spans_of_a_request() -> None:
    figures = Metrics("m", "vllm")
    times = RequestMetrics(1.0, 9.0, 2.0, 5.0, 1.0, 9.5)
    figures.request(times, 4, [3], False)
    times.first_scheduled_time = None  # a batch of answers told nothing of its first step
    figures.request(times, 4, [3], False)
    text = figures.render(None).decode()
    for name, count, total in (("queue", 2, 2.0), ("prefill", 1, 3.0), ("decode", 2, 8.0), ("inference", 1, 7.0)):
        assert f'vllm:request_{name}_time_seconds_count{{model_name="m"}} {count}.0\n' in text
        assert f'vllm:request_{name}_time_seconds_sum{{model_name="m"}} {total}\n' in text


def test_where_prompt_tokens_came_from() -> None:
    figures = Metrics("m", "vllm")
    figures.request(RequestMetrics(1.0, 9.0, 2.0, 5.0, 1.0, 9.5), 40, [3], False, cached=32)
    figures.pooled(10, 0.5, cached=4)
    text = figures.render(None).decode()
    for line in (
        'prompt_tokens_cached_total{model_name="m"} 36.0',
        'prompt_tokens_by_source_total{model_name="m",source="local_cache_hit"} 36.0',
        'prompt_tokens_by_source_total{model_name="m",source="local_compute"} 14.0',
        'request_prefill_kv_computed_tokens_count{model_name="m"} 2.0',
        'request_prefill_kv_computed_tokens_sum{model_name="m"} 14.0',
    ):
        assert f"vllm:{line}\n" in text


def test_figures_of_the_schedulers_work() -> None:
    text = Metrics("m", "vllm").render(everything()).decode()
    for line in (
        'num_requests_waiting_by_reason{model_name="m",reason="capacity"} 1.0',
        'num_requests_waiting_by_reason{model_name="m",reason="deferred"} 1.0',
        'cache_config_info{block_size="16",enable_prefix_caching="True",model_name="m",num_gpu_blocks="10"} 1.0',
        'iteration_tokens_total_bucket{le="1024.0",model_name="m"} 0.0',
        'iteration_tokens_total_bucket{le="2048.0",model_name="m"} 3.0',
        'iteration_tokens_total_sum{model_name="m"} 4000.0',
        'request_num_preemptions_bucket{le="2.0",model_name="m"} 5.0',
        'request_num_preemptions_bucket{le="5.0",model_name="m"} 6.0',
        'corrupted_requests_total{model_name="m"} 2.0',
        'engine_sleep_state{model_name="m",sleep_state="awake"} 0.0',
        'engine_sleep_state{model_name="m",sleep_state="discard_all"} 1.0',
        'kv_block_lifetime_seconds_bucket{le="0.5",model_name="m"} 0.0',
        'kv_block_lifetime_seconds_bucket{le="1.0",model_name="m"} 3.0',
        'kv_block_lifetime_seconds_sum{model_name="m"} 2.5',
    ):
        assert f"vllm:{line}\n" in text


def test_answers_by_route_and_status() -> None:
    with FakeServer() as server:
        post(server, HI)
        post(server, {**HI, "stream": True})
        post(server, {**HI, "n": 0})
        for path in ("/v1/models/fake", "/v1/models/no-such", "/no-such/1", "/health"):
            ask(server, "GET", path)
        ask(server, "PROPFIND", "/v1/models")
        text = ask(server, "GET", "/metrics")[1].decode()
    counts = re.findall(r'^http_requests_total\{handler="(.*)",method="(.*)",status="(.*)"\} (\S+)$', text, re.M)
    chat, one = "/v1/completions", "/v1/models/{model}"
    assert sorted(counts) == sorted([
        (chat, "POST", "2xx", "2.0"), (chat, "POST", "4xx", "1.0"), (one, "GET", "2xx", "1.0"),
        (one, "GET", "4xx", "1.0"), ("none", "GET", "4xx", "1.0"), ("none", "other", "4xx", "1.0"),
    ])  # fmt: skip
    assert f'http_request_duration_seconds_count{{handler="{chat}",method="POST"}} 3.0' in text


def test_what_the_launcher_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told where it writes it down, and left out where nobody does, or not yet."""
    restarts = Restarts()
    assert b"process" not in Metrics("m").render(None)
    monkeypatch.setenv(PROCESSES, str(tmp_path / TOLD))
    assert b"process" not in Metrics("m").render(None)
    restarts.tell(str(tmp_path), {}, {}, False)
    assert b'quire:process_restarts_total{service="gpu_worker"} 0.0\n' in Metrics("m").render(None)
    restarts.tell(str(tmp_path), {"gpu_worker": 7, "frontend": 1}, {"gpu_worker": 1}, False)
    text = Metrics("m").render(None)
    for line in (
        b'quire:process_restarts_total{service="gpu_worker"} 7.0\n', b'quire:processes_failing{service="frontend"} 0.0',
        b'quire:process_restarts_total{service="frontend"} 1.0', b'quire:processes_failing{service="gpu_worker"} 1.0',
    ):  # fmt: skip
        assert line in text


def test_another_prefix_is_refused() -> None:
    with pytest.raises(ConfigError, match="metrics_prefix must be one of vllm, quire, both, got 'sglang'"):
        access_of(EngineArgs(model="m", metrics_prefix="sglang"))
