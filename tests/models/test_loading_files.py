"""Weight files: which are read, slices of their tensors, and pickles, of which nothing is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from quire.gpu_worker.models import files
from quire.gpu_worker.models.files import Tensors, weight_files
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.config import ConfigError

CPU = torch.device("cpu")
TENSORS = {
    "wide": torch.arange(3000.0).view(60, 50), "narrow": torch.randn(7).bfloat16(), "scalar": torch.tensor(3.0),
    "cube": torch.randn(5, 4, 3).half(), "nothing": torch.empty(0, 4),
}  # fmt: skip


def written(folder: Path, kind: str, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    file = folder / {"safetensors": "model.safetensors", "old pickle": "old.bin", "pickle": "new.bin"}[kind]
    tensors = TENSORS if tensors is None else tensors
    if kind == "safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file, _use_new_zipfile_serialization=kind == "pickle")
    return file


@pytest.mark.parametrize("kind", ["safetensors", "pickle", "old pickle"])
def test_tensors_and_slices_of_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIECE", 1000)  # five rows of the wide one
    with Tensors.open(written(tmp_path, kind)) as tensors:
        entries = {entry.name: entry for entry in tensors}
        assert {name: (e.shape, e.dtype) for name, e in entries.items()} == {
            name: (tuple(t.shape), t.dtype) for name, t in TENSORS.items()
        }
        for name, tensor in TENSORS.items():
            assert entries[name].nbytes == tensor.nbytes
            assert torch.equal(entries[name].read(), tensor)
        wide, entry = TENSORS["wide"], entries["wide"]
        assert torch.equal(entry.read(slice(3, 58)), wide[3:58])
        assert torch.equal(entry.read(None, slice(10, 11)), wide[:, 10:11])
        assert torch.equal(entry.read(slice(59, None), slice(40)), wide[59:, :40])
        assert torch.equal(entries["cube"].read(slice(1, 3), slice(2, 4)), TENSORS["cube"][1:3, 2:4])
        out = torch.zeros(4, 50, dtype=torch.bfloat16)
        entry.copy_to(out, slice(56, 60))
        assert torch.equal(out, wide[56:].bfloat16())


@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_what_is_no_plain_float_is_refused_where_one_is_meant(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    file = written(tmp_path, kind, {"codes": torch.ones(4, dtype=dtype), "fine": torch.ones(2)})
    with Tensors.open(file) as tensors:
        entries = {entry.name: entry for entry in tensors}
        entries["fine"].check(torch.bfloat16)
        assert entries["fine"].read().tolist() == [1, 1]
        with pytest.raises(ConfigError, match=rf"{file.name}: codes is {str(dtype)[6:]}, a quantised weight, which is"):
            entries["codes"].check(torch.float32)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, "safetensors")
    with Tensors.open(file) as tensors:
        os.truncate(file, 2000)
        with pytest.raises(
            ConfigError, match=r"model\.safetensors is cut short .*it ends within a tensor.*download it"
        ):
            for entry in tensors:
                entry.read()


class Bomb:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("kind", ["pickle", "old pickle"])
def test_code_in_a_pickle_is_never_run(kind: str, tmp_path: Path) -> None:
    file = written(tmp_path, kind, {"weight": Bomb(tmp_path / "boom")})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=rf"{file.name} holds more than tensors \(posix\.mkdir\)") as caught:
        Tensors.open(file)
    assert "\n" not in str(caught.value) and "use safetensors weights" in str(caught.value)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("kind", ["pickle", "old pickle"])
@pytest.mark.parametrize("keep", [0.6, 0.01, 0.0])
def test_a_pickle_that_is_cut_short_is_named(kind: str, keep: float, tmp_path: Path) -> None:
    file = written(tmp_path, kind)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    with pytest.raises(ConfigError, match=rf"{file.name} is cut short .*download it again") as caught:
        Tensors.open(file)
    assert "\n" not in str(caught.value)


def test_a_pickle_without_a_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.bin").write_text("hello")
    with pytest.raises(ConfigError, match=r"text\.bin is cut short or no file of torch\.save .*download it again"):
        Tensors.open(tmp_path / "text.bin")
    torch.save([torch.ones(2)], tmp_path / "list.bin")
    with pytest.raises(ConfigError, match=r"list\.bin is no table of tensors by name"):
        Tensors.open(tmp_path / "list.bin")


def test_pickled_weights_are_read_only_when_asked_for(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    config = load_model_config(str(folder))
    want = load_model(config, torch.float32, CPU).logits(torch.ones(1, 48))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    torch.save([1], folder / "training_args.bin")
    with pytest.raises(ConfigError, match=r"holds no .safetensors file, but pytorch_model.bin: .*--load-format pt"):
        load_model(config, torch.float32, CPU)
    assert torch.equal(load_model(config, torch.float32, CPU, "pt").logits(torch.ones(1, 48)), want)
    names = sorted(tensors)
    for shard in range(2):
        torch.save({name: tensors[name] for name in names[shard::2]}, folder / f"pytorch_model-{shard}.bin")
    index = {"weight_map": {name: f"pytorch_model-{at % 2}.bin" for at, name in enumerate(names)}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(folder, "pt")] == ["pytorch_model-0.bin", "pytorch_model-1.bin"]
    assert torch.equal(load_model(config, torch.float32, CPU, "pt").logits(torch.ones(1, 48)), want)


def test_which_files_are_read(tmp_path: Path) -> None:
    def names(load_format: str = "auto") -> list[str]:
        return [file.name for file in weight_files(tmp_path, load_format)]

    for name in ("a.safetensors", "b.safetensors", "consolidated.safetensors", "x.bin", "y.pt", "optimizer.pt"):
        (tmp_path / name).touch()
    assert names() == names("safetensors") == ["a.safetensors", "b.safetensors"]
    assert names("pt") == ["x.bin", "y.pt"]
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "pytorch_model.bin").touch()
    assert (names(), names("pt")) == (["model.safetensors"], ["pytorch_model.bin"])
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "b.safetensors"}}')
    assert names() == ["b.safetensors"]
    with pytest.raises(ConfigError, match=r"Unknown load format: zip\. Must be one of \['auto', 'safetensors', 'pt'"):
        names("zip")
    with pytest.raises(ConfigError, match=r"holds no \.bin or \.pt file"):
        weight_files(tmp_path / "none", "pt")


@pytest.mark.parametrize(
    "index", ["{", "[1]", "{}", '{"weight_map": {}}', '{"weight_map": {"w": 3}}', '{"weight_map": 3}']
)
def test_an_index_that_is_none_is_named(index: str, tmp_path: Path) -> None:
    for name, load_format in (("model.safetensors", "auto"), ("pytorch_model.bin", "pt")):
        (tmp_path / f"{name}.index.json").write_text(index)
        with pytest.raises(ConfigError, match=rf"{name}\.index\.json is not a \w+ index \(.*\); download it again"):
            weight_files(tmp_path, load_format)
