"""``--batch-invariant``: whether a row must get the same bits in any company. Set once, before a model is loaded."""

from __future__ import annotations

_invariant = False


def set_batch_invariant(on: bool) -> None:
    """For all of this process, which serves one model under one set of flags."""
    global _invariant
    _invariant = on


def batch_invariant() -> bool:
    """Whether products, attention and sums among ranks have one order, whatever else is in the step."""
    return _invariant
