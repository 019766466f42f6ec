"""Conversations whose KV cache is several times the device's: time to first token with tiers and without.

Each turn goes through all conversations in order, so that what the device's cache holds is never what comes next.
"restart" has the disk alone, and ends every process before each turn. Tokens are compared with those that are computed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

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
    expected: list[list[list[int]]] | None = None
    for variant in args.variants:
        with tempfile.TemporaryDirectory() as folder:
            told = _run(report, args, variant, {**options, **_tiers(variant, folder)})
        if expected is not None and told != expected:
            raise BenchError(f"{variant}: tokens differ from those of {args.variants[0]}; please report it")
        expected = told


def _tiers(variant: str, folder: str) -> dict[str, Any]:
    disk = {"kv_disk_path": folder, "kv_disk_size": 8}
    return {"computed": {}, "host": {"swap_space": 4}, "disk": disk, "restart": disk}[variant]


def _run(report: Report, args: argparse.Namespace, variant: str, options: dict[str, Any]) -> list[list[list[int]]]:
    """The tokens of each turn and conversation."""
    from quire import LLM

    chance = random.Random(0)
    prompts = [_ids(chance, args.first) for _ in range(args.conversations)]
    answers = []
    llm = LLM(**options)
    for turn in range(args.turns):
        if turn and variant == "restart":
            llm.close()
            llm = LLM(**options)
        _ask(llm, [_ids(random.Random(turn), 20)], 2)  # what a process does once is not measured
        with report.sample(variant=variant, turn=turn + 1) as values:
            told, values_of_turn = _ask(llm, prompts, args.outputs)
            values |= values_of_turn
        answers.append(told)
        prompts = [ids + more + _ids(chance, args.more) for ids, more in zip(prompts, told, strict=True)]
    llm.close()
    return answers


def _ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def _ask(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], dict[str, float]]:
    """One after another. Their tokens; times to first tokens, and the share of prompt tokens that were cached."""
    from quire import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    told, times, cached = [], [], 0
    for ids in prompts:
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        told.append(list(output.outputs[0].token_ids))
        times.append(output.metrics.first_token_time - output.metrics.arrival_time)
        cached += output.num_cached_tokens or 0
    ordered = sorted(times)
    return told, {
        "ttft_p50_ms": 1000 * statistics.median(ordered), "ttft_p90_ms": 1000 * ordered[int(0.9 * (len(ordered) - 1))],
        "cached_share": cached / sum(map(len, prompts)),
    }  # fmt: skip
