"""From a folder, or a flag's text, to what a request carries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import adapter_folder

from quire.client.adapter_folders import AdapterFolders, Module, parse_module, parse_modules
from quire.client.offline.lora import LoRARequest, parse_lora
from quire.proto.config import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    adapter_folder(tmp_path / "root" / "a")
    adapter_folder(tmp_path / "root" / "deep" / "b", b"other")
    adapter_folder(tmp_path / "outside", b"secret")
    adapter_folder(tmp_path / "rooted", b"beside")
    return tmp_path / "root"


def test_an_adapter_is_what_is_in_its_files(root: Path) -> None:
    folders = AdapterFolders(16)
    first = folders.adapter("x", str(root / "a"))
    assert first.path == str(root / "a") and len(first.digest) == 16
    assert folders.adapter("y", str(root / "a")).digest == first.digest
    assert folders.adapter("x", str(root / "deep/b")).digest != first.digest
    adapter_folder(root / "a", b"trained on")
    changed = folders.adapter("x", str(root / "a")).digest
    adapter_folder(root / "a", b"trained on", lora_alpha=3)
    assert len({first.digest, changed, folders.adapter("x", str(root / "a")).digest}) == 3


def test_files_are_read_again_only_where_they_have_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.client import adapter_folders as module

    read, whole = [], module.adapter_digest
    monkeypatch.setattr(module, "adapter_digest", lambda folder: (read.append(folder), whole(folder))[1])
    folders = AdapterFolders(16)
    for _ in range(3):
        folders.adapter("x", str(root / "a"))
    assert len(read) == 1


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("rank", {"r": 64}, "LoRA rank 64 is greater than max_lora_rank 16"),
        ("dora", {"use_dora": True}, "does not yet support DoRA"),
        ("saved", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ("bias", {"bias": "all"}, "Adapter bias is not supported"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, name: str, change: dict[str, Any], said: str) -> None:
    folder = adapter_folder(tmp_path / name, **change)
    with pytest.raises(ConfigError, match=said) as refused:
        AdapterFolders(16).adapter(name, str(folder))
    assert str(refused.value).startswith(f"lora adapter '{name}': {folder}") and "\n" not in str(refused.value)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    folders = AdapterFolders(16)
    (tmp_path / "empty").mkdir()
    for path in (str(tmp_path / "empty"), str(tmp_path / "none"), "", "x" * 5000):
        with pytest.raises(ConfigError):
            folders.adapter("x", path)
    with pytest.raises(ConfigError):
        folders.adapter("", str(tmp_path))


@pytest.mark.parametrize("path", ["a", "deep/b", "./a", "deep/../a"])
def test_a_folder_below_the_root_is_found(root: Path, path: str) -> None:
    assert AdapterFolders(16).adapter("x", path, str(root)).path.startswith(str(root))
    assert AdapterFolders(16).adapter("x", str(root / path), str(root)).path.startswith(str(root))


@pytest.mark.parametrize(
    "path", ["../outside", "..", ".", "a/../../outside", "../rooted", "/etc", "a\0b", "none", "link"]
)
def test_nothing_else_is(root: Path, path: str) -> None:
    os.symlink(root.parent / "outside", root / "link")
    with pytest.raises(ConfigError, match="lora adapter 'x': lora_path"):
        AdapterFolders(16).adapter("x", path, str(root))


def test_a_file_that_is_a_link_out_of_the_root_is_refused(root: Path) -> None:
    weights = root / "a" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(root.parent / "outside" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="below --lora-root"):
        AdapterFolders(16).adapter("x", "a", str(root))


def test_modules_are_names_with_paths_or_json() -> None:
    assert parse_module("sql=/x/y=z") == Module("sql", "/x/y=z")
    assert parse_module('{"name": "a=b", "path": "p,q", "base_model_name": "m"}') == Module("a=b", "p,q", "m")
    for bad in ("sql", "=x", "sql=", '{"name": "a"}', "a=b,c=d", '{"name": "a", "path": "b", "more": 1}'):
        with pytest.raises(ConfigError, match="Invalid JSON format for --lora-modules"):
            parse_module(bad)
    for twice in (["a=x", "a=y"], ["model=x"]):
        with pytest.raises(ConfigError, match="which another adapter or the model is called"):
            parse_modules(twice, ["model"])


def test_lora_requests_have_vllms_names_and_checks() -> None:
    request = LoRARequest("sql", 3, "/x", base_model_name="m")
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/x")
    assert request == LoRARequest("sql", 9, "/y") != LoRARequest("b", 3, "/x") and len({request, request}) == 1
    for wrong, said in (
        (("a", 0, "/x"), "id must be > 0, got 0"),
        (("", 1, "/x"), "lora_name"),
        (("a", 1), "lora_path"),
    ):
        with pytest.raises(ValueError, match=said):
            LoRARequest(*wrong)


def test_each_prompt_gets_its_own(root: Path) -> None:
    folders = AdapterFolders(16)
    a, b = LoRARequest("a", 1, str(root / "a")), LoRARequest("b", 2, str(root / "deep/b"))
    assert parse_lora(None, 2, None) == parse_lora([None, None], 2, None) == [(None, None)] * 2
    found = parse_lora([a, None, b, a], 4, folders)
    assert [made and made.name for _, made in found] == ["a", None, "b", "a"] and found[0][0] is a
    assert [made and made.name for _, made in parse_lora(b, 2, folders)] == ["b", "b"]
    with pytest.raises(ValueError, match="lengths of prompts and lora_request must be the same"):
        parse_lora([a], 2, folders)
    with pytest.raises(ValueError, match="but LoRA is not enabled"):
        parse_lora(a, 1, None)
    for odd in ("x", object(), 1):
        with pytest.raises(TypeError, match="must be a LoRARequest"):
            parse_lora(odd, 1, folders)
