"""What GPTQ and AWQ share: columns in groups of any order and length, and words of int32 that become planes.

Nothing is unpacked whole: words are read and packed again in pieces of rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...kernels.codes import COLUMN_UNIT, pack, plane_widths, unpack
from ...kernels.cpu.codes import word_planes
from ...kernels.cpu.library import library
from .base import Part, TensorError, Weight

_PIECE = 1 << 22
"""Codes that are unpacked at a time."""


# --- groups ---


@dataclass(frozen=True)
class Grouping:
    """The columns that a process holds, as groups of one size.

    Attributes:
        size: columns of a group; the last may be shorter.
        sources: int64 [groups]: which group of the checkpoint each is, or a piece of; [E, groups] where experts differ.
        order: int32 [columns of the planes], or [E, ...], as ``Codes.order`` has it; None: the columns stay in place.
    """

    size: int
    sources: torch.Tensor
    order: torch.Tensor | None = None

    def spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """[..., rows, the checkpoint's groups] -> [..., rows, groups]."""
        if self.sources.dim() > 1:
            index = self.sources[:, None].expand(*numbers.shape[:-1], -1)
            return numbers.gather(-1, index)
        if self.sources.tolist() == [*range(numbers.shape[-1])]:
            return numbers.contiguous()
        return numbers.index_select(-1, self.sources)


def grouping(groups: torch.Tensor, usual: int) -> Grouping:
    """Of int64 [columns], the group of each column in the checkpoint, where groups are of ``usual`` columns; or of
    [E, columns], each expert's.

    Columns are ordered by group. Where groups are then not of one size (a rank's columns of an act-order layer, or a
    share that begins within a group), they are cut into pieces that are, or filled up to them with columns of nothing.
    """
    if groups.dim() == 1:
        return _grouping(groups, usual)
    if len(groups) and (groups == groups[0]).all():
        return _grouping(groups[0], usual)
    each = [_grouping(one, usual) for one in groups]
    if not each:
        return Grouping(max(1, groups.shape[1]), torch.zeros(1, dtype=torch.int64, device=groups.device))
    if any(one.size != each[0].size or len(one.sources) != len(each[0].sources) for one in each):
        each = [_filled(*_runs(one)) for one in groups]
    count, width = groups.shape[1], max(1 if one.order is None else len(one.order) for one in each)
    width = max(width, _padded(count))
    orders = [
        _lengthened(one.order if one.order is not None else _places(count, groups.device), width, count)
        for one in each
    ]  # fmt: skip
    most = max(len(one.sources) for one in each)
    sources = [_lengthened(one.sources, most, 0) for one in each]
    return Grouping(each[0].size, torch.stack(sources), torch.stack(orders))


def _grouping(groups: torch.Tensor, usual: int) -> Grouping:
    order, sources, lengths = _runs(groups)
    before = lengths[:-1]
    size = functools.reduce(math.gcd, before) if before else len(groups)
    one_size = all(length == size for length in before) and lengths[-1] <= size
    if size % COLUMN_UNIT and before and not (one_size and size == usual):
        return _filled(order, sources, lengths)
    if not one_size:
        pieces = torch.tensor([-(-length // size) for length in lengths], device=sources.device)
        sources = sources.repeat_interleave(pieces)
    if (order[1:] > order[:-1]).all():
        return Grouping(size, sources)
    full = _padded(len(groups))
    sources = _lengthened(sources, -(-full // size), 0)  # those beyond the last column are read, and count for nothing
    return Grouping(size, sources, _lengthened(order.int(), full, len(groups)))


def _runs(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The columns ordered by group, the groups that there are, and how many columns each has."""
    order = groups.argsort(stable=True)
    found, lengths = torch.unique_consecutive(groups[order], return_counts=True)
    return order, found, lengths.tolist()


def _filled(order: torch.Tensor, sources: torch.Tensor, lengths: list[int]) -> Grouping:
    """Each group filled up to whole units with columns of nothing."""
    units = [-(-length // COLUMN_UNIT) for length in lengths]
    places, at = order.new_full((sum(units) * COLUMN_UNIT,), len(order)), 0
    for unit, run in zip(units, order.split(lengths), strict=True):
        places[at : at + len(run)] = run
        at += unit * COLUMN_UNIT
    return Grouping(COLUMN_UNIT, sources.repeat_interleave(torch.tensor(units, device=sources.device)), places.int())


def _padded(columns: int) -> int:
    return -(-columns // COLUMN_UNIT) * COLUMN_UNIT


def _places(columns: int, device: torch.device) -> torch.Tensor:
    return torch.arange(columns, dtype=torch.int32, device=device)


def _lengthened(numbers: torch.Tensor, length: int, value: int) -> torch.Tensor:
    return F.pad(numbers, (0, max(0, length - len(numbers))), value=value)


# --- words ---


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., words] -> uint8 [..., codes], the first in the lowest bits, as GPTQ packs them.

    3 bits: 32 codes in 96 bits, so that codes 10 and 21 lie across two words.
    """
    if bits != 3:
        return unpack((laid(words),), bits)
    low, middle, high = (part.long() & 0xFFFFFFFF for part in words.unflatten(-1, (-1, 3)).unbind(-1))
    first = low | middle << 32
    codes = [(first >> 3 * at & 7).to(torch.uint8) for at in range(21)]
    codes.append(((first >> 63 & 1) | (high & 3) << 1).to(torch.uint8))
    codes += [(high >> 3 * at - 64 & 7).to(torch.uint8) for at in range(22, 32)]
    return torch.stack(codes, -1).flatten(-2)


def laid(words: torch.Tensor) -> torch.Tensor:
    """``words`` in order of its dims, those of one place too: as bytes, torch takes no others."""
    return words.reshape(-1).view(words.shape)


def outputs_of(words: torch.Tensor, shifts: Sequence[int]) -> torch.Tensor:
    """int32 [..., rows / 8, columns], each word of eight rows at ``shifts``, to uint8 [..., rows, columns]."""
    bytes = laid(words).view(torch.uint8).unflatten(-1, (-1, 4))
    rows = [(bytes[..., shift // 8] >> shift % 8) & 15 for shift in shifts]
    return torch.stack(rows, -2).flatten(-3, -2)


def planes_of(
    words: torch.Tensor, bits: int, columns: int, order: torch.Tensor | None, shifts: Sequence[int] = ()
) -> tuple[torch.Tensor, ...]:
    """The planes of int32 ``words`` [..., rows of words, words], with their columns in ``order``.

    A row has the codes of one output, as ``unpacked`` reads them; with ``shifts`` of eight, as ``outputs_of`` does.
    """
    width, rows = _padded(columns) if order is None else order.shape[-1], len(shifts) or 1
    flat = words.flatten(0, -2)
    planes = tuple(
        torch.empty(len(flat) * rows, width * each // 32, dtype=torch.int32, device=words.device)
        for each in plane_widths(bits)
    )  # fmt: skip
    # Rows of an order of their own: one expert's, else all.
    run = words.shape[-2] if order is not None and order.dim() > 1 else len(flat)
    native = words.device.type == "cpu" and library() is not None
    for start in range(0, len(flat), max(1, run)):
        index = order if order is None or order.dim() == 1 else order[start // run]
        into = [plane[start * rows : (start + run) * rows] for plane in planes]
        (word_planes if native else _planes_by_torch)(flat[start : start + run], bits, columns, index, into, shifts)
    return tuple(plane.view(*words.shape[:-2], words.shape[-2] * rows, plane.shape[-1]) for plane in planes)


def _planes_by_torch(
    words: torch.Tensor, bits: int, columns: int, order: torch.Tensor | None, planes: Sequence[torch.Tensor],
    shifts: Sequence[int],
) -> None:  # fmt: skip
    """``word_planes`` on any device."""
    rows = len(shifts) or 1
    step = max(1, _PIECE // max(1, columns * rows))
    for at in range(0, len(words), step):
        piece = words[at : at + step]
        codes = (outputs_of(piece, shifts) if shifts else unpacked(piece, bits))[..., :columns]
        if order is not None:
            codes = F.pad(codes, (0, 1)).index_select(-1, order)
        for plane, made in zip(planes, pack(codes, bits), strict=True):
            plane[at * rows : (at + step) * rows] = made


# --- numbers of each group ---


def whole_number(numbers: torch.Tensor) -> torch.Tensor | int:
    """``numbers``, or the one that all of them are."""
    if numbers.numel() and (numbers == numbers.flatten()[0]).all():
        return int(numbers.flatten()[0])
    return numbers.contiguous()


def check_scales(scales: torch.Tensor, weight: Weight) -> None:
    """Raises TensorError for one that is no finite number."""
    if not scales.isfinite().all():
        bad = (~scales.isfinite()).any(-1).flatten().nonzero()[0].item()
        part = part_of(int(bad), weight.parts)
        raise TensorError("scales", "holds numbers that are not finite; download the file again.", part)


def part_of(row: int, parts: Sequence[Part]) -> int:
    """Which of the parts that are held ``row`` of all experts' rows is in."""
    held = [len(part) for part in parts if len(part)]
    expert, row = divmod(row, sum(held))
    part = next(index for index in range(len(held)) if row < sum(held[: index + 1]))
    return expert * len(held) + part
