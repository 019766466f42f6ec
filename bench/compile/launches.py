"""Every Triton kernel of the worker, launched through its wrapper at the shapes that decide how it is compiled.

The tensors have a CUDA device and no memory (torch's FakeTensorMode), so a wrapper chooses what it would choose on
the card whose properties ``compiler`` shows it; ``JITFunction.run`` is replaced, so nothing runs. One list serves
the compile matrix, the roofline and the search for 32-bit products.

A name says the part, then the shape. ``Launch.short``: what the test suite compiles as well.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.gpu_worker.batch import StepBatch
from quire.gpu_worker.kernels import (
    activation,
    attention,
    coded,
    linear,
    logprobs,
    lora,
    marks,
    masks,
    moe,
    moe_routing,
    norm,
    penalties,
    rope,
    sampling,
)
from quire.gpu_worker.kernels.card import card_of
from quire.gpu_worker.kernels.codes import Activations, Codes, PerGroup, plane_widths
from quire.gpu_worker.kernels.columns import COLUMNS
from quire.gpu_worker.spec import MoESpec

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BYTE, INT, LONG = torch.uint8, torch.int32, torch.int64
VOCAB, PAGE, CONTEXT = 128_256, 16, 4096


class Launch(NamedTuple):
    """Something that a step does with one or more kernels."""

    name: str
    run: Callable[[], object]
    short: bool = False


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor of the card."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def caches(kv_heads: int, dim: int, dtype: torch.dtype, tokens: int = 1 << 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer in the order of a GPU's cache: heads before the places of a block."""
    shape = tokens // PAGE, kv_heads, PAGE, dim
    return empty(*shape, dtype=dtype).transpose(1, 2), empty(*shape, dtype=dtype).transpose(1, 2)


def step(rows: int, tokens: int, decodes: int | None = None, context: int = CONTEXT) -> StepBatch:
    """A step of decodes (rows == tokens), of prefills, or of ``decodes`` and prefills; lengths are equal."""
    decodes = (rows if rows == tokens else 0) if decodes is None else decodes
    length = 1 if decodes == rows else (tokens - decodes) // (rows - decodes)
    ids, shorts = empty(tokens, dtype=LONG), empty(rows + 1, dtype=INT)
    table = empty(rows, context // PAGE, dtype=INT)
    return StepBatch(
        token_ids=ids, positions=ids, slots=ids, query_starts=shorts, context_lens=shorts[:rows], block_tables=table,
        num_decodes=decodes, max_query_len=length, max_context_len=context, block_size=PAGE,
    )  # fmt: skip


def attend(
    heads: tuple[int, int, int],
    batch: StepBatch,
    dtype: torch.dtype = BF16,
    cache: torch.dtype | None = None,
    **options,
) -> None:
    """One layer's attention; ``heads`` are (query heads, key heads, their dim), ``cache`` the cache's dtype."""
    queries, kv_heads, dim = heads
    k, v = caches(kv_heads, dim, cache or dtype)
    per_head = {name: empty(queries, dtype=FLOAT) for name in ("slopes", "sinks") if options.pop(name, False)}
    q = empty(len(batch.token_ids), queries + 2 * kv_heads, dim, dtype=dtype)[:, :queries]
    attention.paged_attention(q, k, v, batch, attention.Scores(dim**-0.5, **options, **per_head))


LLAMA, QWEN, GEMMA, PHI, OSS = (32, 8, 128), (14, 2, 64), (8, 1, 256), (32, 32, 80), (64, 8, 64)

ATTENTION = [
    Launch("attention.decode-1-of-8k", lambda: attend(LLAMA, step(1, 1, context=8192))),
    Launch("attention.decode-8", lambda: attend(LLAMA, step(8, 8)), short=True),
    Launch("attention.decode-64", lambda: attend(LLAMA, step(64, 64))),
    Launch("attention.decode-256", lambda: attend(LLAMA, step(256, 256))),
    Launch("attention.prefill-8", lambda: attend(LLAMA, step(8, 64))),
    Launch("attention.prefill-2048", lambda: attend(LLAMA, step(1, 2048)), short=True),
    Launch("attention.mixed-64-and-1024", lambda: attend(LLAMA, step(65, 1088, decodes=64))),
    Launch("attention.softcap-window-prefill", lambda: attend(QWEN, step(4, 512), HALF, window=100, softcap=30.0)),
    Launch("attention.dim-256-decode", lambda: attend(GEMMA, step(8, 8))),
    Launch("attention.dim-256-prefill", lambda: attend(GEMMA, step(2, 1024))),
    Launch("attention.dim-80-decode", lambda: attend(PHI, step(300, 300))),
    Launch("attention.dim-80-prefill", lambda: attend(PHI, step(2, 1024))),
    Launch("attention.sinks-decode", lambda: attend(OSS, step(8, 8), slopes=True, sinks=True)),
    Launch("attention.sinks-window-prefill", lambda: attend(OSS, step(4, 2048), window=128, slopes=True, sinks=True)),
    Launch("attention.e4m3-decode-8", lambda: attend(LLAMA, step(8, 8), cache=E4M3), short=True),
    Launch("attention.e4m3-decode-256", lambda: attend(LLAMA, step(256, 256), cache=E4M3)),
    Launch("attention.e4m3-prefill-2048", lambda: attend(LLAMA, step(1, 2048), cache=E4M3)),
    Launch("attention.e4m3-half-dim-256-prefill", lambda: attend(GEMMA, step(2, 1024), HALF, E4M3)),
    Launch("attention.e5m2-decode-8", lambda: attend(LLAMA, step(8, 8), cache=E5M2)),
    Launch("attention.e5m2-prefill-2048", lambda: attend(LLAMA, step(1, 2048), cache=E5M2)),
    Launch("attention.fp32-decode", lambda: attend(LLAMA, step(8, 8), FLOAT)),
    Launch("attention.fp32-prefill", lambda: attend(LLAMA, step(2, 256), FLOAT)),
]


def rows_of(batch: int, dtype: torch.dtype = FLOAT) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, parameters and positions (or slots) of a step's samples."""
    return empty(batch, VOCAB, dtype=dtype), empty(batch, COLUMNS, dtype=INT), empty(batch, dtype=LONG)


def thresholds(search: bool, dtype: torch.dtype = BF16) -> None:
    logits, params, _ = rows_of(64, dtype)
    sampling.threshold(logits, params, True, search, search)


def draw(filtered: bool, dtype: torch.dtype = BF16) -> None:
    logits, params, positions = rows_of(64, dtype)
    sampling.draw(logits, params, positions, empty(64, dtype=FLOAT) if filtered else None)


def draw_part() -> None:
    """A rank's share of the vocabulary, that begins within four tokens."""
    _, params, positions = rows_of(64)
    sampling.draw_part(empty(64, VOCAB // 4 + 1), params, positions, VOCAB // 4 + 1)


def mask(by_row: bool) -> None:
    logits, params, rows = rows_of(64)
    bits = empty(256, -(-VOCAB // 32), dtype=INT)
    masks.mask_bits(logits, bits, rows, params) if by_row else masks.mask_bits(logits, bits[:64])


def ban() -> None:
    logits, params, rows = rows_of(64)
    words = masks.Words(*(empty(17, dtype=INT) for _ in range(4)))
    masks.ban_words(logits, words, empty(256, CONTEXT, dtype=INT), rows, rows, params)


def penalise() -> None:
    logits, params, rows = rows_of(64)
    penalties.penalise(logits, empty(256, VOCAB, dtype=INT), rows, params)


def tell(processed: bool) -> None:
    logits, params, slots = rows_of(64)
    source = logprobs.Source(logits, slots)
    if processed:
        source = logprobs.Source(logits, slots, params, empty(64, dtype=FLOAT))
    logprobs.stats(source, slots)
    logprobs.best(source, 20)


SAMPLER = [
    Launch("sampler.threshold", lambda: thresholds(True), short=True),
    Launch("sampler.threshold-float32", lambda: thresholds(True, FLOAT)),
    Launch("sampler.threshold-min-p", lambda: thresholds(False)),
    Launch("sampler.draw", lambda: draw(False), short=True),
    Launch("sampler.draw-filtered", lambda: draw(True)),
    Launch("sampler.draw-float32", lambda: draw(True, FLOAT)),
    Launch("sampler.draw-part", draw_part),
    Launch("sampler.mask-by-slot", lambda: mask(False)),
    Launch("sampler.mask-by-row", lambda: mask(True)),
    Launch("sampler.bad-words", ban),
    Launch("sampler.marks", lambda: marks.marked(rows_of(64)[0], rows_of(64)[2])),
    Launch("sampler.marks-of-values", lambda: marks.marked(empty(64, dtype=FLOAT), rows_of(64)[2])),
    Launch("sampler.penalties", penalise),
    Launch("sampler.logprobs", lambda: tell(False)),
    Launch("sampler.logprobs-processed", lambda: tell(True)),
]


def rms(width: int = 4096, residual: bool = True) -> None:
    x = empty(64, width)
    norm.rms_norm(x, empty(width), 1e-5, empty(64, width) if residual else None)


def head_norm(centred: bool) -> None:
    """Of the query heads of a fused projection."""
    heads = empty(64, 48, 128)[:, :32]
    if centred:
        norm.layer_norm(heads, empty(32, 128), None, 1e-5)
    else:
        norm.rms_norm(heads, empty(128), 1e-5, plus_one=True)


def layer_norm() -> None:
    norm.layer_norm(empty(64, 4096), empty(4096), empty(4096), 1e-5, empty(64, 4096))


def rotate(pairs: bool = False, half: int = 64, dtype: torch.dtype = BF16, cache: torch.dtype | None = None) -> None:
    """Queries, keys and values of one fused projection; half 0: nothing is rotated."""
    q, k, v = empty(64, 48, 128, dtype=dtype).split([32, 8, 8], dim=1)
    k_cache, v_cache = caches(8, 128, cache or dtype)
    table = empty(8192, half, dtype=FLOAT) if half else None
    places = empty(64, dtype=LONG)
    rope.rope_write(q, k, v, table, table, places, places, k_cache, v_cache, interleaved=pairs)


LAYERS = [
    Launch("layers.rms-norm-and-residual", rms, short=True),
    Launch("layers.rms-norm-8192", lambda: rms(8192)),
    Launch("layers.rms-norm-heads", lambda: head_norm(False)),
    Launch("layers.layer-norm", layer_norm),
    Launch("layers.layer-norm-heads", lambda: head_norm(True)),
    Launch("layers.rope-and-cache", rotate, short=True),
    Launch("layers.rope-interleaved", lambda: rotate(pairs=True, half=32)),
    Launch("layers.cache", lambda: rotate(half=0)),
    Launch("layers.rope-fp32", lambda: rotate(dtype=FLOAT)),
    Launch("layers.rope-e4m3-cache", lambda: rotate(cache=E4M3)),
    Launch("layers.rope-e5m2-cache", lambda: rotate(cache=E5M2)),
    *(
        Launch(f"layers.gated-{kind}", lambda kind=kind: activation.gated_activation(empty(64, 28_672), kind))
        for kind in ("silu", "gelu", "gelu_tanh", "swiglu_oai")
    ),
    *(
        Launch(f"layers.{kind}", lambda kind=kind: activation.activation(empty(64, 14_336), kind))
        for kind in ("relu", "relu2", "quick_gelu")
    ),
]


def choose(spec: MoESpec) -> None:
    """The router's choice."""
    moe_routing.route(empty(8, spec.experts), spec, empty(spec.experts, dtype=FLOAT) if spec.groups else None)


def codes_of(
    rows: int, columns: int, bits: int = 4, group: int = 128, experts: int | None = None, **more: Any
) -> Codes:
    """A weight of codes with zeros and fp16 scales of groups, as AWQ and GPTQ have them, or as ``more`` says."""
    lead = () if experts is None else (experts,)
    planes = tuple(empty(*lead, rows, columns * width // 32, dtype=INT) for width in plane_widths(bits))
    groups = columns // group
    given = {
        "scales": PerGroup(empty(*lead, rows, groups, dtype=HALF)),
        "zeros": empty(*lead, rows, groups, dtype=BYTE),
    }
    return Codes(planes, bits, columns, group, **given | more)


def experts(
    tokens: int, count: int, top_k: int, sizes: tuple[int, int], kind: str = "silu", bias: bool = False,
    dtype: torch.dtype = BF16, codes: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """The experts of a layer, between the router's choice and the sum; ``sizes`` are (hidden, an expert's width).

    ``codes``: what ``codes_of`` is given, where weights are codes."""
    from quire.gpu_worker.layers.formats.base import Weight, whole
    from quire.gpu_worker.layers.formats.coded import Coded
    from quire.gpu_worker.layers.formats.dense import PLAIN
    from quire.gpu_worker.layers.linear import ExpertLinear
    from quire.gpu_worker.layers.moe import Experts, experts_grouped

    hidden, width = sizes
    linears = []
    for rows, columns in ((2 * width, hidden), (hidden, width)):
        format, tensors = PLAIN, {}
        if codes is None:
            tensors["weight"] = empty(count, rows, columns, dtype=dtype)
        else:
            format = Coded()
            format.codes = partial(lambda held, *_: held, codes_of(rows, columns, experts=count, **codes))
        weight = Weight((whole(rows),), whole(columns), dtype, torch.device("cuda"), count)
        linears.append(ExpertLinear(format, tensors, weight, empty(count, rows, dtype=dtype) if bias else None))
    weights, ids = empty(tokens, top_k, dtype=FLOAT), empty(tokens, top_k, dtype=LONG)
    experts_grouped(empty(tokens, hidden, dtype=dtype), weights, ids, Experts(*linears, activation=kind))


MOE = [
    Launch("moe.route-softmax", lambda: choose(MoESpec(128, 8, 1, renormalise=True)), short=True),
    Launch("moe.route-topk-softmax", lambda: choose(MoESpec(60, 4, 1, "topk_softmax"))),
    Launch("moe.route-few", lambda: choose(MoESpec(8, 2, 1, renormalise=True))),
    Launch("moe.route-64", lambda: choose(MoESpec(64, 4, 1))),
    Launch(
        "moe.route-groups",
        lambda: choose(MoESpec(256, 8, 1, "sigmoid", renormalise=True, groups=8, topk_groups=4)),
    ),
    Launch("moe.decode-8", lambda: experts(8, 128, 8, (2048, 768)), short=True),
    Launch("moe.decode-256", lambda: experts(256, 128, 8, (2048, 768))),
    Launch("moe.prefill-2048", lambda: experts(2048, 128, 8, (2048, 768))),
    Launch("moe.swiglu-bias-decode", lambda: experts(8, 32, 4, (2880, 2880), "swiglu_oai", True)),
    Launch("moe.swiglu-bias-prefill", lambda: experts(1024, 32, 4, (2880, 2880), "swiglu_oai", True, HALF)),
    Launch("moe.fp32-ragged", lambda: experts(8, 4, 2, (72, 40), "gelu", dtype=FLOAT)),
]


def few_rows(width: int, activation: str = "", dtype: torch.dtype = BF16, most: int | None = None) -> None:
    """A product of eight rows with a weight [width, 4096], by each of the tiles that are measured on a card."""
    x, weight = empty(8, 4096, dtype=dtype), empty(width, 4096, dtype=dtype)
    outputs = width // 2 if activation else width
    for tiles in linear.few_rows_tiles(outputs, 4096, dtype, activation, card_of(x.device))[:most]:
        linear.product(x, weight, None, tiles, activation)


def invariant(rows: int, dtype: torch.dtype = BF16) -> None:
    """A product whose rows have the same bits in any company (``--batch-invariant``)."""
    x, weight = empty(rows, 4096, dtype=dtype), empty(6144, 4096, dtype=dtype)
    linear.product(x, weight, empty(6144, dtype=dtype), linear.invariant_tiles(6144, 4096, dtype, card_of(x.device)))


PRODUCTS = [
    Launch("products.few-rows-first", lambda: few_rows(6144, most=1), short=True),
    Launch("products.few-rows", lambda: few_rows(6144)),
    Launch("products.few-rows-gated", lambda: few_rows(28_672, "silu")),
    Launch("products.few-rows-fp32", lambda: few_rows(6144, dtype=FLOAT, most=1)),
    Launch("products.invariant-decode", lambda: invariant(8)),
    Launch("products.invariant-prefill", lambda: invariant(2048), short=True),
    Launch("products.invariant-fp32", lambda: invariant(2048, FLOAT)),
]


def coded_product(tokens: int, codes: Codes, activation: str = "", dtype: torch.dtype = HALF) -> None:
    """A product with codes, by what is chosen for so many rows."""
    x, held = empty(tokens, codes.columns, dtype=dtype), coded.Held.of(codes)
    coded.product(x, held, None, coded.tiles_of(held, tokens, dtype, card_of(x.device), activation), activation)


def k_quants() -> None:
    """GGUF's Q4_K: scales and mins in two steps, of groups of 32."""
    numbers = PerGroup(empty(4096, 16, dtype=HALF), empty(4096, 128, dtype=BYTE), 8)
    for tokens in coded.STEPS:
        coded_product(tokens, codes_of(4096, 4096, 4, 32, scales=numbers, mins=numbers, zeros=0), dtype=BF16)


def row_scales(bits: int = 8) -> dict[str, Any]:
    """Of codes with a scale for each row."""
    return {"bits": bits, "group": 4096, "scales": PerGroup(empty(4096, 1, dtype=FLOAT)), "zeros": 0}


def small_floats(kind: str, bits: int, group: int, tokens: int) -> None:
    """FP8, or MXFP4."""
    table = empty(1 << bits, dtype=FLOAT)
    numbers = PerGroup(empty(4096, 4096 // group, dtype=FLOAT))
    coded_product(
        tokens, codes_of(4096, 4096, bits, group, scales=numbers, zeros=0, table=table, floats=kind), dtype=BF16
    )  # fmt: skip


def invariant_codes(tokens: int) -> None:
    """Codes with --batch-invariant."""
    held, x = coded.Held.of(codes_of(6144, 4096)), empty(tokens, 4096, dtype=HALF)
    coded.product(x, held, None, coded.invariant_tiles(held, HALF, card_of(x.device)))


def values(**more: Any) -> None:
    """The values of codes, for the vendor's library."""
    coded.values(coded.Held.of(codes_of(6144, 4096, **more)), HALF)


def mxfp4_experts(tokens: int) -> None:
    """gpt-oss as it is released."""
    codes = {"group": 32, "zeros": 0, "table": empty(16, dtype=FLOAT), "floats": "e2m1"}
    experts(tokens, 32, 4, (2880, 2880), "swiglu_oai", True, codes=codes)


def narrow_rows(kind: str, tokens: int, group: int = 0, activation: str = "", **how: Any) -> None:
    """A product with int8 or FP8 rows, where the card multiplies them; with rows as they are elsewhere."""
    from quire.gpu_worker.layers.formats.cuda_coded import cuda_product

    scales = PerGroup(empty(6144, 4096 // group if group else 1, dtype=FLOAT))
    more = {"signed": True} if kind == "int8" else {"table": empty(256, dtype=FLOAT), "floats": "e4m3"}
    how = Activations(kind, group, **how)
    codes = codes_of(6144, 4096, 8, group or 4096, scales=scales, zeros=0, activations=how, **more)
    x = empty(tokens, 4096)
    run = cuda_product(codes, x.device)
    (run.joined(activation) if activation else run)(x, None)


NARROW = [
    Launch("narrow.int8-8", lambda: narrow_rows("int8", 8), short=True),
    Launch("narrow.int8-256", lambda: narrow_rows("int8", 256)),
    Launch("narrow.int8-2048", lambda: narrow_rows("int8", 2048)),
    Launch("narrow.int8-2048-gated", lambda: narrow_rows("int8", 2048, activation="silu")),
    Launch("narrow.int8-zeros", lambda: narrow_rows("int8", 8, symmetric=False)),
    Launch("narrow.int8-static", lambda: narrow_rows("int8", 8, scale=empty(1, dtype=FLOAT))),
    Launch("narrow.fp8-8", lambda: narrow_rows("fp8", 8)),
    Launch("narrow.fp8-2048", lambda: narrow_rows("fp8", 2048)),
    Launch("narrow.fp8-blocks-8", lambda: narrow_rows("fp8", 8, 128)),
    Launch("narrow.fp8-blocks-2048", lambda: narrow_rows("fp8", 2048, 128)),
]

CODES = [
    Launch("codes.awq-8", lambda: coded_product(8, codes_of(6144, 4096)), short=True),
    Launch("codes.awq-32", lambda: coded_product(32, codes_of(6144, 4096))),
    Launch("codes.awq-256", lambda: coded_product(256, codes_of(6144, 4096))),
    Launch("codes.awq-bf16-gated", lambda: coded_product(8, codes_of(28_672, 4096), "silu", BF16)),
    Launch("codes.awq-gated-64", lambda: coded_product(64, codes_of(28_672, 4096), "silu")),
    Launch("codes.gptq-act-order", lambda: coded_product(8, codes_of(4096, 4096, order=empty(4096, dtype=INT)))),
    *(Launch(f"codes.{bits}-bits", lambda bits=bits: coded_product(8, codes_of(4096, 4096, bits)))
      for bits in (2, 3, 5, 6, 7)),
    Launch("codes.int8", lambda: coded_product(8, codes_of(4096, 4096, **row_scales(), signed=True), dtype=BF16)),
    Launch("codes.int8-256", lambda: coded_product(256, codes_of(4096, 4096, **row_scales(), signed=True), dtype=BF16)),
    Launch("codes.k-quants", k_quants),
    Launch("codes.e4m3", lambda: small_floats("e4m3", 8, 128, 8)),
    Launch("codes.e4m3-256", lambda: small_floats("e4m3", 8, 128, 256)),
    Launch("codes.mxfp4", lambda: small_floats("e2m1", 4, 32, 8)),
    Launch("codes.nf4", lambda: small_floats("", 4, 64, 8)),
    Launch("codes.tables", lambda: coded_product(
        8, codes_of(4096, 4096, **row_scales(3), table=empty(4096, 8, dtype=FLOAT)))),
    Launch("codes.fp32", lambda: coded_product(8, codes_of(4096, 4096), dtype=FLOAT)),
    Launch("codes.invariant-decode", lambda: invariant_codes(8)),
    Launch("codes.invariant-prefill", lambda: invariant_codes(2048)),
    Launch("codes.values", values, short=True),
    Launch("codes.values-ordered", lambda: values(order=empty(4096, dtype=INT))),
    Launch("codes.experts-8", lambda: experts(8, 128, 8, (2048, 768), dtype=HALF, codes={})),
    Launch("codes.experts-256", lambda: experts(256, 128, 8, (2048, 768), dtype=HALF, codes={})),
    Launch("codes.experts-2048", lambda: experts(2048, 128, 8, (2048, 768), dtype=HALF, codes={})),
    Launch("codes.mxfp4-experts-8", lambda: mxfp4_experts(8)),
    Launch("codes.mxfp4-experts-1024", lambda: mxfp4_experts(1024)),
]  # fmt: skip


def stack_of(sizes: tuple[int, ...], inner: int, rank: int, dtype: torch.dtype, experts: int = 0) -> lora.Stack:
    """Of eight slots for modules of ``sizes`` side by side; of a table of ``inner`` rows where there are none."""
    groups, each = 8 * max(1, experts), max(1, len(sizes))
    table = not sizes
    a = (groups, inner, rank) if table else (groups, each, rank, inner)
    outputs = 4096 if table else sum(sizes)
    return lora.Stack(
        empty(*a, dtype=dtype), empty(groups, outputs, rank, dtype=dtype), empty(groups, each, 3, dtype=INT),
        empty(groups, each, dtype=FLOAT), empty(each, 3, dtype=INT), max(sizes, default=4096),
    )  # fmt: skip


def adapt(rows: int, rank: int = 16, sizes: tuple[int, ...] = (4096, 1024, 1024), dtype: torch.dtype = BF16) -> None:
    """What adapters add to a layer's queries, keys and values; without ``sizes`` to embeddings."""
    stack, size = stack_of(sizes, 4096 if sizes else VOCAB, rank, dtype), lora.block_rows(rows, dtype)
    blocks = lora.most_blocks(rows, 8, size)
    layout, y = (
        lora.Layout(empty(blocks, size, dtype=INT), empty(blocks, dtype=INT), rows),
        empty(rows, 6144, dtype=dtype),
    )
    if sizes:
        lora.expand(lora.shrink(empty(rows, 4096, dtype=dtype), stack, layout), stack, layout, y)
    else:
        lora.expand_table(empty(rows, dtype=LONG), stack, layout, y[:, :4096])


def adapt_experts(tokens: int) -> None:
    """What they add to the products of 8 of 128 experts."""
    ids, weights, slots = empty(tokens, 8, dtype=LONG), empty(tokens, 8, dtype=FLOAT), tokens * 8
    layout = lora.lay_out_experts(ids, empty(tokens, dtype=INT), 0, 128, 8, lora.expert_rows(slots, 128, BF16))
    for sizes, inner, rows in (((768, 768), 2048, tokens), ((2048,), 768, slots)):
        stack, x = stack_of(sizes, inner, 16, BF16, 128), empty(rows, inner)
        shrunk = lora.shrink(x, stack, layout)
        lora.expand(shrunk, stack, layout, empty(slots, sum(sizes)), weights if rows == slots else None)


ADAPTERS = [
    Launch("adapters.qkv-8", lambda: adapt(8), short=True),
    Launch("adapters.qkv-8-rank-64", lambda: adapt(8, 64)),
    Launch("adapters.qkv-2048", lambda: adapt(2048)),
    Launch("adapters.qkv-2048-rank-512", lambda: adapt(2048, 512)),
    Launch("adapters.qkv-fp16-2048", lambda: adapt(2048, 64, dtype=HALF)),
    Launch("adapters.qkv-fp32-8", lambda: adapt(8, 64, dtype=FLOAT)),
    Launch("adapters.qkv-fp32-2048", lambda: adapt(2048, 64, dtype=FLOAT)),
    Launch("adapters.embedding-8", lambda: adapt(8, sizes=())),
    Launch("adapters.experts-8", lambda: adapt_experts(8), short=True),
    Launch("adapters.experts-2048", lambda: adapt_experts(2048)),
]

LAUNCHES = [*ATTENTION, *SAMPLER, *LAYERS, *PRODUCTS, *MOE, *CODES, *NARROW, *ADAPTERS]


def kernels() -> set[str]:
    """``module.kernel`` of all that a wrapper may launch: jitted functions that no other jitted function calls."""
    folder = Path(moe.__file__).parent
    jitted, called = set(), set()
    for path in folder.glob("*_jit.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                jitted.add((path.stem, node.name))
                called |= {call.func.id for call in ast.walk(node)
                           if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}  # fmt: skip
    return {f"{module}.{name}" for module, name in jitted if name not in called}
