"""A layer's experts as operations of a step's program: route, dispatch, both products of each expert, combine.

Rows are copied into the order of their experts, so that each expert's product reads one block of rows. A row's results
are added up from the lowest expert on, as ``layers/moe.py`` does.
"""

from __future__ import annotations

from ctypes import addressof

import torch

from ..kernels.cpu import program as native
from ..kernels.cpu.linear import ADD, GATED, STORE
from ..layers.mlp import MoEBlock
from ..layers.moe import MoE
from ..spec import MoESpec
from .program_writer import Area, Writer

SCORINGS = ("softmax", "sigmoid", "topk_softmax")
"""In the order of route.h's Q_SOFTMAX and those after it."""
MOST_EXPERTS = 512
"""route.h's Q_MOST_EXPERTS."""


def experts_run_in_c(block: MoEBlock) -> bool:
    """Whether ``write_experts`` can: the experts' weights are packed with gate and up beside each other."""
    gate_up, down = block.experts.local.gate_up.packed, block.experts.local.down.packed
    if not gate_up or not down or block.experts.spec.experts > MOST_EXPERTS:
        return False
    return all(weight.struct.gated for weight in gate_up)


def new_routing(to: Writer, spec: MoESpec) -> native.Routing:
    """Where a step keeps which experts its rows go to: one after another for all layers."""
    parts = [to.zeros(spec.top_k, dtype) for dtype in (torch.int32, torch.float32, torch.int32)]
    ends = torch.zeros(spec.experts, dtype=torch.int32)
    to.keep.append(ends)
    return native.Routing(spec.experts, spec.top_k, *(part.data_ptr() for part in parts), ends.data_ptr())


def write_experts(
    to: Writer, routing: native.Routing, block: MoEBlock, source: Area, out: Area, action: int, scale: float
) -> None:
    """``scale * block(source)`` to ``out``, as the epilogue ``action`` says (STORE or ADD)."""
    moe, shared, gated = block.experts, block.shared, block.shared_gate is not None
    logits = to.area("router logits", moe.spec.experts)
    to.product(source, moe.router, logits)
    # What reads the source comes first: ``out`` may be the same buffer.
    if shared is not None:
        wide = to.area("wide of the shared MLP", moe.spec.shared_width, to.input_type(shared.down.packed))
        to.product(source, shared.up, wide, GATED, shared.kind)
    if block.shared_gate is not None:
        gate = to.area("gate of the shared MLP", 1)
        to.product(source, block.shared_gate, gate)
    results = _each_expert(to, routing, moe, source, logits, scale)
    if shared is not None and not gated:
        to.product(wide, shared.down, out, action, scale=scale)
        action = ADD
    to.add(native.Combine(addressof(routing), results.buffer, out.buffer, out.width, int(action == ADD)), out)
    if shared is not None and gated:
        result = to.area("result of the shared MLP", out.width)
        to.product(wide, shared.down, result)
        to.add(native.GatedSum(out.width, scale, gate.buffer, result.buffer, out.buffer), out)


def _each_expert(to: Writer, routing: native.Routing, moe: MoE, source: Area, logits: Area, scale: float) -> Area:
    """The results of each row's experts, in the order of the experts; ``routing`` says which are whose."""
    of_gate_up, of_down = moe.local.gate_up, moe.local.down
    gate_up, down = of_gate_up.packed, of_down.packed
    assert gate_up is not None and down is not None  # experts_run_in_c
    top_k, first = moe.spec.top_k, gate_up[0].struct
    rows = to.inputs(source, gate_up[0])
    to.add(native.Route(_router(to, moe, scale), logits.buffer, addressof(routing)), logits)
    dispatched, slots = to.rows(f"{source.name} of each expert", first, top_k)
    size = first.padded_inputs * dispatched.tensor.element_size()
    to.add(native.Dispatch(addressof(routing), rows, slots, size, first.groups), dispatched)
    wide = to.area("wide of each expert", moe.spec.width, to.input_type(down[0]), top_k)
    to.experts(routing, of_gate_up, source, slots, wide, GATED, moe.spec.activation)
    results = to.area("results of each expert", down[0].struct.outputs, each=top_k)
    to.experts(routing, of_down, wide, to.inputs(wide, down[0]), results, STORE)
    return results


def _router(to: Writer, moe: MoE, scale: float) -> native.Router:
    spec = moe.spec
    return native.Router(
        spec.experts, spec.top_k, SCORINGS.index(spec.scoring), spec.renormalise, spec.groups, spec.topk_groups,
        spec.scale * scale, to.pointer(moe.correction),
    )  # fmt: skip
