"""Traces of real servers, as a collector gets them: one request, four processes, and a worker that is killed."""

import http.client
import json
import os
import signal

import pytest
from collector import Collector
from stack import Server, wait_until

from quire import LLM, SamplingParams

SERVICES = ("quire-frontend", "quire-detokenizer", "quire-scheduler", "quire-gpu_worker")
CALLER = bytes.fromhex("00f067aa0ba902b7")


def traceparent(trace, sampled=1):
    return {"traceparent": f"00-{trace.hex()}-{CALLER.hex()}-0{sampled}"}


@pytest.fixture(scope="module")
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(collector):
    env = {
        "OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_HEADERS": "x-team=red",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }  # fmt: skip
    server = Server(f"--otlp-traces-endpoint={collector.url}", "--collect-detailed-traces=all", env=env)
    try:
        yield server
        assert server.stop() == (0, [], False)
    finally:
        server.close()


def named(spans, name):
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start)


def test_one_request_is_one_trace_through_four_processes(server, collector):
    trace = bytes.fromhex("4bf92f3577b34da6a3ce929d0e0e4736")
    body = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0.5, "seed": 3, "ignore_eos": True}
    status, answer, _ = server.post("/v1/completions", body, headers=traceparent(trace))
    assert status == 200
    wait_until(lambda: named(collector.spans, "llm_request"), "the root span", 30)
    spans = collector.of(trace, *SERVICES)
    (root,), (schedule,) = named(spans, "llm_request"), named(spans, "schedule")
    assert (root.service, root.kind, root.parent) == ("quire-frontend", 2, CALLER)
    parents = {span.name: (span.service, span.parent) for span in spans}
    assert parents == {
        "llm_request": ("quire-frontend", CALLER),
        "tokenize": ("quire-detokenizer", root.id),
        "detokenize": ("quire-detokenizer", root.id),
        "schedule": ("quire-scheduler", root.id),
        "queue": ("quire-scheduler", schedule.id),
        "prefill": ("quire-scheduler", schedule.id),
        "decode": ("quire-scheduler", schedule.id),
        "step": ("quire-gpu_worker", schedule.id),
    }
    told, usage = root.attributes, answer["usage"]
    assert told["gen_ai.request.id"] == answer["id"] and told["gen_ai.response.model"] == "quire-demo"
    assert (
        told["gen_ai.usage.prompt_tokens"]
        == usage["prompt_tokens"]
        == schedule.attributes["gen_ai.usage.prompt_tokens"]
    )
    assert (told["gen_ai.usage.completion_tokens"], told["gen_ai.request.max_tokens"]) == (6, 6)
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.n"]) == (0.5, 1)
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    latency = {name: told[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")}
    assert 0 < latency["time_in_queue"] <= latency["time_to_first_token"] <= latency["e2e"]
    steps = named(spans, "step")
    assert steps[0].attributes["quire.tokens"] == usage["prompt_tokens"] and len(steps) >= 6
    (queue,), (prefill,), (decode,) = (named(spans, name) for name in ("queue", "prefill", "decode"))
    assert queue.end == prefill.start or abs(queue.end - prefill.start) < 1e6  # nanoseconds, of two conversions
    assert decode.attributes["quire.output_tokens"] == 6
    assert collector.headers["x-team"] == "red"


def test_what_the_sampler_leaves_out_leaves_no_span(server, collector):
    unsampled, sampled = bytes([1] * 16), bytes([2] * 16)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert server.post("/v1/chat/completions", body, headers=traceparent(unsampled, 0))[0] == 200
    assert server.post("/v1/chat/completions", body)[0] == 200  # the sampler's own choice
    assert server.post("/v1/chat/completions", body, headers=traceparent(sampled))[0] == 200
    collector.of(sampled, *SERVICES)
    assert {span.trace for span in collector.spans} <= {bytes.fromhex("4bf92f3577b34da6a3ce929d0e0e4736"), sampled}


def test_a_refused_request_says_why(server, collector):
    trace = bytes([3] * 16)
    body = {"prompt": "x " * 9000, "max_tokens": 2}
    assert server.post("/v1/completions", body, headers=traceparent(trace))[0] == 400
    spans = collector.of(trace, "quire-frontend", "quire-detokenizer")
    (root,) = named(spans, "llm_request")
    assert root.attributes["http.response.status_code"] == 400 and "maximum context length" in root.error
    assert {span.name for span in spans} == {"llm_request", "tokenize"}


def streamed_over_a_death(server, trace, service):
    """A stream of 300 tokens, during which the process of ``service`` is killed."""
    body = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    headers = {"Content-Type": "application/json", **traceparent(trace)}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert b"data: " in answer.readline()
    (victim,) = [c for c in server.children() if f"-m {service}" in " ".join(c.cmdline())]
    os.kill(victim.pid, signal.SIGKILL)
    assert b"[DONE]" in answer.read()
    connection.close()


def test_a_request_whose_worker_is_killed_stays_one_trace(server, collector):
    trace = bytes([4] * 16)
    streamed_over_a_death(server, trace, "quire.gpu_worker")
    collector.of(trace, "quire-frontend")
    spans = collector.of(trace, *SERVICES)
    (root,), (schedule,) = named(spans, "llm_request"), named(spans, "schedule")
    assert schedule.parent == root.id and not root.error and root.attributes["gen_ai.usage.completion_tokens"] == 300
    lost = schedule.events["worker_lost"]
    assert 0 < lost["quire.output_tokens"] < 300
    order = [span.name for span in sorted(spans, key=lambda span: span.start) if span.parent == schedule.id]
    assert [name for name in order if name != "step"] == ["queue", "prefill", "decode"] * 2
    queue = named(spans, "queue")[1]
    assert queue.attributes["quire.why"] == "worker_lost" and named(spans, "step")[-1].start > queue.end
    below = {"quire-frontend": CALLER, "quire-detokenizer": root.id, "quire-gpu_worker": schedule.id}
    wrong = [span.name for span in spans if span.service in below and span.parent != below[span.service]]
    assert not wrong and {span.parent for span in spans if span.service == "quire-scheduler"} == {root.id, schedule.id}


def test_a_request_that_outlives_the_scheduler_says_that_it_was_sent_again(server, collector):
    trace = bytes([5] * 16)
    streamed_over_a_death(server, trace, "quire.scheduler")
    spans = collector.of(trace, *SERVICES)
    (root,), tokenized = named(spans, "llm_request"), named(spans, "tokenize")
    again = root.events["sent_again"]
    assert 0 < again["quire.output_tokens"] < 300 and root.attributes["quire.attempts"] == again["quire.attempt"] + 1
    assert [span.attributes["quire.attempt"] for span in tokenized] == list(range(root.attributes["quire.attempts"]))
    (schedule,) = named(spans, "schedule")  # that of the scheduler which was killed went with it
    assert schedule.attributes["quire.attempt"] > 0 and not root.error


def test_llm_traces_too(collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with LLM(otlp_traces_endpoint=collector.url, dtype="float32") as llm:
        output = llm.generate(["Hello"], SamplingParams(max_tokens=3, n=2, ignore_eos=True), use_tqdm=False)[0]
    wait_until(lambda: any(span.service == "quire-llm" for span in collector.spans), "the root span", 30)
    roots = [span for span in collector.spans if span.service == "quire-llm"]
    assert (roots[0].name, roots[0].parent, roots[0].attributes["gen_ai.response.model"]) == (
        "llm_request", b"", "quire-demo",
    )  # fmt: skip
    assert roots[0].attributes["gen_ai.usage.completion_tokens"] == sum(len(o.token_ids) for o in output.outputs) == 6
    spans = collector.of(roots[0].trace, "quire-llm", "quire-detokenizer", "quire-scheduler")
    assert sorted(span.attributes["quire.sequence"] for span in named(spans, "decode")) == [0, 1]
