"""AWQ: what files hold is the formula's floats, whole and in ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import packed_weights
import pytest
import torch
from packed_weights import checkpoints, edit
from safetensors.torch import load_file, save_file
from thread_ranks import hidden, in_ranks, load

from quire.gpu_worker.layers.formats import awq, coded
from quire.gpu_worker.layers.formats.awq import AWQ
from quire.gpu_worker.layers.formats.base import Part, Weight, whole
from quire.gpu_worker.layers.formats.dense import dense
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.spec import Shard
from quire.proto.config import ConfigError

CPU = torch.device("cpu")
# group_size, sym, version
ROWS = {
    "gemm": (32, False, "gemm"), "gemm-64": (64, False, "GEMM"), "gemm-one-group": (-1, True, "gemm"),
    "gemv": (32, False, "gemv"), "gemv-64": (64, True, "gemv"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _by_values(monkeypatch: Any) -> None:
    """Multiply by the float weights that codes stand for, so that equal weights give equal bits."""
    monkeypatch.setattr(coded, "product_of", lambda codes, w: dense(w).linear({"weight": codes.values(w.dtype)}, w))
    monkeypatch.setattr(coded, "experts_of", lambda codes, w: dense(w).experts({"weight": codes.values(w.dtype)}, w))


def config_of(row: str, **more: Any) -> dict[str, Any]:
    group, sym, version = ROWS[row]
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": not sym, "version": version, **more}


def written(folder: Path, model: str, row: str, **values: Any) -> tuple[Path, Path]:
    group, sym, version = ROWS[row]

    def quantize(module: str, matrix: torch.Tensor) -> packed_weights.Made:
        return packed_weights.awq(matrix, matrix.shape[1] if group < 0 else group, sym, version == "gemv")

    return checkpoints(folder, model, quantize, config_of(row), **values)


@pytest.mark.parametrize(
    ("row", "model"),
    [
        *((row, "llama") for row in ROWS),
        *(("gemm", model) for model in ("qwen2", "mixtral", "qwen2-moe", "deepseek-moe")),
        ("gemv", "mixtral"),
    ],
)
def test_weights_are_the_formulas_whole_and_in_ranks(row: str, model: str, tmp_path: Path) -> None:
    quantized, plain = written(tmp_path, model, row)
    want = hidden(load(plain))
    assert torch.equal(hidden(load(quantized)), want)
    for each in in_ranks(quantized, 2):
        torch.testing.assert_close(each, want, atol=1e-4, rtol=1e-4)


def test_ranks_without_an_expert(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3}
    quantized, plain = written(tmp_path, "mixtral", "gemm", num_local_experts=2, **heads)
    want = hidden(load(plain))
    for each in in_ranks(quantized, 3):
        torch.testing.assert_close(each, want, atol=1e-4, rtol=1e-4)


def test_values_lie_in_a_word_as_the_format_says() -> None:
    codes = torch.arange(8)
    word = sum(int(code) << 4 * place for place, code in enumerate(codes[[0, 2, 4, 6, 1, 3, 5, 7]]))
    assert word == 0x75316420
    words = torch.full((1, 32), word, dtype=torch.int32)
    held = {"qweight": words, "qzeros": words[:, :1], "scales": torch.ones(8, 1).half()}
    weight = Weight((whole(8),), whole(32), torch.float32, CPU)
    found = AWQ(32).codes(held, weight)
    assert torch.equal(found.codes(), codes[:, None].expand(8, 32).to(torch.uint8))
    assert not found.values().any()
    assert torch.equal(AWQ(32, zeros=False).codes(held, weight).values(), codes[:, None].expand(8, 32) - 8.0)


@pytest.mark.parametrize("gemv", [False, True])
@pytest.mark.parametrize("part", [(0, 64), (64, 192), (96, 192), (40, 112)])
def test_a_share_of_the_inputs_that_begins_within_a_group(part: tuple[int, int], gemv: bool) -> None:
    matrix = torch.randn(16, 192, generator=torch.Generator().manual_seed(1))
    tensors, want = packed_weights.awq(matrix, 64, gemv=gemv)
    start, stop = part
    held = tensors if gemv else {name: tensor.T.contiguous() for name, tensor in tensors.items()}
    cut = slice(start // 8, stop // 8) if gemv else slice(start, stop)
    held = {**held, "qweight": held["qweight"][:, cut].contiguous()}
    weight = Weight((whole(16),), Part(192, start, stop), torch.float32, CPU)
    found = AWQ(64, gemv).codes(held, weight)
    assert torch.equal(found.values(), want[:, start:stop])
    assert (found.order is None) == (start % 32 == 0)
    assert found.group == (64 if start % 64 == 0 else 32)


def test_groups_of_which_ranks_hold_halves(tmp_path: Path) -> None:
    """An intermediate size of three groups, as Qwen2.5-72B's is of 231."""
    quantized, plain = written(tmp_path, "llama", "gemm-64")
    want = hidden(load(plain))
    for each in in_ranks(quantized, 2):
        torch.testing.assert_close(each, want, atol=1e-5, rtol=1e-5)


def test_modules_that_are_not_converted() -> None:
    found = awq.awq(config_of("gemm", modules_to_not_convert=["self_attn", "layers.1.mlp.up"])).format_of
    assert found("model.layers.0.mlp.up_proj") == AWQ(32)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        assert found(name) is None
    own = {
        "quant_method": "awq",
        "w_bit": 4,
        "q_group_size": 64,
        "zero_point": True,
        "version": "GEMM",
        "lm_head": True,
    }
    assert awq.awq(own).format_of("lm_head") == AWQ(64)
    assert "lm_head.weight" not in awq.awq(own).floats and "lm_head.weight" in awq.awq(config_of("gemm")).floats


def test_floats_that_no_list_names(tmp_path: Path) -> None:
    def quantize(module: str, matrix: torch.Tensor) -> packed_weights.Made | None:
        made = None if "0.self_attn" in module else packed_weights.awq(matrix, 32)
        if made is not None:
            made[0]["scales"] = made[0]["scales"].float()  # which float32 holds as they are
        return made

    quantized, plain = checkpoints(tmp_path, "llama", quantize, config_of("gemm"))
    assert torch.equal(hidden(load(quantized)), hidden(load(plain)))


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, "qwen2-moe", "gemm")
    (quantized / "model.safetensors").unlink()
    assert hidden(load(quantized, load_format="dummy")).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 3}, r"bits=3 is not supported; AWQ has 4"),
        ({"modules_to_not_convert": "lm_head"}, r"modules_to_not_convert must be a list of names of modules"),
        ({"group_size": -2}, r"group_size=-2 is no number of inputs"),
        ({"version": "gemv_fast"}, r"version gemv_fast is not supported; quantize the model with version gemm"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        awq.awq(config_of("gemm", **changes))


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        ({"group_size": 64}, None, r"\.(scales|qzeros) has shape \(6, \d+\) where config\.json makes it \(3, "),
        ({}, lambda t: t.pop(f"{DOWN}.scales"), rf"the weights lack {DOWN}\.scales"),
        ({}, lambda t: t.pop(f"{DOWN}.qzeros"), rf"the weights lack {DOWN}\.qzeros"),
        (
            {}, lambda t: t.update({f"{DOWN}.qzeros": torch.zeros(6, 16, dtype=torch.int32)}),
            rf"model\.safetensors: {DOWN}\.qzeros has shape \(6, 16\) where config\.json makes it \(6, 8\)",
        ),
        (
            {}, lambda t: t[f"{DOWN}.scales"].view(-1)[5].fill_(np.nan),
            rf"model\.safetensors: {DOWN}\.scales holds numbers that are not finite",
        ),
    ],
)  # fmt: skip
def test_bad_files_are_named(config: dict[str, Any], change: Any, said: str, tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, "llama", "gemm")
    if change is not None:
        tensors = load_file(quantized / "model.safetensors")
        change(tensors)
        save_file(tensors, quantized / "model.safetensors")
    edit(quantized, quantization_config=config_of("gemm", **config))
    with pytest.raises(ConfigError, match=said) as error:
        load(quantized)
    assert "\n" not in str(error.value) and str(quantized) in str(error.value)


def test_a_share_that_tears_words_apart_is_refused(tmp_path: Path) -> None:
    quantized, _ = written(tmp_path, "llama", "gemm", intermediate_size=96)
    with pytest.raises(
        ConfigError, match=r"gate_up\.qweight: one process would hold 0 to 19 of 96, .* units of 8; use"
    ):
        load(quantized, Group(Shard(0, 5)))
