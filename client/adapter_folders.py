"""From what a user calls an adapter to what a request carries: its folder found, checked, and told by its contents."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..proto.checkpoint.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_digest
from ..proto.checkpoint.lora_config import check_adapter
from ..proto.checkpoint.model_config import resolve_model
from ..proto.config import ConfigError
from ..proto.readable import is_folder
from ..proto.work import Adapter

MAX_NAME, MAX_PATH = 256, 4096
"""Characters of an adapter's name and of its path, at most."""


class AdapterFolders:
    """Adapters by their folders. ``max_rank`` is ``--max-lora-rank``. Its methods read files, and may be called from
    several threads."""

    def __init__(self, max_rank: int, download_dir: str | None = None):
        self.max_rank, self.download_dir = max_rank, download_dir
        self._digests: dict[str, tuple[object, bytes]] = {}  # by folder: what its files were, and their digest
        self._lock = threading.Lock()

    def adapter(self, name: str, path: str, root: str | None = None) -> Adapter:
        """The adapter in the folder ``path``, or of that hub id. With a ``root`` it must be a folder below it, and so
        must its files; a relative path begins there. Raises ConfigError."""
        if not name or len(name) > MAX_NAME or not path or len(path) > MAX_PATH:
            raise ConfigError(
                f"a lora adapter's name has 1 to {MAX_NAME} characters and its path 1 to {MAX_PATH}, got {name[:80]!r} "
                f"and {path[:80]!r}."
            )
        try:
            folder = self._found(path) if root is None else _below(root, path)
            check_adapter(Path(folder), self.max_rank)
            return Adapter(name, folder, self._digest(folder))
        except ConfigError as error:
            raise ConfigError(f"lora adapter '{name}': {error}") from error

    def _found(self, path: str) -> str:
        if is_folder(path):
            return os.path.abspath(path)
        return resolve_model(path, None, self.download_dir)

    def _digest(self, folder: str) -> bytes:
        """Files are read again only where they have changed."""
        now = _state(folder)
        with self._lock:
            known = self._digests.get(folder)
        if known is not None and known[0] == now:
            return known[1]
        digest = adapter_digest(folder)
        with self._lock:
            self._digests[folder] = now, digest
        return digest


def _state(folder: str) -> object:
    try:
        found = [os.stat(os.path.join(folder, name)) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from None
    return [(each.st_ino, each.st_dev, each.st_size, each.st_mtime_ns) for each in found]


def _below(root: str, path: str) -> str:
    """The real folder of ``path``, which is below ``root`` with its files. Raises ConfigError."""
    real_root = os.path.realpath(root)
    try:
        folder = os.path.realpath(os.path.join(real_root, path))
        named = [os.path.realpath(os.path.join(folder, name)) for name in ("", ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    except ValueError as error:  # a NUL
        raise ConfigError(f"lora_path {path[:80]!r} is no path: {error}.") from None
    if folder == real_root or any(os.path.commonpath([real_root, each]) != real_root for each in named):
        raise ConfigError(f"lora_path {path!r} is not a folder below --lora-root ({root}), or its files are not.")
    if not is_folder(folder):
        raise ConfigError(f"lora_path {path!r} is no folder.")
    return folder


class Module(NamedTuple):
    """One of ``--lora-modules``. ``parent`` is the model that it is shown to be made for; "": the served one."""

    name: str
    path: str
    parent: str = ""


class _Json(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str
    base_model_name: str | None = None


def parse_module(text: str) -> Module:
    """``name=path``, or a JSON object with name, path and base_model_name. Raises ConfigError."""
    if "=" in text and "," not in text and not text.lstrip().startswith("{"):
        name, _, path = text.partition("=")
        if name and path:
            return Module(name, path)
    try:
        found = msgspec.json.decode(text.encode(), type=_Json)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(
            f"Invalid JSON format for --lora-modules: {text!r} ({error}); name=path is the short form."
        ) from None
    return Module(found.name, found.path, found.base_model_name or "")


def parse_modules(texts: list[str], models: list[str]) -> list[Module]:
    """All of them. Raises ConfigError also where a name is given twice, or is one of ``models``."""
    modules = [parse_module(text) for text in texts]
    taken = set(models)
    for module in modules:
        if module.name in taken:
            raise ConfigError(f"--lora-modules names {module.name!r}, which another adapter or the model is called.")
        taken.add(module.name)
    return modules
