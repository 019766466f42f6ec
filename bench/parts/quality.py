"""What --quantization and --kv-cache-dtype cost the demo model: perplexity on its own corpus, and its greedy answers.

The corpus is `examples/train_demo_model.py`'s with another seed than the training's; the answers are to that file's
questions. ``same_tokens_pct`` are the answers' tokens before the first that differs from the float32 model's.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from types import ModuleType
from typing import Any

from ..machine import ROOT
from ..report import Report

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
SEED = 12345  # of documents that the model was not trained on


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How much text, and which methods."""
    parser.add_argument("--only", default="", help="methods whose name begins so, beside none")
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most")


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each method; the first is float32's."""
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
