"""LoRA adapters of a worker against PEFT's: any mixture of them and of the base model in one step."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import draft_rig
import lora_toys
import numpy as np
import pytest
import quantized
import tiny_models
import tiny_moe
import torch
from lora_toys import GPT2, LLAMA, MIXTRAL, Oracle, check, hand_of, load, put, run
from paged_runner import PagedRunner, Row
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks

from quire.gpu_worker.lora.target import Adapter, Matrices
from quire.gpu_worker.speculation.heads import load_head
from quire.proto.checkpoint.lora_config import CONFIG, WEIGHTS
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.config import ConfigError

pytestmark = pytest.mark.slow
torch.set_num_threads(1)

Q = "base_model.model.model.layers.1.self_attn.q_proj."
KINDS: dict[str, list[dict[str, Any]]] = {"llama": LLAMA, "qwen2": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL}


def folder_of(kind: str, to: Path) -> Path:
    import tiny_gpt

    for module in (tiny_models, tiny_gpt, tiny_moe):
        if kind in module.ROWS:
            prefix, values = module.ROWS[kind][:2]
            return tiny_models.write(prefix, to / kind, 3, values)
    raise KeyError(kind)


@pytest.fixture(scope="module", params=KINDS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Oracle, list[Any], list[int]]:
    """A model's folder, its adapters, prompts, and which adapter each prompt has."""
    to = tmp_path_factory.mktemp(request.param)
    configs, folder = KINDS[request.param], folder_of(request.param, to)
    oracle = Oracle(folder, configs, to / "adapters")
    prompts = tiny_models.random_prompts(32, seed=5, longest=50)
    return folder, oracle, prompts, [row % (len(configs) + 1) - 1 for row in range(len(prompts))]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A Llama with room for one adapter, and the folder of a sound one."""
    to = tmp_path_factory.mktemp("one")
    folder = folder_of("llama", to)
    oracle = Oracle(folder, [{"r": 8, "target_modules": ["q_proj"]}], to / "adapters")
    return load(folder, 1), oracle.folders[0]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The same of a Mixtral, whose adapter changes both parameters of its experts."""
    to = tmp_path_factory.mktemp("moe")
    folder = folder_of("mixtral", to)
    return load(folder, 1), Oracle(folder, MIXTRAL[1:2], to / "adapters").folders[0]


def adapted(folder: Path, oracle: Oracle, **more: Any) -> Any:
    model = load(folder, len(oracle.folders), **more)
    for slot, each in enumerate(oracle.folders):
        put(model, slot, each)
    return model


def test_mixed_rows_equal_peft(made: Any) -> None:
    """In chunks, all side by side; and a row has the same bits alone."""
    folder, oracle, prompts, slots = made
    model = adapted(folder, oracle)
    found = run(hand_of(model), prompts, slots, 7, 3)
    check(oracle, prompts, slots, found, 1e-4)
    for row in range(0, len(prompts), 5):
        alone = run(hand_of(model), prompts[row : row + 1], slots[row : row + 1], 64, 3)
        assert torch.equal(alone[0][0], found[0][row]) and alone[1][0] == found[1][row]


def test_rows_without_adapter_have_the_bits_of_a_server_without_any(made: Any) -> None:
    folder, oracle, prompts, slots = made
    found = run(hand_of(adapted(folder, oracle)), prompts, slots, 9, 2)
    plain = run(hand_of(load(folder, 1)), prompts, [-1] * len(prompts), 9, 2)
    for row, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(found[0][row], plain[0][row]) and found[1][row] == plain[1][row]


def test_by_torch(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tensor parallel workers run: the same by torch, with and without the native kernels."""
    folder, oracle, prompts, slots = made
    monkeypatch.setattr("quire.gpu_worker.runner.program_of", lambda *given: None)
    for native in (True, False):
        monkeypatch.setattr("quire.gpu_worker.kernels.cpu.adapt.native_adapters", lambda native=native: native)
        model = adapted(folder, oracle)
        assert model.adapters.native == native
        check(oracle, prompts[:8], slots[:8], run(hand_of(model), prompts[:8], slots[:8], 20, 2), 1e-4)


def test_slots_change_between_steps(made: Any) -> None:
    """Another adapter in a slot, and none: the rows admitted from then on have it; children have their parent's."""
    folder, oracle, prompts, _ = made
    model = load(folder, 2)
    hand, ids = hand_of(model), prompts[0]
    for number, each in enumerate(oracle.folders):
        put(model, 1, each)
        lora_toys.admit(hand, 0, ids, 1)
        first = hand.run((0, len(ids)))[0]
        check(oracle, [ids], [number], ([oracle.logits(ids, number)[:-1]], [[first]]), 1e-4)
        assert not model.adapters.active, "a step has ended, and what runs until the next has none of its adapters"
        hand.fork(0, 1)
        hand.tables[1], hand.lengths[1], hand.done[1] = list(hand.tables[0]), hand.lengths[0], hand.done[0]
        if hand.done[1] % hand.block_size:
            hand.copy_block(1, len(hand.tables[1]) - 1)
        both = hand.run((0, 1), (1, 1))
        assert hand.state.adapters[:2].tolist() == [1, 1] and both[0] == both[1]
        check(oracle, [[*ids, first]], [number], ([oracle.logits([*ids, first], number)[:-1]], [[both[1]]]), 1e-4)
        hand.drop(0)
        hand.drop(1, free=False)
    model.adapters.install(1, None)
    with pytest.raises(ValueError, match="adapter slot 1"):
        lora_toys.admit(hand, 2, ids, 1)
        hand.run((2, len(ids)))


def test_heads_that_share_the_output_layer_draft_without_adapters(one: tuple[Any, Path], tmp_path: Path) -> None:
    """What they are asked has other rows than the target's step."""
    draft_rig.eagle(tmp_path)
    model, config = one[0], load_model_config(str(one[1].parent.parent / "llama"), lora_toys.LENGTH)
    head, x = load_head("eagle", str(tmp_path), config, model), torch.randn(3, model.whole.hidden_size)
    plain, (outputs, inputs) = head.logits(x), model.adapters.targets.shapes["lm_head"]
    adapter = Adapter("a", {"lm_head": (Matrices(torch.ones(8, inputs), torch.ones(outputs, 8), 1.0, 8),)})
    lora_toys.install(model, 0, adapter)
    model.adapters.begin(np.zeros(2, np.int32))
    assert torch.equal(head.logits(x), plain)
    with pytest.raises(ValueError, match="adapters of 2 rows are to be added to 3 rows"):
        model.logits(x)
    model.adapters.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel(kind: str, tmp_path: Path) -> None:
    """Two ranks, each with its part of every adapter: side by side their logits are PEFT's. Also fully sharded."""
    folder = folder_of(kind, tmp_path)
    configs = KINDS[kind]
    oracle = Oracle(folder, configs, tmp_path / "adapters")
    prompts = tiny_models.random_prompts(len(configs) + 1, seed=7, longest=20)
    slots = np.repeat(np.arange(-1, len(configs)), [len(ids) for ids in prompts]).astype(np.int32)

    def logits(group: Any, divided: bool) -> tuple[torch.Tensor, int]:
        model = load(folder, len(configs), group, divided)
        for slot, each in enumerate(oracle.folders):
            put(model, slot, each)
        model.adapters.begin(slots)
        return PagedRunner(model).step([(Row(ids), len(ids)) for ids in prompts]), model.adapters.most_bytes

    sizes = {}
    for divided in (False, True):
        ranks = on_ranks(2, partial(logits, divided=divided))
        found = torch.cat([each for each, _ in ranks], 1).split([len(ids) for ids in prompts])
        for number, (ids, each) in enumerate(zip(prompts, found, strict=True)):
            assert (oracle.logits(ids, number - 1) - each).abs().max() <= 1e-4
        sizes[divided] = ranks[0][1]
    assert sizes[True] < sizes[False]


@pytest.mark.parametrize("kind", KINDS)
def test_int4_base(kind: str, tmp_path: Path) -> None:
    """What adapters add stands beside the product with codes."""
    writer = next(row for row in quantized.rows_of("quantized_gptq") if "4" in row.name)
    plain, folder = tmp_path / "plain", tmp_path / "int4"
    if kind == "gpt2":
        tiny_models.save("GPT2", plain, quantized.SEED, **WIDE_GPT2)
        turned = quantized.copied(plain, tmp_path / "turned")  # codes are [out, in], and GPT-2's weights [in, out]
        save_file(turn(load_file(plain / "model.safetensors")), turned / "model.safetensors")
        writer.write(turned, folder)
        values = turn(dict(writer.dequantized(folder)))
    else:
        quantized.plain(kind, plain)
        writer.write(plain, folder)
        values = dict(writer.dequantized(folder))
    twin = quantized.copied(plain, tmp_path / "twin")
    save_file({**load_file(plain / "model.safetensors"), **values}, twin / "model.safetensors")
    oracle = Oracle(twin, KINDS[kind], tmp_path / "adapters")
    prompts = tiny_models.random_prompts(13, seed=5, longest=50)
    slots = [row - 1 for row in range(13)]
    found = run(hand_of(adapted(folder, oracle)), prompts, slots, 16, 3)
    check(oracle, prompts, slots, found, 1e-3)


WIDE_GPT2 = {"vocab_size": 320, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512}


def turn(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each weight of a layer's linears the other way round."""
    return {name: each.T.contiguous() if "c_" in name and each.dim() == 2 else each for name, each in tensors.items()}


LAYERS = "base_model.model.model.layers"
WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "shape of A": ({}, lambda t: t.update({Q + "lora_A.weight": torch.zeros(8, 47)}), f"{Q}lora_A.weight has shape"),
    "shape of B": ({}, lambda t: t.update({Q + "lora_B.weight": torch.zeros(47, 8)}), f"{Q}lora_B.weight has shape"),
    "no B": ({}, lambda t: t.pop(Q + "lora_B.weight"), "lora_B of model.layers.1.self_attn.q_proj is not"),
    "neither": ({}, lambda t: [t.pop(f"{Q}lora_{each}.weight") for each in "AB"], f"lacks {Q}lora_A.weight"),
    "no such layer": ({}, lambda t: t.update({f"{LAYERS}.9.self_attn.q_proj.lora_A.weight": torch.zeros(8, 48)}),
                      f"{LAYERS}.9.self_attn.q_proj.lora_A.weight is for"),
    "not named": ({}, lambda t: t.update({f"{LAYERS}.1.self_attn.o_proj.lora_A.weight": torch.zeros(8, 48)}),
                  "expected target modules in {q_proj} but received"),
    "another kind": ({}, lambda t: t.update({Q + "lora_magnitude_vector": torch.zeros(48)}),
                     "lora_magnitude_vector is unsupported LoRA weight"),
    "nothing": ({}, lambda t: t.clear(), "doesn't contain tensors"),
    "not a number": ({}, lambda t: t[Q + "lora_B.weight"].fill_(float("nan")), f"{Q}lora_B.weight has values that are"),
    "twice": ({}, lambda t: t.update({Q[17:] + "lora_A.weight": torch.zeros(8, 48)}), "for which other tensors were"),
    "DoRA": ({"use_dora": True}, None, "DoRA"),
    "bias": ({"bias": "all"}, None, "Adapter bias is not supported"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, None, "modules_to_save"),
    "r": ({"r": 513}, None, "LoRA rank 513 is greater than max_lora_rank 512."),
    "rank_pattern": ({"rank_pattern": {"q_proj": 600}}, None, "LoRA rank 600 is greater than max_lora_rank 512."),
    "r 0": ({"r": 0}, None, "r is '0'"),
    "a number that is none": ({"lora_alpha": 10**400}, None, "lora_alpha is"),
    "slow pattern": ({"alpha_pattern": {"(a+)+b": 3}}, None, "repeats too often"),
    "peft_type": ({"peft_type": "IA3"}, None, "peft_type 'IA3'"),
    "unknown": ({"new_kind_of_lora": True}, None, "new_kind_of_lora True is not known"),
    "pissa": ({"init_lora_weights": "pissa"}, None, "pissa"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_refused(one: tuple[Any, Path], tmp_path: Path, fault: str) -> None:
    """In one line, which names the file, and the tensor or the key."""
    (model, sound), (config, change, said) = one, WRONG[fault]
    folder = Path(shutil.copytree(sound, tmp_path / "adapter"))
    told = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**told, **config}))
    if change is not None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        put(model, 0, folder)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


EXPERTS = f"{LAYERS}.1.mlp.experts."
HALF: dict[str, tuple[dict[str, Any], Any, str]] = {
    "the inner": (
        {},
        lambda t: _without(t, EXPERTS + "base_layer."),
        "layers.1.mlp.experts.gate_up_proj, which target_p",
    ),
    "both": ({}, lambda t: _without(t, EXPERTS), "which target_parameters of adapter_config.json asks for"),
    "no such": ({"target_parameters": ["mlp.experts.w1"]}, None, "target_parameters has 'mlp.experts.w1'"),
    "unnamed": ({"target_parameters": ["mlp.experts.down_proj"]}, None, "does not name"),
    "an expert": (
        {"target_modules": ["o_proj", "w1"]},
        lambda t: _experts(t, 3),
        "block_sparse_moe.experts.3.w1.lora_A",
    ),
}


def _without(tensors: dict[str, Any], prefix: str) -> None:
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


def _experts(tensors: dict[str, Any], but: int) -> None:
    """Adapters of each expert's own w1, but of one."""
    for expert in (each for each in range(4) if each != but):
        name = f"{LAYERS}.0.block_sparse_moe.experts.{expert}.w1."
        tensors.update({name + "lora_A.weight": torch.zeros(4, 48), name + "lora_B.weight": torch.zeros(32, 4)})


@pytest.mark.parametrize("fault", HALF)
def test_experts_that_lack_a_part_are_refused(moe: tuple[Any, Path], tmp_path: Path, fault: str) -> None:
    (model, sound), (config, change, said) = moe, HALF[fault]
    folder = Path(shutil.copytree(sound, tmp_path / "adapter"))
    told = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**told, **config}))
    tensors = load_file(folder / WEIGHTS)
    if change is not None:
        change(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=re.escape(said)):
        put(model, 0, folder)


def test_pickles_are_refused(one: tuple[Any, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(one[1], tmp_path / "adapter"))
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin is pickled and is not read"):
        put(one[0], 0, folder)
