"""Loads a server and makes figures of what the load client saw."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .load import Load
from .machine import cpu_seconds
from .report import BenchError
from .stats import percentile

CLIENT = Path(__file__).with_name("load.py")
Slo = dict[str, float]
"""Milliseconds that a request may take at most, by ``ttft`` and ``tpot``."""


def run_load(load: Load) -> dict[str, Any]:
    """What the client, a process of its own, saw. Raises BenchError where it failed."""
    done = subprocess.run(
        [sys.executable, "-P", str(CLIENT)], input=json.dumps(asdict(load)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise BenchError(f"the load client failed with code {done.returncode}: {last}")
    return json.loads(done.stdout)


def measure_load(load: Load, server: int, slo: Slo) -> dict[str, Any]:
    """`figures` of one load, and the CPU time that the server (a process id, with its descendants) took for a token."""
    before = cpu_seconds(server)
    found = run_load(load)
    used = cpu_seconds(server) - before
    values = figures(found, slo, load.concurrency)
    tokens = sum(request["tokens"] or len(request["times"]) for request in found["requests"])
    values["server_cpu_ms_per_token"] = 1000 * used / max(tokens, 1)
    values["client_cpu_s"] = found["cpu_seconds"]
    return values


def figures(found: dict[str, Any], slo: Slo, concurrency: int) -> dict[str, Any]:
    """Throughput, latencies in milliseconds, and goodput, of one window; ``concurrency`` 0 stands for an open loop.

    A gap between tokens counts where it ended within the window. So does a time to first token of a closed loop, but
    for the first requests, which all came at once; of an open loop it counts where the request was sent within the
    window. TPOT is the time a token after the first, of requests that ended. An event may hold several tokens, or a
    token have no event (its text is half a character yet), so tokens are not counted by events: those of an answer are
    taken to have come evenly between its first event and its end, and the share within the window counts.
    """
    begin, end = found["window"]
    requests = found["requests"]
    ended = [request for request in requests if request["done"] and request["tokens"]]
    all_events = sum(len(request["times"]) for request in ended)
    per_event = sum(request["tokens"] for request in ended) / all_events if all_events else 1.0
    tokens = sum(within(request, begin, end) for request in ended)
    tokens += per_event * sum(
        begin <= at < end for request in requests if not request["done"] for at in request["times"]
    )
    if concurrency:
        later = [request for request in requests if request["number"] >= concurrency]
        inside = [request for request in later if request["times"] and begin <= request["times"][0] < end]
    else:
        inside = [request for request in requests if begin <= request["sent"] < end]
    values: dict[str, Any] = {
        "output_tokens_per_s": tokens / (end - begin),
        "requests": len(inside),
        "failed": sum(bool(request["error"]) for request in requests),
        "tokens_per_event": per_event,
    }
    values |= spread("ttft", [request["times"][0] - request["sent"] for request in inside if request["times"]])
    gaps = [
        after - before
        for request in requests
        for before, after in zip(request["times"], request["times"][1:], strict=False)
        if begin <= after < end
    ]
    values |= spread("itl", gaps)
    values |= spread(
        "tpot",
        [tpot(each) for each in ended if each["times"] and each["tokens"] > 1 and begin <= each["sent"] < end],
    )
    if not concurrency:
        met = sum(meets(request, slo) for request in inside)
        values["arrived_per_s"] = len(inside) / (end - begin)
        values["goodput_per_s"] = met / (end - begin)
        values["goodput_pct"] = 100 * met / max(len(inside), 1)
    return values


def within(request: dict[str, Any], begin: float, end: float) -> float:
    """How many tokens of an answer came between ``begin`` and ``end``, if they came evenly."""
    first, last = (request["times"] or [request["sent"]])[0], request["ended"]
    if last <= first:
        return request["tokens"] * (begin <= first < end)
    return request["tokens"] * max(0.0, min(last, end) - max(first, begin)) / (last - first)


def tpot(request: dict[str, Any]) -> float:
    """Seconds a token after the first."""
    return (request["times"][-1] - request["times"][0]) / (request["tokens"] - 1)


def meets(request: dict[str, Any], slo: Slo) -> bool:
    """Whether a request ended and kept within every limit; one that was cut off did not."""
    if not request["done"] or not request["times"]:
        return False
    taken = {"ttft": request["times"][0] - request["sent"], "tpot": tpot(request) if request["tokens"] > 1 else 0.0}
    return all(1000 * taken[name] <= limit for name, limit in slo.items())


def spread(name: str, seconds: list[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile in milliseconds; None for no values."""
    values = [1000 * value for value in seconds]
    return {
        f"{name}_mean_ms": sum(values) / len(values) if values else None,
        f"{name}_p50_ms": percentile(values, 50),
        f"{name}_p99_ms": percentile(values, 99),
    }


def parse_slo(given: list[str]) -> Slo:
    """``ttft:500 tpot:50``. Raises BenchError."""
    slo = {}
    for item in given:
        name, _, limit = item.partition(":")
        if name not in ("ttft", "tpot") or not limit.replace(".", "", 1).isdecimal():
            raise BenchError(f"--slo {item!r} must look like ttft:500 or tpot:50 (milliseconds).")
        slo[name] = float(limit)
    return slo
