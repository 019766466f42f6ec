"""SqueezeLLM's checkpoints, written here by the format's definition: tables, packed codes, and a sparse part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_moe
import torch
from quantized_tables import VARIANTS
from quantized_tables import squeezellm as squeezellm_tensors
from safetensors.torch import load_file, save_file
from thread_ranks import hidden, in_ranks, load

from quire.gpu_worker.layers.formats.coded import Coded
from quire.gpu_worker.layers.formats.dense import Dequantized
from quire.gpu_worker.layers.formats.squeezellm import Rows, SqueezeLLM, squeezellm
from quire.proto.config import ConfigError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
MODELS = {
    "llama": tiny_models.ROWS["llama-bias-tied"],
    "mixtral": tiny_moe.ROWS["mixtral"],
}
KEPT = ("lm_head", "embed_tokens", "gate", "norm", "input_layernorm", "post_attention_layernorm")


def checkpoints(variant: str, model: str, folder: Path, pickled: bool = True) -> tuple[Path, Path]:
    """A quantized checkpoint, and one of the float32 weights that its definition makes of it."""
    plain, quantized, random = folder / "plain", folder / "quantized", torch.Generator().manual_seed(3)
    kind, others = MODELS[model]
    for each in (plain, quantized):
        tiny_models.write(kind, each, 5, {**others, **SIZES})
    (quantized / "model.safetensors").unlink()
    stored: dict[str, Any] = {}
    floats = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = floats[name] = tensor
        if name.endswith(".weight") and not set(KEPT) & set(name.split(".")):
            del stored[name]
            module = name.removesuffix(".weight")
            saved, floats[name] = squeezellm_tensors(tensor, *VARIANTS[variant], random)
            stored |= {f"{module}.{key}": value for key, value in saved.items()}
            if "vals" in saved and pickled:
                stored[f"sparse_threshold.{module}"] = len(saved["vals"])
    save_file(floats, plain / "model.safetensors")
    if pickled:
        torch.save(stored, quantized / f"sq-tiny-w{variant}.pt")
    else:
        save_file({name: value.contiguous() for name, value in stored.items()}, quantized / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "squeezellm", "wbits": VARIANTS[variant][0]}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, plain


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_definitions_values_are_multiplied_by(
    variant: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, plain = checkpoints(variant, model, tmp_path, pickled=model == "llama")
    want = hidden(load(plain))
    torch.testing.assert_close(hidden(load(quantized)), want, rtol=1e-4, atol=1e-4)
    # Columns of 3 bits are cut at multiples of 32, and these models have but 64 and 96.
    if variant.startswith("4") or model == "mixtral":
        for each in in_ranks(quantized, 2):
            torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)
    for name in ("linear", "experts"):
        monkeypatch.setattr(Coded, name, getattr(Dequantized, name))
        monkeypatch.setattr(SqueezeLLM, name, getattr(Dequantized, name))
    assert torch.equal(hidden(load(quantized)), want)  # the same weights, so the same bits


def test_a_sparse_part_of_many_entries_is_cut_with_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own cut of more than 32768 entries raises where inference mode and threads meet."""
    monkeypatch.setitem(SIZES, "hidden_size", 128)
    monkeypatch.setitem(SIZES, "intermediate_size", 352)
    quantized, plain = checkpoints("4-sparse", "llama", tmp_path)
    file = next(quantized.glob("*.pt"))
    tensors, floats = torch.load(file, weights_only=True), load_file(plain / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    random = torch.Generator().manual_seed(4)
    sparse = torch.randn(352, 128, generator=random)
    ends, columns, values = (tensors[f"{name}.{key}"] for key in ("rows", "cols", "vals"))
    rows = torch.arange(352).repeat_interleave(ends.diff())
    floats[f"{name}.weight"] += sparse
    floats[f"{name}.weight"][rows, columns.long()] -= values
    rows, columns = sparse.nonzero(as_tuple=True)
    assert len(rows) > 40_000
    ends = torch.cat((torch.zeros(1), rows.bincount(minlength=352).cumsum(0))).int()
    tensors |= {f"{name}.rows": ends, f"{name}.cols": columns.int(), f"{name}.vals": sparse[rows, columns],
                f"sparse_threshold.{name}": len(rows)}  # fmt: skip
    torch.save(tensors, file)
    save_file(floats, plain / "model.safetensors")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        want = hidden(load(plain))
        for each in (hidden(load(quantized)), *in_ranks(quantized, 2)):
            torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_the_sparse_product_of_a_row_does_not_hang_on_others() -> None:
    random = torch.Generator().manual_seed(0)
    matrix = torch.randn(50, 40, generator=random) * (torch.rand(50, 40, generator=random) < 0.2)
    x = torch.randn(70, 40, generator=random)
    rows = Rows.of(matrix.to_sparse().coalesce())
    whole = rows.product(x)
    torch.testing.assert_close(whole, x @ matrix.t())
    for count in (1, 2, 3, 4, 5, 8, 16, 17, 33, 64):
        assert torch.equal(rows.product(x[:count]), whole[:count])
        assert torch.equal(rows.product(x[-count:]), whole[-count:])


@pytest.mark.parametrize("value", [-1, 1 << 63, True, "many"])
def test_what_is_no_count_beside_the_tensors_is_refused(value: Any, tmp_path: Path) -> None:
    quantized, _ = checkpoints("4-sparse", "llama", tmp_path)
    file = next(quantized.glob("*.pt"))
    torch.save(torch.load(file, weights_only=True) | {"sparse_threshold.x": value}, file)
    with pytest.raises(ConfigError, match=r"\.pt is no table of tensors by name"):
        load(quantized)


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    quantized, _ = checkpoints("4-sparse", "mixtral", tmp_path)
    next(quantized.glob("*.pt")).unlink()
    assert hidden(load(quantized, load_format="dummy")).isfinite().all()


@pytest.mark.parametrize("bits", [None, 2, 8, True, "4"])
def test_other_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ConfigError, match=f"wbits={bits!r} is not supported; SqueezeLLM has 3 or 4"):
        squeezellm({"wbits": bits})


MODULE = "model.layers.1.mlp.up_proj"


def first(value: float) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("cols", first(64), "cols holds 64, which must be 0 to 63"),
        ("cols", lambda t: t.float(), "cols holds no list of whole numbers"),
        ("cols", None, "cols is not there, and what it belongs to is"),
        ("rows", lambda t: t[:-1].clone(), "rows ends 95 rows and"),
        ("rows", first(1), "rows ends 96 rows and"),
        ("rows", lambda t: torch.cat((t[:1], t[-1:].repeat(2), t[3:])), "rows does not rise"),
        ("vals", first(float("nan")), "vals or full_rows holds numbers that are not finite"),
        ("full_row_indices", first(96), "full_row_indices holds 96, which must be 0 to 95"),
        ("full_rows", lambda t: t[:32].clone(), r"full_rows has shape \(32, 2\) where config.json makes it \(64, 2\)"),
        ("lookup_table", first(float("inf")), "lookup_table holds numbers that are not finite"),
        ("lookup_table", lambda t: t[:, :4].clone(), r"lookup_table has shape \(96, 4\) where .* \(96, 8\)"),
        ("qweight", lambda t: t.float(), "qweight is float32, where config.json's quantization makes it int32"),
        ("lookup_table", None, "the weights lack model.layers.1.mlp.up_proj.lookup_table"),
    ],
)
def test_bad_files_are_named(name: str, change: Any, said: str, tmp_path: Path) -> None:
    quantized, _ = checkpoints("3-hybrid", "llama", tmp_path)
    file = next(quantized.glob("*.pt"))
    tensors = torch.load(file, weights_only=True)
    found = tensors.pop(f"{MODULE}.{name}")
    if change is not None:
        tensors[f"{MODULE}.{name}"] = change(found)
    torch.save(tensors, file)
    with pytest.raises(ConfigError, match=said) as error:
        load(quantized)
    assert str(error.value).startswith(str(quantized if "lack" in said else file))
    assert MODULE in str(error.value)
    assert "\n" not in str(error.value)
