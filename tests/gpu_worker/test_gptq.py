"""GPTQ: what files hold is the formula's floats, in every width and order, whole and in ranks."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import packed_weights
import pytest
import tiny_models
import tiny_moe
import torch
from packed_weights import act_order, checkpoints, edit
from safetensors.torch import load_file, save_file
from thread_ranks import hidden, in_ranks, load

from quire.gpu_worker.kernels.cpu.library import library
from quire.gpu_worker.layers.formats import coded, gptq, packed
from quire.gpu_worker.layers.formats.auto_round import auto_round
from quire.gpu_worker.layers.formats.awq import AWQ
from quire.gpu_worker.layers.formats.base import Part, Weight, whole
from quire.gpu_worker.layers.formats.dense import dense
from quire.gpu_worker.layers.formats.gptq import GPTQ
from quire.gpu_worker.layers.formats.packed import grouping
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.spec import Shard
from quire.proto.config import ConfigError

CPU = torch.device("cpu")
# bits, group_size, sym, v2, what the order of inputs is: plain, none (no g_idx), static (and desc_act), act
ROWS: dict[str, tuple[int, int, bool, bool, str]] = {
    "4-bit": (4, 32, True, False, "plain"),
    "4-bit-zeros": (4, 64, False, False, "none"),
    "4-bit-v2": (4, 32, False, True, "plain"),
    "4-bit-one-group": (4, -1, False, False, "act"),
    "4-bit-act-order": (4, 32, False, False, "act"),
    "4-bit-static-groups": (4, 64, True, False, "static"),
    "2-bit": (2, 32, False, False, "plain"),
    "2-bit-act-order": (2, 32, False, True, "act"),
    "3-bit": (3, 32, False, False, "plain"),
    "3-bit-act-order": (3, 32, True, True, "act"),
    "8-bit": (8, -1, True, False, "plain"),
    "8-bit-act-order": (8, 32, False, False, "act"),
}


@pytest.fixture(autouse=True)
def _by_values(monkeypatch: Any) -> None:
    """Multiply by the float weights that codes stand for, so that equal weights give equal bits."""
    monkeypatch.setattr(coded, "product_of", lambda codes, w: dense(w).linear({"weight": codes.values(w.dtype)}, w))
    monkeypatch.setattr(coded, "experts_of", lambda codes, w: dense(w).experts({"weight": codes.values(w.dtype)}, w))


def config_of(row: str, **more: Any) -> dict[str, Any]:
    bits, group, sym, v2, order = ROWS[row]
    layout = {"checkpoint_format": "gptq_v2"} if v2 else {}
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, **layout,
            "desc_act": order in ("act", "static"), **more}  # fmt: skip


def written(
    folder: Path, model: str, row: str, config: dict[str, Any] | None = None, **values: Any
) -> tuple[Path, Path]:
    """A checkpoint of ``row``, and its floats. Modules of a layer share an order of inputs, each expert's their own."""
    bits, size, sym, v2, order = ROWS[row]

    def quantize(module: str, matrix: torch.Tensor) -> packed_weights.Made:
        columns = matrix.shape[1]
        group, seed = columns if size < 0 else size, sum(int(n) for n in module.split(".") if n.isdigit())
        groups = act_order(columns, group, seed) if order == "act" else np.arange(columns) // group
        tensors, floats = packed_weights.gptq(matrix, groups, bits, sym, v2)
        if order == "none":
            del tensors["g_idx"]
        return tensors, floats

    return checkpoints(folder, model, quantize, config or config_of(row), **values)


@pytest.mark.parametrize("row", ROWS)
def test_weights_are_the_formulas_whole_and_in_ranks(row: str, tmp_path: Path) -> None:
    quantized, plain = written(tmp_path, "llama", row)
    want = hidden(load(plain))
    assert torch.equal(hidden(load(quantized)), want)
    for each in in_ranks(quantized, 2):
        torch.testing.assert_close(each, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model", ["qwen2", "mixtral", "qwen2-moe", "deepseek-moe"])
@pytest.mark.parametrize("row", ["4-bit-zeros", "4-bit-act-order"])
def test_biases_and_experts(model: str, row: str, tmp_path: Path) -> None:
    quantized, plain = written(tmp_path, model, row)
    want = hidden(load(plain))
    assert torch.equal(hidden(load(quantized)), want)
    for each in in_ranks(quantized, 2):
        torch.testing.assert_close(each, want, atol=1e-4, rtol=1e-4)


def test_ranks_without_an_expert(tmp_path: Path) -> None:
    quantized, plain = written(tmp_path, "mixtral", "4-bit-act-order", num_local_experts=2, num_attention_heads=12,
                               num_key_value_heads=3)  # fmt: skip
    want = hidden(load(plain))
    for each in in_ranks(quantized, 3):
        torch.testing.assert_close(each, want, atol=1e-4, rtol=1e-4)


def test_experts_by_other_names(tmp_path: Path) -> None:
    """auto-round 0.16 names Mixtral's as transformers 5 does."""
    quantized, plain = written(tmp_path, "mixtral", "4-bit-zeros")
    tensors = load_file(quantized / "model.safetensors")
    for old, new in ((".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj.")):
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, quantized / "model.safetensors")
    assert torch.equal(hidden(load(quantized)), hidden(load(plain)))


def test_experts_of_gpt_oss_that_are_modules_of_their_own(tmp_path: Path) -> None:
    """As auto-round and GPTQModel save them, where the float model has one tensor of all experts."""
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    kind, values = tiny_moe.ROWS["gpt-oss"]
    for folder in (plain, quantized):
        tiny_models.write(kind, folder, 5, {**values, "hidden_size": 64, "intermediate_size": 96})
    floats, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(floats.items()):
        stem, _, key = name.partition(".experts.")
        if not key:
            stored[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            for part, kind in enumerate(("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)):
                module = f"{stem}.experts.{expert}.{kind}"
                rows = slice(part, None, 2) if "gate_up" in key else slice(None)
                if key.endswith("bias"):
                    stored[f"{module}.bias"] = matrix[rows].contiguous()
                else:
                    made, floats[name][expert, :, rows] = turned(matrix[:, rows])
                    stored |= {f"{module}.{each}": made[each].contiguous() for each in made}
    save_file(stored, quantized / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    edit(quantized, quantization_config=config_of("4-bit-zeros", group_size=32))
    want = hidden(load(plain))
    assert torch.equal(hidden(load(quantized)), want)
    for each in in_ranks(quantized, 2):
        torch.testing.assert_close(each, want, atol=1e-4, rtol=1e-4)


def turned(matrix: torch.Tensor) -> packed_weights.Made:
    """GPTQ of a matrix [in, out], and its values likewise."""
    tensors, floats = packed_weights.gptq(matrix.T, np.arange(len(matrix)) // 32)
    return tensors, floats.T


# --- one weight ---


def codes_of(tensors: dict[str, torch.Tensor], format: GPTQ, rows: int, columns: Part) -> Any:
    """Of a checkpoint's tensors, with the columns cut as the loader cuts them."""
    words = slice(columns.start * format.bits // 32, columns.stop * format.bits // 32)
    held = {name: tensor.T for name, tensor in tensors.items() if name != "g_idx"}
    held["qweight"] = held["qweight"][:, words].contiguous()
    held["g_idx"] = tensors["g_idx"][None]
    return format.codes(held, Weight((whole(rows),), columns, torch.float32, CPU))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_code_and_every_zero(bits: int) -> None:
    most = 1 << bits
    columns = max(32, most)
    codes = np.tile(np.arange(columns) % most, (most, 1))
    zeros = np.arange(most)[None]
    tensors = {
        "qweight": torch.from_numpy(packed_weights.bits_of(codes, bits).T.copy()),
        "scales": torch.full((1, most), 0.1).half(), "g_idx": torch.zeros(columns, dtype=torch.int32),
    }  # fmt: skip
    if bits < 4:  # words of zeros are whole
        codes, zeros = np.tile(codes, (32 // most, 1)), np.tile(zeros, (1, 32 // most))
        tensors["qweight"], tensors["scales"] = (
            tensors["qweight"].repeat(1, 32 // most),
            tensors["scales"].repeat(1, 32 // most),
        )
    want = torch.from_numpy((codes - zeros.T).astype(np.float32)) * torch.tensor(0.1).half().float()
    for v2 in (False, True):
        tensors["qzeros"] = torch.from_numpy(packed_weights.bits_of(zeros if v2 else (zeros - 1) % most, bits))
        found = codes_of(tensors, GPTQ(bits, -1, False, v2), len(codes), whole(columns))
        assert torch.equal(found.values(), want)


@pytest.mark.parametrize("part", [(0, 96), (0, 32), (32, 96), (40, 72)])
@pytest.mark.parametrize("order", ["plain", "act", "reversed", "any"])
def test_a_share_of_the_inputs_in_any_order_of_groups(order: str, part: tuple[int, int]) -> None:
    groups = {
        "plain": np.arange(96) // 32, "act": act_order(96, 32), "reversed": np.arange(96)[::-1] // 32,
        "any": np.random.default_rng(1).integers(0, 3, 96),
    }[order].copy()  # fmt: skip
    matrix = torch.randn(16, 96, generator=torch.Generator().manual_seed(1))
    tensors, want = packed_weights.gptq(matrix, groups)
    start, stop = part
    found = codes_of(tensors, GPTQ(4, 32, False), 16, Part(96, start, stop))
    assert torch.equal(found.values(), want[:, start:stop])
    assert found.planes[0].shape[-1] * 8 % 32 == 0
    assert found.group % 32 == 0
    if order == "plain":
        assert found.order is None or start % 32


def test_words_that_are_planes_already_are_not_made_anew() -> None:
    tensors, _ = packed_weights.gptq(torch.randn(16, 64), np.arange(64) // 32)
    words = tensors["qweight"].T.contiguous()
    held = {"qweight": words, "qzeros": tensors["qzeros"].T, "scales": tensors["scales"].T}
    found = GPTQ(4, 32, False, ordered=False).codes(held, Weight((whole(16),), whole(64), torch.float32, CPU))
    assert found.planes[0].data_ptr() == words.data_ptr()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_of_one_word_of_zeros(bits: int) -> None:
    tensors, want = packed_weights.gptq(torch.randn(32 // bits, 96), np.arange(96) // 32, bits)
    assert torch.equal(codes_of(tensors, GPTQ(bits, 32, False), 32 // bits, whole(96)).values(), want)


def test_groups_of_experts_that_differ() -> None:
    plain, mixed = torch.arange(64) // 32, torch.tensor(act_order(64, 32))
    assert grouping(torch.stack([plain, plain]), 32).order is None
    both = grouping(torch.stack([plain, mixed]), 32)
    assert both.size == 32 and both.order is not None and both.order[0].tolist() == [*range(64)]
    odd = grouping(torch.stack([plain, (torch.arange(64) > 40).long()]), 32)
    assert odd.order is not None and odd.order.shape == (2, 96) and odd.sources.tolist() == [[0, 1, 0], [0, 0, 1]]


def test_zeros_that_a_symmetric_file_cannot_mean_are_those_of_the_other_version(caplog: Any) -> None:
    matrix = torch.randn(16, 64)
    for v2 in (False, True):
        tensors, want = packed_weights.gptq(matrix, np.arange(64) // 32, sym=True, v2=v2)
        gptq._mislabelled.cache_clear()
        with caplog.at_level(logging.WARNING):
            found = codes_of(tensors, GPTQ(4, 32, True, v2=not v2), 16, whole(64))
        assert torch.equal(found.values(), want)
        assert f"are those of checkpoint_format {'gptq_v2' if v2 else 'gptq'}, and are read so" in caplog.text
        misread = codes_of(tensors, GPTQ(4, 32, False, v2=not v2), 16, whole(64))
        assert not torch.equal(misread.values(), want)


# --- which modules, and how ---


def test_overrides_by_pattern() -> None:
    config = config_of("4-bit", dynamic={
        r"-:.*\.1\..*down": {}, r"+:.*\.mlp\..*": {"bits": 8, "group_size": 64}, r".*\.o_proj": {"sym": False},
        r".*\.mlp\.up_proj": {"bits": 2},
    })  # fmt: skip
    found = gptq.gptq(config).format_of
    assert found("model.layers.0.self_attn.q_proj") == GPTQ(4, 32, True)
    assert found("model.layers.1.mlp.down_proj") is None
    assert found("model.layers.0.mlp.down_proj") == found("model.layers.1.mlp.up_proj") == GPTQ(8, 64, True)
    assert found("model.layers.0.self_attn.o_proj") == GPTQ(4, 32, False)
    assert "lm_head.weight" in gptq.gptq(config).floats
    assert "lm_head.weight" not in gptq.gptq({**config, "lm_head": True}).floats
    inside = gptq.gptq(
        {**config, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["self_attn.o_proj"]]}
    ).format_of
    assert inside("model.layers.0.self_attn.o_proj") and not inside("model.layers.0.self_attn.k_proj")


def test_mixed_widths_by_pattern_and_floats_by_what_the_file_has(tmp_path: Path) -> None:
    """No list says which modules are floats, and a quantized lm_head has no flag."""

    def quantize(module: str, matrix: torch.Tensor) -> packed_weights.Made | None:
        if re.search(r"0\.mlp\.down|1\.self_attn\.[qkv]", module):
            return None
        bits, groups = (8 if "o_proj" in module else 4), np.arange(matrix.shape[1]) // 32
        return packed_weights.gptq(matrix, groups, bits, True)

    quantized, plain = checkpoints(
        tmp_path, "llama", quantize, config_of("4-bit", dynamic={"+:.*o_proj$": {"bits": 8}})
    )
    tensors, floats = (load_file(folder / "model.safetensors") for folder in (quantized, plain))
    head, values = packed_weights.gptq(tensors.pop("lm_head.weight"), np.arange(64) // 32, 4, True)
    head["scales"] = head["scales"].float() * 2**-30  # which float16 does not hold
    floats["lm_head.weight"] = values * 2**-30
    save_file(
        {**tensors, **{f"lm_head.{name}": tensor for name, tensor in head.items()}}, quantized / "model.safetensors"
    )
    save_file(floats, plain / "model.safetensors")
    got, want = load(quantized), load(plain)
    x = hidden(want)
    assert torch.equal(hidden(got), x)
    assert torch.equal(got.logits(x), want.logits(x)) and got.logits(x).any()


def test_a_bias_of_zeros_is_left_and_another_is_not(tmp_path: Path) -> None:
    quantized, plain = written(tmp_path, "llama", "4-bit")
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(192).half()
    save_file(tensors, quantized / "model.safetensors")
    assert torch.equal(hidden(load(quantized)), hidden(load(plain)))
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ConfigError, match=r"hold model\.layers\.0\.mlp\.up_proj\.bias, which"):
        load(quantized)


@pytest.mark.parametrize("row", ["4-bit", "3-bit-act-order"])
def test_random_weights_need_no_file(row: str, tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, "mixtral", row)
    (quantized / "model.safetensors").unlink()
    assert hidden(load(quantized, load_format="dummy")).isfinite().all()
    load(quantized, Group(Shard(1, 2)), load_format="dummy")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 5}, r"bits=5 is not supported; GPTQ has 2, 3, 4 or 8"),
        ({"bits": None}, r"bits=None is not supported"),
        ({"group_size": 0}, r"group_size=0 is no number of inputs"),
        ({"group_size": "128"}, r"group_size='128' is no number"),
        ({"checkpoint_format": "gptq_p"}, r"checkpoint_format gptq_p is not supported; quantize the model with"),
        ({"is_marlin_format": True}, r"checkpoint_format marlin is not supported"),
        ({"dynamic": {"+:(": {}}}, r"dynamic has '\+:\(', which is no regular expression"),
        ({"dynamic": {".*": {"bits": 7}}}, r"bits=7 is not supported"),
        (
            {"dynamic": {"-:(([a-z0-9_.])+)+$!": {}}},
            r"no regular expression \(repeated groups, names and flags are not",
        ),
        ({"dynamic": {".*.*.*.*.*.*!": {}}}, r"no regular expression \(it has too many repetitions and choices"),
        ({"dynamic": {"(?x)(a+) +": {}}}, r"no regular expression \(repeated groups"),
        ({"dynamic": {"(a|a)" * 30: {}}}, r"no regular expression \(it has too many"),
        ({"dynamic": ["x"]}, r"dynamic=\['x'\] is no object"),
        ({"dynamic": {".*": 4}}, r"dynamic says 4 of"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gptq.gptq(config_of("4-bit", **changes))


def spoil(name: str, index: Any, value: Any) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][index] = value

    return change


FILE = r"/model\.safetensors"
UP, QUERY = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        ({"group_size": 16}, None, r"down_proj\.qzeros has shape \(6, \d+\) where config\.json makes it \(12, "),
        ({"bits": 8}, None, r"\.(qweight|qzeros) has shape .* where config\.json makes it"),
        ({}, lambda t: t.pop(f"{UP}.scales"), rf"the weights lack {UP}\.scales"),
        ({}, lambda t: t.pop(f"{UP}.qweight"), rf"the weights lack {UP}\.qweight"),
        ({"desc_act": True}, lambda t: t.pop(f"{UP}.g_idx"), rf"the weights lack {UP}\.g_idx"),
        ({}, spoil(f"{UP}.g_idx", 5, 2), rf"{FILE}: {UP}\.g_idx sends an input to group 2, where .* 0 to 1"),
        ({}, spoil(f"{QUERY}.g_idx", 5, -1), rf"{FILE}: {QUERY}\.g_idx sends an input to group -1"),
        ({}, spoil(f"{UP}.g_idx", 5, 1), rf"{FILE}: {UP}\.g_idx orders inputs otherwise"),
        ({}, spoil(f"{UP}.scales", (1, 7), float("inf")), rf"{FILE}: {UP}\.scales holds numbers that are not"),
        (
            {}, lambda t: t.update({f"{UP}.qzeros": torch.zeros(2, 48, dtype=torch.int32)}),
            rf"{UP}\.qzeros has shape \(2, 48\) where config\.json makes it \(2, 24\)",
        ),
        ({}, lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"].float()}), rf"{UP}\.qweight is float32, where"),
    ],
)  # fmt: skip
def test_bad_files_are_named(config: dict[str, Any], change: Any, said: str, tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, "llama", "4-bit")
    if change is not None:
        tensors = load_file(quantized / "model.safetensors")
        change(tensors)
        save_file(tensors, quantized / "model.safetensors")
    edit(quantized, quantization_config=config_of("4-bit", **config))
    with pytest.raises(ConfigError, match=said) as error:
        load(quantized)
    assert "\n" not in str(error.value) and str(quantized) in str(error.value)


def test_a_bad_order_of_an_expert_is_named(tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, "mixtral", "4-bit-act-order")
    tensors = load_file(quantized / "model.safetensors")
    name = next(name for name in tensors if name.endswith("1.block_sparse_moe.experts.3.w3.g_idx"))
    tensors[name] = tensors[name].flip(0)
    tensors[name][0] = 9
    save_file(tensors, quantized / "model.safetensors")
    for group in (None, Group(Shard(1, 2))):
        with pytest.raises(ConfigError, match=rf"model\.safetensors: {name} sends an input to group 9"):
            load(quantized, group)


def test_a_share_that_tears_words_apart_is_refused(tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, "llama", "3-bit", intermediate_size=96)
    with pytest.raises(ConfigError, match=r"would hold 0 to 48 of 96, .* units of 32; use another --tensor-parallel"):
        load(quantized, Group(Shard(0, 2)))


# --- auto-round's own config ---


def test_what_auto_round_calls_its_own() -> None:
    extra = {"model.layers.0.mlp.up_proj": {"bits": 8}, r"layers\.1.*down": {"bits": 16}}
    config = {"bits": 4, "group_size": 32, "sym": False, "data_type": "int", "extra_config": extra}
    found = auto_round({**config, "packing_format": "auto_round:auto_gptq"}).format_of
    assert found("model.layers.0.mlp.up_proj") == GPTQ(8, 32, False) and found("model.layers.1.mlp.down_proj") is None
    assert found("model.layers.0.mlp.up_proj_too") == found("model.layers.0.mlp.down_proj") == GPTQ(4, 32, False)
    assert auto_round({**config, "packing_format": "auto_round:gptqmodel"}).format_of("layers.2.a") == GPTQ(
        4, 32, False, True
    )
    found = auto_round({**config, "packing_format": "auto_round:auto_awq"}).format_of
    assert found("model.layers.0.mlp.down_proj") == AWQ(32)
    for changes in ({"data_type": "mx_fp"}, {"packing_format": "auto_round:fp8"}, {"act_bits": 8}):
        with pytest.raises(ConfigError, match="is not supported; quantize the model with the format auto_round:auto"):
            auto_round({**config, **changes})


@pytest.mark.skipif(library() is None, reason="no native CPU kernels here")
@pytest.mark.parametrize("columns", [32, 96, 100])
@pytest.mark.parametrize(("bits", "shifts"), [(2, ()), (3, ()), (4, ()), (8, ()), (4, (0, 16, 4, 20, 8, 24, 12, 28))])
def test_planes_by_the_native_kernels_are_those_by_torch(
    bits: int, shifts: tuple[int, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = -(-columns // 32) * 32
    words = torch.randint(-(2**31), 2**31, (2, 9, columns if shifts else filled * bits // 32)).int()
    orders = torch.full((2, filled + 32), columns, dtype=torch.int32)
    orders[0, 7 : 7 + columns], orders[1, :columns] = torch.randperm(columns).int(), torch.randperm(columns).int()
    kinds = (None, orders[0], orders)
    native = [packed.planes_of(words, bits, columns, order, shifts) for order in kinds]
    monkeypatch.setattr(packed, "library", lambda: None)
    for found, order in zip(native, kinds, strict=True):
        for ours, theirs in zip(found, packed.planes_of(words, bits, columns, order, shifts), strict=True):
            assert torch.equal(ours, theirs)
