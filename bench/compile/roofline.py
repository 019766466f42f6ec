"""What a step cannot be faster than on each card, from the makers' figures and the compile table: an estimate.

A kernel takes at least the bytes that it must move over the card's bandwidth, and its products over the card's rate;
attention's and the linear layers' two times are not added up, the larger counts. Three things are charged on top, each
a plain assumption: a launch costs ``Card.launch_s`` inside a graph; the last wave of programs is as long as the others
(``fill``: programs over the places of the waves they need, places from the table's occupancy); and nothing overlaps.
cuBLAS's products are not in the table: they count as full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..cards.floor import LLAMA_3_8B, decode_bytes, prefill_flops
from .cards import CARDS, Card

HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, DIM, VOCAB = (
    LLAMA_3_8B[name]
    for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size",
    )
)  # fmt: skip
ITEM = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True)
class Work:
    """One kernel's share of a step."""

    name: str
    bytes: float
    flops: float = 0.0
    times: int = 1  # in a step
    launches: int = 1
    row: tuple[str, str] | None = None  # (launch, kernel) in the compile table
    programs: int = 0  # of its grid

    def seconds(self, card: Card) -> float:
        """At least, of one call."""
        return max(self.bytes / card.bandwidth, self.flops / card.products)


def linears(tokens: int) -> list[Work]:
    """The four products of a layer."""
    shapes = {
        "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * DIM), "attention out": (HEADS * DIM, HIDDEN),
        "gate and up": (HIDDEN, 2 * WIDE), "down": (WIDE, HIDDEN),
    }  # fmt: skip
    return [
        Work(f"product: {name}", ITEM * (a * b + tokens * (a + b)), 2.0 * tokens * a * b, LAYERS)
        for name, (a, b) in shapes.items()
    ]


def small_kernels(tokens: int) -> list[Work]:
    """What a layer does beside products and attention."""
    block, heads = 1024, HEADS + 2 * KV_HEADS
    return [
        Work("norm and residual", ITEM * 4 * tokens * HIDDEN, times=2 * LAYERS + 1,
             row=("layers.rms-norm-and-residual", "norm_kernel"), programs=tokens),
        Work("rope and cache", ITEM * tokens * DIM * (2 * heads), times=LAYERS,
             row=("layers.rope-and-cache", "rope_write_kernel"), programs=tokens * (HEADS + KV_HEADS)),
        Work("gated activation", ITEM * 3 * tokens * WIDE, times=LAYERS,
             row=("layers.gated-silu", "activation_kernel"), programs=tokens * math.ceil(WIDE / block)),
    ]  # fmt: skip


def sampling(rows: int) -> list[Work]:
    """lm_head, and a draw by temperature."""
    return [
        Work("product: lm_head", ITEM * (HIDDEN * VOCAB + rows * (HIDDEN + VOCAB)), 2.0 * rows * HIDDEN * VOCAB),
        Work("draw", ITEM * rows * VOCAB, launches=2, row=("sampler.draw", "draw_kernel"),
             programs=rows * math.ceil(VOCAB / 2048)),
    ]  # fmt: skip


def decode(batch: int, context: int) -> list[Work]:
    """One step of ``batch`` rows that have ``context`` keys each. Few rows' keys are split to fill whole waves."""
    attention = Work(
        "attention", decode_bytes(batch, context, KV_HEADS, DIM), 4.0 * batch * context * HEADS * DIM, LAYERS,
        launches=2, row=("attention.decode-8", "attention_kernel"), programs=batch * KV_HEADS,
    )  # fmt: skip
    return [*linears(batch), attention, *small_kernels(batch), *sampling(batch)]


def prefill(tokens: int) -> list[Work]:
    """One step over a whole prompt."""
    attention = Work(
        "attention", ITEM * tokens * DIM * (2 * HEADS + 2 * KV_HEADS), prefill_flops(tokens, HEADS, DIM), LAYERS,
        row=("attention.prefill-2048", "attention_kernel"),
    )  # fmt: skip
    return [*linears(tokens), attention, *small_kernels(tokens), *sampling(1)]


def fill(work: Work, card: Card, table: Mapping) -> float:
    """The used share of the places of a kernel's waves; 1 where nothing is known."""
    row = table.get((card.target, *work.row)) if work.row else None
    if row is None or not row.programs:
        return 1.0
    programs = work.programs or math.prod(int(part) for part in row.grid.split("x"))
    places = row.programs * card.processors
    # Fewer programs than places is no loss by itself: what bounds it then is said by the bandwidth that they draw.
    return 1.0 if programs <= places else programs / (math.ceil(programs / places) * places)


def step_seconds(works: list[Work], card: Card, table: Mapping) -> tuple[float, float]:
    """(the floor of a step, the estimate with launches and waves)."""
    floor = sum(work.times * work.seconds(card) for work in works)
    spent = sum(
        work.times * (work.seconds(card) / fill(work, card, table) + work.launches * card.launch_s) for work in works
    )
    return floor, spent


STEPS = {
    **{f"decode, batch {batch}, context 1,024": decode(batch, 1024) for batch in (1, 8, 64, 256)},
    "prefill, 2,048 tokens": prefill(2048),
}


def kernel_table(table: Mapping) -> list[str]:
    """Lines of Markdown: microseconds of each kernel of one layer's decode step at batch 64, floor and fill."""
    head = ["| kernel | " + " | ".join(card.name for card in CARDS.values()) + " |", "|---" * (len(CARDS) + 1) + "|"]
    lines = []
    for step, works in (("decode 64", decode(64, 1024)), ("prefill 2,048", prefill(2048))):
        for work in works:
            cells = []
            for card in CARDS.values():
                share = fill(work, card, table)
                cells.append(f"{number(work.seconds(card) * 1e6)}" + (f" ({share:.0%})" if share < 0.995 else ""))
            lines.append(f"| {step}: {work.name} | " + " | ".join(cells) + " |")
    return head + lines


def step_table(table: Mapping) -> list[str]:
    """Lines of Markdown: milliseconds of each step, floor and estimate."""
    head = ["| step | " + " | ".join(card.name for card in CARDS.values()) + " |",
            "|---" * (len(CARDS) + 1) + "|"]  # fmt: skip
    lines = []
    for name, works in STEPS.items():
        times = [step_seconds(works, card, table) for card in CARDS.values()]
        cells = " | ".join(f"{number(floor * 1e3)} / {number(spent * 1e3)}" for floor, spent in times)
        lines.append(f"| {name} | {cells} |")
    return head + lines


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
