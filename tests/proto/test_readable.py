"""What this process's user may not read is told as such, with the user and a remedy, and never as absent."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.detokenizer.tokenizer import load_tokenizer
from quire.gpu_worker.models.files import weight_files
from quire.proto.checkpoint.chat_templates import templates_of
from quire.proto.checkpoint.gguf import read_gguf
from quire.proto.checkpoint.lora_config import check_adapter
from quire.proto.checkpoint.model_config import demo_model_path, load_model_config, resolve_model
from quire.proto.config import ConfigError
from quire.proto.wire.keys import Keys

ROOT = Path(__file__).resolve().parents[2]
USER = 10001


@contextlib.contextmanager
def a_user() -> Iterator[None]:
    """Root, who may run the tests, may read everything: it is another user meanwhile."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(USER)
    try:
        yield
    finally:
        if before == 0:
            os.seteuid(before)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A model's folder, in a place that every user may enter until a test closes some of it."""
    place = Path(tempfile.mkdtemp())  # pytest's own folders are for their user alone
    place.chmod(0o755)
    found = place / "models" / "demo"
    shutil.copytree(demo_model_path(), found, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    for each in found.rglob("*"):
        each.chmod(0o644)
    (found / "adapter_config.json").write_text("{}")
    (found / "adapter_model.safetensors").write_text("")
    (found / "model.gguf").write_text("")
    (found / "chat_template.jinja").write_text("{{ messages }}")
    found.chmod(0o755)
    found.parent.chmod(0o755)
    yield found
    for each in (found.parent, found):
        each.chmod(0o755)
    shutil.rmtree(place)


READERS = {
    "": lambda folder: resolve_model(str(folder)),
    "config.json": lambda folder: load_model_config(str(folder), None),
    "model.gguf": lambda folder: read_gguf(folder / "model.gguf"),
    "tokenizer.json": lambda folder: load_tokenizer(str(folder)),
    "chat_template.jinja": lambda folder: load_tokenizer(str(folder)),
    "model.safetensors": weight_files,
    "adapter_model.safetensors": check_adapter,
}


@pytest.mark.parametrize("name", READERS)
def test_a_closed_file_is_told_with_the_user_and_the_remedy(name: str, folder: Path) -> None:
    (folder / name).chmod(0)
    with a_user(), pytest.raises(ConfigError) as caught:
        READERS[name](folder)
    said, user = str(caught.value), USER if os.geteuid() == 0 else os.geteuid()
    assert said.startswith(f"{folder / name} cannot be read by user {user} (permission denied); let "), said
    assert said.endswith(f"`chmod -R a+rX {folder / name}`."), said


@pytest.mark.parametrize("name", READERS)
def test_a_closed_folder_above_is_told_as_such(name: str, folder: Path) -> None:
    folder.parent.chmod(0o600)
    with a_user(), pytest.raises(ConfigError, match=r"cannot be read by user \d+ \(permission denied\)") as caught:
        READERS[name](folder)
    assert str(caught.value).endswith(f"`chmod -R a+rX {folder.parent}`.")


def test_a_chosen_chat_template_is_told_as_such(folder: Path) -> None:
    (folder / "chat_template.jinja").chmod(0)
    with a_user(), pytest.raises(ConfigError, match=r"jinja cannot be read by user \d+ \(permission denied\)"):
        templates_of(folder, {}, str(folder / "chat_template.jinja"))


@pytest.mark.parametrize("closed", ["file", "folder"])
def test_a_key_file_is_to_be_given_to_its_user_and_not_to_all(closed: str, folder: Path) -> None:
    Keys.generate().save(str(key := folder / "quire.key"))
    if closed == "folder":
        folder.chmod(0o600)
    elif os.geteuid():
        key.chmod(0)
    with a_user(), pytest.raises(ConfigError, match=rf"^{key} cannot be read by user \d+ .*`chown \d+ {key}`"):
        Keys.load(str(key))


def test_what_is_absent_is_told_as_absent(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"models/none' does not exist"):
        resolve_model(str(folder.parent / "none"))


def test_readers_of_models_ask_whether_a_file_is_there_in_one_place() -> None:
    """``Path.is_file`` and its like tell what may not be looked at as absent, or end in a traceback."""
    asks = re.compile(r"\.is_file\(\)|\.is_dir\(\)|path\.isfile\(|path\.isdir\(")
    allowed = {"gpu_worker/models/files.py", "gpu_worker/models/identity.py"}  # the first says what it means itself
    files = [*(ROOT / "proto/checkpoint").glob("*.py"), *(ROOT / "gpu_worker/models").glob("*.py")]
    files += [ROOT / name for name in ("detokenizer/tokenizer.py", "client/adapter_folders.py", "proto/wire/keys.py")]
    found = [str(file.relative_to(ROOT)) for file in files if asks.search(file.read_text("utf-8"))]
    assert set(found) <= allowed
