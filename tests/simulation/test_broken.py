"""Faults that are put into the code by hand are really there, and gone afterwards."""

from __future__ import annotations

import pytest

from quire.proto.hashing import ROOT, root_of
from quire.proto.losses import Losses
from simulation.broken import BROKEN, Fault


@pytest.mark.parametrize("name", BROKEN)
def test_the_lines_that_a_fault_changes_are_in_the_product(name):
    with BROKEN[name].put_in():
        pass


def test_a_fault_is_in_the_code_meanwhile_and_only_then():
    losses = Losses(2, 5)
    with BROKEN["quarantine ignored"].put_in():
        assert not losses.in_quarantine(5)
    assert losses.in_quarantine(5)
    with pytest.raises(RuntimeError), BROKEN["a salt forgotten"].put_in():
        assert root_of("salt") == ROOT
        raise RuntimeError
    assert root_of("salt") != ROOT


def test_lines_that_are_not_there_are_an_error():
    with (
        pytest.raises(LookupError, match="is 0 times in"),
        Fault("", ("proto.hashing:root_of", "no such line", "pass")).put_in(),
    ):
        pass
