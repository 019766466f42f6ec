"""One project of containers for all tests here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose.engine import Compose, reason_to_skip


@pytest.fixture(scope="session")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """The project, built and up. Its report goes to QUIRE_COMPOSE_LOG, or a temporary file."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    named = os.environ.get("QUIRE_COMPOSE_LOG")
    project = Compose(Path(named) if named else tmp_path_factory.mktemp("compose") / "report.log")
    project.run("build")
    try:
        project.up()
        project.wait_ready()
        yield project
    finally:
        project.close()
