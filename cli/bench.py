"""``quire bench {serve,sweep,throughput,latency,control-plane}``: names and meaning of flags are vLLM's.

throughput and latency run offline through ``quire.LLM``; serve loads a running server over HTTP, and sweep does so
again and again; control-plane measures the scheduler alone. Each prints a table and writes JSON with ``--output-json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from typing import Any

from ..proto.checkpoint.model_config import config_of, model_folder
from ..proto.config import ConfigError, EngineArgs, add_flags, from_namespace
from ..proto.http_args import HttpArgs
from ..proto.params import ParamError, SamplingParams
from .bench_results import percentile, positive, random_ids, save, spread
from .bench_serve import add_serve
from .bench_sweep import add_sweep
from .errors import CommandError

_NOT_OFFLINE = (
    *(fld.name for fld in dataclasses.fields(HttpArgs) if fld.name != "log_level"), "api_server_count", "headless",
    "scheduler", "advertise", "bind",
)  # fmt: skip
PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_parser(subparsers: Any) -> None:
    """Add ``bench`` and its commands; each sets ``run``, which returns an exit code."""
    parser = subparsers.add_parser("bench")
    kinds = parser.add_subparsers(dest="bench", metavar="KIND", required=True)
    _add_throughput(kinds)
    _add_latency(kinds)
    _add_control_plane(kinds)
    add_serve(kinds)
    add_sweep(kinds)


def _add_offline(kinds: Any, name: str, help: str) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=help, description=help)
    add_flags(parser, skip=_NOT_OFFLINE)
    parser.add_argument("--n", type=positive, default=1, help="continuations of each prompt (default: 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1.0)")
    parser.add_argument("--output-json", metavar="FILE", help="write the results here")
    return parser


def _add_throughput(kinds: Any) -> None:
    parser = _add_offline(kinds, "throughput", "tokens a second, offline, all prompts at once")
    parser.add_argument("--input-len", "--random-input-len", type=positive, default=1024, help="tokens of a prompt")
    parser.add_argument("--output-len", "--random-output-len", type=positive, default=128, help="tokens generated")
    parser.add_argument("--random-range-ratio", type=float, default=0.0, help="spread of lengths: x * [1 - r, 1 + r]")
    parser.add_argument("--num-prompts", type=positive, default=1000, help="prompts (default: 1000)")
    parser.add_argument("--num-warmups", type=int, default=1, help="prompts run before the clock starts (default: 1)")
    parser.set_defaults(run=throughput)


def _add_latency(kinds: Any) -> None:
    parser = _add_offline(kinds, "latency", "seconds of one batch, offline")
    parser.add_argument("--input-len", type=positive, default=32, help="tokens of a prompt (default: 32)")
    parser.add_argument("--output-len", type=positive, default=128, help="tokens generated (default: 128)")
    parser.add_argument("--batch-size", type=positive, default=8, help="prompts in a batch (default: 8)")
    parser.add_argument("--num-iters", type=positive, default=30, help="batches measured (default: 30)")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="batches run before (default: 10)")
    parser.set_defaults(run=latency)


def _add_control_plane(kinds: Any) -> None:
    help = "microseconds of the scheduler's plan + commit, with a worker that has no model"
    parser = kinds.add_parser("control-plane", help=help, description=help)
    parser.add_argument("--num-seqs", type=positive, default=256, help="running sequences (default: 256)")
    parser.add_argument("--steps", type=positive, default=2000, help="steps measured (default: 2000)")
    parser.add_argument("--input-len", type=positive, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--output-len", type=positive, default=256, help="tokens generated, on average (default: 256)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", metavar="FILE", help="write the results here")
    parser.set_defaults(run=control_plane)


# ---------------------------------------------------------------- offline


def throughput(args: argparse.Namespace) -> int:
    """Run every prompt at once and print requests/s and tokens/s."""
    draw = random.Random(args.seed)
    engine = _engine_args(args)
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"random_range_ratio must be in [0, 1), got {args.random_range_ratio}.")
    vocab = _check_lengths(engine, args.input_len, args.output_len, 1 + args.random_range_ratio)
    lengths = [(spread(draw, args.input_len, args.random_range_ratio),
                spread(draw, args.output_len, args.random_range_ratio)) for _ in range(args.num_prompts)]  # fmt: skip
    prompts = [random_ids(draw, i, vocab) for i, _ in lengths]
    params = [_params(args, o) for _, o in lengths]
    with _llm(engine) as llm:
        if args.num_warmups:
            warm = [random_ids(draw, args.input_len, vocab) for _ in range(args.num_warmups)]
            llm.generate(prompt_token_ids=warm, sampling_params=_params(args, min(args.output_len, 8)), use_tqdm=False)
        began = time.perf_counter()
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
        elapsed = time.perf_counter() - began
    read = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(child.token_ids) for output in outputs for child in output.outputs)
    result = {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": read + written,
        "total_output_tokens": written,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (read + written) / elapsed,
        "output_tokens_per_second": written / elapsed,
    }
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens: {read}\nTotal num output tokens: {written}"
    )
    save(args, "throughput", result)
    return 0


def latency(args: argparse.Namespace) -> int:
    """Run one batch again and again, with fresh prompts so that no prefix is cached; print seconds of each."""
    draw = random.Random(args.seed)
    engine = _engine_args(args)
    vocab = _check_lengths(engine, args.input_len, args.output_len, 1.0)
    params = _params(args, args.output_len)
    times = []
    with _llm(engine) as llm:
        for number in range(args.num_iters_warmup + args.num_iters):
            prompts = [random_ids(draw, args.input_len, vocab) for _ in range(args.batch_size)]
            began = time.perf_counter()
            llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            if number >= args.num_iters_warmup:
                times.append(time.perf_counter() - began)
    result: dict[str, Any] = {
        "avg_latency": sum(times) / len(times),
        "latencies": times,
        "percentiles": {str(p): percentile(times, p) for p in PERCENTILES},
    }
    print(f"Avg latency: {result['avg_latency']:.4f} seconds")
    for p, value in result["percentiles"].items():
        print(f"{p}% percentile latency: {value:.4f} seconds")
    save(args, "latency", result)
    return 0


def _engine_args(args: argparse.Namespace) -> EngineArgs:
    return from_namespace(args)


def _llm(engine: EngineArgs) -> Any:
    from ..client.offline.llm import LLM
    from ..client.supervisor.launch import LaunchError

    fields = {field.name: getattr(engine, field.name) for field in dataclasses.fields(EngineArgs)}
    changed = {f.name: fields[f.name] for f in dataclasses.fields(EngineArgs) if fields[f.name] != f.default}
    try:
        return LLM(**changed)
    except LaunchError as error:
        raise CommandError(str(error), error.code if error.code > 0 else 1) from error


def _params(args: argparse.Namespace, output_len: int) -> SamplingParams:
    try:
        return SamplingParams(n=args.n, temperature=args.temperature, ignore_eos=True, max_tokens=output_len)
    except ParamError as error:
        raise ConfigError(str(error)) from error


def _check_lengths(engine: EngineArgs, input_len: int, output_len: int, most: float) -> int:
    """The model's vocabulary. Raises ConfigError where the longest request cannot fit the model."""
    model = config_of(engine, model_folder(engine))
    longest = int((input_len + output_len) * most)
    if longest > model.max_model_len:
        raise ConfigError(
            f"input_len + output_len is up to {longest} tokens and max_model_len is {model.max_model_len}; "
            "lower --input-len or --output-len."
        )
    return model.vocab_size


# ---------------------------------------------------------------- the scheduler alone


def control_plane(args: argparse.Namespace) -> int:
    """Print microseconds of plan + commit."""
    from ..scheduler.fake.bench import run_control_plane

    result = run_control_plane(args.num_seqs, args.steps, args.input_len, args.output_len, args.seed)
    print(f"plan + commit of {args.num_seqs} sequences, microseconds of CPU a step (budget 1000, goal 150)")
    for name, value in result.items():
        print(f"{name:>20} {value:12.1f}")
    save(args, "control-plane", result)
    return 0
