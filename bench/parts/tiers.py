"""Conversations whose KV cache is several times the device's: time to first token with tiers and without.

Each turn goes through all conversations in order, so that what the device's cache holds is never what comes next.
"restart" has the disk alone, and ends every process before each turn. The servers of all variants are up at once and
each conversation goes to one after the other, so that whatever else the machine does strikes all alike. Tokens are
compared with those of the first variant.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..machine import Watch
from ..models import find_model
from ..report import BenchError, Report

BLOCK = 16
FIRST_ID, LAST_ID = 100, 1000


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How many conversations, of which lengths."""
    parser.add_argument("--model", default="small-llama", help="of bench/models.py, or a folder")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--first", type=int, default=256, help="tokens of a conversation's first prompt")
    parser.add_argument("--more", type=int, default=48, help="tokens that each further turn adds")
    parser.add_argument("--outputs", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--share", type=float, default=0.25, help="of all conversations, what the device's cache holds")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--variants", nargs="+", default=["computed", "host", "disk", "restart"])


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each variant and turn. Raises BenchError where tokens differ."""
    length = args.first + (args.turns - 1) * (args.more + args.outputs) + args.outputs
    blocks = max(int(args.share * args.conversations * length / BLOCK), -(-length // BLOCK) + 1)
    model = args.model if Path(args.model).is_dir() else str(find_model(args.model))
    options = {
        "model": model, "num_gpu_blocks_override": blocks, "block_size": BLOCK, "max_model_len": length + BLOCK,
        "max_num_seqs": 4, "kv_cache_dtype": args.kv_cache_dtype,
    }  # fmt: skip
    chance = random.Random(0)
    prompts = [_ids(chance, args.first) for _ in range(args.conversations)]
    with ExitStack() as stack:
        servers = [_Server(variant, options, stack) for variant in args.variants]
        for turn in range(args.turns):
            for server in servers:
                server.prepare(turn)
            told = _ask_all(report, servers, prompts, turn, args.outputs)
            prompts = [ids + more + _ids(chance, args.more) for ids, more in zip(prompts, told, strict=True)]


class _Server:
    """One variant's, and what came of it in this turn."""

    def __init__(self, variant: str, options: dict[str, Any], stack: ExitStack):
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        disk = {"kv_disk_path": folder, "kv_disk_size": 8}
        tiers: dict[str, dict[str, Any]] = {"computed": {}, "host": {"swap_space": 4}, "disk": disk, "restart": disk}
        self.variant, self._options = variant, {**options, **tiers[variant]}
        self._llm: Any = None
        self.times: list[float] = []
        self.cached = 0
        stack.callback(self._close)

    def _close(self) -> None:
        if self._llm is not None:
            self._llm.close()

    def prepare(self, turn: int) -> None:
        """Start it where it does not run or is to be started anew; what a process does once is not measured."""
        from quire import LLM

        if self._llm is None or (turn and self.variant == "restart"):
            self._close()
            self._llm = LLM(**self._options)
        self.times, self.cached = [], 0
        self.ask(_ids(random.Random(turn), 20), 2)
        self.times, self.cached = [], 0

    def ask(self, ids: list[int], tokens: int) -> list[int]:
        """The answer. Keeps the time to its first token, and how many tokens of the prompt were cached."""
        from quire import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        (output,) = self._llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        self.times.append(output.metrics.first_token_time - output.metrics.arrival_time)
        self.cached += output.num_cached_tokens or 0
        return list(output.outputs[0].token_ids)


def _ask_all(
    report: Report, servers: list[_Server], prompts: list[list[int]], turn: int, tokens: int
) -> list[list[int]]:
    """Each conversation's next turn, of every server. The answers."""
    watch, answers = Watch(), []
    for at, ids in enumerate(prompts):
        first = at % len(servers)
        told = {server.variant: server.ask(ids, tokens) for server in servers[first:] + servers[:first]}
        answers.append(told[servers[0].variant])
        for variant, found in told.items():
            if found != answers[-1]:
                raise BenchError(f"{variant}: tokens differ from those of {servers[0].variant}; please report it")
    machine, expected = watch.stop(), statistics.median(servers[0].times)
    for server in servers:
        ordered, middle = sorted(server.times), statistics.median(server.times)
        values = {
            "ttft_p50_ms": 1000 * middle, "ttft_p90_ms": 1000 * ordered[int(0.9 * (len(ordered) - 1))],
            f"of_{servers[0].variant}": middle / expected, "cached_share": server.cached / sum(map(len, prompts)),
        }  # fmt: skip
        report.add({"variant": server.variant, "turn": turn + 1}, values, machine)
    return answers


def _ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(FIRST_ID, LAST_ID) for _ in range(count)]
