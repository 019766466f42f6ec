"""The flags of traces, the way to a collector, and one that is away."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from quire.client.traced import TracedCore
from quire.detokenizer.traced import TracedDetokenizer
from quire.gpu_worker.traced import TracedLink
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.spans import Span
from quire.proto.tracing import QUIET_S, Tracing, _Complaints, exporter_for
from quire.scheduler.traced import TracedScheduler

SPAN = Span("x", bytes([1] * 16), bytes([2] * 8), b"", 1.0, 2.0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"collect_detailed_traces": "all"}, "needs a collector; give --otlp-traces-endpoint too"),
        ({"otlp_traces_endpoint": "localhost:4317"}, "must be like http://localhost:4318, got 'localhost:4317'"),
        ({"otlp_traces_endpoint": "http://x", "collect_detailed_traces": "worker,gpu"}, "got 'gpu'"),
    ],
)  # fmt: skip
def test_flags_that_lead_nowhere_are_refused(flags: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineArgs(**flags).check()


def test_without_the_packages_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.proto.flag_checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs packages: pip install 'quire\[tracing\]'\.$"):
        EngineArgs(otlp_traces_endpoint="http://x:4318").check()
    assert EngineArgs(otlp_traces_endpoint=None).check()


def test_the_path_of_traces_is_added_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exporter_for("http://h:4318")._endpoint == "http://h:4318/v1/traces"
    assert exporter_for("https://h/otlp/v1/traces")._endpoint == "https://h/otlp/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert exporter_for("http://h:4317")._endpoint == "http://h:4317/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="must be http/protobuf or grpc, got 'http/json'"):
        exporter_for("http://h:4318")


def test_grpc_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    for endpoint in ("grpc://h", "http://h:4317"):
        with pytest.raises(ConfigError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
            exporter_for(endpoint)


def test_a_collector_that_is_away_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    tracing = Tracing("http://user:secret@127.0.0.1:9", "frontend")
    for _ in range(3000):  # more than the queue holds
        tracing.spans.end(SPAN, 2.0)
    tracing.close()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1 and "spans may be lost, requests are not affected" in lines[0]
    assert "http://127.0.0.1:9" in lines[0] and "secret" not in lines[0]


def test_a_minute_later_there_is_another_line_with_how_many_were_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler, now = _Complaints("http://h"), 100.0
    monkeypatch.setattr("quire.proto.tracing.time.monotonic", lambda: now)
    for wait in (0, 1, 2, QUIET_S):
        now += wait
        handler.handle(logging.makeLogRecord({"msg": "away", "levelno": logging.WARNING}))
    assert [record.getMessage().endswith("away (2 more such lines left out)") for record in caplog.records] == [
        False,
        True,
    ]


def test_the_sampler_and_the_caller_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    tracing = Tracing("http://127.0.0.1:9", "frontend")
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    assert tracing.root("r", {}, 1.0) is None
    assert tracing.root("r", {"traceparent": f"00-{trace}-{caller}-00"}, 1.0) is None
    assert tracing.root("r", {"traceparent": "nonsense"}, 1.0) is None
    span = tracing.root("r", {"traceparent": f"00-{trace}-{caller}-01"}, 1.0)
    assert span is not None and (span.trace.hex(), span.parent.hex(), span.server) == (trace, caller, True)
    tracing.close()


def test_the_page_has_every_span_event_and_attribute_and_no_other() -> None:
    root = Path(__file__).resolve().parents[2]
    source = "".join(path.read_text("utf-8") for path in root.glob("*/traced.py"))
    page = re.sub(r"```.*?```", "", (root / "docs/tracing.md").read_text("utf-8"), flags=re.S)
    names = re.findall(r"`((?:gen_ai|quire|http)\.[a-z0-9_.]+|\.[a-z_0-9]+)`", page)
    full, group = set(), ""
    for name in names:  # `.top_p` stands behind one of its group
        group = group if name[0] == "." else name.rpartition(".")[0]
        full.add(name if name[0] != "." else group + name)
    assert full == set(re.findall(r'"((?:gen_ai|quire|http)\.[a-z0-9_.]+)"', source))
    told = set(re.findall(r"`([a-z_]+)`", page))
    spans = re.findall(r'(?:begin\(|ROOT_SPAN = |_enter_phase\(followed, seq, )\s*"([a-z_]+)"', source)
    events = re.findall(r'(?:\.event\(|self\._why = |blame else )"([a-z_]+)"', source)
    assert {*spans, *events} <= told and len(set(spans)) == 8 and len(set(events)) == 6


OVERRIDDEN = {
    TracedLink: "get send",
    TracedScheduler: "_finish _forget commit end_lease fail note_start plan preempt requeue submit take_over",
    TracedDetokenizer: "_put _refuse _tokenize heartbeat received",
    TracedCore: "_enter _resubmit finish",
}


@pytest.mark.parametrize("traced", OVERRIDDEN, ids=lambda traced: traced.__name__)
def test_nothing_of_the_base_class_is_replaced_by_accident(traced: type) -> None:
    """A method of the same name as one of the base's own silences that one."""
    found = [name for name in vars(traced) if hasattr(traced.__base__, name) and not name.startswith("__")]
    assert sorted(found) == OVERRIDDEN[traced].split()
