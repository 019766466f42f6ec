"""``quire bench serve``: load a running server and time each stream, as `vllm bench serve` does.

TTFT is the time to the first chunk, ITL the time between chunks, TPOT the time a token after the first, E2EL the
whole. Any server with OpenAI's API will do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..proto.checkpoint.model_config import DEMO_MODEL, load_model_config, resolve_model
from ..proto.config import ConfigError
from .bench_results import percentile, positive, random_ids, save, spread

SMALL_VOCAB = 1000
"""Ids below this are used where the model's vocabulary is not known here."""

WORDS = ("the", "of", "and", "to", "in", "is", "it", "that", "for", "was", "on", "as", "with", "at", "by", "from")
METRICS = ("ttft", "tpot", "itl", "e2el")
_TITLES = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)",
           "itl": "Inter-token Latency", "e2el": "End-to-end Latency"}  # fmt: skip


def add_serve(kinds: Any) -> None:
    """Add the command."""
    help = "load a running server: TTFT, TPOT, ITL, end-to-end latency, tokens/s"
    parser = kinds.add_parser("serve", help=help, description=help)
    add_load_flags(parser)
    parser.add_argument("--request-rate", type=float, default=float("inf"), help="requests/s, Poisson (default: inf)")
    parser.add_argument("--max-concurrency", type=positive, help="requests under way at most")
    parser.add_argument("--output-json", metavar="FILE", help="write the results here")
    parser.set_defaults(run=serve)


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Which server, and what it is asked: all but how fast the requests come, and how many at once."""
    parser.add_argument(
        "--base-url", "--url", help="such as http://localhost:8000, in place of --host and --port"
    )  # as vLLM has it, and as quire chat and quire top do
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--endpoint", default="/v1/completions", help="or /v1/chat/completions")
    parser.add_argument("--model", help="name to ask for, or a local folder (default: the first the server has)")
    parser.add_argument("--api-key", help="also QUIRE_API_KEY or OPENAI_API_KEY")
    parser.add_argument("--num-prompts", type=positive, default=1000)
    parser.add_argument("--random-input-len", type=positive, default=1024)
    parser.add_argument("--random-output-len", type=positive, default=128)
    parser.add_argument("--random-range-ratio", type=float, default=0.0, help="spread of lengths: x * [1 - r, 1 + r]")
    parser.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all prompts share")
    parser.add_argument("--ignore-eos", action="store_true", help="generate to the full length")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the server's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goodput", nargs="+", metavar="METRIC:MS", help="count requests within, such as ttft:200")
    parser.add_argument("--ready-check-timeout-sec", type=float, default=60, help="wait for the server (default: 60)")
    parser.add_argument("--timeout", type=float, default=6 * 3600, help="seconds a request may take")


@dataclass
class Outcome:
    """One request as its client saw it; times are seconds."""

    ok: bool = False
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    e2el: float = 0.0
    itl: list[float] = field(default_factory=list)

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def serve(args: argparse.Namespace) -> int:
    """Run the load and print what came of it; 1 where no request succeeded."""
    if args.request_rate <= 0 or not 0 <= args.random_range_ratio < 1 or args.random_prefix_len < 0:
        raise ConfigError(
            "request_rate must be above 0, random_range_ratio in [0, 1) and random_prefix_len at least 0."
        )
    goals = _goals(args.goodput)
    outcomes, elapsed = asyncio.run(_load(args))
    result = summary(outcomes, elapsed, goals)
    _print(result, outcomes)
    save(args, "serve", result)
    return 0 if result["completed"] else 1


def _goals(given: list[str] | None) -> dict[str, float]:
    """Milliseconds by metric. Raises ConfigError."""
    goals = {}
    for item in given or []:
        name, _, limit = item.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"goodput {item!r} must look like ttft:200, tpot:50 or e2el:1000 (milliseconds).")
    return goals


# ---------------------------------------------------------------- the load


async def _load(args: argparse.Namespace) -> tuple[list[Outcome], float]:
    import aiohttp

    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1")
    key = args.api_key or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    draw = random.Random(args.seed)
    session = aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=args.timeout),
        read_bufsize=2**18,
    )
    async with session:
        model = await _model(session, base, args.model)
        bodies = _bodies(args, model, draw)
        url = base + args.endpoint
        await _first(session, url, bodies[0], args.ready_check_timeout_sec)
        gate = asyncio.Semaphore(args.max_concurrency or len(bodies))

        async def one(body: bytes) -> Outcome:
            async with gate:
                return await _ask(session, url, body)

        tasks = []
        began = due = time.perf_counter()
        for body in bodies:
            if args.request_rate != float("inf"):
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                due += draw.expovariate(args.request_rate)
            tasks.append(asyncio.create_task(one(body)))
        outcomes = await asyncio.gather(*tasks)
        return outcomes, time.perf_counter() - began


async def _first(session: Any, url: str, body: bytes, patience: float) -> None:
    """One request that is not measured, tried until the server is ready. Raises ConfigError."""
    limit = time.monotonic() + patience
    while not (outcome := await _ask(session, url, body)).ok:
        if time.monotonic() >= limit or outcome.error[:3] in ("400", "401", "404", "413"):
            raise ConfigError(f"a first request to {url} failed: {outcome.error}")
        await asyncio.sleep(0.5)


async def _model(session: Any, base: str, name: str | None) -> str:
    import aiohttp

    if name is not None:
        return name
    try:
        async with session.get(base + "/v1/models") as answer:
            return (await answer.json())["data"][0]["id"]
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"cannot ask {base} for its models ({error}); is the server running?") from error


def _bodies(args: argparse.Namespace, model: str, draw: random.Random) -> list[bytes]:
    """Each request's JSON. Completions get token ids; chats get words, about one a token."""
    chat = "chat" in args.endpoint
    vocab = _vocab(model)
    prefix = [draw.choice(WORDS) for _ in range(args.random_prefix_len)] if chat else []
    prefix_ids = random_ids(draw, args.random_prefix_len, vocab)
    bodies = []
    for _ in range(args.num_prompts):
        length = spread(draw, args.random_input_len, args.random_range_ratio)
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": spread(draw, args.random_output_len, args.random_range_ratio),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if chat:
            text = " ".join(prefix + [draw.choice(WORDS) for _ in range(length)])
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = prefix_ids + random_ids(draw, length, vocab)
        if args.ignore_eos:
            body["ignore_eos"] = True
        if args.temperature is not None:
            body["temperature"] = args.temperature
        bodies.append(msgspec.json.encode(body))
    return bodies


def _vocab(model: str) -> int:
    """The model's vocabulary where its folder is here."""
    if model != DEMO_MODEL and not Path(model, "config.json").is_file() and not model.endswith(".gguf"):
        return SMALL_VOCAB
    return load_model_config(resolve_model(model)).vocab_size


async def _ask(session: Any, url: str, body: bytes) -> Outcome:
    """One request, timed."""
    import aiohttp

    outcome = Outcome()
    began = last = time.perf_counter()
    done = False
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
            if answer.status != 200:
                outcome.error = f"{answer.status} {(await answer.text())[:300]}"
                return outcome
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    done = True
                    break
                event = msgspec.json.decode(data)
                if event.get("error"):
                    outcome.error = str(event["error"])[:300]
                    return outcome
                if event.get("choices"):
                    now = time.perf_counter()
                    if outcome.ttft:
                        outcome.itl.append(now - last)
                    else:
                        outcome.ttft = now - began
                    last = now
                if usage := event.get("usage"):
                    outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:300]
        return outcome
    outcome.e2el = last - began
    outcome.ok = done and outcome.ttft > 0
    if not outcome.ok:
        outcome.error = "the stream ended before [DONE]" if not done else "the stream held no text"
    return outcome


# ---------------------------------------------------------------- results


def summary(outcomes: list[Outcome], elapsed: float, goals: dict[str, float]) -> dict[str, Any]:
    """The names are vLLM's; latencies are milliseconds."""
    good = [outcome for outcome in outcomes if outcome.ok]
    read, written = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "duration": elapsed,
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(good) / elapsed,
        "output_throughput": written / elapsed,
        "total_token_throughput": (read + written) / elapsed,
    }
    if goals:
        met = sum(all(1000 * getattr(o, name) <= limit for name, limit in goals.items()) for o in good)
        result["request_goodput"] = met / elapsed
    values = {
        "ttft": [o.ttft for o in good],
        "tpot": [o.tpot for o in good if o.output_tokens > 1],
        "itl": [gap for o in good for gap in o.itl],
        "e2el": [o.e2el for o in good],
    }
    for name in METRICS:
        numbers = [1000 * value for value in values[name]]
        result[f"mean_{name}_ms"] = sum(numbers) / len(numbers) if numbers else 0.0
        result[f"median_{name}_ms"] = percentile(numbers, 50)
        result[f"p99_{name}_ms"] = percentile(numbers, 99)
    return result


def _print(result: dict[str, Any], outcomes: list[Outcome]) -> None:
    def line(title: str, value: float) -> None:
        print(f"{title:<42} {value:<12.2f}" if isinstance(value, float) else f"{title:<42} {value:<12}")

    print(f"{' Serving Benchmark Result ':=^55}")
    for title, name in (
        ("Successful requests:", "completed"), ("Failed requests:", "failed"), ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"), ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"), ("Request goodput (req/s):", "request_goodput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):  # fmt: skip
        if name in result:
            line(title, result[name])
    for name in METRICS:
        print(f"{_TITLES[name]:-^55}")
        for kind in ("mean", "median", "p99"):
            line(f"{kind.capitalize()} {name.upper()} (ms):", result[f"{kind}_{name}_ms"])
    print("=" * 55)
    errors = {outcome.error: None for outcome in outcomes if not outcome.ok}
    for error in list(errors)[:3]:
        print(f"failed: {error}")
