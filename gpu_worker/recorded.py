"""Which CUDA graphs a runner has: of decode steps, and of what lies between the attentions of other small steps.

Where rows may have adapters there are both again for steps in which some row has one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from .graphs import DecodeGraphs, Graphs, PieceGraphs, capture_sizes, piece_sizes
from .lora.card import CardSlots

if TYPE_CHECKING:
    from .models.model import Model
    from .state import RowState


def kinds_of(
    model: Model, state: RowState, max_tokens: int, max_context: int | None, sizes: list[int] | None = None
) -> list[Callable[[], Graphs]]:
    """Who makes them, before anything is recorded: pieces and decodes without adapters, then with.

    ``max_context``: the longest context of decode steps, None: any. ``sizes``: their rows, None: ``capture_sizes``.
    """
    sizes = capture_sizes(state.max_rows) if sizes is None else sizes
    slots = model.adapters
    found: list[Callable[[], Graphs]] = []
    for with_slots in (None, slots) if isinstance(slots, CardSlots) else (None,):
        found.append(partial(_pieces, model, state, max_tokens, with_slots))
        found.append(partial(_decodes, state, max_context, with_slots, sizes))
    return found


def _decodes(state: RowState, max_context: int | None, slots: CardSlots | None, sizes: list[int]) -> DecodeGraphs:
    longest = state.max_model_len if max_context is None else min(max_context, state.max_model_len)
    return DecodeGraphs(sizes, longest, state.block_size, state.device, slots)


def _pieces(model: Model, state: RowState, max_tokens: int, slots: CardSlots | None) -> PieceGraphs:
    spec = model.spec
    return PieceGraphs(
        piece_sizes(max_tokens), spec.heads, spec.head_dim, state.block_size, model.dtype, state.device, slots
    )
