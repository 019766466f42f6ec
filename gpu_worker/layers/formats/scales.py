"""Scales as checkpoints have them (of a tensor, of rows, groups or blocks) made those of codes, of rows and groups.

A scale of a whole tensor becomes one for each row, so that tensors with scales of their own are fused as they are.
(vLLM quantizes such tensors anew, by the largest scale, and so loses bits.)
"""

from __future__ import annotations

import math

import torch

from ...kernels.codes import PerGroup
from .base import Axis, Part, Stored, TensorError, Weight
from .packed import part_of

INPUT_SCALE = Stored("input_scale", Axis(0), None, torch.float32)
"""The scale of the activations of each part's tensor."""


def check(scales: torch.Tensor, stored: Stored, weight: Weight) -> None:
    """Raises TensorError where ``scales``, which were loaded as ``stored``, are not all finite, or, where activations
    are divided by them, not all above 0."""
    odd, said = ~scales.isfinite(), "holds NaN or infinity, and no weight has such a scale"
    if stored == INPUT_SCALE and not odd.any():
        odd, said = scales <= 0, "must be above 0, as activations are divided by it"
    if not odd.any():
        return
    bad = odd if stored.columns is None else odd.any(-1)
    parts = [stored.rows.cut(part, stored.name) for part in weight.parts]
    first = part_of(int(bad.flatten().nonzero()[0]), parts)
    raise TensorError(stored.name, f"{said}; download the file again.", first)


def narrowest(scales: torch.Tensor) -> torch.Tensor:
    """float32 ``scales`` in two bytes each where these have the same values."""
    for dtype in (torch.bfloat16, torch.float16):
        short = scales.to(dtype)
        if torch.equal(short.float(), scales):
            return short
    return scales


def by_tensor(scales: torch.Tensor, weight: Weight) -> torch.Tensor:
    """[..., parts], of each part's tensor -> [..., rows, 1]; [..., 1, 1] where that is one."""
    if len(weight.parts) > 1:
        lengths = torch.tensor([len(part) for part in weight.parts], device=scales.device)
        scales = scales.repeat_interleave(lengths, -1)
    return scales[..., None]


def by_block(scales: torch.Tensor, weight: Weight, block: tuple[int, int]) -> tuple[torch.Tensor, int]:
    """``scales`` [..., blocks of rows of all parts, blocks of columns] of ``block`` (rows, columns), those of the whole
    model's tensors -> [..., rows, groups] of what is held here, and the columns of such a group.

    A share may begin within a block; then a group is what divides both.
    """
    height, width = block
    index, before = [], 0
    for part in weight.parts:
        index.append(torch.arange(part.start, part.stop) // height + before)
        before += -(-part.total // height) if len(part) else 0
    rows = scales.index_select(-2, torch.cat(index).to(scales.device))
    return cut_groups(rows, weight.columns, width)


def cut_groups(scales: torch.Tensor, columns: Part, group: int) -> tuple[torch.Tensor, int]:
    """Of [..., groups of all columns] those of ``columns``, and the columns of one of them: fewer than ``group`` where
    ``columns`` begin within one."""
    own = math.gcd(group, columns.start) if columns.start else group
    starts = torch.arange(columns.start, columns.stop, own, device=scales.device)
    return scales.index_select(-1, starts // group), own


def per_group(scales: torch.Tensor) -> PerGroup:
    """Of scales [..., rows, groups]."""
    return PerGroup(narrowest(scales.contiguous()))


def stored_scales(strategy: str, block: tuple[int, int], name: str) -> Stored:
    """The tensor ``name`` of float32 scales by ``strategy``: tensor, channel, group or block.

    Every process holds the scales of all blocks, and so may hold a part of one.
    """
    if strategy == "tensor":
        return Stored(name, Axis(0), None, torch.float32)
    if strategy == "channel":
        return Stored(name, Axis(), Axis(0), torch.float32)
    if strategy == "group":
        return Stored(name, Axis(), Axis(block[1], uncut=True), torch.float32)
    return Stored(name, Axis(block[0], uncut=True), Axis(block[1], uncut=True), torch.float32)


def spread(
    scales: torch.Tensor, strategy: str, block: tuple[int, int], weight: Weight
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """What ``stored_scales`` loaded as [..., rows or 1, groups], and the columns of a group."""
    if strategy == "tensor":
        return by_tensor(scales, weight), weight.shape[1]
    if strategy == "channel":
        return scales, weight.shape[1]
    if strategy == "group":
        return cut_groups(scales, weight.columns, block[1])
    return by_block(scales, weight, block)
