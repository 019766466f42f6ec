"""Speculation changes nothing: thousands of requests of every kind, with each method and without, under kills too.

The requests run once through an engine that does not speculate; then through one for each method, all drafts verified,
while processes of it are killed where --kills says so. Tokens, texts, reasons to end, ids to stop at and
log-probabilities must be the same, to the bit (with kills, log-probabilities to rounding: what was decoded one by one
is computed as one chunk after a loss).

The target is the demo model, turned into a MiMoForCausalLM of the same weights, so that every method has one model to
draft for. Draft model and EAGLE head are the demo model's; heads of the other methods are of random weights, which are
right where the noise decides: some requests are of high temperature.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from ..machine import ROOT
from ..report import BenchError, Report

DEMO = ROOT / "demo_model"
METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp")
TOLERANCE = 2e-3
"""Of a log-probability, where processes are killed."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WORDS = ["the", "a", "cat", "dog", "king", "house", "once", "upon", "time", "there", "little", "girl", "went", "forest"]
QUESTIONS = ("Tell me a story about a fox.", "Count to 12.", "Write a poem.", "Tell me a joke.", "Who are you?")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "hot": {"temperature": 2.0, "logprobs": 1},
    "filters": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "greedy penalties": {"temperature": 0.0, "presence_penalty": 0.5, "logprobs": 2},
    "json": {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}, "max_tokens": 60},
    "greedy json": {"temperature": 0.0, "structured_outputs": {"json": SCHEMA}, "max_tokens": 60, "logprobs": 1},
    "regex": {"temperature": 1.0, "structured_outputs": {"regex": "[a-z ]{10,30}[.]"}},
    "choice": {"temperature": 0.9, "structured_outputs": {"choice": ["a red fox", "a red house", "nothing at all"]}},
    "n": {"temperature": 1.0, "n": 3},
    "best_of": {"temperature": 0.9, "n": 2, "best_of": 4},
    "logprobs": {"temperature": 1.0, "logprobs": 5},
    "prompt_logprobs": {"temperature": 0.6, "prompt_logprobs": 2, "logprobs": 0},
    "stop strings": {"temperature": 1.0, "stop": ["the", ". "], "min_tokens": 3},
    "stop ids": {"temperature": 0.7, "stop_token_ids": [5, 9, 300, 301, 302], "min_tokens": 2},
    "logit_bias": {"temperature": 0.0, "logit_bias": {5: 4.0, 300: -5.0, 301: 3.0}},
    "bad_words": {"temperature": 0.8, "bad_words": ["the", " and", "once upon"], "ignore_eos": True},
    "allowed": {"temperature": 1.0, "allowed_token_ids": list(range(300, 330)), "ignore_eos": True},
    "to the limit": {"temperature": 0.5, "max_tokens": None},
}
"""Each more than once among the first hundred requests."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How many, of which methods, and how hard it is made."""
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--requests", type=int, default=10_000, help="for each method (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4, help="num_speculative_tokens (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=32, help="max_num_seqs, all of which speculate")
    parser.add_argument("--blocks", type=int, default=60, help="of 8 tokens: few, so that rows are preempted")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kills", type=float, default=0.0, help="seconds between kills of processes (default: none)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each method. Raises BenchError where an output differs."""
    with tempfile.TemporaryDirectory(prefix="quire-identity-") as scratch:
        target = mimo(Path(scratch) / "target", args.seed)
        asked = requests(args.requests, args.seed)
        with report.sample(method="off") as values:
            wanted = run(target, None, asked, args, values, kills=0.0)
        wrong = []
        for method in args.methods:
            config = config_of(method, Path(scratch) / method, args)
            with report.sample(method=method, kills_every_s=args.kills) as values:
                found = run(target, config, asked, args, values, args.kills)
                different = [at for at, each in enumerate(found) if not same(each, wanted[at], bool(args.kills))]
                values["requests"], values["different"] = len(found), len(different)
            wrong += [f"{method}: request {at} ({asked[at][0]}): {found[at]!r:.300} where off gave {wanted[at]!r:.300}"
                      for at in different[:5]]  # fmt: skip
        if wrong:
            raise BenchError("speculation changed outputs. " + " | ".join(wrong))


def requests(count: int, seed: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Of each request the kind, the prompt and the parameters."""
    rng, found = random.Random(seed), []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 40)))
        if rng.random() < 0.4:
            prompt = f"{prompt} . {prompt}"
        elif rng.random() < 0.5:
            prompt = f"<|im_start|>user\n{rng.choice(QUESTIONS)}<|im_end|>\n<|im_start|>assistant\n"
        found.append((kind, prompt, {"max_tokens": rng.randrange(3, 40), "seed": number, **KINDS[kind]}))
    return found


def run(
    target: Path, config: dict[str, Any] | None, asked: list[tuple[str, str, dict[str, Any]]],
    args: argparse.Namespace, values: dict[str, Any], kills: float,
) -> list[Any]:  # fmt: skip
    """What each request came to."""
    from quire import LLM, SamplingParams, StructuredOutputsParams

    params = []
    for _, _, fields in asked:
        form = fields.get("structured_outputs")
        more = {"structured_outputs": StructuredOutputsParams(**form)} if form else {}
        params.append(SamplingParams(**{**fields, **more}))
    options: dict[str, Any] = {} if config is None else {"speculative_config": config}
    if args.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = args.tensor_parallel_size
    found: list[Any] = []
    with LLM(
        model=str(target), max_model_len=160, block_size=8, max_num_seqs=args.rows, num_gpu_blocks_override=args.blocks,
        max_num_batched_tokens=2 * args.rows * (1 + args.tokens), data_parallel_size=args.workers, **options,
    ) as llm:  # fmt: skip
        killer = Killer(kills, args.seed)
        for first in range(0, len(asked), 500):
            part = slice(first, first + 500)
            outputs = llm.generate([prompt for _, prompt, _ in asked[part]], params[part], use_tqdm=False)
            found += [seen(output) for output in outputs]
        values["kills"] = killer.stop()
        try:
            stats = llm.stats()
        except TimeoutError:  # the last kill was of the scheduler, which had been asked
            stats = llm.stats()
        values["tokens"], values["preemptions"] = sum(len(c[0]) for each in found for c in each[1]), stats.preemptions
        values["drafted_tokens"], values["accepted_tokens"] = stats.draft_tokens, sum(stats.accepted)
    return found


def seen(output: Any) -> Any:
    """All that a client has of one request."""
    children = [(list(c.token_ids), c.text, c.finish_reason, c.stop_reason, told(c.logprobs)) for c in output.outputs]
    return list(output.prompt_token_ids), children, told(output.prompt_logprobs)


def told(logprobs: Any) -> Any:
    """Log-probabilities as lists of (token, rank, value)."""
    if logprobs is None:
        return None
    return [sorted((k, v.rank, v.logprob) for k, v in each.items()) if each else None for each in logprobs]


def same(one: Any, other: Any, rounded: bool) -> bool:
    """Whether two outcomes are equal; ``rounded``: floats, and the ranks beside them, nearly so."""
    if one == other or not rounded:
        return bool(one == other)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= TOLERANCE
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same(a, b, True) for a, b in zip(one, other, strict=True))
    return False


class Killer:
    """Kills a process of this one's engine, by chance, every ``gap`` seconds in the mean; 0: none."""

    def __init__(self, gap: float, seed: int) -> None:
        self._gap, self._rng, self._over, self._count = gap, random.Random(seed), threading.Event(), 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        if gap:
            self._thread.start()

    def stop(self) -> int:
        """How many were killed."""
        self._over.set()
        if self._gap:
            self._thread.join()
        return self._count

    def _run(self) -> None:
        import psutil

        while not self._over.wait(self._rng.uniform(0.5, 1.5) * self._gap):
            try:
                children = [each for each in psutil.Process().children(recursive=True)
                            if any(name in " ".join(each.cmdline()) for name in SERVICES)]  # fmt: skip
                if children:
                    self._rng.choice(children).kill()
                    self._count += 1
            except psutil.Error:
                continue


SERVICES = ("quire.gpu_worker", "quire.scheduler", "quire.detokenizer")

# ---------------------------------------------------------------- models


def mimo(folder: Path, seed: int) -> Path:
    """The demo model as a MiMoForCausalLM, with a layer of random weights that predicts a second token."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("draft", "eagle", "*.safetensors"))
    config = json.loads((DEMO / "config.json").read_text())
    tensors = load_file(DEMO / "model.safetensors")
    hidden, dim = config["hidden_size"], config["head_dim"]
    sizes = {"q": config["num_attention_heads"] * dim, "k": config["num_key_value_heads"] * dim}
    sizes["v"] = sizes["k"]
    generator, prefix = torch.Generator().manual_seed(seed), "model.mtp_layers.0."
    more = layer(prefix, hidden, config, generator)
    more[f"{prefix}input_proj.weight"] = noise(generator, hidden, 2 * hidden)
    for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm"):
        more[f"{prefix}{name}.weight"] = torch.ones(hidden)
    for at in [f"model.layers.{number}." for number in range(config["num_hidden_layers"])] + [prefix]:
        more |= {f"{at}self_attn.{name}_proj.bias": torch.zeros(size) for name, size in sizes.items()}
    save_file({name: tensor.bfloat16().contiguous() for name, tensor in (tensors | more).items()},
              folder / "model.safetensors")  # fmt: skip
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(method: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """``speculative_config`` of a method, whose heads are written where the demo model has none."""
    config: dict[str, Any] = {
        "method": method, "num_speculative_tokens": args.tokens, "adapt": False,
        "disable_by_batch_size": args.rows + 1,
    }  # fmt: skip
    if method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    elif method in ("draft_model", "eagle"):
        config["model"] = str(DEMO / method.removesuffix("_model"))
    elif method in ("eagle3", "medusa"):
        (eagle3 if method == "eagle3" else medusa)(folder, args)
        config["model"] = str(folder)
    return config


def eagle3(folder: Path, args: argparse.Namespace) -> None:
    """An EAGLE-3 head of random weights, with half of the vocabulary."""
    import torch

    config, generator = json.loads((DEMO / "config.json").read_text()), torch.Generator().manual_seed(args.seed)
    hidden, own = config["hidden_size"], config["vocab_size"] // 2
    tensors = layer("midlayer.", 2 * hidden, config, generator)
    tensors["fc.weight"] = noise(generator, hidden, 3 * hidden)
    tensors["lm_head.weight"] = noise(generator, own, hidden)
    tensors["d2t"] = torch.arange(own)  # every second token
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    write(folder, config | {"num_hidden_layers": 1, "draft_vocab_size": own}, tensors)


def medusa(folder: Path, args: argparse.Namespace) -> None:
    """Medusa's heads, of random weights."""
    import torch

    config, generator = json.loads((DEMO / "config.json").read_text()), torch.Generator().manual_seed(args.seed)
    hidden, tensors = config["hidden_size"], {}
    for head in range(args.tokens):
        tensors[f"{head}.0.linear.weight"] = noise(generator, hidden, hidden)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(hidden)
        tensors[f"{head}.1.weight"] = noise(generator, config["vocab_size"], hidden)
    write(folder, {"medusa_num_heads": args.tokens, "medusa_num_layers": 1}, tensors, "medusa_lm_head.safetensors")


def layer(prefix: str, inputs: int, config: dict[str, Any], generator: Any) -> dict[str, Any]:
    """Random tensors of one of Llama's layers, whose attention reads ``inputs`` values."""
    import torch

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (queries, inputs), "self_attn.k_proj": (keys, inputs), "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    found = {f"{prefix}{name}.weight": noise(generator, *shape) for name, shape in shapes.items()}
    return found | {f"{prefix}post_attention_layernorm.weight": torch.ones(hidden)}


def noise(generator: Any, rows: int, columns: int) -> Any:
    """A random matrix that keeps the size of what it multiplies."""
    import torch

    return torch.randn((rows, columns), generator=generator) / columns**0.5


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any], name: str = "model.safetensors") -> None:
    """A head's folder."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
