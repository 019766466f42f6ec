"""Traces leave a process by OTLP: the only file that knows OpenTelemetry, imported only where traces are asked for.

The SDK's batch processor exports from a thread of its own; its queue is bounded, and what does not fit is dropped. The
standard variables (``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_BSP_*``, ...) mean what they mean
elsewhere.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import random
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .config_error import ConfigError
from .spans import Span, Spans
from .version import __version__

log = logging.getLogger(__name__)

GRPC_PORT = 4317
"""OTLP's own for gRPC; 4318 is that for HTTP."""
FAREWELL_S = 2.0
"""How long the last spans may take when a process ends."""
QUIET_S = 60.0
"""At most one warning about the collector in this time."""
_SCOPE = InstrumentationScope("quire", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Tracing:
    """The way out for the spans of one process, which is told as ``service``. Raises ConfigError."""

    def __init__(self, endpoint: str, service: str):
        self._complaints = _quiet(endpoint)
        name = os.environ.get("OTEL_SERVICE_NAME") or f"quire-{service}"
        self._resource = Resource.create(
            {"service.name": name, "service.namespace": "quire", "service.version": __version__,
             "service.instance.id": f"{service}-{os.getpid()}", "process.pid": os.getpid()}
        )  # fmt: skip
        self._processor = BatchSpanProcessor(exporter_for(endpoint))
        self._closing, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._close, name="traces-closer", daemon=True).start()  # at exit none can be started
        self._rng = random.Random()
        self._sampler = TracerProvider(resource=self._resource, shutdown_on_exit=False).sampler
        self._propagator = TraceContextTextMapPropagator()
        self.spans = Spans(self._export, self._rng)
        atexit.register(self.close)

    def root(self, name: str, headers: Mapping[str, str], now: float) -> Span | None:
        """The first span of this server, below the caller's where ``headers`` have a traceparent; None where the
        sampler leaves the request out."""
        above = self._propagator.extract(headers) if headers else None
        caller = get_current_span(above).get_span_context() if above is not None else None
        known = caller is not None and caller.is_valid
        number = caller.trace_id if known and caller is not None else self._rng.getrandbits(128)
        if not self._sampler.should_sample(above, number, name, SpanKind.SERVER).decision.is_sampled():
            return None
        parent = caller.span_id.to_bytes(8, "big") if known and caller is not None else b""
        return Span(name, number.to_bytes(16, "big"), self.spans.new_id(8), parent, now, server=True)

    def close(self) -> None:
        """Send what waits, for a short while, unless the collector was away lately. Idempotent."""
        self._closing.set()
        self._closed.wait(0.0 if self._complaints.lately else FAREWELL_S)

    def _close(self) -> None:
        self._closing.wait()
        self._processor.shutdown()
        self._closed.set()

    def _export(self, span: Span) -> None:
        """Hand one span to the exporter's thread."""
        now = time.time() - time.monotonic()  # of this moment: either clock may be set

        def nanoseconds(at: float) -> int:
            return int((at + now) * 1e9)

        self._processor.on_end(
            ReadableSpan(
                span.name, _context(span.trace, span.id), _context(span.trace, span.parent) if span.parent else None,
                self._resource, span.attributes,
                [Event(name, attributes, nanoseconds(at)) for name, at, attributes in span.events],
                kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=nanoseconds(span.start), end_time=nanoseconds(span.end), instrumentation_scope=_SCOPE,
            )
        )  # fmt: skip


def _context(trace: bytes, span: bytes) -> SpanContext:
    return SpanContext(int.from_bytes(trace, "big"), int.from_bytes(span, "big"), is_remote=False, trace_flags=_SAMPLED)


def exporter_for(endpoint: str) -> SpanExporter:
    """Over gRPC or HTTP: as OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says, else as the endpoint looks. Raises ConfigError."""
    parts = urlsplit(endpoint)
    grpc = parts.scheme.startswith("grpc") or parts.port == GRPC_PORT
    named = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = named or ("grpc" if grpc else "http/protobuf")
    if protocol == "grpc":
        return _grpc_exporter(endpoint, parts.scheme)
    if protocol != "http/protobuf":
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be http/protobuf or grpc, got {protocol!r:.80}.")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    path = parts.path if parts.path not in ("", "/") else "/v1/traces"
    scheme = parts.scheme if parts.scheme == "https" else "http"
    return OTLPSpanExporter(urlunsplit((scheme, parts.netloc, path, parts.query, "")))


def _grpc_exporter(endpoint: str, scheme: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError:
        address = endpoint.rpartition("@")[2]
        raise ConfigError(
            f"traces by gRPC to {address} need a package: pip install opentelemetry-exporter-otlp-proto-grpc; or name "
            "the collector's port for HTTP (4318), or set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf."
        ) from None
    exporter: SpanExporter = OTLPSpanExporter(endpoint.replace("grpc://", "http://"), insecure=scheme != "https")
    return exporter


class _Complaints(logging.Handler):
    """What the SDK has to say about a collector that is away: one line a minute, and how many more there were."""

    def __init__(self, endpoint: str):
        super().__init__(logging.WARNING)
        parts = urlsplit(endpoint)
        address = parts.netloc.rpartition("@")[2]  # what is before it is a password
        self._endpoint, self._told, self._left_out = f"{parts.scheme}://{address}", -math.inf, 0

    @property
    def lately(self) -> bool:
        """It has complained within ``QUIET_S``."""
        return time.monotonic() - self._told < QUIET_S

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if self.lately:
            self._left_out += 1
            return
        said = record.getMessage().replace("\n", " ")[:300]
        more = f" ({self._left_out} more such lines left out)" if self._left_out else ""
        self._told, self._left_out = now, 0
        log.warning(
            "spans may be lost, requests are not affected; the collector at %s: %s%s", self._endpoint, said, more
        )


def _quiet(endpoint: str) -> _Complaints:
    """Have what exports speak through ``_Complaints`` alone. The rest of OpenTelemetry may be the user's own."""
    handler = _Complaints(endpoint)
    for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    return handler
