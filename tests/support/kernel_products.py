"""Looks for 32-bit products that feed a pointer in every launch of ``bench/compile/launches.py``; see ``ir_products``.

A script, run without TRITON_INTERPRET from the repository's root.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from ir_products import Finding, Reader

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.compile.cards import CARDS, Card
from bench.compile.compiler import Request, first_ir, requests

TOKENS, REACH, SLOTS = 1 << 20, 1 << 24, 1 << 26
"""More tokens than a step may have, more than a row may have, and more choices of experts than a step's tokens make."""
LARGEST = {
    # A grid's first axis counts rows, tokens or blocks of them, or slots; CUDA allows 65,535 on the others.
    "program x": TOKENS, "program y": 65_535, "program z": 65_535,
    "attention_kernel.program x": 1 << 30, "attention_kernel.program y": 64,  # key heads of Q-blocks; splits
    "attention_kernel.splits": 64, "reduce_kernel.splits": 1024, "kv_heads": 1024,
    # Parts of the inner axis.
    "product_kernel.program y": 32, "coded_kernel.program y": 32, "rows_kernel.program y": 32,
    "shrink_kernel.program z": 8,
    # Sizes of a model: heads, a head's dim, a hidden size or an expert's width, words; strides inside one token.
    "dim": 1024, "heads": 4096, "half": 1024, "width": TOKENS, "inner": TOKENS, "vocab": TOKENS, "count": 1 << 16,
    "q_head": 1024, "k_head": TOKENS, "v_head": TOKENS, "out_head": 1024, "x_head": TOKENS, "weight_head": TOKENS,
    "bias_head": TOKENS, "splits": 1024, "skip": 3, "first_block": TOKENS,
    "padded": TOKENS, "groups": TOKENS, "coded_kernel.order": TOKENS, "values_kernel.first": TOKENS,
    "values_kernel.stop": TOKENS, "columns": TOKENS,
    # Of one token in a block to the next, the heads between them.
    "k_offset": TOKENS, "v_offset": TOKENS, "block_size": 1 << 16,
    # Rows and lengths of a step.
    "rows": TOKENS, "tokens": TOKENS, "first_row": TOKENS, "query_starts": TOKENS, "order": TOKENS,
    "order_starts": TOKENS, "context_lens": REACH,
    "window": REACH,
    "total": SLOTS, "align_kernel.rows": 128, "align_kernel.blocks": SLOTS // 8,  # blocks have 16 places or more
    # What the host writes into small tables: slots of a step, positions in a row and in the words' prefixes.
    "ban_words_kernel.slots": TOKENS, "starts": REACH,
}  # fmt: skip
"""The largest legal value of an argument, or of what is loaded through it, by its name, or by kernel.name."""

ASSUMED = {
    # No expert has more slots than there are, and they are rounded up to a block.
    "padded = tl.where(bins < count, (sizes + rows - 1) // rows * rows, 0)": SLOTS + 128,
    # The search of a Q-block's row ends at the row that has it, so the block's first token is one of the row's, or lies
    # less than a block behind them.
    "return row, start, length, ((length + BLOCK_Q - 1) // BLOCK_Q - 1 - before) * BLOCK_Q": 2 * TOKENS,
}  # fmt: skip
"""Text in a kernel's line -> what the product there cannot pass, where the bounds above do not show it."""


def search(requests: Iterable[Request], card: Card) -> tuple[list[Finding], set[str]]:
    """The findings of several kernels, and which of ASSUMED was made use of."""
    wrong, used = set(), set()
    for request in requests:

        def assumed(place: str, request: Request = request) -> int | None:
            text = next((text for text in ASSUMED if text in line_of(request, place)), None)
            used.update({text} - {None})
            return ASSUMED.get(text)

        wrong.update(Reader(first_ir(request, card), request.parameters, LARGEST, assumed).findings())
    return sorted(wrong, key=str), used


def line_of(request: Request, place: str) -> str:
    """The line of source at ``file:line``, beside the kernel's own file."""
    name, _, number = place.rpartition(":")
    path = Path(request.fn.fn.__code__.co_filename).parent / name
    return path.read_text("utf-8").splitlines()[int(number) - 1] if path.exists() else ""


def main() -> None:
    """Look at every launch for an H100: JSON with kernels seen, launches failed, findings, assumptions not needed."""
    card = CARDS["sm_90"]
    asked = list(requests(card))
    every = [one for some in asked if isinstance(some, list) for one in some]
    failed = [f"{some[0].name}: {some[1]}" for some in asked if not isinstance(some, list)]
    wrong, used = search(every, card)
    kernels = sorted({f"{one.module}.{one.kernel}" for one in every})
    print(json.dumps({"kernels": kernels, "failed": failed, "wrong": [str(w) for w in wrong],
                      "unused": sorted(ASSUMED.keys() - used)}))  # fmt: skip


if __name__ == "__main__":
    main()
