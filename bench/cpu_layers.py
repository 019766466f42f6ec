"""Times of the CPU layers at the shape of Qwen2-0.5B, and of whole steps next to transformers' own.

    python bench/cpu_layers.py linear          products: plain, oneDNN and MKL packed, by rows
    python bench/cpu_layers.py attention       paged attention of one layer, by context
    python bench/cpu_layers.py step            decode of 32 rows and prefill of 2048 tokens, against transformers
    options: --threads N  --dtype float32|bfloat16  --json FILE

Every number is in milliseconds: the first quartile of several runs, of steps the best. On a machine that does other
things too, compare numbers of one run only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from quire.gpu_worker.batch import StepBatch
from quire.gpu_worker.kernels.attention import Scores
from quire.gpu_worker.layers.attention_cpu import paged_attention
from quire.gpu_worker.layers.formats.dense import DENSE, cpu_backend, cpu_flags
from quire.gpu_worker.layers.linear import weight_of
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import ModelConfig

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_theta": 1000000.0,
}  # fmt: skip
BLOCK = 16
ROWS, CONTEXT, PROMPT, PREFILL_ROWS = 32, 160, 128, 16


def timed(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of ``run``, first quartile."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 4] * 1e3


def paired(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Milliseconds of both, taken in turns so that what else the machine does falls on both; the best of each."""
    best = [float("inf")] * 2
    for turn in range(-2, 2 * repeats):
        start = time.perf_counter()
        (ours, theirs)[turn % 2]()
        if turn >= 0:
            best[turn % 2] = min(best[turn % 2], (time.perf_counter() - start) * 1e3)
    return {"quire": best[0], "transformers": best[1], "ratio": best[1] / best[0]}


def show(name: str, values: dict[str, float], into: dict[str, Any]) -> None:
    """Print one row and keep it."""
    into[name] = {key: round(value, 3) for key, value in values.items()}
    print(f"{name:34s}", "  ".join(f"{key} {value:9.3f}" for key, value in values.items()), flush=True)


@torch.inference_mode()
def bench_linear(dtype: torch.dtype, results: dict[str, Any]) -> None:
    """Products of the model's five shapes with each packing."""
    print(f"linear, {dtype}, the rule chooses {cpu_backend(dtype)}")
    for columns, rows in ((896, 1152), (896, 896), (896, 9728), (4864, 896), (896, 151936)):
        weight = torch.randn(rows, columns, dtype=dtype) * 0.02
        names = ["plain", "onednn"]
        if dtype == torch.float32 and torch.backends.mkl.is_available():
            names.append("mkl")
        runs = {name: DENSE[name].linear({"weight": weight}, weight_of(weight)) for name in names}
        for count in (1, 8, 32, 128, 512):
            if rows > 100_000 and count > 128:
                continue
            x = torch.randn(count, columns, dtype=dtype)
            repeats = 4 if rows * count > 5_000_000 else 20
            values = {name: timed(lambda run=run, x=x: run(x, None), repeats) for name, run in runs.items()}
            show(f"{columns} -> {rows}, {count} rows", values, results)


def pages(rows: int, context: int) -> tuple[torch.Tensor, int]:
    """Shuffled block tables [rows, blocks] and how many blocks the cache needs."""
    width = -(-context // BLOCK)
    return torch.randperm(rows * width).view(rows, width).int(), rows * width


def decode_batch(rows: int, context: int) -> tuple[StepBatch, int]:
    """A step of ``rows`` decodes that see ``context`` keys each."""
    tables, blocks = pages(rows, context)
    last = context - 1
    return StepBatch(
        token_ids=torch.randint(0, 1000, (rows,)), positions=torch.full((rows,), last),
        slots=tables[:, last // BLOCK].long() * BLOCK + last % BLOCK,
        query_starts=torch.arange(rows + 1, dtype=torch.int32), context_lens=torch.full((rows,), context).int(),
        block_tables=tables, num_decodes=rows, max_query_len=1, max_context_len=context, block_size=BLOCK,
        host_query_starts=list(range(rows + 1)), host_context_lens=[context] * rows,
    ), blocks  # fmt: skip


def prefill_batch(rows: int, length: int) -> tuple[StepBatch, int]:
    """A step that prefills ``rows`` whole prompts of ``length`` tokens."""
    tables, blocks = pages(rows, length)
    position = torch.arange(length)
    starts = [row * length for row in range(rows + 1)]
    return StepBatch(
        token_ids=torch.randint(0, 1000, (rows * length,)), positions=position.repeat(rows),
        slots=(tables[:, position // BLOCK].long() * BLOCK + position % BLOCK).flatten(),
        query_starts=torch.tensor(starts).int(), context_lens=torch.full((rows,), length).int(), block_tables=tables,
        num_decodes=0, max_query_len=length, max_context_len=length, block_size=BLOCK,
        host_query_starts=starts, host_context_lens=[length] * rows,
    ), blocks  # fmt: skip


class Cache:
    """A paged cache in the CPU's physical order."""

    def __init__(self, layers: int, blocks: int, dtype: torch.dtype) -> None:
        def make() -> list[torch.Tensor]:
            return [torch.randn(2, blocks, BLOCK, 64).to(dtype).permute(1, 2, 0, 3) for _ in range(layers)]

        self.k, self.v = make(), make()


@torch.inference_mode()
def bench_attention(dtype: torch.dtype, results: dict[str, Any]) -> None:
    """One layer's paged attention, next to torch's attention over keys that lie ready (no paging at all)."""
    print(f"attention of one layer, {dtype}")
    cases = [(f"decode {rows} x {n}", *decode_batch(rows, n)) for rows, n in ((1, 2048), (32, 160), (32, 512))]
    cases += [(f"prefill {rows} x {n}", *prefill_batch(rows, n)) for rows, n in ((16, 128), (4, 512), (1, 2048))]
    for name, batch, blocks in cases:
        cache = Cache(1, blocks, dtype)
        rows, length, n = len(batch.host_context_lens), batch.max_query_len, batch.max_context_len
        q = torch.randn(rows * length, 14, 64, dtype=dtype)
        dense_q = q.view(rows, length, 14, 64).transpose(1, 2)
        k, v = (torch.randn(rows, 14, n, 64, dtype=dtype) for _ in range(2))
        values = {
            "paged": timed(lambda: paged_attention(q, cache.k[0], cache.v[0], batch, Scores(0.125)), 15),  # noqa: B023
            "dense": timed(
                lambda: F.scaled_dot_product_attention(dense_q, k, v, is_causal=length > 1),  # noqa: B023
                15,
            ),
        }
        show(name, values, results)


@torch.inference_mode()
def bench_step(dtype: torch.dtype, results: dict[str, Any]) -> None:
    """Whole steps, logits included: one decode of 32 rows, one prefill of 2048 tokens."""
    print(f"steps of the whole model, {dtype}, {torch.get_num_threads()} threads")
    start = time.perf_counter()
    model = load_model(ModelConfig("", SHAPE, 4096, SHAPE["vocab_size"]), dtype, torch.device("cpu"), "dummy")
    print(f"dummy weights in {time.perf_counter() - start:.1f} s")
    reference = transformers_model(dtype)
    decode, blocks = decode_batch(ROWS, CONTEXT)
    cache = Cache(24, blocks, dtype)
    theirs = transformers_decode(reference, dtype)
    show(
        f"decode {ROWS} x {CONTEXT}",
        paired(lambda: model.logits(model.forward(decode, cache)).argmax(-1), theirs, 6),
        results,
    )
    prefill, blocks = prefill_batch(PREFILL_ROWS, PROMPT)
    cache = Cache(24, blocks, dtype)
    last = torch.arange(PROMPT - 1, PREFILL_ROWS * PROMPT, PROMPT)
    ids = prefill.token_ids.view(PREFILL_ROWS, PROMPT)
    show(
        f"prefill {PREFILL_ROWS} x {PROMPT}",
        paired(
            lambda: model.logits(model.forward(prefill, cache)[last]).argmax(-1),
            lambda: reference(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1),
            2,
        ),
        results,
    )
    one, blocks = decode_batch(1, CONTEXT)
    cache = Cache(24, blocks, dtype)
    ours = timed(lambda: model.logits(model.forward(one, cache)).argmax(-1), 8)
    show(f"decode 1 x {CONTEXT}", {"quire": ours}, results)


def transformers_model(dtype: torch.dtype) -> Any:
    """The same shape as transformers runs it (sdpa attention), random weights."""
    import transformers

    config = transformers.Qwen2Config(**{k: v for k, v in SHAPE.items() if k not in ("architectures", "model_type")})
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config).to(dtype).eval()
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def transformers_decode(reference: Any, dtype: torch.dtype) -> Callable[[], None]:
    """One decode step of 32 rows with its own growing cache, from 160 keys on."""
    from transformers import DynamicCache

    cache = DynamicCache(config=reference.config)
    for layer in range(24):
        keys = torch.randn(ROWS, 2, CONTEXT, 64, dtype=dtype)
        cache.update(keys, keys.clone(), layer)
    ids = torch.randint(0, 1000, (ROWS, 1))
    mask = torch.ones(ROWS, CONTEXT + 1, dtype=torch.long)
    mask[::2, :3] = 0  # left padding, as generate has it for prompts of mixed length

    def run() -> None:
        nonlocal mask
        reference(ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits.argmax(-1)
        mask = F.pad(mask, (0, 1), value=1)

    return run


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["linear", "attention", "step"], default=[])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results: dict[str, Any] = {"threads": args.threads, "dtype": args.dtype, "cpu": cpu_flags()[0]}
    benches = {"linear": bench_linear, "attention": bench_attention, "step": bench_step}
    for what in args.what or benches:
        benches[what](getattr(torch, args.dtype), results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
