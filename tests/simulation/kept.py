"""Plans that are kept because they failed once: what was wrong is mended, and stays so.

A file each in ``plans/``, and in ``plans/broken/`` those that find the faults of ``broken.py``. They are kept whole and
not as seeds, because what a seed means changes with everything that is drawn more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from .plan import Plan
from .shrink import default

PLANS = Path(__file__).parent / "plans"
BY_HAND = PLANS / "broken"


class Kept(msgspec.Struct):
    """A plan, the rule that failed, and in words what was wrong: of one for ``broken.py``, the fault's name."""

    was: str
    rule: str
    plan: Plan


def load(path: Path) -> Kept:
    """One that was kept."""
    return msgspec.json.decode(path.read_bytes(), type=Kept)


def save(path: Path, kept: Kept) -> None:
    """Keep one. Values that are the plainest are left out, so that what is there can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_said(kept))) + b"\n")


def _said(value: Any) -> Any:
    """A struct's values that are not the plainest, as JSON has them."""
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
        return {name: _said(it) for name in names if (it := getattr(value, name)) != default(value, (name,))}
    return [_said(each) for each in value] if isinstance(value, list) else msgspec.to_builtins(value)


def file_of(fault: str) -> Path:
    """Where the plan is kept that finds this fault of ``broken.py``."""
    return BY_HAND / (fault.replace(" ", "-").lower() + ".json")
