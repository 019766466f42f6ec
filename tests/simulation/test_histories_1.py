"""Histories of fixed seeds. They are in two files, because a file is run by one process whole."""

from __future__ import annotations

import pytest

from simulation.histories import FIXED, PIECES, check

SIZE = FIXED // PIECES


@pytest.mark.parametrize("first", range(0, FIXED // 2, SIZE))
def test_nothing_fails(first: int) -> None:
    check(range(first, first + SIZE))
