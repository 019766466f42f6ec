"""Time between tokens while others' long prompts are computed: two workers that do both, and one of each role.

``--streams`` completions decode while ``--prompts`` clients send long prompts of one output token each, one after the
other. The same requests run with two workers of role both ("together") and with a worker for prefills and one for
decodes ("apart"), in turns. Tokens of both must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from ..report import BenchError, Report
from ..sides import free_port
from ..stats import percentile
from .chain import end_process, generated

LAYOUTS = {"together": ("both", "both"), "apart": ("prefill", "decode")}
START_S = 120.0
VOCAB = 2000


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How much is asked."""
    parser.add_argument("--model", help="folder or hub id (default: the demo model)")
    parser.add_argument("--streams", type=int, default=8, help="completions that decode")
    parser.add_argument("--tokens", type=int, default=200, help="of each")
    parser.add_argument("--prompts", type=int, default=2, help="clients that send long prompts meanwhile")
    parser.add_argument("--prompt-len", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each layout and repeat."""
    known: list[list[int]] | None = None
    for repeat in range(args.repeats):
        for layout, roles in LAYOUTS.items():
            with report.sample(layout=layout, repeat=repeat) as values, server(roles, args.model) as (port, _):
                tokens, gaps, firsts, prompts = _load(port, args, repeat)
                values["itl_p50_ms"], values["itl_p99_ms"] = (1000 * (percentile(gaps, p) or 0.0) for p in (50, 99))
                values["ttft_p50_ms"] = 1000 * (percentile(firsts, 50) or 0.0)
                values["prompts"], values["moves"] = prompts, generated(port, "kv_moves")
                values["recomputed_tokens"] = generated(port, "recomputed_tokens")
            if layout == "together":
                known = tokens
            elif tokens != known:
                raise BenchError(f"tokens differ between the layouts in repeat {repeat}")


@contextlib.contextmanager
def server(
    roles: tuple[str, ...], model: str | None, flags: Sequence[str] = (), log: str = os.devnull
) -> Iterator[tuple[int, list[subprocess.Popen[bytes]]]]:
    """Its port and its workers, once all are ready. ``flags`` are the workers', and the scheduler's number of rows.
    ``log`` is a file for all that the scheduler says."""
    with tempfile.TemporaryDirectory(prefix="quire-roles-") as folder, contextlib.ExitStack() as stack:
        os.mkdir(f"{folder}/s", 0o700)
        port = free_port()
        of_model = [f"--model={model}"] if model else []
        rows = [flag for flag in flags if flag.startswith("--max-num-seqs")]
        level = [] if log == os.devnull else ["--log-level=debug"]
        commands = [["scheduler", *level, *rows], ["detokenizer", *of_model]]
        commands += [["frontend", "--host=127.0.0.1", f"--port={port}", *of_model]]
        others = [flag for flag in flags if flag not in rows]
        commands += [["gpu_worker", f"--worker-role={role}", *of_model, *others] for role in roles]
        workers = []
        for service, *own in commands:
            command = [sys.executable, "-P", "-m", f"quire.{service}", f"--scheduler=ipc://{folder}/s", *own]
            said = stack.enter_context(open(log if service == "scheduler" else os.devnull, "ab"))
            process = subprocess.Popen(command, stdout=said, stderr=said)
            stack.callback(end_process, process)
            if service == "gpu_worker":
                workers.append(process)
        limit = time.monotonic() + START_S
        while time.monotonic() < limit:
            with contextlib.suppress(OSError, BenchError):
                if generated(port, "replicas", total=False) == len(roles):
                    break
            time.sleep(0.2)
        else:
            raise BenchError(f"{len(roles)} workers were not ready within {START_S:g} s")
        yield port, workers


def _load(port: int, args: argparse.Namespace, seed: int) -> tuple[list[list[int]], list[float], list[float], int]:
    """Tokens of the streams, seconds between them, seconds to the first, and how many prompts were computed."""
    rng, over, done = random.Random(seed), threading.Event(), [0] * args.prompts
    asked = [[rng.randrange(10, VOCAB) for _ in range(32)] for _ in range(args.streams)]

    def prompts(number: int) -> None:
        own = random.Random(f"{seed} {number}")
        while not over.is_set():
            ids = [own.randrange(10, VOCAB) for _ in range(args.prompt_len)]
            body = {"prompt": ids, "max_tokens": 1, "temperature": 0.0}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            urllib.request.urlopen(request, timeout=300).close()
            done[number] += 1

    with ThreadPoolExecutor(args.streams + args.prompts) as pool:
        others = [pool.submit(prompts, number) for number in range(args.prompts)]
        streams = [pool.submit(_stream, port, ids, args.tokens) for ids in asked]
        try:
            found = [stream.result() for stream in streams]
        finally:
            over.set()
        for other in others:
            other.result()
    return (
        [each[0] for each in found],
        [gap for each in found for gap in each[1]],
        [each[2] for each in found],
        sum(done),
    )


def _stream(port: int, ids: list[int], tokens: int) -> tuple[list[int], list[float], float]:
    """One completion: its tokens, seconds between events that have some, and to the first."""
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True,
            "return_token_ids": True}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    began = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found: list[int] = []
    times: list[float] = []
    for line in answer:
        if line.startswith(b"data: {") and (new := json.loads(line[6:])["choices"][0].get("token_ids")):
            found += new
            times.append(time.monotonic())
    connection.close()
    if len(found) != tokens:
        raise BenchError(f"a stream brought {len(found)} tokens of {tokens}")
    return found, [b - a for a, b in pairwise(times)], times[0] - began
