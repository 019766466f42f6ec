"""Processes that die of one prompt: ``python poison.py worker|detokenizer|scheduler FLAGS``.

Each is the real process (the worker: the one with a page store) but for one method, which ends it on the spot when it
meets ``POISON``. That is what a bug in a kernel or a parser would do.
"""

from __future__ import annotations

import os
import sys
from typing import Any

POISON = [2001, 2002, 2003]
"""The prompt."""


def _die() -> None:
    os._exit(9)


def _is_poison(ids: bytes) -> bool:
    from quire.proto.codec import from_i32

    return from_i32(ids)[: len(POISON)] == POISON


def worker() -> None:
    """Dies in the first step that runs the prompt."""
    from quire.scheduler.fake import fake_worker

    admit = fake_worker.PageStore._admit

    def poisoned(self: Any, message: Any) -> None:
        if _is_poison(message.ids):
            _die()
        admit(self, message)

    fake_worker.PageStore._admit = poisoned  # type: ignore[method-assign]
    fake_worker.main()


def scheduler() -> None:
    """Dies when the prompt is submitted."""
    from quire.scheduler import main as module
    from quire.scheduler.core import Scheduler

    submit = Scheduler.submit

    def poisoned(self: Any, owner: str, message: Any) -> None:
        if _is_poison(message.ids):
            _die()
        submit(self, owner, message)

    Scheduler.submit = poisoned  # type: ignore[method-assign]
    module.main()


def detokenizer() -> None:
    """Dies when it prepares the prompt."""
    from quire.detokenizer import main as module
    from quire.detokenizer.tokenize import Preparer

    prepare = Preparer.prepare

    def poisoned(self: Any, message: Any, *rest: Any) -> Any:
        if message.ids is not None and _is_poison(message.ids):
            _die()
        return prepare(self, message, *rest)

    Preparer.prepare = poisoned  # type: ignore[method-assign]
    module.main()


if __name__ == "__main__":
    {"worker": worker, "scheduler": scheduler, "detokenizer": detokenizer}[sys.argv.pop(1)]()
