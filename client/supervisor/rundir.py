"""The folder of socket files that lives as long as one launcher and its children, however they end."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import time

from ...proto.config import ConfigError

STALE_S = 60.0
"""A folder that was left behind all the same is removed by a later launcher when it is as old as this."""

_PREFIX = "quire-run-"
_LOCK = "launcher.lock"  # the scheduler locks the folder itself


def make_run_dir() -> tuple[str, int]:
    """A new 0700 folder for socket files, and a lock on it that goes with this process. Raises ConfigError."""
    base = tempfile.gettempdir()
    if len(base) > 40:  # a socket's path has at most 107 bytes
        base = "/tmp"
    try:
        _sweep(base)
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(
            f"no folder for socket files can be made in {base}: {error.strerror}; make room, or name one with TMPDIR."
        ) from error
    return path, fd


def remove_after(path: str) -> tuple[subprocess.Popen[bytes] | None, int]:
    """Have ``path`` removed once nobody holds the descriptor any more: this process, and whom it is passed on to.

    The kernel counts them, so it works where all were killed: a shell of its own session waits for the end of a
    pipe. Returns the shell (None where there is none: a later launcher sweeps then) and the descriptor.
    """
    read_end, write_end = os.pipe()
    try:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; rm -rf -- "$1"', "quire-run-dir", path], stdin=read_end, cwd="/",
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError:
        os.close(write_end)
        return None, -1
    finally:
        os.close(read_end)
    return shell, write_end


def _sweep(base: str) -> None:
    """Remove run folders whose launcher was killed: ours, not new, and no longer locked."""
    with os.scandir(base) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in found:
        try:
            info = os.lstat(path)
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or time.time() - info.st_mtime < STALE_S:
                continue
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(os.path.join(path, _LOCK), flags, 0o600)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(fd)
