"""What a drain costs the sequences that move: the pause of each stream, beside the time that its copy takes by itself.

``--streams`` completions decode at two workers when one of them is asked to leave. What a stream waits is the time from
its last token at one worker until the step of the other begins that draws its next, by the scheduler's clock: what that
is longer than ever, for between two steps of one worker next to nothing is waited. A token is the median time between
two before the drain. The copy's own time is that of all blocks of a sequence, from one cache to another, with nothing
else to do. The longest time between two tokens of a stream during the drain is what clients see; it has in it all that
the machine does besides, so that of as long a time without a drain stands beside it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import random
import re
import subprocess
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from ..report import BenchError, Report
from ..stats import percentile
from .chain import generated
from .roles import VOCAB, server

BLOCK = 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How much is asked."""
    parser.add_argument("--model", help="folder or hub id (default: the demo model)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=16, help="completions that decode, of both workers")
    parser.add_argument("--prompt-len", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=600, help="of each")
    parser.add_argument("--before", type=int, default=150, help="tokens of each stream before the drain begins")
    parser.add_argument("--repeats", type=int, default=3)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each repeat; tokens must be those of a run without a drain."""
    flags = [f"--dtype={args.dtype}", f"--max-num-seqs={2 * args.streams}"]
    for repeat in range(args.repeats):
        rng = random.Random(repeat)
        asked = [[rng.randrange(10, VOCAB) for _ in range(args.prompt_len)] for _ in range(args.streams)]
        with (
            report.sample(streams=args.streams, prompt_len=args.prompt_len, repeat=repeat) as values,
            tempfile.NamedTemporaryFile(prefix="quire-moves-") as log,
            server(("both", "both"), args.model, flags, log.name) as (port, workers),
        ):
            undisturbed, _ = _run(port, asked, args, None)
            found, (began, ended) = _run(port, asked, args, workers[0])
            if [stream.tokens for stream in found] != [stream.tokens for stream in undisturbed]:
                raise BenchError(f"tokens differ from those without a drain in repeat {repeat}")
            tokens, gaps = _gaps(found, began, ended)
            start = max(stream.times[min(args.before, len(stream.times) - 1)] for stream in undisturbed)
            _, usual = _gaps(undisturbed, start, start + ended - began)
            waits = [
                float(each) for each in re.findall(r"goes on at replica \d+ after ([\d.]+) ms", log.read().decode())
            ]
            values["moves"] = generated(port, "kv_moves")
            values["recomputed_tokens"] = generated(port, "recomputed_tokens")
            values["drain_s"] = ended - began
            token, copy = 1000 * (percentile(tokens, 50) or 0.0), _copy_ms(args)
            values["token_p50_ms"], values["copy_ms"] = token, copy
            for rank in (50, 99):
                values[f"wait_p{rank}_ms"] = wait = percentile(waits, rank) or 0.0
                values[f"beyond_copy_p{rank}_tokens"] = (wait - copy) / token
                values[f"longest_gap_p{rank}_ms"] = 1000 * (percentile(gaps, rank) or 0.0)
                values[f"longest_gap_undisturbed_p{rank}_ms"] = 1000 * (percentile(usual, rank) or 0.0)


class Stream:
    """One completion, as it comes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []  # of the events that have some

    def read(self, port: int, ids: list[int], tokens: int) -> Stream:
        """All of it."""
        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True,
                "return_token_ids": True}  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {") and (new := json.loads(line[6:])["choices"][0].get("token_ids")):
                self.times.append(time.monotonic())
                self.tokens += new
        connection.close()
        if len(self.tokens) != tokens:
            raise BenchError(f"a stream brought {len(self.tokens)} tokens of {tokens}")
        return self


def _run(
    port: int, asked: list[list[int]], args: argparse.Namespace, leaves: subprocess.Popen[bytes] | None
) -> tuple[list[Stream], tuple[float, float]]:
    """All streams, and from when to when ``leaves``, if anybody, was on its way out."""
    streams = [Stream() for _ in asked]
    began = ended = 0.0
    with ThreadPoolExecutor(len(asked)) as pool:
        futures: list[Future[Stream]] = [
            pool.submit(stream.read, port, ids, args.tokens) for stream, ids in zip(streams, asked, strict=True)
        ]
        if leaves is not None:
            while any(len(stream.tokens) < args.before for stream in streams):
                if any(future.done() for future in futures):
                    raise BenchError("a stream was over before the drain; ask for more --tokens.")
                time.sleep(0.01)
            began = time.monotonic()
            leaves.terminate()  # it asks to be drained
            leaves.wait(120)
            ended = time.monotonic()
        for future in futures:
            future.result()
    return streams, (began, ended)


def _gaps(streams: list[Stream], began: float, ended: float) -> tuple[list[float], list[float]]:
    """Seconds between tokens before the drain, of all; and the longest of each while it went on."""
    before: list[float] = []
    longest = []
    for stream in streams:
        gaps = [(b, b - a) for a, b in pairwise(stream.times)]
        half = stream.times[len(stream.times) // 8]
        before += [gap for at, gap in gaps if half < at < began]
        longest.append(max((gap for at, gap in gaps if began <= at <= ended), default=0.0))
    return before, longest


def _copy_ms(args: argparse.Namespace) -> float:
    """Milliseconds for the blocks of one sequence in the middle of its stream, from one worker's cache to another's by
    the path that they take: the median of nine."""
    import torch

    from quire.gpu_worker.kv_cache import KVCache
    from quire.gpu_worker.models.families import find_family
    from quire.gpu_worker.moving import Mover
    from quire.proto.checkpoint.model_config import config_of, model_folder
    from quire.proto.codec import i32
    from quire.proto.config import EngineArgs
    from quire.proto.messages import Give, Lease, Take
    from quire.scheduler.moves import PIECE_BYTES

    flags = EngineArgs(**({"model": args.model} if args.model else {}), dtype=args.dtype)
    spec = find_family(config_of(flags, model_folder(flags, weights=False)).hf)[0]
    count = -(-(args.prompt_len + (args.before + args.tokens) // 2) // BLOCK)
    caches = [KVCache(spec, count, BLOCK, getattr(torch, args.dtype), torch.device("cpu")) for _ in range(2)]
    for kv in caches:
        kv.write_blocks(list(range(count)), torch.ones((count, kv.bytes_of_block), dtype=torch.uint8))
    piece, lease, took = max(1, PIECE_BYTES // caches[0].bytes_of_block), Lease(1, 0, 1), []
    with tempfile.TemporaryDirectory(prefix="quire-moves-") as folder:
        movers = [Mover(f"ipc://{folder}/{name}", None, None) for name in ("giver", "taker")]
        arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        for mover in movers:
            mover.start(lambda: arrived.put(None))
            mover.begin(count)
        for number in range(1, 10):
            movers[1].handle(Take(lease, number, 0, i32(range(count))), lease, caches[1])
            began, there = time.monotonic(), 0
            for first in range(0, count, piece):
                blocks = i32(range(first, min(count, first + piece)))
                movers[0].handle(Give(lease, number, first, blocks, movers[1].endpoint, lease), lease, caches[0])
            movers[0].flush()
            while there < count:
                arrived.get(timeout=30)
                there = max([there, *(taken.pages for taken in movers[1].take_arrived(lease, caches[1]))])
            took.append(time.monotonic() - began)
        for mover in movers:
            mover.close()
    return 1000 * (percentile(took, 50) or 0.0)
