"""An OTLP/HTTP collector on a port of its own, which keeps the spans that it is sent."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from stack import wait_until


def _plain(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, kind)


def _attributes(found):
    return {each.key: _plain(each.value) for each in found}


class Seen:
    """A span as it came. Ids are bytes; ``parent`` is empty where there is none."""

    def __init__(self, service, span):
        self.service, self.name, self.kind = service, span.name, span.kind
        self.trace, self.id, self.parent = span.trace_id, span.span_id, span.parent_span_id
        self.start, self.end = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes, self.error = _attributes(span.attributes), span.status.message
        self.events = {each.name: _attributes(each.attributes) for each in span.events}


class Collector:
    """``spans`` are all that came, ``headers`` those of the last request."""

    def __init__(self):
        self.spans, self.headers, lock = [], {}, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(this):
                body = this.rfile.read(int(this.headers["Content-Length"]))
                with lock:
                    self.headers = dict(this.headers)
                    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                        service = _attributes(group.resource.attributes)["service.name"]
                        self.spans += [Seen(service, span) for scope in group.scope_spans for span in scope.spans]
                this.send_response(200 if this.path == "/v1/traces" else 404)
                this.send_header("Content-Length", "0")
                this.end_headers()

            def log_message(this, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def of(self, trace, *services):
        """The spans of a trace, once there are some of each of these services and no more have come for a second: a
        process sends those that ended later on their own."""
        wait_until(lambda: {span.service for span in self.spans if span.trace == trace} >= set(services),
                   f"spans of {services}", 30)  # fmt: skip
        before = -1
        while before != (before := len(self.spans)):
            time.sleep(1)
        return [span for span in self.spans if span.trace == trace]
