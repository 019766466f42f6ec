"""quire and llama.cpp with the same GGUF file, one request at a time, in turns: the first token and the gaps after it.

quire serves over HTTP, as its users have it; llama.cpp runs in its Python package's process, without a server. Weights
are those of --model, rounded to each type; prompts are random token ids.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..load import Load
from ..models import find_model, prompt_ids
from ..quantized import GGUF_TYPES, write_gguf
from ..report import BenchError, Report
from ..serving import run_load
from ..sides import Server, quire

SCRIPT = Path(__file__).parent.parent / "llamacpp_run.py"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, types and prompts, and where llama.cpp is."""
    parser.add_argument("--model", default="half-b-qwen2", help="a Qwen2 folder")
    parser.add_argument("--types", nargs="+", choices=GGUF_TYPES, default=list(GGUF_TYPES))
    parser.add_argument("--python", type=Path, help="an interpreter with llama-cpp-python")
    parser.add_argument("--dtype", default="bfloat16", help="of quire's activations")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--seconds", type=float, default=20.0, help="of quire's window, in each turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of llama.cpp")
    parser.add_argument("--turns", type=int, default=2)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each side, type and turn."""
    if args.python is None:
        raise BenchError("llamacpp needs an interpreter with llama-cpp-python; name it with --python.")
    model = find_model(args.model)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        for name in args.types:
            file = write_gguf(name, model, Path(folder))
            for turn in range(args.turns):
                for side, run in (("quire", _quire), ("llama.cpp", _llamacpp)):
                    labels = {"model": model.name, "type": name, "prompt": args.prompt}
                    with report.sample(**labels, side=side, turn=turn) as values:
                        values |= _figures(run(file, prompt_ids(model), args), args)
            file.unlink()


def _figures(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, float]:
    """Tokens/s by the medians of ``runs``: each has the seconds of a prefill, and of each token after its first."""
    first = statistics.median(run["prefill"] for run in runs)
    gap = statistics.median(gap for run in runs for gap in run["gaps"])
    return {
        "ttft_ms": 1000 * first,
        "prompt_tokens_per_s": args.prompt / first,
        "itl_p50_ms": 1000 * gap,
        "itl_min_ms": 1000 * min(gap for run in runs for gap in run["gaps"]),
        "decode_tokens_per_s": 1 / gap,
        "requests": len(runs),
    }


def _quire(file: Path, ids: tuple[int, int], args: argparse.Namespace) -> list[dict[str, Any]]:
    with Server(quire(), file, args.dtype) as server:
        load = Load(
            "127.0.0.1", server.port, file.name, 1, seconds=args.seconds, inputs=(args.prompt, args.prompt),
            outputs=(args.tokens, args.tokens), ids=ids,
        )  # fmt: skip
        found = run_load(load)
    ended = [request for request in found["requests"] if request["done"] and len(request["times"]) > 1]
    if not ended:
        raise BenchError("no request ended within the window; give a longer one with --seconds.")
    return [
        {
            "prefill": each["times"][0] - each["sent"],
            "gaps": [after - before for before, after in itertools.pairwise(each["times"])],
        }
        for each in ended
    ]


def _llamacpp(file: Path, ids: tuple[int, int], args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = random.Random(0)
    asked = {
        "file": str(file), "threads": args.threads, "tokens": args.tokens,
        "prompts": [rng.choices(range(*ids), k=args.prompt) for _ in range(3)],
    }  # fmt: skip
    command = [str(args.python), "-P", str(SCRIPT)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise BenchError(f"llama.cpp in {args.python} failed with code {done.returncode}: {last}")
    return json.loads(done.stdout)
