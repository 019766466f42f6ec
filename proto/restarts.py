"""What a launcher tells its frontends of the processes that it started again, in a file: for their /metrics."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

PROCESSES = "QUIRE_PROCESSES"
"""Environment variable: the file in which a frontend's launcher tells how often it has started processes again."""


TOLD = "processes"
"""Its name in the launcher's folder."""


class Restarts:
    """The launcher's side. Where there is no room for the file, nothing is told."""

    def __init__(self) -> None:
        self._told: tuple[dict[str, int], dict[str, int], bool] | None = None

    def tell(self, folder: str, restarts: Mapping[str, int], failing: Mapping[str, int], no_workers: bool) -> None:
        """Write how many processes were started in place of others, and in how many places none can be kept running,
        both by service, and whether all workers have left on purpose, where that has changed. Nobody sees half of the
        file."""
        if (told := (dict(restarts), dict(failing), no_workers)) == self._told:
            return
        self._told = told
        part = os.path.join(folder, TOLD + ".part")
        with contextlib.suppress(OSError):
            with open(part, "w", encoding="utf-8") as file:
                json.dump(told, file)
            os.replace(part, os.path.join(folder, TOLD))


def read_restarts() -> tuple[dict[str, int], dict[str, int], bool] | None:
    """What the launcher has told; None where there is none that does."""
    if (path := os.environ.get(PROCESSES)) is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            restarts, failing, no_workers = json.load(file)
    except (OSError, ValueError):
        return None
    return restarts, failing, no_workers
