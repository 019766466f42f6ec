"""Mixtures of experts: every family's block against transformers', and the Triton kernels against their twins.

Kernels are compiled where there is a GPU, else run under Triton's interpreter.
"""

from typing import NamedTuple

import pytest
import torch
from kernel_device import DEVICE

pytest.importorskip("triton")

from transformers import AutoConfig
from transformers.models.dbrx.modeling_dbrx import DbrxFFN
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from quire.gpu_worker.kernels import moe as kernels
from quire.gpu_worker.kernels.activation import gated_activation_torch
from quire.gpu_worker.kernels.cpu.library import library
from quire.gpu_worker.layers.formats.dense import PLAIN
from quire.gpu_worker.layers.linear import ExpertLinear, Linear, weight_of
from quire.gpu_worker.layers.moe import Experts, MoE, experts_cpu, experts_grouped, route
from quire.gpu_worker.spec import MoESpec

HIDDEN, WIDTH, EXPERTS = 32, 24, 8
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got, want, dtype=torch.float32):
    assert got.dtype == want.dtype == dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# --- whole blocks against transformers ---

_QWEN = {"num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": WIDTH}
_DEEPSEEK = {
    "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts": EXPERTS, "num_experts_per_tok": 3,
    "moe_intermediate_size": WIDTH, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
_DBRX = {"moe_num_experts": EXPERTS, "moe_top_k": 4, "ffn_hidden_size": WIDTH}
# name -> (model type, block, what its config says, what our spec says)
BLOCKS = {
    "mixtral": (
        "mixtral", MixtralSparseMoeBlock,
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": WIDTH},
        {"top_k": 2, "renormalise": True},
    ),
    "qwen2": ("qwen2_moe", Qwen2MoeSparseMoeBlock, {**_QWEN, "shared_expert_intermediate_size": 40}, {"top_k": 3}),
    "qwen3": (
        "qwen3_moe", Qwen3MoeSparseMoeBlock, {**_QWEN, "norm_topk_prob": True}, {"top_k": 3, "renormalise": True},
    ),
    "dbrx": (
        "dbrx", DbrxFFN, {"ffn_config": {**_DBRX, "moe_normalize_expert_weights": 1.0}},
        {"top_k": 4, "renormalise": True},
    ),
    "dbrx-as-they-are": (
        "dbrx", DbrxFFN, {"ffn_config": {**_DBRX, "moe_normalize_expert_weights": None}}, {"top_k": 4},
    ),
    "gpt-oss": (
        "gpt_oss", GptOssMLP, {"num_local_experts": EXPERTS, "num_experts_per_tok": 4, "intermediate_size": WIDTH},
        {"top_k": 4, "scoring": "topk_softmax", "activation": "swiglu_oai", "bias": True, "router_bias": True},
    ),
    "deepseek-v3": (
        "deepseek_v3", DeepseekV3MoE, {**_DEEPSEEK, "norm_topk_prob": True},
        {"top_k": 3, "scoring": "sigmoid", "renormalise": True, "scale": 2.5, "correction_bias": True,
         "groups": 4, "topk_groups": 2},
    ),
    "deepseek-v2": (
        "deepseek_v2", DeepseekV2Moe, {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
        {"top_k": 3, "scale": 2.5, "groups": 4, "topk_groups": 2},
    ),
}  # fmt: skip


def block_of(name):
    """transformers' block with random weights, in float32."""
    kind, make, values, _ = BLOCKS[name]
    config = AutoConfig.for_model(kind, hidden_size=HIDDEN, **values)
    if kind == "dbrx":
        config.ffn_config.hidden_size = HIDDEN
    block = make(config).eval()
    draw = torch.Generator().manual_seed(7)
    for tensor in [*block.parameters(), *block.buffers()]:
        tensor.data.normal_(0, 0.3, generator=draw)
    return block


def ours(name, block):
    """The MoE with the weights of ``block``."""
    spec = MoESpec(experts=EXPERTS, width=WIDTH, **BLOCKS[name][3])
    state = {key.removeprefix("experts."): value for key, value in block.state_dict().items()}
    if name.startswith("dbrx"):
        w1, v1, w2 = (state[f"mlp.{key}"].unflatten(0, (EXPERTS, WIDTH)) for key in ("w1", "v1", "w2"))
        gate_up, down = torch.cat([w1, v1], 1), w2.mT.contiguous()
        return MoE(spec, Linear.of(state["router.layer.weight"]), ExpertLinear.of(gate_up), ExpertLinear.of(down))
    if name == "gpt-oss":  # transposed, gate and up interleaved
        split = torch.cat([torch.arange(0, 2 * WIDTH, 2), torch.arange(1, 2 * WIDTH, 2)])
        return MoE(
            spec, Linear.of(state["router.weight"], state["router.bias"]),
            ExpertLinear.of(state["gate_up_proj"].mT[:, split].contiguous(), state["gate_up_proj_bias"][:, split]),
            ExpertLinear.of(state["down_proj"].mT.contiguous(), state["down_proj_bias"]),
        )  # fmt: skip
    correction = state.get("gate.e_score_correction_bias")
    gate_up, down = ExpertLinear.of(state["gate_up_proj"]), ExpertLinear.of(state["down_proj"])
    return MoE(spec, Linear.of(state["gate.weight"]), gate_up, down, correction=correction)


@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_blocks_agree_with_transformers(name):
    block = block_of(name)
    x = torch.randn(33, HIDDEN, generator=torch.Generator().manual_seed(1))
    want = block(x[None])
    want = (want[0] if isinstance(want, tuple) else want)[0]
    moe = ours(name, block)
    got = moe(x)
    if name == "qwen2":
        got += block.shared_expert_gate(x).sigmoid() * block.shared_expert(x)
    elif name.startswith("deepseek"):
        got += block.shared_experts(x)
    close(got, want)
    # Scores of one size would let a wrong choice pass.
    assert moe(x).abs().max() > 0.1


# --- the choice ---


def test_equal_scores_choose_the_lowest_ids():
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0], [0.0] * 6])
    for scoring in ("softmax", "sigmoid", "topk_softmax"):
        weights, ids = route(logits, MoESpec(6, 4, 1, scoring, renormalise=True), None)
        assert ids.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]] and ids.dtype == torch.int64
        torch.testing.assert_close(weights.sum(1), torch.ones(2))
        assert weights.dtype == torch.float32


def test_the_correction_moves_the_choice_and_not_the_weights():
    logits, spec = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), MoESpec(4, 2, 1, "sigmoid", scale=3.0)
    weights, ids = route(logits, spec, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, 3 * torch.tensor([[-1.0, 2.0]]).sigmoid())


def test_groups_are_chosen_by_their_two_best():
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.55, 0.2]])  # sums 1.0, 1.1, 0.75
    spec = MoESpec(6, 2, 1, "sigmoid", groups=3, topk_groups=1)
    assert route(scores.logit(), spec, None)[1].tolist() == [[2, 3]]
    # With softmax a group is worth its best expert.
    assert route(scores.log(), MoESpec(6, 2, 1, groups=3, topk_groups=1), None)[1].tolist() == [[0, 1]]


# --- the experts on a CPU ---


class Held(NamedTuple):
    """The tensors of ``Experts``."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    first: int = 0
    activation: str = "silu"

    @property
    def linears(self):
        gate_up = ExpertLinear.of(self.gate_up, self.gate_up_bias)
        return Experts(gate_up, ExpertLinear.of(self.down, self.down_bias), self.first, self.activation)

    @property
    def for_triton(self):
        """Not packed, also where the interpreter runs the kernels on a CPU."""
        gate_up, down = (
            ExpertLinear(PLAIN, {"weight": matrices}, weight_of(matrices), bias)
            for matrices, bias in ((self.gate_up, self.gate_up_bias), (self.down, self.down_bias))
        )
        return Experts(gate_up, down, self.first, self.activation)


def on_cpu(x, weights, ids, held):
    return experts_cpu(x, weights, ids, held.linears)


def grouped(x, weights, ids, held):
    return experts_grouped(x, weights, ids, held.for_triton)


def twin(x, weights, ids, held):
    """The twin of ``grouped``."""
    count = len(held.gate_up)
    blocks = kernels.align_torch(ids, held.first, count, 16)
    wide = kernels.grouped_product_torch(x, held.gate_up, held.gate_up_bias, blocks, activation=held.activation)
    each = kernels.grouped_product_torch(wide, held.down, held.down_bias, blocks, weights=weights)
    return kernels.sum_slots_torch(each, ids, held.first, count)


def local(experts=EXPERTS, hidden=HIDDEN, width=WIDTH, bias=False, activation="silu", dtype=torch.float32):
    """Random experts."""
    biases = [randn(experts, n, dtype=dtype, seed=s) if bias else None for n, s in ((2 * width, 3), (hidden, 4))]
    gate_up, down = (randn(experts, 2 * width, hidden, seed=1), randn(experts, hidden, width, seed=2))
    return Held((gate_up * hidden**-0.5).to(dtype), (down * width**-0.5).to(dtype), *biases, activation=activation)


def part(experts, first, last):
    """Experts ``first .. last - 1`` of them, as another rank holds them."""
    tensors = [None if tensor is None else tensor[first:last] for tensor in experts[:4]]
    return Held(*tensors, first=first, activation=experts.activation)


def choices(tokens, top_k=2, experts=EXPERTS, seed=5):
    """Random (weights, ids)."""
    return route(randn(tokens, experts, seed=seed), MoESpec(experts, top_k, 1, renormalise=True), None)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(library() is None, reason="no native CPU kernels: products may follow the batch")
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("hidden", [HIDDEN, 300])
def test_a_token_does_not_depend_on_its_company(hidden):
    """Bit for bit, alone and among any number of others at the same expert."""
    held = Held(*(t if t is None else t.cpu() for t in local(1, hidden, 257, bias=True)[:4]))
    x, weights, ids = randn(30, hidden).cpu(), torch.ones(30, 1), torch.zeros(30, 1, dtype=torch.int64)
    whole = on_cpu(x, weights, ids, held)
    for rows in (slice(0, 1), slice(3, 8), slice(1, 12)):
        assert torch.equal(on_cpu(x[rows], weights[rows], ids[rows], held), whole[rows]), rows
    assert on_cpu(x[:0], weights[:0], ids[:0], held).shape == (0, hidden)


# --- the kernels ---


def dense(x, weights, ids, held):
    """Token by token, choice by choice, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate_up = held.gate_up[expert].double() @ x[token].double()
            gate_up = gate_up if held.gate_up_bias is None else gate_up + held.gate_up_bias[expert].double()
            wide = gated_activation_torch(gate_up[None], held.activation)[0].double()
            y = held.down[expert].double() @ wide
            out[token] += weight * (y if held.down_bias is None else y + held.down_bias[expert].double())
    return out.to(x.dtype)


RUNS = [grouped, twin, *([on_cpu] if DEVICE == "cpu" else [])]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_ranks_add_up(run, activation):
    held, x, (weights, ids) = local(bias=True, activation=activation), randn(7, HIDDEN), choices(7)
    whole = dense(x, weights, ids, held)
    close(run(x, weights, ids, held), whole)
    close(sum(run(x, weights, ids, part(held, *bounds)) for bounds in ((0, 3), (3, 4), (4, 8))), whole)


@pytest.mark.parametrize("tokens", [1, 5, 50])
@pytest.mark.parametrize(("first", "count"), [(0, 8), (2, 3), (7, 1)])
def test_align(tokens, first, count):
    """Every local slot is once in a block of its expert; blocks are filled from the front."""
    ids = choices(tokens, 3)[1]
    blocks = kernels.align(ids, first, count, 4)
    found = []
    for slots, expert in zip(blocks.slots.tolist(), blocks.experts.tolist(), strict=True):
        filled = [slot for slot in slots if slot < blocks.total]
        assert expert == count or (filled and slots[: len(filled)] == filled)
        found += [(slot, expert + first) for slot in filled if expert < count]
    want = [(slot, expert) for slot, expert in enumerate(ids.flatten().tolist()) if first <= expert < first + count]
    assert sorted(found) == want


def test_a_plan_has_room_for_the_worst():
    """All experts used, each with one slot more than whole blocks; and all slots at one expert."""
    for ids in (torch.arange(4).repeat(5)[:, None], torch.full((33, 1), 3)):
        blocks = kernels.align(ids.to(DEVICE), 0, 4, 4)
        work = blocks.slots[blocks.experts < 4].flatten().tolist()
        assert sorted(slot for slot in work if slot < blocks.total) == [*range(len(ids))]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("activation", "bias", "hidden", "width"),
    [("silu", False, 64, 40), ("swiglu_oai", True, 72, 70), ("gelu", False, 16, 128), ("gelu_tanh", True, 64, 64)],
)
def test_grouped_products(dtype, activation, bias, hidden, width):
    """Both products and the sum, each against its twin."""
    held = local(5, hidden, width, bias, activation, dtype)
    x, (weights, ids) = randn(23, hidden, dtype=dtype), choices(23, 2, 9)
    blocks = kernels.align(ids, 2, 5, 16)
    mine = ((ids >= 2) & (ids < 7)).flatten()
    args = (x, held.gate_up, held.gate_up_bias, blocks, activation)
    wide = kernels.grouped_product_torch(*args)
    close(kernels.grouped_product(*args)[mine], wide[mine], dtype)
    args = (wide, held.down, held.down_bias, blocks, "", weights)
    each = kernels.grouped_product_torch(*args)
    close(kernels.grouped_product(*args)[mine], each[mine], dtype)
    each[~mine] = float("nan")  # as memory that nobody wrote may be
    close(kernels.sum_slots(each, ids, 2, 5), kernels.sum_slots_torch(each, ids, 2, 5), dtype)


@pytest.mark.slow
def test_many_tokens_and_none():
    """Blocks of more than the least rows; a step without tokens."""
    held, x, (weights, ids) = local(2), randn(100, HIDDEN), choices(100, 1, 2)
    close(grouped(x, weights, ids, held), twin(x, weights, ids, held))
    assert grouped(x[:0], weights[:0], ids[:0], held).shape == (0, HIDDEN)


def test_unknown_activation_is_named():
    held, x, (weights, ids) = local(activation="swish"), randn(2, HIDDEN), choices(2)
    with pytest.raises(ValueError, match="swish"):
        grouped(x, weights, ids, held)
