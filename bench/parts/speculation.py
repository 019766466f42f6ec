"""Speculation on and off: tokens/s of one row and of many, what is accepted at each place, and what coupling costs.

One request at a time (``rows`` 1) or many at once, of the demo model's own kind of conversation. With --coupling no
engine is started: along the target's own text the probability is summed that a draft is accepted, by shared noise as
quire does it and by the rejection test of arXiv 2211.17192 on the same two distributions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import time
from itertools import product
from typing import Any

from ..machine import ROOT
from ..report import BenchError, Report, note_progress, rounded

DEMO = ROOT / "demo_model"
METHODS: dict[str, dict[str, Any]] = {
    "off": {},
    "off_again": {},  # another engine that drafts nothing: how far two of a kind are apart
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": str(DEMO / "draft")},
    "eagle": {"method": "eagle", "model": str(DEMO / "eagle")},
}
QUESTIONS = (
    "Tell me a story about a fox.", "Count to 12.", "Write a poem.", "Tell me a joke.",
    "Explain the theory of plate tectonics.",
    "Give me a JSON object with name and age", "Who are you?", "How do I repair a steam engine?",
)  # fmt: skip
"""Of PROBES in examples/train_demo_model.py, and of their kind."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which methods, how many rows, how often."""
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--tokens", type=int, default=4, help="num_speculative_tokens (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--requests", type=int, default=48, help="for each of rows (default: %(default)s)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--ignore-eos", action="store_true", help="answers of --max-tokens tokens")
    parser.add_argument("--turns", type=int, default=3)
    help = "so often all engines are started anew: each is a few per cent quicker or slower for as long as it runs"
    parser.add_argument("--starts", type=int, default=1, help=f"{help} (default: %(default)s)")
    parser.add_argument("--coupling", action="store_true", help="acceptance by shared noise and by rejection, on paper")
    parser.add_argument("--positions", type=int, default=4000, help="of --coupling (default: %(default)s)")


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each method, number of rows, temperature and turn."""
    if args.coupling:
        measure_coupling(report, args)
        return
    for start in range(args.starts):
        with contextlib.ExitStack() as stack:
            order = args.methods[start % len(args.methods) :] + args.methods[: start % len(args.methods)]
            engines = {method: stack.enter_context(engine(args, method)) for method in order}
            for llm in engines.values():
                run(args, llm, 2 * max(args.rows), max(args.rows), 0.0)  # warm
            for turn, rows, temperature in product(range(args.turns), args.rows, args.temperatures):
                in_turns(report, args, engines, rows, temperature, start * args.turns + turn)


def engine(args: argparse.Namespace, method: str) -> Any:
    """Of the demo model, drafting by ``method``."""
    from quire import LLM

    config = json.dumps({**METHODS[method], "num_speculative_tokens": args.tokens})
    options = {"speculative_config": config} if METHODS[method] else {}
    return LLM(model=str(DEMO), max_model_len=1024, max_num_seqs=max(args.rows), **options)


def in_turns(
    report: Report, args: argparse.Namespace, engines: dict[str, Any], rows: int, temperature: float, turn: int
) -> None:
    """The same requests to one engine after another, in an order drawn for each turn: whoever comes first after a pause
    is a little quicker. Each is compared with those that draft nothing, their mean in the same turn."""
    order = list(engines.items())
    random.Random(turn).shuffle(order)
    speed: dict[str, float] = {}
    for method, llm in order:
        before = counters(llm)
        labels = {"method": method, "rows": rows, "temperature": temperature, "drafted": args.tokens}
        with report.sample(**labels, turn=turn) as values:
            tokens, seconds = run(args, llm, args.requests, rows, temperature)
            speed[method] = tokens / seconds
            values["tokens_per_s"], values["output_tokens"] = speed[method], tokens
            values |= accepted(before, counters(llm))
    plain = [each for method, each in speed.items() if not METHODS[method]]
    if plain:
        shares = {method: rounded(100 * each * len(plain) / sum(plain)) for method, each in speed.items()}
        for sample in report.samples[-len(order) :]:
            sample["values"]["of_off_pct"] = shares[sample["labels"]["method"]]
        note_progress("of off, %: " + ", ".join(f"{method} {share:.1f}" for method, share in shares.items()))
        report.save()


def run(args: argparse.Namespace, llm: Any, requests: int, rows: int, temperature: float) -> tuple[int, float]:
    """(tokens, seconds) of so many requests, ``rows`` at a time."""
    from quire import SamplingParams

    tokens, began = 0, time.monotonic()
    for first in range(0, requests, rows):
        numbers = range(first, min(first + rows, requests))
        chats = [[{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}] for number in numbers]
        asked = {"max_tokens": args.max_tokens, "ignore_eos": args.ignore_eos}
        params = [SamplingParams(temperature=temperature, seed=number, **asked) for number in numbers]
        for output in llm.chat(chats, params, use_tqdm=False):
            tokens += len(output.outputs[0].token_ids)
    return tokens, time.monotonic() - began


def counters(llm: Any) -> tuple[int, int, list[int]]:
    """The engine's counters: verifications, tokens drafted, and kept by place."""
    stats = llm.stats()
    return stats.drafts, stats.draft_tokens, list(stats.accepted)


def accepted(before: tuple[int, int, list[int]], after: tuple[int, int, list[int]]) -> dict[str, Any]:
    """What was drafted and kept between two readings; by place, of the verifications."""
    drafts, tokens = after[0] - before[0], after[1] - before[1]
    if not drafts:
        return {}
    past = before[2] + [0] * len(after[2])
    kept = [now - then for now, then in zip(after[2], past, strict=False)]
    values: dict[str, Any] = {"drafted_tokens": tokens, "accepted_pct": 100 * sum(kept) / max(1, tokens)}
    values["mean_length_tokens"] = 1 + sum(kept) / drafts
    return values | {f"place_{place}_pct": 100 * count / drafts for place, count in enumerate(kept)}


# ---------------------------------------------------------------- on paper


def measure_coupling(report: Report, args: argparse.Namespace) -> None:
    """A sample for each temperature: means over positions of the target's text."""
    import torch
    from transformers import AutoModelForCausalLM

    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (DEMO, DEMO / "draft")
    )
    for temperature in (each for each in args.temperatures if each > 0):
        with report.sample(method="draft_model", temperature=temperature, part="coupling") as values:
            values |= coupling(target, draft, texts(args.positions), temperature)


def texts(positions: int) -> Any:
    """Rows of 256 ids of the demo model's corpus that it was not trained on."""
    import torch
    from transformers import AutoTokenizer

    path = ROOT / "examples" / "train_demo_model.py"
    found = importlib.util.spec_from_file_location("train_demo_model", path)
    if found is None or found.loader is None:
        raise BenchError(f"{path} cannot be read.")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    corpus, tokenizer = module.Corpus(12345), AutoTokenizer.from_pretrained(DEMO)
    ids: list[int] = []
    while len(ids) < positions:
        text = "".join(part for part, _ in corpus.document())
        ids += tokenizer(text, add_special_tokens=False).input_ids
    return torch.tensor(ids[: positions // 256 * 256]).view(-1, 256)


def coupling(target: Any, draft: Any, rows: Any, temperature: float) -> dict[str, float]:
    """Means of the probability that one draft is accepted: as drawn by quire's sampler (one draw a position); by shared
    noise sum_i 1 / sum_j max(p_j/p_i, q_j/q_i); by the rejection test 1 - TV = sum_i min(p_i, q_i); of the most likely
    token of the draft p(argmax q); and the bound (1 - TV) / (1 + TV) of arXiv 2408.07978."""
    import torch

    found: dict[str, list[float]] = {"drawn": [], "shared_noise": [], "rejection": [], "greedy_draft": [], "bound": []}
    with torch.inference_mode():
        for seed, row in enumerate(rows):
            p, q = ((model(row[None]).logits[0].double() / temperature).softmax(-1) for model in (target, draft))
            found["drawn"] += drawn_alike(p, q, seed)
            overlap = torch.minimum(p, q).sum(-1)
            found["rejection"] += overlap.tolist()
            found["bound"] += (overlap / (2 - overlap)).tolist()
            found["greedy_draft"] += p.gather(1, q.argmax(-1, keepdim=True))[:, 0].tolist()
            found["shared_noise"] += [shared_noise(a, b) for a, b in zip(p, q, strict=True)]
    return {f"{name}_pct": 100 * sum(each) / len(each) for name, each in found.items()}


def drawn_alike(p: Any, q: Any, seed: int) -> list[float]:
    """1.0 for each position at which both distributions [T, V] draw the same token with the noise of ``seed``."""
    import numpy as np
    import torch

    from quire.gpu_worker.kernels import columns
    from quire.gpu_worker.kernels.sampling import draw_numpy

    params = np.zeros((len(p), columns.COLUMNS), np.int32)
    params.view(np.float32)[:, columns.INV_T] = 1.0
    params[:, columns.SEED_LOW] = seed
    told = torch.from_numpy(params), torch.arange(len(p)), None
    tokens = [draw_numpy(each.log().clamp(min=-1e4).float(), *told) for each in (p, q)]
    return (tokens[0] == tokens[1]).double().tolist()


def shared_noise(p: Any, q: Any) -> float:
    """Sum over tokens i of 1 / sum over j of max(p_j / p_i, q_j / q_i), for two distributions over V tokens.

    With the tokens in the order of r = p / q, max(p_j / p_i, q_j / q_i) is p_j / p_i where r_j >= r_i, and q_j / q_i
    elsewhere: so the inner sums are two cumulative sums.
    """
    import torch

    alive = (p > 1e-300) & (q > 1e-300)
    order = (p[alive] / q[alive]).argsort()
    a, b = p[alive][order], q[alive][order]
    # Tokens that one side alone has count for that side.
    only_p, only_q = float(p[~alive].sum()), float(q[~alive].sum())
    above = a.flip(0).cumsum(0).flip(0) + only_p  # of p, from i on
    below = torch.cat((b.new_zeros(1), b.cumsum(0)[:-1])) + only_q
    return float((1 / (above / a + below / b)).sum())
