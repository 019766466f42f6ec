"""Whether files and folders are there, told apart from those that this process's user may not look at."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .config_error import ConfigError


def is_file(path: str | Path, remedy: str = "") -> bool:
    """Whether a plain file is there. Raises ConfigError where this process's user may not know that, or not read it.

    ``remedy`` is what to do then, for files that not everyone should read.
    """
    if not stat.S_ISREG(_mode(path, remedy)):
        return False
    if not os.access(path, os.R_OK, effective_ids=True):
        raise unreadable(path, remedy)
    return True


def is_folder(path: str | Path) -> bool:
    """Whether a folder is there, to be listed and entered. Raises ConfigError where this process's user may not."""
    if not stat.S_ISDIR(_mode(path)):
        return False
    try:
        os.stat(os.path.join(path, os.curdir))
        with os.scandir(path):
            return True
    except PermissionError as error:
        raise unreadable(path) from error
    except OSError:
        return False


def unreadable(path: str | Path, remedy: str = "") -> ConfigError:
    """What is said of a file or folder that this process's user may not read."""
    user = os.geteuid()
    remedy = remedy or (
        f"let this process's user read it and its folder, for example with `chmod -R a+rX "
        f"{_closed(os.path.abspath(path))}`"
    )
    return ConfigError(f"{path} cannot be read by user {user} (permission denied); {remedy}.")


def _mode(path: str | Path, remedy: str = "") -> int:
    """0 where nothing is there."""
    try:
        return os.stat(path).st_mode
    except PermissionError as error:
        raise unreadable(path, remedy) from error
    except (OSError, ValueError):  # a ValueError is for a NUL in the name
        return 0


def _closed(path: str) -> str:
    """The uppermost folder on the way to ``path`` that may not be entered; else ``path`` itself."""
    above = [str(each) for each in reversed(Path(path).parents)]
    return next((each for each in above if not _entered(each)), path)


def _entered(folder: str) -> bool:
    try:
        os.stat(os.path.join(folder, os.curdir))
    except OSError:
        return False
    return True
