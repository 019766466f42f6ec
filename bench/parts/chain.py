"""HTTP streaming through scheduler, detokenizer and frontend, with a worker that has no model.

Scheduler, detokenizer and frontend run as `quire serve` starts them, over socket files; a fake worker draws ids in
turn at once (or after ``--delay-ms``), so every token has text. The client is this process, and not `load.py`: it keeps
completions open over plain sockets, each followed by the next, and looks at no more of an event than where it begins,
for here it is what the server shares the cores with.

Tokens a second say what this machine does with all processes at once; tokens per CPU second of a process say what one
core does for it. CPU time is that of all threads of a process. The goal is 150,000 in the slowest process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..report import BenchError, Report
from ..sides import free_port
from ..stats import percentile

SERVICES = ("scheduler", "detokenizer", "frontend", "worker")
START_S = 30.0
WARM_S = 2.0
"""Before the clock starts: every stream is open, and the allocators have seen a step."""
PROMPT = list(range(100, 132))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How many streams."""
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256], help="completions open at a time")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured, of each repeat")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="what a step of the worker takes")
    parser.add_argument("--repeats", type=int, default=3)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each number of streams and repeat."""
    for repeat in range(args.repeats):
        for streams in args.streams:
            with report.sample(streams=streams, delay_ms=args.delay_ms, repeat=repeat) as values:
                found = run_chain(streams, args.seconds, delay_ms=args.delay_ms)
                values["output_tokens_per_s"] = found["tokens_per_second"]
                for name, speed in found["tokens_per_cpu_second"].items():
                    values[f"{name}_tokens_per_cpu_s"] = speed
                for name in ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms"):
                    values[name] = found[name]


def run_chain(streams: int, seconds: float, tokens: int = 1024, delay_ms: float = 0.0) -> dict[str, Any]:
    """Keep ``streams`` completions of ``tokens`` tokens each open for ``seconds``; a step takes ``delay_ms`` or more.

    ``cpu_seconds`` and ``tokens_per_cpu_second`` are by process. ``itl`` are milliseconds between two reads of a
    stream that brought text, ``ttft`` from a request to its first text. Raises BenchError where the processes do not
    come up or an answer is not a stream of text.
    """
    with _chain(streams, delay_ms) as (port, pids):
        client = _Client(port, streams, tokens)
        client.run(WARM_S)
        client.itl.clear()
        client.ttft.clear()
        made, used, began = generated(port), _cpu_seconds(pids), time.monotonic()
        client.run(seconds)
        elapsed = time.monotonic() - began
        made, used = generated(port) - made, {name: now - used[name] for name, now in _cpu_seconds(pids).items()}
        client.close()
    return {
        "streams": streams,
        "seconds": elapsed,
        "tokens": made,
        "tokens_per_second": made / elapsed,
        "cpu_seconds": used,
        "tokens_per_cpu_second": {name: made / spent for name, spent in used.items()},
        "itl_p50_ms": percentile(client.itl, 50),
        "itl_p99_ms": percentile(client.itl, 99),
        "ttft_p50_ms": percentile(client.ttft, 50),
    }


# ---------------------------------------------------------------- the processes


@contextlib.contextmanager
def _chain(streams: int, delay_ms: float) -> Iterator[tuple[int, dict[str, int]]]:
    """The port and the pids, by name, of one process of each service."""
    with tempfile.TemporaryDirectory(prefix="quire-chain-") as folder, contextlib.ExitStack() as stack:
        port = free_port()
        address = f"ipc://{folder}/s"
        os.mkdir(f"{folder}/s", 0o700)
        flags = {
            "scheduler": [f"--max-num-seqs={streams}", f"--max-num-batched-tokens={max(2048, streams)}"],
            "detokenizer": [],
            "frontend": ["--host=127.0.0.1", f"--port={port}"],
            "worker": [
                "--page-store=off", "--vocab-size=2048", f"--num-blocks={(streams + 1) * 128}",
                "--delay-ms", str(delay_ms), str(delay_ms),
            ],
        }  # fmt: skip
        pids = {}
        for name in SERVICES:
            module = "scheduler.fake.fake_worker" if name == "worker" else name
            command = [sys.executable, "-P", "-m", f"quire.{module}", f"--scheduler={address}", *flags[name]]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(end_process, process)
            pids[name] = process.pid
        _wait_ready(port)
        yield port, pids


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and end it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_ready(port: int) -> None:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5).close()
            return
        time.sleep(0.1)
    raise BenchError(f"the chain was not ready within {START_S:g} s")


def generated(port: int, name: str = "generation_tokens", total: bool = True) -> float:
    """Tokens that the scheduler has committed so far, or another of its figures; ``total``: it is a counter."""
    name = f"quire:{name}{'_total' * total}"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = re.search(rf"^{name}(?:{{\S*)? (\S+)$", answer.read().decode(), re.M)
    if found is None:
        raise BenchError(f"/metrics has no {name}")
    return float(found.group(1))


def _cpu_seconds(pids: dict[str, int]) -> dict[str, float]:
    """CPU time of all threads so far, by process; the scheduler of the kernel counts it in nanoseconds."""
    return {
        name: sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
        for name, pid in pids.items()
    }


# ---------------------------------------------------------------- the client


@dataclass
class _Stream:
    """One connection: its requests follow each other."""

    socket: socket.socket
    asked: float = 0.0
    last: float = 0.0  # when text last came; 0 before the first
    tail: bytes = b""  # the last bytes read, in which an end may begin


@dataclass
class _Client:
    port: int
    streams: int
    tokens: int
    itl: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._poll = selectors.DefaultSelector()
        self._turn = 0
        for _ in range(self.streams):
            connection = socket.create_connection(("127.0.0.1", self.port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = _Stream(connection)
            self._poll.register(connection, selectors.EVENT_READ, stream)
            self._ask(stream)

    def _ask(self, stream: _Stream) -> None:
        """The next request. Lengths of the first ones differ, so that ends come evenly."""
        self._turn += 1
        tokens = self.tokens if self._turn > self.streams else max(1, self.tokens * self._turn // self.streams)
        body = json.dumps(
            {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        ).encode()
        stream.asked, stream.last, stream.tail = time.perf_counter(), 0.0, b""
        stream.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    def run(self, seconds: float) -> None:
        """Read for so long."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for key, _ in self._poll.select(0.1):
                self._read(key.data)

    def _read(self, stream: _Stream) -> None:
        data = stream.socket.recv(2**16)
        now = time.perf_counter()
        if not data or (data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200")):
            raise BenchError(f"the server answered {data[:300]!r}")
        if b'"text":' in data:
            if stream.last:
                self.itl.append(1000 * (now - stream.last))
            else:
                self.ttft.append(1000 * (now - stream.asked))
            stream.last = now
        ending = stream.tail + data
        if ending.endswith(b"0\r\n\r\n"):
            if b"[DONE]" not in ending:
                raise BenchError(f"a stream ended with {ending[-300:]!r}")
            self._ask(stream)
        else:
            stream.tail = data[-64:]

    def close(self) -> None:
        """Leave; what is open is aborted."""
        for key in list(self._poll.get_map().values()):
            key.data.socket.close()
        self._poll.close()
