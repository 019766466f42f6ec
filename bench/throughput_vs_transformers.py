"""quire against transformers.generate: the same batch, the same machine, the same number of threads, in turns.

    python bench/throughput_vs_transformers.py --output-json bench/results/cpu-throughput.json

The model has Qwen2-0.5B's shape and random float32 weights; 32 requests of 128 tokens in and 64 out, greedy, no end
token. Each measurement has a process of its own that ends before the next begins, so neither side runs beside the
other; loading, the first pass and compiling are not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "eos_token_id": 151645,
}


def make_model(folder: Path) -> None:
    """The model's folder: a config, and the demo model's tokenizer, of which only the presence matters."""
    (folder / "config.json").write_text(json.dumps(SHAPE, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "demo_model" / name, folder / name)


def prompts(args: argparse.Namespace, seed: int) -> list[list[int]]:
    """Token ids of one batch."""
    draw = random.Random(seed)
    return [[draw.randrange(1000, 150_000) for _ in range(args.input_len)] for _ in range(args.num_prompts)]


# ---------------------------------------------------------------- the two sides, each in a process of its own


def run_quire(args: argparse.Namespace) -> float:
    """Seconds of one batch through quire.LLM."""
    from quire import LLM, SamplingParams

    def params(tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    with LLM(model=args.model, load_format="dummy", dtype="float32", device="cpu", cpu_threads=args.threads,
             max_model_len=args.input_len + args.output_len + 1) as llm:  # fmt: skip
        llm.generate(prompt_token_ids=prompts(args, 1), sampling_params=params(4), use_tqdm=False)
        batch = prompts(args, 2)
        began = time.perf_counter()
        outputs = llm.generate(prompt_token_ids=batch, sampling_params=params(args.output_len), use_tqdm=False)
        elapsed = time.perf_counter() - began
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    if made != args.num_prompts * args.output_len:
        raise SystemExit(f"quire made {made} tokens where {args.num_prompts * args.output_len} were asked for")
    return elapsed


def run_transformers(args: argparse.Namespace) -> float:
    """Seconds of one batch through transformers.generate, with its KV cache, left-padded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with no_init_weights():  # filling half a billion numbers from a normal distribution takes longer than the test
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.02, 0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)

    def generate(batch: list[list[int]], tokens: int) -> Any:
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
        with torch.inference_mode():
            return model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
                use_cache=True, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip

    generate(prompts(args, 1), 4)
    batch = prompts(args, 2)
    began = time.perf_counter()
    out = generate(batch, args.output_len)
    elapsed = time.perf_counter() - began
    if out.shape[1] != args.input_len + args.output_len:
        raise SystemExit(f"transformers made {out.shape[1] - args.input_len} tokens, not {args.output_len}")
    return elapsed


SIDES = {"quire": run_quire, "transformers": run_transformers}


# ---------------------------------------------------------------- the comparison


def measure(side: str, args: argparse.Namespace) -> float:
    """Seconds of one batch, measured in a fresh process."""
    flags = [f"--{name.replace('_', '-')}={getattr(args, name)}"
             for name in ("model", "threads", "num_prompts", "input_len", "output_len")]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--side", side, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{side} failed:\n{done.stderr[-4000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def cpu_name() -> str:
    """The processor as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str:
    """The commit this was measured at."""
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turns and print tokens/s of each."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(args.rounds):
        for side in SIDES if turn % 2 == 0 else reversed(SIDES):
            seconds[side].append(measure(side, args))
            made = args.num_prompts * args.output_len
            print(f"round {turn + 1}: {side:>12} {seconds[side][-1]:8.2f} s {made / seconds[side][-1]:9.1f} tokens/s",
                  flush=True)  # fmt: skip
    made, read = args.num_prompts * args.output_len, args.num_prompts * args.input_len
    result: dict[str, Any] = {
        "benchmark": "throughput_vs_transformers",
        "device": cpu_name(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
        "command": "python bench/throughput_vs_transformers.py " + " ".join(sys.argv[1:]),
        "load_average": os.getloadavg()[0],
        "requests": args.num_prompts,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "shape": SHAPE,
    }
    for side, times in seconds.items():
        median = statistics.median(times)
        result[side] = {"seconds": times, "output_tokens_per_second": made / median,
                        "total_tokens_per_second": (made + read) / median}  # fmt: skip
    result["ratio"] = result["quire"]["output_tokens_per_second"] / result["transformers"]["output_tokens_per_second"]
    print(
        f"{args.num_prompts} requests, {args.input_len} in, {args.output_len} out, {args.threads} threads, medians of "
        f"{args.rounds}:\nquire {result['quire']['output_tokens_per_second']:.1f} output tokens/s, transformers "
        f"{result['transformers']['output_tokens_per_second']:.1f}, ratio {result['ratio']:.2f}"
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compute threads of both sides")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side, in turns")
    parser.add_argument("--output-json", metavar="FILE")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(SIDES[args.side](args))
        return
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        make_model(Path(folder))
        args.model = folder
        result = compare(args)
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
