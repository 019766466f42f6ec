"""Limits that are too low for a server are told in one line each."""

from __future__ import annotations

import resource

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
