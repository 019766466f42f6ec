"""Whole servers over an fp8 cache: a killed worker changes no stream, as its scales are measured alike."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import psutil
from support.stack import Server

PROMPTS = ["Once upon a time " * 20 + str(number) for number in range(12)]
BODY = {"prompt": PROMPTS, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
FLAGS = ("--dtype=float32", "--kv-cache-dtype=fp8", "--calculate-kv-scales")


def events(server: Server) -> Iterator[dict]:
    """Those of one streamed answer to all prompts."""
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(BODY).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])


def answers(kill: bool, *flags: str) -> list[str]:
    """Greedy texts; with ``kill`` the worker is killed once the first of them has begun."""
    with closing(Server(*FLAGS, *flags)) as server:
        worker = next(each for each in server.children() if "gpu_worker" in " ".join(each.cmdline()))
        texts = [""] * len(PROMPTS)
        for number, event in enumerate(events(server)):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
            if kill and number == 0:
                worker.kill()
        if kill:
            psutil.wait_procs([worker], timeout=15)
            assert not worker.is_running()
        return texts


def test_a_killed_worker_changes_no_stream_over_an_fp8_cache() -> None:
    killed = answers(True, "--max-num-batched-tokens=280")
    assert all(killed)
    assert killed == answers(False)
