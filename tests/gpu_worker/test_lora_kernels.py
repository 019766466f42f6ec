"""Adapters' kernels against plain products: every type, rank and mixture of rows, and how rows lie in blocks.

Kernels are compiled where there is a GPU, else run under Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_device import DEVICE

pytest.importorskip("triton")

from quire.gpu_worker.batch import StepShape
from quire.gpu_worker.kernels import lora
from quire.gpu_worker.layers.formats.base import Part, whole
from quire.gpu_worker.lora.card import empty_stack, write
from quire.gpu_worker.lora.target import Matrices, Piece, Target
from quire.gpu_worker.spec import Shard

NONE = -1


def target(sizes: tuple[int, ...], inputs: int, experts: int = 0, kind: str = "linear") -> Target:
    """Modules of ``sizes`` side by side, of each expert's."""
    firsts = np.cumsum([0, *sizes])
    pieces = [Piece("m", size, np.arange(size), int(first)) for size, first in zip(sizes, firsts, strict=False)]
    return Target("t", kind, whole(inputs), tuple(pieces * max(1, experts)), experts)


def adapter(of: Target, rank: int, seed: int, dtype: torch.dtype, without: tuple[int, ...] = ()) -> list[Any]:
    """Random matrices for each module but those of ``without``."""
    chance, inputs, found = torch.Generator().manual_seed(seed), len(of.columns), []
    for at, piece in enumerate(of.pieces):
        a, b = (torch.randn(shape, generator=chance) / 3 for shape in ((rank, inputs), (len(piece.rows), rank)))
        found.append(None if at in without else Matrices(a.to(dtype), b.to(dtype), 0.5 + seed, rank))
    return found


def stack_of(of: Target, slots: list[Any], max_rank: int, dtype: torch.dtype) -> lora.Stack:
    made = empty_stack(of, len(slots), max_rank, dtype, torch.device(DEVICE))
    for slot, pieces in enumerate(slots):
        write(made, of, slot, pieces)
    return made


def layout_of(slots: list[int], count: int, size: int) -> lora.Layout:
    order, groups = lora.lay_out(np.array(slots, np.int32), count, size)
    return lora.Layout(torch.from_numpy(order).to(DEVICE), torch.from_numpy(groups).to(DEVICE), len(slots))


def plain(of: Target, slots: list[Any], rows: list[int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Row by row."""
    y = y.clone().float()
    for row, slot in enumerate(rows):
        for piece, each in zip(of.pieces, slots[slot] or () if slot >= 0 else (), strict=False):
            if each is not None:
                shrunk = each.a[:, x[row]].float() if of.kind == "table" else each.a.float() @ x[row].cpu().float()
                y[row, piece.first : piece.first + len(piece.rows)] += each.scale * (each.b.float() @ shrunk).to(DEVICE)
    return y


TYPES = {"float32": (torch.float32, 2e-5), "float16": (torch.float16, 5e-3), "bfloat16": (torch.bfloat16, 4e-2)}
MIXTURES = {
    "one of each": [0, 1, 2, NONE, 3],
    "runs": [2] * 17 + [NONE] * 3 + [0] * 16 + [1] * 2,
    "one row": [1],
    "an empty slot alone": [3, 3],
}


def near(found: torch.Tensor, wanted: torch.Tensor, within: float) -> None:
    scale = wanted.abs().max().clamp(min=1)
    assert (found.float() - wanted).abs().max() <= within * scale


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rank", [1, 16, 33, 512])
def test_what_is_added_is_the_product(rank: int, dtype: str) -> None:
    """Three modules side by side, of adapters of several ranks, one that leaves a module alone and an empty slot."""
    kind, within = TYPES[dtype]
    inner = 1100 if rank == 16 else 72  # cut into parts, or not even a tile's
    of = target((40, 8, 70), inner)
    lower = max(1, rank // 3)
    slots = [adapter(of, rank, 0, kind), adapter(of, lower, 1, kind, (1,)), adapter(of, rank, 2, kind, (0, 2)), None]
    stack = stack_of(of, slots, rank, kind)
    for rows in MIXTURES.values() if rank == 33 else [MIXTURES["one of each"]]:
        x = torch.randn(len(rows), inner, generator=torch.Generator().manual_seed(7)).to(DEVICE, kind)
        y = torch.randn(len(rows), 120, generator=torch.Generator().manual_seed(8)).to(DEVICE, kind)[:, 1:-1]
        layout, wanted = layout_of(rows, 4, 16), plain(of, slots, rows, x, y)
        before, twin = y.clone(), y.clone()
        shrunk = lora.shrink(x, stack, layout)
        assert len(shrunk) == lora.parts_of(len(rows), inner) == (2 if inner > 1000 else 1)
        lora.expand(shrunk, stack, layout, y)
        near(y, wanted, within)
        lora.add_torch(x, stack, layout, twin)
        near(twin, wanted, within)
        for row, slot in enumerate(rows):
            assert slot in (0, 1, 2) or torch.equal(y[row], before[row])


def test_adapters_may_be_wider_than_the_model() -> None:
    of = target((24,), 40)
    slots = [adapter(of, 8, 0, torch.float32)]
    x, y = torch.randn(2, 40).to(DEVICE, torch.bfloat16), torch.zeros(2, 24, device=DEVICE, dtype=torch.bfloat16)
    layout, stack = layout_of([0, 0], 1, 16), stack_of(of, slots, 8, torch.float32)
    lora.expand(lora.shrink(x, stack, layout), stack, layout, y)
    near(y, plain(of, slots, [0, 0], x, torch.zeros(2, 24, device=DEVICE)), 8e-3)


@pytest.mark.parametrize("by_rank", [True, False])
def test_processes_add_up_their_parts(by_rank: bool) -> None:
    """Fully sharded: A is divided by its rows or by its columns; B A x is what one process alone has."""
    of, rows = target((24,), 40), [1, NONE, 0]
    slots = [adapter(of, 5, 0, torch.float32), adapter(of, 1, 1, torch.float32)]
    x, y = torch.randn(3, 40, device=DEVICE), torch.randn(3, 24, device=DEVICE)
    layout, wanted, parts, stacks = layout_of(rows, 2, 16), plain(of, slots, rows, x, y), [], []
    for shard in (Shard(0, 2), Shard(1, 2)):
        columns = shard.share(40)
        here = range(40) if by_rank else columns
        mine = replace(of, among=shard, by_rank=by_rank, columns=Part(40, here.start, here.stop))
        held = []
        for (full,) in slots:
            ranks = mine.rows_of_a(full.rank)
            a = full.a[ranks.start : ranks.stop, here.start : here.stop]
            held.append([Matrices(a, full.b, full.scale, full.rank, ranks.start)])
        stacks.append(stack_of(mine, held, 5, torch.float32))
        parts.append(lora.shrink(x[:, here.start : here.stop], stacks[-1], layout, whole=True).sum(0, keepdim=True))
    lora.expand(parts[0] + parts[1], stacks[0], layout, y)
    near(y, wanted, 2e-5)
    assert stacks[0].a.numel() < stack_of(of, slots, 5, torch.float32).a.numel()


def test_many_rows() -> None:
    """Larger blocks, and no parts."""
    of, rows = target((24, 24), 600), [NONE, 1] * 40 + [0] * 60
    slots = [adapter(of, 5, 0, torch.float32), adapter(of, 20, 1, torch.float32)]
    x, y = torch.randn(140, 600, device=DEVICE), torch.randn(140, 48, device=DEVICE)
    layout, stack = layout_of(rows, 2, lora.block_rows(140, torch.float32)), stack_of(of, slots, 20, torch.float32)
    wanted = plain(of, slots, rows, x, y)
    shrunk = lora.shrink(x, stack, layout)
    assert len(shrunk) == 1 and layout.order.shape == (4, 32)
    lora.expand(shrunk, stack, layout, y)
    near(y, wanted, 2e-5)


def test_embeddings_are_looked_up() -> None:
    of, rows, ids = target((40,), 30, kind="table"), [1, NONE, 0, 1], torch.tensor([29, 3, 0, 7])
    slots = [adapter(of, 3, 0, torch.float16), adapter(of, 18, 1, torch.float16)]
    y = torch.randn(4, 40, device=DEVICE).half()
    layout, stack = layout_of(rows, 2, 16), stack_of(of, slots, 18, torch.float16)
    wanted, twin = plain(of, slots, rows, ids, y), y.clone()
    lora.expand_table(ids.to(DEVICE), stack, layout, y)
    near(y, wanted, 5e-3)
    lora.add_torch(ids.to(DEVICE), stack, layout, twin)
    near(twin, wanted, 5e-3)


@pytest.mark.parametrize(("tokens", "first", "experts"), [(5, 0, 6), (60, 2, 3)])
def test_experts_have_adapters_of_their_own(tokens: int, first: int, experts: int) -> None:
    """Choices of experts by slot and expert: an up product of a token's row, and a down product of each choice's, times
    the router's weights. A process may have some of the experts."""
    chance = torch.Generator().manual_seed(tokens)
    top_k, count = 2, 3
    ids = torch.stack([torch.randperm(6, generator=chance)[:top_k] for _ in range(tokens)]).to(DEVICE)
    rows = torch.randint(-1, count, (tokens,), generator=chance, dtype=torch.int32).to(DEVICE)
    size = lora.expert_rows(tokens * top_k, 6, torch.float32)
    layout, twin = (run(ids, rows, first, experts, count, size) for run in
                    (lora.lay_out_experts, lora.lay_out_experts_torch))  # fmt: skip
    assert torch.equal(layout.groups, twin.groups)
    work = twin.groups < count * experts
    assert torch.equal(layout.order[work], twin.order[work])
    for sizes, inner, each in (((8, 8), 24, False), ((24,), 16, True)):
        of = target(sizes, inner, experts)
        slots = [adapter(of, rank, rank, torch.float32) for rank in (4, 17)] + [None]
        stack = stack_of(of, slots, 17, torch.float32)
        x = torch.randn(tokens * (top_k if each else 1), inner, generator=chance).to(DEVICE)
        y = torch.randn(tokens * top_k, sum(sizes), generator=chance).to(DEVICE)
        weights = torch.rand(tokens, top_k, generator=chance).to(DEVICE) if each else None
        wanted = y.clone()
        for token, slot in enumerate(rows.tolist()):
            for choice in range(top_k):
                expert, at = ids[token, choice].item() - first, token * top_k + choice
                if slot < 0 or not 0 <= expert < experts:
                    continue
                mine = (slots[slot] or [])[expert * of.each : (expert + 1) * of.each]
                added = [m.scale * (m.b @ (m.a @ x[at if each else token].cpu())) for m in mine]
                if added:
                    wanted[at] += torch.cat(added).to(DEVICE) * (1 if weights is None else weights[token, choice])
        lora.expand(lora.shrink(x, stack, layout), stack, layout, y, weights)
        near(y, wanted, 2e-5)


def test_rows_lie_in_blocks_of_their_slot() -> None:
    order, groups = lora.lay_out(np.array([1, -1, 0, 1, 1, -1], np.int32), 3, 2)
    assert order.tolist() == [[2, 6], [0, 3], [4, 6]] and groups.tolist() == [0, 1, 1]
    order, groups = lora.lay_out(np.full(3, -1, np.int32), 2, 16)
    assert order.shape == (0, 16) and len(groups) == 0
    chance = np.random.default_rng(0)
    for rows, count, size in ((1, 1, 16), (40, 9, 16), (300, 4, 64)):
        slots = chance.integers(-1, count, rows).astype(np.int32)
        assert len(lora.lay_out(slots, count, size)[1]) <= lora.most_blocks(rows, count, size)
    assert lora.most_blocks(8, 100, 16) == 8 and lora.most_blocks(64, 1, 16) == 5


def test_what_is_compiled_follows_from_few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [StepShape(1, 0, tokens, tokens, tokens) for tokens in range(1, 3000)]
    linear, moe = lora.AdaptedRows(torch.bfloat16), lora.AdaptedRows(torch.bfloat16, 2, 8)
    assert set().union(*map(linear, shapes)) == {(16, True), (64, False)}
    assert set().union(*map(moe, shapes)) == {(16, True), (16, False), (64, False)}
    monkeypatch.setattr(lora, "batch_invariant", lambda: True)
    assert set().union(*map(linear, shapes)) == set().union(*map(moe, shapes)) == {(64, True)}
