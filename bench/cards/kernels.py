"""Each kernel of a layer against its floor: norm, activation, rope with the cache write, decode attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.gpu_worker.kernels import activation, attention, norm, rope

from .card import PAGE, Card, Row
from .floor import decode_bytes
from .timing import seconds_each


def rows(card: Card) -> Iterator[Row]:
    """Every kernel at every size."""
    for tokens in card.few((4,), (1, 64, 256, 2048)):
        yield from _layer(card, tokens)
    for batch in card.few((2,), (1, 8, 64, 256)):
        for context in card.few((40,), (512, 1024, 4096)):
            yield _decode(card, batch, context)


def _layer(card: Card, tokens: int) -> Iterator[Row]:
    hidden, wide = card.config["hidden_size"], card.config["intermediate_size"]
    shape, item = f"tokens {tokens}", card.dtype.itemsize
    copies = card.copies(4 * item * tokens * hidden)
    xs = [(card.randn(tokens, hidden), card.randn(tokens, hidden)) for _ in range(copies)]
    weight = card.randn(hidden)
    calls = [lambda x=x, r=r: norm.rms_norm(x, weight, 1e-5, r) for x, r in xs]
    yield card.row("rms_norm + residual", shape, seconds_each(calls, card.device), 4 * xs[0][0].nbytes)
    wides = [card.randn(tokens, 2 * wide) for _ in range(card.copies(3 * item * tokens * wide))]
    calls = [lambda x=x: activation.gated_activation(x, "silu") for x in wides]
    yield card.row("gated silu", shape, seconds_each(calls, card.device), 1.5 * wides[0].nbytes)
    yield _rope(card, tokens, shape)


def _rope(card: Card, tokens: int, shape: str) -> Row:
    heads, kv_heads, dim = card.heads
    fused = card.randn(tokens, heads + 2 * kv_heads, dim)
    q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
    caches = card.caches(-(-tokens // PAGE))
    table = torch.rand(tokens, dim // 2, device=card.device)
    at = torch.arange(tokens, device=card.device)
    seconds = seconds_each([lambda: rope.rope_write(q, k, v, table, table, at, at, *caches)], card.device)
    return card.row("rope + kv write", shape, seconds, 2 * (fused.nbytes - v.numel() * v.itemsize // 2))


def decode_case(card: Card, rows: int, context: int) -> tuple[list[tuple], int]:
    """Arguments of paged attention for several layers in turn, more than the cache holds; bytes of one call."""
    heads, kv_heads, dim = card.heads
    size = decode_bytes(rows, context, kv_heads, dim, card.dtype.itemsize)
    batch, blocks = card.batch(rows, 1, context)
    q, scores = card.randn(rows, heads, dim), attention.Scores(dim**-0.5)
    return [(q, *card.caches(blocks), batch, scores) for _ in range(card.copies(size, 32))], size


def _decode(card: Card, rows: int, context: int) -> Row:
    cases, size = decode_case(card, rows, context)
    calls = [lambda c=case: attention.paged_attention(*c) for case in cases]
    return card.row("decode attention", f"batch {rows} context {context}", seconds_each(calls, card.device), size)
