"""Folders that cannot be loaded: one line that names the file and the remedy, an exit code that is not 0, no process
left. Most go through the functions that a worker calls; some through real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from stack import BIN

from quire.gpu_worker.models.dtypes import resolve_dtype
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import config_of, model_folder
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.process import EXIT_CONFIG

CPU = torch.device("cpu")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A good folder that a test may spoil."""
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(folder: Path, **flags: Any) -> Any:
    """What ``python -m quire.gpu_worker`` does between its flags and a loaded model."""
    args = EngineArgs(model=str(folder), **flags).check()
    config = config_of(args, model_folder(args, weights=True))
    return load_model(config, resolve_dtype(args.dtype, config, CPU), CPU, args.load_format)


def cut(folder: Path, name: str = WEIGHTS, share: float = 0.5) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * share)])


def edit(folder: Path, name: str = "config.json", **values: Any) -> None:
    """Write ``values`` over those of a JSON file; None takes a key away."""
    found = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({k: v for k, v in {**found, **values}.items() if v is not None}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def widen(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)


# what is wrong -> (how it comes about, flags, what is said after the folder, the remedy)
BAD: dict[str, tuple[Callable[[Path], object], dict[str, Any], str, str]] = {
    "cut short": (cut, {}, rf"/{WEIGHTS} is cut short", "download it again"),
    "header cut": (lambda f: cut(f, share=0.001), {}, rf"/{WEIGHTS} is cut short", "download it again"),
    "empty": (lambda f: cut(f, share=0), {}, rf"/{WEIGHTS} is cut short", "download it again"),
    "no safetensors": (
        lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"), {},
        rf"/{WEIGHTS} is cut short or no safetensors file", "download it again",
    ),
    "missing": (lambda f: (f / WEIGHTS).unlink(), {}, " holds no .safetensors file", "download the weights, .*dummy"),
    "missing shard": (
        lambda f: edit(f, INDEX, weight_map={"lm_head.weight": "model-9.safetensors"}), {},
        rf"/{INDEX} names model-9.safetensors, which the folder lacks", "download the missing files",
    ),
    "shard elsewhere": (
        lambda f: edit(f, INDEX, weight_map={"lm_head.weight": f"../{f.name}/{WEIGHTS}"}), {},
        rf"/{INDEX} names ../\w+/{WEIGHTS}, which lies outside the folder", "download it again",
    ),
    "the same tensor in two files": (
        lambda f: ((f / "b.safetensors").hardlink_to(f / WEIGHTS), (f / WEIGHTS).rename(f / "a.safetensors")), {},
        r"/b.safetensors: lm_head.weight is in a.safetensors too", "remove the file or the copy",
    ),
    "a flag in quotes": (
        lambda f: edit(f, tie_word_embeddings="false"), {},
        "/config.json: tie_word_embeddings must be true or false, got 'false'", "correct it",
    ),
    "a shard whose name cannot be": (
        lambda f: edit(f, INDEX, weight_map={"lm_head.weight": "x" * 5000}), {},
        rf"/{INDEX} names what cannot be a file \(File name too long\)", "download it again",
    ),
    "broken index": (
        lambda f: (f / INDEX).write_text("{"), {}, rf"/{INDEX} is not a safetensors index", "download it again",
    ),
    "shape": (
        lambda f: edit(f, intermediate_size=97), {}, rf"/{WEIGHTS}: model.layers.0.mlp.\w+.weight has shape",
        "check that config.json belongs to these weights",
    ),
    "fewer layers": (
        lambda f: edit(f, num_hidden_layers=2), {}, ": the weights hold model.layers.2.",
        "check that config.json belongs to these weights",
    ),
    "more layers": (
        lambda f: edit(f, num_hidden_layers=4), {}, ": the weights lack model.layers.3.", "download the folder again",
    ),
    "layers without end": (
        lambda f: edit(f, num_hidden_layers=10**7), {}, "num_hidden_layers must be .*, got 10000000", "at most 10000",
    ),
    "another model's weights": (
        lambda f: rewrite(f, lambda t: t.pop("lm_head.weight")), {}, ": the weights lack lm_head.weight",
        "correct config.json",
    ),
    "quantised": (
        lambda f: rewrite(f, lambda t: widen(t, torch.int8)), {}, rf"/{WEIGHTS}: model.norm.weight is int8",
        "use the model's float weights",
    ),
    "dtype": (lambda f: edit(f, dtype="float7"), {}, "/config.json; choose one", "--dtype bfloat16"),
    "no config": (lambda f: (f / "config.json").unlink(), {}, "/config.json does not exist", "a Hugging Face folder"),
    "config cut": (lambda f: cut(f, "config.json"), {}, "/config.json cannot be read as JSON", "download it again"),
    "no plain config": (
        lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")), {}, "/config.json is no plain file",
        "in its place",
    ),
    "no vocabulary": (
        lambda f: edit(f, vocab_size=None), {},
        "/config.json has no usable vocab_size", "correct it, or download it again",
    ),
    "no hidden size": (
        lambda f: edit(f, hidden_size=None), {},
        "/config.json: hidden_size must be a positive integer", "correct it",
    ),
    "no architecture": (lambda f: edit(f, architectures=None), {}, ": architectures", "docs/models.md"),
    "nobody's architecture": (
        lambda f: edit(f, architectures=["NobodyForCausalLM"]), {}, r": architectures \['Nobody", "docs/models.md",
    ),
    "code of its own": (
        lambda f: edit(f, architectures=["OwnForCausalLM"], auto_map={"AutoConfig": "own.Own"}), {}, "",
        "Failed to load the model config. .*`--trust-remote-code` flag",
    ),
    "code that is not there": (
        lambda f: edit(f, architectures=["OwnForCausalLM"], auto_map={"AutoConfig": "own.Own"}, model_type="own"),
        {"trust_remote_code": True}, ": transformers cannot load OwnForCausalLM", "check that config.json",
    ),
    "too long": (
        lambda f: None, {"max_model_len": 513}, "", r"derived max_model_len \(512\) .*lower it",
    ),
    "a value of another kind": (
        lambda f: edit(f, hidden_act=[1]), {}, r"/config.json: hidden_act must be a name, got \[1\]", "must be a name",
    ),
    "rope of another kind": (
        lambda f: edit(f, rope_parameters=["linear"]), {}, "/config.json: rope_parameters must be an object",
        "correct it",
    ),
    "nested without end": (
        lambda f: (f / "config.json").write_text("[" * 100000), {}, "/config.json cannot be read as JSON",
        "download it again",
    ),
    "quantised by config": (
        lambda f: edit(f, quantization_config={"quant_method": "aqlm"}), {},
        r"/config.json: Unknown quantization method: aqlm. Must be one of \[", "--hf-overrides",
    ),
    "a link to nothing": (
        lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).symlink_to("gone")), {}, " holds no .safetensors file",
        "download the weights",
    ),
    "pickled numbers for names": (
        lambda f: torch.save({1: torch.zeros(2)}, f / "pytorch_model.bin"), {"load_format": "pt"},
        "/pytorch_model.bin is no table of tensors by name", "save it again",
    ),
    "pickled sparse tensors": (
        lambda f: torch.save({"lm_head.weight": torch.zeros(2, 2).to_sparse()}, f / "pytorch_model.bin"),
        {"load_format": "pt"}, "/pytorch_model.bin: lm_head.weight hold no plain numbers", "save them as dense",
    ),
    "pickles alone": (pickled, {}, " holds no .safetensors file, but pytorch_model.bin", "--load-format pt"),
    "pickle cut": (
        lambda f: (pickled(f), cut(f, "pytorch_model.bin")), {"load_format": "pt"}, "/pytorch_model.bin is cut short",
        "download it again",
    ),
    "no pickles": (lambda f: None, {"load_format": "pt"}, " holds no .bin or .pt file", "leave out --load-format"),
}  # fmt: skip


def test_positions_that_were_never_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the user says that the model can go further: there is no row to look up."""
    folder = tiny_models.save("GPT2", tmp_path, 0, vocab_size=320, n_embd=48, n_layer=1, n_head=2, n_positions=64)
    assert load(folder).spec.positions == 64
    monkeypatch.setenv("QUIRE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with pytest.raises(ConfigError, match=rf"{folder}: max_model_len=65 is more .* use --max-model-len 64 at most"):
        load(folder, max_model_len=65)
    edit(folder, n_positions=None, n_ctx=None)  # GPT-2's own 1024 positions, of a model that holds 2048 by default
    with pytest.raises(ConfigError, match="max_model_len=2048 is more than the 1024 positions"):
        load(folder)


@pytest.mark.parametrize("name", BAD)
def test_it_is_said_in_one_line(name: str, folder: Path) -> None:
    spoil, flags, said, remedy = BAD[name]
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        load(folder, **flags)
    text = str(caught.value)
    assert str(folder) in text and "\n" not in text
    assert re.search(said, text) and re.search(remedy, text), text


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, INDEX])
def test_a_file_that_may_not_be_read_is_named(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(folder, INDEX, weight_map={"lm_head.weight": WEIGHTS})
    opened = Path.open

    def open_(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == folder / name:  # root, who may run the tests, may read everything
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_)
    with pytest.raises(ConfigError, match=rf"^{folder}/{name} cannot be read by user \d+ \(permission denied\); "):
        load(folder)


def test_the_good_folder_is_good(folder: Path) -> None:
    assert load(folder).spec.num_layers == 3


def ended(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def left_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in part for part in process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.mark.slow
def test_a_worker_ends_with_that_line(good: Path, tmp_path: Path) -> None:
    """Two of them, and one of ``quire serve``, at once: none hangs, and nothing is left."""
    for name in ("cut", "own", "shape"):
        (tmp_path / name).mkdir()
        for file in good.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    cut(tmp_path / "cut")
    edit(tmp_path / "own", architectures=["OwnForCausalLM"], auto_map={"AutoConfig": "own.Own"})
    edit(tmp_path / "shape", intermediate_size=97)
    worker = (sys.executable, "-m", "quire.gpu_worker", "--device=cpu", f"--scheduler=ipc://{tmp_path}/run")
    (tmp_path / "run").mkdir(mode=0o700)
    processes = {
        f"{tmp_path}/cut/{WEIGHTS} is cut short": ended(*worker, f"--model={tmp_path}/cut"),
        "Failed to load the model config.": ended(*worker, f"--model={tmp_path}/own"),
        f"{tmp_path}/shape/{WEIGHTS}: model.layers.0.mlp": ended(
            str(BIN / "quire"), "serve", f"{tmp_path}/shape", "--device=cpu", "--port=0", "--host=127.0.0.1"
        ),
        f"{tmp_path}/none": ended(str(BIN / "quire"), "serve", f"{tmp_path}/none", "--port=0"),
    }
    for said, process in processes.items():
        out, error = process.communicate(timeout=120)
        lines = [line for line in error.splitlines() if "error: " in line]
        assert len(lines) == 1, error
        assert said in lines[0]
        assert "Traceback" not in error
        assert process.returncode == EXIT_CONFIG
        assert "ready" not in out
    assert not left_of(tmp_path)
    assert not os.listdir(tmp_path / "run")
