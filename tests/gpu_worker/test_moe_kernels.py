"""Choosing experts and laying out their slots on a GPU: the kernels against their twins, and what a layer launches.

Kernels are compiled where there is a GPU, else run under Triton's interpreter.
"""

import pytest
import torch
from kernel_device import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from quire.gpu_worker.kernels import moe, moe_jit, moe_routing, moe_routing_jit
from quire.gpu_worker.kernels.card import Card
from quire.gpu_worker.layers import dispatch
from quire.gpu_worker.layers.formats.dense import PLAIN
from quire.gpu_worker.layers.linear import ExpertLinear, Linear, weight_of
from quire.gpu_worker.layers.moe import MoE
from quire.gpu_worker.spec import MoESpec

INF, NAN = float("inf"), float("nan")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def agree(logits, spec, correction=None):
    got, want = (run(logits, spec, correction) for run in (moe_routing.route, moe_routing.route_torch))
    assert got[1].dtype == torch.int64 and got[1].tolist() == want[1].tolist()
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-7, equal_nan=True)
    return got


# --- the choice ---

RULES = {
    "mixtral": MoESpec(8, 2, 1, renormalise=True),
    "qwen2": MoESpec(60, 4, 1),
    "qwen3": MoESpec(128, 8, 1, renormalise=True),
    "gpt-oss": MoESpec(32, 4, 1, "topk_softmax"),
    "sigmoid": MoESpec(5, 5, 1, "sigmoid", scale=2.5),
    "deepseek-v2": MoESpec(24, 6, 1, groups=3, topk_groups=2, scale=16.0),
    "deepseek-v3": MoESpec(64, 8, 1, "sigmoid", renormalise=True, scale=2.5, groups=8, topk_groups=4),
    "groups of no power of two": MoESpec(30, 3, 1, "sigmoid", groups=5, topk_groups=1),
    # A group has fewer experts than are chosen: the rest come from without, where all are worth the same.
    "more than the groups hold": MoESpec(12, 5, 1, groups=4, topk_groups=1),
    "one": MoESpec(1, 1, 1, renormalise=True),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_routing_agrees_with_its_twin(name, dtype):
    spec = RULES[name]
    correction = randn(spec.experts, seed=2) if spec.scoring == "sigmoid" else None
    weights, _ = agree(randn(5, spec.experts, seed=1).to(dtype), spec, correction)
    assert weights.dtype == torch.float32 and weights.shape == (5, spec.top_k)


def test_equal_scores_choose_the_lowest_ids():
    rows = torch.tensor([[0.0, 1.0, -0.0, 1.0, 1.0, 0.0], [0.0] * 6, [-INF] * 3 + [0.0] * 3, [-0.0] * 3 + [0.0] * 3])
    for scoring in ("softmax", "sigmoid", "topk_softmax"):
        ids = agree(rows.to(DEVICE), MoESpec(6, 4, 1, scoring, renormalise=True))[1]
        assert ids.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3], [3, 4, 5, 0], [0, 1, 2, 3]]
    ids = agree(rows.to(DEVICE), MoESpec(6, 3, 1, "sigmoid", groups=3, topk_groups=2))[1]
    assert ids[1].tolist() == [0, 1, 2]


def test_nan_chooses_experts_that_exist_and_shows_in_the_weights():
    rows = randn(3, 8)
    rows[1, 3] = NAN
    for scoring in ("softmax", "sigmoid", "topk_softmax"):
        weights, ids = agree(rows, MoESpec(8, 2, 1, scoring, renormalise=True))
        assert weights.isnan().any(1).tolist() == [False, True, False]
        assert ids[1].min() >= 0 and len(set(ids[1].tolist())) == 2
    agree(rows, MoESpec(8, 2, 1, "sigmoid", groups=4, topk_groups=2))


def test_very_low_logits_are_no_division_by_zero():
    weights, _ = agree(torch.full((1, 4), -200.0, device=DEVICE), MoESpec(4, 2, 1, "sigmoid", renormalise=True))
    assert weights.tolist() == [[0.0, 0.0]]


def test_rows_apart_from_each_other_in_memory():
    """The router's result may be a view of something wider."""
    wide = randn(4, 24)
    agree(wide[:, :8], RULES["mixtral"])
    assert moe_routing.route(wide[:0, :8], RULES["mixtral"])[1].shape == (0, 2)


# --- the layout of the slots ---


def choices(tokens, top_k, experts, seed=5):
    return randn(tokens, experts, seed=seed).topk(top_k).indices.contiguous()


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "first", "count", "rows"),
    [(1, 2, 8, 0, 8, 16), (7, 3, 9, 2, 5, 16), (50, 4, 8, 7, 1, 4), (530, 2, 4, 1, 3, 32), (4, 2, 8, 4, 4, 128)],
)
def test_slots_lie_as_the_twin_lays_them(tokens, top_k, experts, first, count, rows, monkeypatch):
    ids = choices(tokens, top_k, experts)
    got, want = moe.align(ids, first, count, rows), moe.align_torch(ids, first, count, rows)
    assert got.total == want.total == ids.numel() and got.slots.dtype == got.experts.dtype == torch.int32
    assert torch.equal(got.experts, want.experts)
    work = want.experts < count
    assert torch.equal(got.slots[work], want.slots[work])
    # Looked at in pieces, as longer steps are.
    monkeypatch.setattr(moe, "_chunk", lambda slots: 256)
    again = moe.align(ids, first, count, rows)
    assert torch.equal(again.experts, want.experts) and torch.equal(again.slots[work], want.slots[work])


def test_more_than_128_blocks_of_one_expert_and_without_work():
    for ids in (torch.zeros(300, 1), torch.ones(300, 1)):
        got, want = (run(ids.long().to(DEVICE), 0, 1, 2) for run in (moe.align, moe.align_torch))
        assert torch.equal(got.experts, want.experts)
        work = want.experts < 1
        assert torch.equal(got.slots[work], want.slots[work])


# --- the whole layer ---


def layer(spec, hidden, first=0, count=None):
    count = spec.experts if count is None else count
    gate_up, down = (
        ExpertLinear(PLAIN, {"weight": matrices}, weight_of(matrices))
        for matrices in (randn(count, 2 * spec.width, hidden, seed=3), randn(count, hidden, spec.width, seed=4))
    )
    router = randn(spec.experts, hidden, seed=5)
    correction = randn(spec.experts, seed=6) if spec.correction_bias else None
    return MoE(spec, Linear(PLAIN, {"weight": router}, weight_of(router)), gate_up, down, first, correction)


class Operations(TorchDispatchMode):
    """The names of torch's operations that would launch something on a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if name not in ("empty", "view", "t", "detach", "alias"):
            self.names.append(name)
        return operation(*args, **(kwargs or {}))


class Recorded:
    """In a kernel's place: its launches."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append(self.name)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek-v3"])
def test_what_a_layer_launches(name, monkeypatch):
    """The router's product, routing, layout, the experts' two products and their sum, and nothing else."""
    rule = RULES[name]
    spec = MoESpec(
        rule.experts, rule.top_k, 8, rule.scoring, rule.renormalise, groups=rule.groups, topk_groups=rule.topk_groups,
        correction_bias=rule.scoring == "sigmoid",
    )  # fmt: skip
    launches = []
    for module in (moe_jit, moe_routing_jit):
        for kernel in [each for each in vars(module) if each.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Recorded(kernel, launches))
    monkeypatch.setattr(dispatch, "use_kernels", lambda x: True)
    mixture, x = layer(spec, 16), randn(4, 16)
    with Operations() as seen:
        mixture(x)
    assert launches == ["route_kernel", "align_kernel", "grouped_kernel", "grouped_kernel", "sum_kernel"]
    assert seen.names == ["mm"]


def test_a_layer_by_kernels_is_the_layer_in_torch(monkeypatch):
    spec = MoESpec(8, 3, 8, "sigmoid", True, 2.5, correction_bias=True, groups=4, topk_groups=2)
    mixture, x = layer(spec, 16), randn(5, 16)
    weights, ids = moe_routing.route_torch(mixture.router(x), spec, mixture.correction)
    blocks = moe.align_torch(ids, 0, 8, 16)
    local = mixture.local
    wide = moe.grouped_product_torch(x, local.gate_up._products.matrices, None, blocks, "silu")
    each = moe.grouped_product_torch(wide, local.down._products.matrices, None, blocks, "", weights)
    monkeypatch.setattr(dispatch, "use_kernels", lambda x: True)
    torch.testing.assert_close(mixture(x), moe.sum_slots_torch(each, ids, 0, 8), rtol=1e-4, atol=1e-4)


# --- tiles ---


def test_tiles_follow_from_the_slots_of_an_expert():
    half = torch.bfloat16
    assert [moe.block_rows(slots, half) for slots in (0, 16, 17, 64, 65)] == [16, 16, 64, 64, 128]
    assert [moe.block_rows(slots, torch.float32) for slots in (16, 17, 1000)] == [16, 32, 32]


def test_tiles_do_not_follow_from_the_step_where_bits_must_not_depend_on_it(monkeypatch):
    monkeypatch.setattr(moe, "batch_invariant", lambda: True)
    for dtype in (torch.bfloat16, torch.float32):
        assert len({moe.block_rows(slots, dtype) for slots in (0, 16, 17, 64, 65, 1000)}) == 1


def test_the_experts_tiles_fit_the_card():
    for shared in (64, 99, 227):
        card = Card("a card", "cuda", 90, 100, shared * 1024, shared * 1024)
        for rows, dtype in ((16, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16), (32, torch.float32)):
            tiles = moe.product_tiles(rows, dtype, True, card)
            assert (rows + 2 * tiles.block_n) * tiles.block_k * tiles.stages * dtype.itemsize <= card.shared
            if rows < 64:  # two programs, each with all stages but one in memory
                stage = (rows + 2 * tiles.block_n) * tiles.block_k * dtype.itemsize
                assert 2 * (tiles.stages - 1) * stage <= card.shared_processor


def test_a_rank_with_few_experts_takes_the_tiles_of_the_whole_layer(monkeypatch):
    """Its experts get no more slots each than the others'."""
    rows, spec = [], MoESpec(8, 2, 8)
    monkeypatch.setattr(dispatch, "use_kernels", lambda x: True)
    monkeypatch.setattr(moe, "block_rows", lambda slots, dtype: rows.append(slots) or 16)
    for count in (8, 2):
        layer(spec, 16, 0, count)(randn(40, 16))
    assert rows == [10, 10]
