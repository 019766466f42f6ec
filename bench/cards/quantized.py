"""Products with quantized weights beside bfloat16's, at the shapes of a Llama-3-8B: AWQ's 4 bits, int8 and FP8.

int8 and FP8 are measured with rows as narrow (W8A8), where the card multiplies those, and with rows as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from quire.gpu_worker.kernels.codes import Activations, Codes, PerGroup, float_table
from quire.gpu_worker.layers.formats.base import Run
from quire.gpu_worker.layers.formats.cuda_coded import CudaNarrow, cuda_product

from .card import Card, Row
from .timing import seconds_each

GROUP = 128


def rows(card: Card) -> Iterator[Row]:
    """Each of a layer's four products, for the rows of decodes and of prompts."""
    for tokens in card.few((2,), (1, 8, 32, 64, 256, 512, 2048)):
        for name, (width, inner) in shapes(card).items():
            yield _bf16(card, name, width, inner, tokens)
            for method in ("awq4", "int8", "fp8"):
                yield from _quantized(card, f"{method} {name}", method, width, inner, tokens)


def shapes(card: Card) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's products, by name."""
    heads, kv_heads, dim = card.heads
    hidden, wide = card.config["hidden_size"], card.config["intermediate_size"]
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden), "o": (hidden, heads * dim), "gate_up": (2 * wide, hidden),
        "down": (hidden, wide),
    }  # fmt: skip


def codes_of(card: Card, method: str, width: int, inner: int) -> Codes:
    """A weight of random codes."""
    bits, group = (4, min(GROUP, inner)) if method == "awq4" else (8, inner)
    padded = -(-inner // 32) * 32
    planes = (torch.randint(-(2**31), 2**31, (width, padded * bits // 32), dtype=torch.int32, device=card.device),)
    scales = PerGroup(torch.full((width, -(-inner // group)), 1e-2, device=card.device, dtype=torch.float16))
    if method == "awq4":
        zeros = torch.full((width, -(-inner // group)), 8, device=card.device, dtype=torch.uint8)
        return Codes(planes, bits, inner, group, scales, zeros)
    scales = replace(scales, base=scales.base.float())
    if method == "int8":
        return Codes(planes, bits, inner, group, scales, signed=True, activations=Activations("int8"))
    planes = (planes[0] & ~0x40404040,)  # no NaN among them
    table, how = float_table("e4m3", card.device), Activations("fp8")
    return Codes(planes, bits, inner, group, scales, table=table, floats="e4m3", activations=how)


def _quantized(card: Card, name: str, method: str, width: int, inner: int, tokens: int) -> Iterator[Row]:
    codes = codes_of(card, method, width, inner)
    copies = card.copies(codes.nbytes, 8)
    several = [codes, *(codes_of(card, method, width, inner) for _ in range(copies - 1))]
    runs = [cuda_product(each, card.device) for each in several]
    if isinstance(runs[0], CudaNarrow):
        yield _timed(card, f"{name}, narrow rows", list(runs), width, inner, tokens, codes.nbytes)
        runs = [cuda_product(replace(each, activations=None), card.device) for each in several]
    yield _timed(card, name, list(runs), width, inner, tokens, codes.nbytes)


def _bf16(card: Card, name: str, width: int, inner: int, tokens: int) -> Row:
    size = width * inner * card.dtype.itemsize
    matrices = [card.randn(width, inner) for _ in range(card.copies(size, 8))]
    runs: list[Run] = [lambda x, bias, m=matrix: torch.nn.functional.linear(x, m, bias) for matrix in matrices]  # type: ignore[misc]
    return _timed(card, f"bf16 {name}", runs, width, inner, tokens, size)


def _timed(card: Card, name: str, runs: list[Run], width: int, inner: int, tokens: int, size: int) -> Row:
    x = card.randn(tokens, inner)
    seconds = seconds_each([lambda run=run: run(x, None) for run in runs], card.device)  # type: ignore[misc]
    moved = size + tokens * (inner + width) * card.dtype.itemsize
    return card.row(name, f"tokens {tokens}", seconds, moved, 2.0 * tokens * width * inner, bytes_per_s=moved / seconds)
