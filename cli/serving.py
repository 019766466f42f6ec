"""The servers that this user runs here: found by their folders of socket files, where each says who it is."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import socket
import stat
import tempfile
from dataclasses import asdict, dataclass

from ..proto.config import default_run_dir

RUN_DIRS, SHARED_TMP = "quire-run-*", "/tmp"
"""What ``quire serve`` calls its folder of socket files, and where it is if TMPDIR is too long; see ``rundir.py``."""
FILE = "serving.json"
SCHEDULER, LAUNCHER = "scheduler.front", "launcher.sock"
"""Sockets in that folder: the scheduler's, and that of ``quire serve`` itself once the server is ready."""


@dataclass(frozen=True)
class Serving:
    """What ``quire serve`` says of itself. ``port`` is 0 for a server without one, ``model`` what it is called,
    ``scheduler`` the scheduler's address."""

    port: int = 0
    model: str = ""
    pid: int = 0
    scheduler: str = ""

    def write(self, folder: str) -> None:
        """Say so in the server's folder; where that cannot be written the server is found without."""
        with contextlib.suppress(OSError), open(os.path.join(folder, FILE), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)


def serving(folder: str) -> Serving:
    """What the server in a folder says of itself; empty where it says nothing, as one that still starts."""
    try:
        with open(os.path.join(folder, FILE), encoding="utf-8") as file:
            return Serving(**json.load(file))
    except (OSError, ValueError, TypeError):
        return Serving()


def named(folder: str) -> str:
    """A server in words: its address, port and model."""
    told = serving(folder)
    port = f"port {told.port}, " if told.port else ""
    return f"ipc://{folder} ({port}model {told.model})" if told.model else f"ipc://{folder}"


def serving_folders(listens: str = SCHEDULER) -> list[str]:
    """Folders of this user's servers in which somebody listens on that socket."""
    folders = {default_run_dir()}
    for base in {tempfile.gettempdir(), SHARED_TMP}:
        folders.update(glob.glob(os.path.join(glob.escape(base), RUN_DIRS)))
    return sorted(folder for folder in folders if _serves(folder, listens))


def _serves(folder: str, listens: str) -> bool:
    """Somebody listens on the folder's socket of that name, and the folder is ours."""
    path = os.path.join(folder, listens)
    try:
        info = os.lstat(folder)
        if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
        return True
    except OSError:
        return False
