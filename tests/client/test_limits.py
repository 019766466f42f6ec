"""Limits that are too low for a server, and memory that ran out, are told in one line each."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from quire.client.supervisor import limits


@pytest.mark.parametrize(
    ("files", "space", "said"),
    [(64, -1, ["64 files"]), (65536, 700 << 20, ["700 MiB"]), (64, 300 << 20, ["64 files", "300 MiB"]), (-1, -1, [])],
)
def test_a_low_limit_is_told_with_its_remedy(
    files: int, space: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {resource.RLIMIT_NOFILE: (files, files), resource.RLIMIT_AS: (space, space)}
    monkeypatch.setattr(resource, "getrlimit", found.__getitem__)
    lines = list(limits.too_low())
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert words in line and "ulimit" in line and "\n" not in line


def test_a_process_without_memory_ends_with_a_line() -> None:
    code = "from quire.proto.process import setup_logging; setup_logging('frontend'); raise MemoryError"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("quire.frontend: error: out of memory") and done.stderr.count("\n") == 1
