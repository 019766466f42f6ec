"""A decoder's step in C against the same step in torch, and against itself: in other batches, chunks and threads."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from cpu_kernels import VARIANTS, using
from program_rig import CPU, LENGTH, ProgramRig

from quire.gpu_worker.device import LongSteps
from quire.gpu_worker.kernels.cpu.library import library
from quire.gpu_worker.kernels.cpu.program import KINDS
from quire.gpu_worker.layers.linear import Linear
from quire.gpu_worker.models.decoder import Decoder
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.models.program import Program, program_of
from quire.proto.checkpoint.model_config import load_model_config

pytestmark = pytest.mark.skipif(library() is None, reason="no native CPU kernels: not compiled, or switched off")

ROWS: dict[str, Any] = {}
for module in ("tiny_models", "tiny_gpt", "tiny_modern", "tiny_moe", "tiny_remote"):
    ROWS |= importlib.import_module(module).ROWS

QUICK = ("llama", "qwen2", "gemma2", "gpt2", "opt-350m", "falcon-7b", "bloom-normed-residual", "mixtral")
"""One row of each shape of layer, a soft cap, tables of positions, projections, ALiBi, experts."""

PROMPTS = (1, 40, 7, 300, 17)
"""Lengths: of one token, of several tiles, and past one pass."""


def load(row: str, folder: Path, dtype: torch.dtype, quantization: str | None = None) -> Decoder:
    """The variant ``row`` of a family, on the CPU."""
    kind, values = ROWS[row][:2]
    folder.mkdir(exist_ok=True)
    config = load_model_config(str(tiny_models.write(kind, folder, 3, values)), LENGTH)
    model = load_model(config, dtype, CPU, quantization=quantization, quantize_lm_head=quantization is not None)
    assert isinstance(model, Decoder)
    return model


def filled(model: Decoder, seed: int = 0, long: LongSteps | None = None) -> ProgramRig:
    """A rig whose first rows hold prompts of the lengths of PROMPTS, always the same ones."""
    rig, generator = ProgramRig(model, seed, long), np.random.default_rng(1)
    for row, length in enumerate(PROMPTS):
        rig.admit(row, generator.integers(0, model.whole.vocab_size, length).tolist())
    return rig


WHOLE = [(row, 0, length) for row, length in enumerate(PROMPTS)]


def check_near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """In bfloat16 torch rounds all that goes from one operation to the next, and a token may take another expert."""
    assert wanted.std() > 0.1
    far, scale = (found - wanted).abs(), wanted.abs().max()
    assert (far.max() <= 1e-5 * scale) if dtype == torch.float32 else (far.median() <= 0.02 * scale)


def check_row(row: str, folder: Path) -> None:
    """The program of ``row`` equals torch, and gives a token the same bits whatever it is computed with."""
    for dtype in (torch.float32, torch.bfloat16):
        rig = filled(load(row, folder / str(dtype), dtype))
        every = rig.every(WHOLE)
        check_near(every, rig.by_torch(WHOLE), dtype)

        last = np.cumsum(PROMPTS) - 1
        logits = rig.logits(WHOLE)
        assert torch.equal(logits, every[last]), "logits of the last tokens alone"
        rig.logits([(3, 0, 77), (1, 0, 39)])
        rig.logits([(3, 77, 23)])
        chunked = rig.logits([(1, 39, 1), (3, 100, 200)])
        assert torch.equal(chunked, logits[[1, 3]]), "in chunks, and by a decode, with other rows"
        assert torch.equal(rig.logits([WHOLE[4]]), logits[4:]), "alone"


@pytest.mark.parametrize("row", QUICK)
def test_a_program_equals_torch_and_itself(row: str, tmp_path: Path) -> None:
    check_row(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row not in QUICK])
def test_every_family_s_program_equals_torch_and_itself(row: str, tmp_path: Path) -> None:
    check_row(row, tmp_path)


@pytest.mark.parametrize("row", ["llama", "gpt2", "falcon-7b", "mixtral", "qwen2-moe"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_made_narrower_give_what_their_layers_give(row: str, quantization: str, tmp_path: Path) -> None:
    rig = filled(load(row, tmp_path, torch.float32, quantization))
    every, wanted = rig.every(WHOLE), rig.by_torch(WHOLE)
    # An activation that lies between two integers may go to the other one, and so to another expert. All tokens behind
    # it see that.
    assert wanted.std() > 0.1
    assert (every - wanted).abs().median() <= 3e-3 * wanted.abs().max()
    assert torch.equal(rig.logits([WHOLE[1], WHOLE[4]]), every[np.cumsum(PROMPTS)[[1, 4]] - 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", ["qwen2", "qwen2-moe"])
def test_a_token_does_not_depend_on_threads_or_blocks(row: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, before, found = load(row, tmp_path, dtype), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rig = filled(model, seed=threads)
            found.append(rig.every(WHOLE))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("row", ["llama", "qwen2-moe"])
def test_long_steps_take_more_threads_and_give_the_same_bits(row: str, tmp_path: Path) -> None:
    model = load(row, tmp_path, torch.bfloat16)
    alone = filled(model, long=LongSteps(tokens=1000, threads=3))
    mixed = filled(model, long=LongSteps(tokens=40, threads=3))
    assert [mixed.program.threads_of(tokens) for tokens in (1, 39, 40, 300)] == [1, 1, 3, 3]
    assert alone.program.threads_of(300) == 1
    assert torch.equal(mixed.every(WHOLE), alone.every(WHOLE))
    # A long step after a short one, and the other way round: nobody is left waiting at a barrier.
    for work in ([(1, 39, 1)], [(3, 0, 200)], [(3, 200, 40), (4, 0, 17)], [(3, 240, 1), (1, 39, 1)]) * 20:
        assert torch.equal(mixed.logits(work), alone.logits(work))


@pytest.mark.parametrize("row", ["llama", "qwen2-moe"])
def test_threads_join_a_step_wherever_it_is(row: str, tmp_path: Path) -> None:
    """More threads than there are cores, so that each comes when it may: at the start, amid a layer, or too late."""
    model = load(row, tmp_path, torch.bfloat16)
    alone = filled(model, long=LongSteps(tokens=1000, threads=12))
    crowd = filled(model, long=LongSteps(tokens=1, threads=12))
    assert torch.equal(crowd.every(WHOLE), alone.every(WHOLE))
    for work in ([(1, 39, 1)], [(3, 0, 200)], [(3, 200, 40), (4, 0, 17)], [(3, 240, 1), (1, 39, 1)]) * 25:
        assert torch.equal(crowd.logits(work), alone.logits(work))
        assert torch.equal(crowd.every(work), alone.every(work))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("row", ["llama", "mixtral"])
def test_every_instruction_set_runs_it(row: str, variant: str, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with using(variant):
            rig = filled(load(row, tmp_path / str(dtype), dtype))
            every = rig.every(WHOLE)
            assert torch.equal(rig.logits(WHOLE[3:]), every[np.cumsum(PROMPTS)[3:] - 1])
            check_near(every, rig.by_torch(WHOLE), dtype)


def test_outputs_come_in_the_order_they_are_asked_for(tmp_path: Path) -> None:
    """Children of one prompt draw from one token's logits, and a step may have no output at all."""
    rig = filled(load("llama", tmp_path, torch.float32))
    logits = rig.logits(WHOLE)
    last = np.cumsum(PROMPTS) - 1
    assert torch.equal(rig.logits(WHOLE, [last[4], last[0], last[0], last[3]]), logits[[4, 0, 0, 3]])
    assert rig.logits(WHOLE, []).shape == (0, rig.model.whole.vocab_size)


@pytest.mark.parametrize("row", ["llama", "gemma2", "falcon-7b"])
def test_any_tokens_of_a_step_can_be_wanted(row: str, tmp_path: Path) -> None:
    """The last layer attends for them alone, and writes everybody's keys, which later steps read."""
    model = load(row, tmp_path, torch.float32)
    every, ends = filled(model).every(WHOLE), np.cumsum(PROMPTS)
    among = [0, 3, 4, 9, 40, 41, 47, *range(52, 56), 303, 304, 305, 363, 364]
    for wanted in (among, [3], [9] * 16, range(248, 264), [0, *ends - 1]):
        rig = filled(model)
        assert torch.equal(rig.logits(WHOLE, list(wanted)), every[list(wanted)])
        again = rig.logits([(row, length - 1, 1) for row, length in enumerate(PROMPTS)])
        assert torch.equal(again, every[ends - 1]), "the keys of those that were not wanted"


ROUTERS: dict[str, dict[str, Any]] = {
    "sigmoid": {"scoring": "sigmoid", "renormalise": True, "scale": 2.5},
    "sigmoid in groups": {"scoring": "sigmoid", "top_k": 3, "groups": 3, "topk_groups": 2, "renormalise": True},
    "softmax in groups": {"groups": 3, "topk_groups": 1, "top_k": 2, "scale": 1.5},
    "softmax of the chosen": {"scoring": "topk_softmax", "top_k": 5, "scale": 0.5},
    "all experts": {"top_k": 6, "renormalise": True},
}
"""Ways to choose that no family of the tables has, beside those that some have."""


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("corrected", [False, True])
def test_every_router_chooses_as_torch_does(name: str, corrected: bool, tmp_path: Path) -> None:
    model = load("qwen3-moe", tmp_path, torch.float32)
    spec = dataclasses.replace(model.spec.moe, **ROUTERS[name])
    model.spec = dataclasses.replace(model.spec, moe=spec)
    for block in model.layers:
        moe = block.mlp.experts
        moe.spec = spec
        moe.router.packed.set_bias(torch.linspace(-0.5, 0.5, spec.experts))
        if corrected:
            moe.correction = torch.linspace(0.3, -0.3, spec.experts)
    rig = filled(model)
    assert not rig.program.calls
    every = rig.every(WHOLE)
    check_near(every, rig.by_torch(WHOLE), torch.float32)
    assert torch.equal(rig.logits([WHOLE[1], WHOLE[4]]), every[np.cumsum(PROMPTS)[[1, 4]] - 1])


def test_tied_experts_are_chosen_by_number(tmp_path: Path) -> None:
    """A router of zeros gives every expert the same score."""
    model = load("mixtral", tmp_path, torch.float32)
    for block in model.layers:
        block.mlp.experts.router = Linear.of(torch.zeros(4, model.spec.hidden_size))
    rig = filled(model)
    check_near(rig.every(WHOLE[:3]), rig.by_torch(WHOLE[:3]), torch.float32)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights without a packed form, whose products torch computes."""
    monkeypatch.setenv("QUIRE_CPU_LINEAR", "plain")


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("row", ["llama", "qwen2-moe"])
def test_what_c_cannot_multiply_is_done_by_torch(row: str, tmp_path: Path) -> None:
    rig = filled(load(row, tmp_path, torch.float32))
    assert rig.program.calls
    check_near(rig.every(WHOLE), rig.by_torch(WHOLE), torch.float32)


@pytest.mark.usefixtures("unpacked")
def test_a_call_that_fails_ends_the_step_with_its_error(tmp_path: Path) -> None:
    rig = filled(load("mixtral", tmp_path, torch.float32))
    wanted = rig.logits(WHOLE[:1])
    operation, function = rig.program.calls[0]

    def fail(rows: int) -> None:
        raise RuntimeError(f"{rows} rows")

    rig.program.calls[0] = operation, fail
    with pytest.raises(RuntimeError, match="7 rows"):
        rig.logits([WHOLE[2]])
    rig.program.calls[0] = operation, function
    assert torch.equal(rig.logits(WHOLE[:1]), wanted)


def test_what_operations_take_is_measured_when_asked_for(tmp_path: Path) -> None:
    rig = filled(load("llama", tmp_path, torch.float32))
    rig.program.nanoseconds = spent = np.zeros(len(KINDS), np.int64)
    rig.logits(WHOLE)
    assert {kind.__name__ for kind, took in zip(KINDS, spent, strict=True) if took} >= {"Linear", "Attend", "Embed"}


def test_a_model_of_a_single_key_head_has_a_program(tmp_path: Path) -> None:
    model = load("falcon-7b", tmp_path, torch.float32)
    assert model.spec.kv_heads[0] == 1
    rig = ProgramRig(model)
    assert program_of(model, rig.kv, rig.tokens, rig.tables, 4) is not None


def test_programs_share_a_team_and_tell_what_lies_between_layers(tmp_path: Path) -> None:
    model = load("llama", tmp_path, torch.float32)
    rig = filled(model)
    taps = (0, 2, 1)
    beside = Program(model, rig.kv, rig.tokens, rig.tables, 4, beside=rig.program, taps=taps)
    columns = rig.columns(WHOLE)
    every = np.arange(columns[2].sum())
    assert torch.equal(beside.hidden(*columns, every), rig.program.hidden(*columns, every))
    tapped = beside.tapped()
    model.taps = taps
    rig.by_torch(sorted(WHOLE, key=lambda item: item[2] != 1))
    assert model.tapped is not None
    assert torch.allclose(tapped, model.tapped, atol=1e-4)
