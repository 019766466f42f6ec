"""Mixed steps of a Llama-3-8B shape: decodes with a chunk of a prompt beside them, and what the chunk adds.

``added_us_per_token`` is what a prompt's token costs the step; in a step of its own it costs ``alone_us_per_token``.
"""

from __future__ import annotations

from collections.abc import Iterator

from .card import Card, Row
from .steps import Steps, loaded, missing_bytes


def rows(card: Card) -> Iterator[Row]:
    """Two batches of decodes, each with chunks from a few tokens to a whole step's."""
    context = card.few(40, 1024)
    chunks = card.few((24,), (16, 128, 512, 1792))
    steps = card.few(12, 32)
    with loaded(card, card.config) as model:
        alone = {chunk: Steps(card, model, 0, 0, chunk).seconds(steps) for chunk in chunks}
        for batch in card.few((2,), (8, 64, 256)):
            if over := missing_bytes(card, card.config, batch, context):
                yield {"batch": batch, "left_out": f"its KV cache is {over / 1e9:.1f} GB too large"}, {}
                continue
            decodes = Steps(card, model, batch, context).seconds(steps)
            for chunk in chunks:
                mixed = Steps(card, model, batch, context, chunk).seconds(steps)
                yield {"batch": batch, "context": context, "chunk": chunk}, {
                    "step_ms": mixed * 1e3, "decodes_alone_ms": decodes * 1e3,
                    "added_us_per_token": (mixed - decodes) / chunk * 1e6,
                    "alone_us_per_token": alone[chunk] / chunk * 1e6,
                }  # fmt: skip
