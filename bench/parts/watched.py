"""What it costs to be watched: a plain server, and one with keys, traces, a scraper and somebody who looks inside.

Both serve the same closed loops in turns, so that the two windows of a turn are neighbours in time. The watched one
asks for API keys, traces ``--sampled`` of its requests to a collector here, has its /metrics read every ``--scrape``
seconds, and ``--pages`` listeners at /dashboard/events all the while. ``--only`` leaves out the others, to see which
one costs. ``ratio`` is the watched server's throughput over the plain one's; its median over the turns is what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from ..load import Load
from ..machine import ROOT
from ..models import prompt_ids
from ..report import Report
from ..serving import measure_load
from ..sides import Server, quire

KEY = "sk-bench"
KINDS = ("keys", "traces", "metrics", "pages")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which loads, how long, and how much is watched."""
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32], help="closed loops")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each window")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--sampled", type=float, default=0.01, help="share of requests that are traced")
    parser.add_argument("--scrape", type=float, default=5.0, help="seconds between readings of /metrics")
    parser.add_argument("--pages", type=int, default=1, help="listeners at /dashboard/events")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS), help="what the watched one has")


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each turn and concurrency, with both servers' figures."""
    model, ratios = ROOT / "demo_model", {width: list[float]() for width in args.concurrency}
    with ExitStack() as stack:
        flags, env = _watched_flags(args, stack)
        sides = {"plain": quire(), "watched": quire(flags, name="quire-watched")}
        sides["watched"].env |= env
        servers = {name: stack.enter_context(Server(side, model, "auto")) for name, side in sides.items()}
        stack.enter_context(_watching(servers["watched"].port, args))
        for turn in range(args.turns):
            for width in args.concurrency:
                order = list(servers) if turn % 2 else list(servers)[::-1]
                with report.sample(concurrency=width, turn=turn) as values:
                    for name in order:
                        load = _load(servers[name].port, model, width, args, KEY if name == "watched" else "")
                        found = measure_load(load, servers[name].pid, {})
                        for figure in ("output_tokens_per_s", "server_cpu_ms_per_token", "itl_p50_ms", "failed"):
                            values[f"{figure}_{name}"] = found[figure]
                    values["ratio"] = values["output_tokens_per_s_watched"] / values["output_tokens_per_s_plain"]
                ratios[width].append(values["ratio"])
    print("median ratios " + ", ".join(f"{width}: {median(each):.3f}" for width, each in ratios.items()))


def _load(port: int, model: Path, width: int, args: argparse.Namespace, key: str) -> Load:
    return Load(
        "127.0.0.1", port, model.name, concurrency=width, seconds=args.seconds, ids=prompt_ids(model), key=key,
        inputs=(32, 128),
    )  # fmt: skip


def _watched_flags(args: argparse.Namespace, stack: ExitStack) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of the watched server."""
    flags, env = [], {}
    if "keys" in args.only:
        env["QUIRE_API_KEY"] = KEY
    if "traces" in args.only:
        flags.append(f"--otlp-traces-endpoint=http://127.0.0.1:{stack.enter_context(_collector())}/v1/traces")
        env |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(args.sampled)}
    return flags, env


@contextlib.contextmanager
def _collector() -> Iterator[int]:
    """A collector that throws away what it is sent; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def _watching(port: int, args: argparse.Namespace) -> Iterator[None]:
    """Scrapes and listens until it is left."""
    over, headers = threading.Event(), {"Authorization": f"Bearer {KEY}"} if "keys" in args.only else {}

    def scrape() -> None:
        while not over.wait(args.scrape):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
            with urllib.request.urlopen(request, timeout=30) as answer:
                answer.read()

    def listen() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/dashboard/events", headers=headers)
        answer = connection.getresponse()
        while not over.is_set() and answer.readline():
            pass
        connection.close()

    work = [scrape] * ("metrics" in args.only) + [listen] * (args.pages * ("pages" in args.only))
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    time.sleep(1)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
