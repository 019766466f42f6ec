"""Decode steps of eight layers of Qwen3-30B-A3B's shape: 128 experts, 8 of them for each token."""

from __future__ import annotations

from collections.abc import Iterator

from .card import Card, Row
from .decode import decodes
from .floor import QWEN3_MOE, TINY_MOE


def rows(card: Card) -> Iterator[Row]:
    """From one row to 256; the floor counts the experts that the rows are expected to hit."""
    config = card.few(TINY_MOE, QWEN3_MOE)
    for labels, values in decodes(card, config, card.few((2,), (1, 8, 64, 256)), card.few((40,), (1024,))):
        if "step_ms" in values:
            values["step_ms_per_layer"] = values["step_ms"] / config["num_hidden_layers"]
        yield labels, values
