"""Other tiles for attention than the ones chosen: what a change of the code that chooses them would bring."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.gpu_worker.kernels import attention
from quire.gpu_worker.kernels.attention_tiles import Tiles, Variant

from .card import Card, Row
from .kernels import decode_case
from .prefill import prefill_case
from .timing import seconds_each


def rows(card: Card) -> Iterator[Row]:
    """Decodes at three batches and one long prompt, each with every tile that the card can hold."""
    for batch, context in card.few(((2, 40),), ((8, 1024), (64, 1024), (256, 1024))):
        cases, size = decode_case(card, batch, context)
        for tiles, splits in _decode_variants(card):
            seconds = _launch(card, cases, Variant(True, tiles, splits > 1), splits)
            if seconds:
                shape = f"batch {batch} context {context} {tiles} splits {splits}"
                yield card.row("decode attention", shape, seconds, size)
        del cases
    for prompts, tokens in card.few(((2, 20),), ((1, 4096),)):
        case, flops = prefill_case(card, prompts, tokens)
        for tiles in _prefill_variants(card):
            seconds = _launch(card, [case], Variant(False, tiles))
            if seconds:
                yield card.row("prefill attention", f"{prompts} x {tokens} tokens {tiles}", seconds, flops=flops)


def _launch(card: Card, cases: list[tuple], variant: Variant, splits: int = 1) -> float | None:
    q, k_cache, _, batch, scores = cases[0]
    out, plan = torch.empty_like(q), attention.plan_launch(q, k_cache, batch, scores, variant, splits)
    calls = [lambda c=c: attention.launch(*c[:3], out, c[3], c[4], plan) for c in cases]
    try:
        return seconds_each(calls, card.device)
    except Exception as error:  # noqa: BLE001 - too much shared memory is an exception of Triton's own
        print(f"  {variant} does not run here: {str(error).splitlines()[0]}")
        return None


def _decode_variants(card: Card) -> Iterator[tuple[Tiles, int]]:
    for block_n in card.few((16,), (32, 64, 128)):
        for stages in card.few((3,), (3, 4, 5)):
            for warps in card.few((4,), (2, 4, 8)):
                for splits in card.few((2,), (1, 2, 3, 4, 6, 8)):
                    if splits in (1, 2, 8) or (stages, warps) == (3, 4):
                        yield Tiles(16, block_n, warps, stages), splits


def _prefill_variants(card: Card) -> Iterator[Tiles]:
    for block_m in card.few((16,), (64, 128)):
        for block_n in card.few((16,), (32, 64, 128)):
            for stages in card.few((3,), (2, 3, 4)):
                for warps in card.few((4,), (4, 8)):
                    yield Tiles(block_m, block_n, warps, stages)
