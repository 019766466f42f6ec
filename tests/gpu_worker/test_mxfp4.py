"""MXFP4 as gpt-oss is released: what transformers makes of the same blocks is what the experts multiply by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_moe
import torch
from quantized_tables import mxfp4_values, write_mxfp4
from safetensors.torch import load_file, save_file
from thread_ranks import hidden, in_ranks, load
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.gpu_worker.layers.formats.base import Weight, whole
from quire.gpu_worker.layers.formats.mxfp4 import MXFP4, mxfp4
from quire.proto.config import ConfigError

CPU = torch.device("cpu")
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def checkpoints(folder: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and one of the float32 weights that transformers makes of it."""
    plain, out = folder / "plain", folder / "quantized"
    kind, values = tiny_moe.ROWS["gpt-oss"]
    tiny_models.write(kind, plain, 5, {**values, "hidden_size": 64, "intermediate_size": 96})
    write_mxfp4(plain, out)
    save_file(load_file(plain / "model.safetensors") | mxfp4_values(out), plain / "model.safetensors")
    return out, plain


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def test_the_released_layout_computes_what_its_float_weights_do(tmp_path: Path) -> None:
    quantized, plain = checkpoints(tmp_path)
    want = hidden(load(plain))
    torch.testing.assert_close(hidden(load(quantized)), want, rtol=1e-4, atol=1e-5)
    for each in in_ranks(quantized, 2):
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)


def test_float_weights_beside_the_same_config_are_read_as_such(tmp_path: Path) -> None:
    _, plain = checkpoints(tmp_path)
    want = hidden(load(plain))
    edit(plain, quantization_config={"quant_method": "mxfp4"})
    assert torch.equal(hidden(load(plain)), want)


@pytest.mark.parametrize("gated", [False, True])
def test_values_are_those_that_transformers_makes_for_every_code_and_scale(gated: bool) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255).view(1, 255 * 16, 1, 16)
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(16).view(1, -1, 1)
    weight = Weight((whole(blocks.shape[1]),), whole(32), torch.float32, CPU, 1, gated)
    tensors = {
        each.name: each.convert(tensor[0])[None]
        for each, tensor in zip(MXFP4().tensors(weight), (blocks, scales), strict=True)
    }
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
    if gated:
        want = torch.cat((want[0::2], want[1::2]))
    got = MXFP4().codes(tensors, weight).values()[0]
    assert torch.equal(got.view(torch.int32), want.contiguous().view(torch.int32))


def test_codes_take_little_more_than_the_file() -> None:
    weight = Weight((whole(64),), whole(128), torch.float32, CPU, 2)
    tensors = {"blocks": torch.zeros(2, 64, 64, dtype=torch.uint8), "scales": torch.zeros(2, 64, 4, dtype=torch.uint8)}
    assert MXFP4().codes(tensors, weight).nbytes < 1.1 * sum(each.nbytes for each in tensors.values())


def test_which_modules_are_converted() -> None:
    found = mxfp4({"modules_to_not_convert": [*KEPT, "model.layers.1.mlp.experts"]}).format_of
    assert found("model.layers.0.mlp.experts.gate_up_proj") == MXFP4()
    assert found("model.layers.10.mlp.experts.down_proj") == MXFP4()
    for name in ("model.layers.1.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj", "lm_head"):
        assert found(name) is None
    with pytest.raises(ConfigError, match="modules_to_not_convert must be a list of names"):
        mxfp4({"modules_to_not_convert": "lm_head"})


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "gate_up_proj_scales",
            lambda t: t.index_fill(1, torch.tensor(3), 255),
            "gate_up_proj_scales holds 255",
        ),
        ("gate_up_proj_blocks", lambda t: t[:, :, :1].clone(), r"blocks has shape \(192, 16\) where .*\(192, 32\)"),
        ("down_proj_scales", None, "the weights lack model.layers.1.mlp.experts.down_proj_scales"),
        ("down_proj_blocks", lambda t: t.float(), "down_proj_blocks is float32, where config.json's quantization"),
    ],
)
def test_bad_files_are_named(name: str, change: Any, said: str, tmp_path: Path) -> None:
    quantized, _ = checkpoints(tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    full = f"model.layers.1.mlp.experts.{name}"
    found = tensors.pop(full)
    if change is not None:
        tensors[full] = change(found)
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ConfigError, match=said) as error:
        load(quantized)
    assert str(quantized) in str(error.value)
    assert full.rpartition("_")[0] in str(error.value)
    assert "\n" not in str(error.value)
