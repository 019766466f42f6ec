"""The threshold on a GPU, ``sampling``'s docstring says of what: a row is read three or four times, by many programs.

A row is cut into chunks of CHUNK tokens by its vocabulary alone, and a program takes one chunk of one row:

1. ``peaks_kernel`` finds each chunk's largest value and smallest finite one. With min_p alone that is all.
2. ``search_kernel`` counts and weighs the tokens at or above each of PIVOTS values that lie evenly between the bounds
   of the row's edge (at first from its largest value down), which moves the bounds to two neighbours of these. Its
   second launch does the same between those, and ends at once for rows whose edge lies among ROOM tokens already.
3. ``gather_kernel`` collects these tokens, and ``finish_kernel``, one program a row, finds the edge among them.

So a row is read three times, or four. (Counted in the interpreter, vocabulary 151,936: top_k 3, top_p 4, both 3, min_p
1. The bisection by one program a row that was here before read it 13 to 15, 15 to 23, 18 to 20 and 1 times.) Only where
more than ROOM tokens are as good as equal, where top_k over ROOM comes with top_p, and where there is no finite maximum
does ``finish_kernel`` read the row itself, once for each bisection of what is left. The launches are the same whatever
the logits are, and the host waits for none of them.

**Masses are integers**, exp(s - max) in units of 2^-42, and sums of integers have no order. So a threshold depends on
the row's logits and parameters alone: not on the company, the type that logits are stored in, the number of programs or
the way that found it. What falls below a unit, in a vocabulary of 2^18, is less than 2^-24 of the mass of the likeliest
token. A sum stays below 2^63 for fewer than 2^21 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .columns import BY_MIN_P, BY_TOP_K, BY_TOP_P, COLUMNS

MOST_TOKENS = (1 << 21) - 1
"""The largest vocabulary whose masses can be summed."""

CHUNK = 8192
PIVOTS = 16
ROOM = 8192  # that many keys and masses still fit the registers of a program of 16 warps
PEAKS_BLOCK, SEARCH_BLOCK, GATHER_BLOCK, ROW_BLOCK = 2048, 512, 2048, 4096
PASSES = 2
SEARCH_STAGES = 3


class _Room(NamedTuple):
    """What the launches hand to each other, on the device; rows are S, chunks of a row C."""

    tops: torch.Tensor  # float32 [S, C]
    bottoms: torch.Tensor  # float32 [S, C]
    counts: torch.Tensor  # int32 [S], how many values of ``found`` are there
    found: torch.Tensor  # float32 [S, ROOM]
    bounds: list[torch.Tensor]  # float32 [S, 4], before each pass
    tallies: list[torch.Tensor]  # int64 [S, 4], before each pass
    weights: list[torch.Tensor]  # int64 [S, C, 2, PIVOTS], of each pass


def _room(rows: int, splits: int, device: torch.device, search: bool) -> _Room:
    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def longs(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    tops, counts = floats(rows, splits), torch.empty(rows, dtype=torch.int32, device=device)
    if not search:
        # Arguments of the same types, so that ``finish_kernel`` is compiled once.
        unused = longs(rows, 1)
        return _Room(tops, floats(rows, splits), counts, tops, [tops], [unused], [unused])
    return _Room(
        tops, floats(rows, splits), counts, floats(rows, ROOM), [floats(rows, 4) for _ in range(PASSES)],
        [longs(rows, 4) for _ in range(PASSES)], [longs(rows, splits, 2, PIVOTS) for _ in range(PASSES)],
    )  # fmt: skip


def threshold(logits: torch.Tensor, params: torch.Tensor, min_p: bool, top_k: bool, top_p: bool) -> torch.Tensor:
    """The lowest scaled logit that may be drawn, float32 [S]; -inf in rows without a filter.

    ``logits`` [S, V] of any float type, which is widened, with contiguous rows; ``params`` int32 [S, COLUMNS]; the
    flags say which filters any row uses. Raises ValueError on more than MOST_TOKENS tokens.
    """
    from . import threshold_jit as jit

    rows, vocab = logits.shape
    if vocab > MOST_TOKENS:
        raise ValueError(f"A vocabulary of {vocab} tokens is over the {MOST_TOKENS} that top_p can sum.")
    splits, search = -(-vocab // CHUNK), top_k or top_p
    room = _room(rows, splits, logits.device, search)
    filters = BY_MIN_P * min_p + BY_TOP_K * top_k + BY_TOP_P * top_p
    source, grid = (logits, logits.stride(0), params), (rows, splits)
    sizes = {"COLUMNS": COLUMNS, "SPLITS": max(2, 1 << (splits - 1).bit_length()), "PIVOTS": PIVOTS, "ROOM": ROOM}
    chunks = {**sizes, "CHUNK": CHUNK, "enable_fp_fusion": False}
    jit.peaks_kernel[grid](
        *source, room.tops, room.bottoms, room.counts, vocab, splits,
        COLUMNS=COLUMNS, CHUNK=CHUNK, BLOCK=PEAKS_BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    if search:
        for number in range(PASSES):
            past = max(number - 1, 0)
            jit.search_kernel[grid](
                *source, filters, room.tops, room.bottoms, room.bounds[past], room.tallies[past], room.weights[past],
                room.bounds[number], room.tallies[number], room.weights[number], vocab, splits,
                PASS=number, BLOCK=SEARCH_BLOCK, STAGES=SEARCH_STAGES, num_warps=8, **chunks,
            )  # fmt: skip
        jit.gather_kernel[grid](
            *source, filters, room.bounds[-1], room.tallies[-1], room.weights[-1], room.found, room.counts, vocab,
            splits, BLOCK=GATHER_BLOCK, num_warps=8, **chunks,
        )  # fmt: skip
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    jit.finish_kernel[(rows,)](
        *source, filters, room.tops, room.bottoms, room.bounds[-1], room.tallies[-1], room.weights[-1], room.found,
        room.counts, out, vocab, splits, BLOCK=ROW_BLOCK, num_warps=16, enable_fp_fusion=False, **sizes,
    )  # fmt: skip
    return out
