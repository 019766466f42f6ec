"""A history to read: its plan in words, then what happened, line by line."""

from __future__ import annotations

from typing import Any

import msgspec

from .plan import Plan
from .run import LIMIT_S, Record, run_plan


def transcript(plan: Plan, limit_s: float = LIMIT_S) -> tuple[list[str], Record]:
    """The lines of a plan's history, and what became of it."""
    lines: list[str] = []
    record = run_plan(plan, limit_s, lines)
    unsaid = [f"!! {failure}" for failure in record.failures if f"!! {failure}" not in lines]
    return [*plan_lines(plan), "", *lines, *unsaid], record


def plan_lines(plan: Plan) -> list[str]:
    """What a plan says: of each part, the values that are not the plainest."""
    return [
        f"seed {plan.seed}",
        f"cluster: {said(plan.shape) or 'the plainest'}",
        *(f"ask: {said(ask)}" for ask in plan.asks),
        *(f"fault: {said(fault)}" for fault in plan.faults),
    ]


def said(value: Any) -> str:
    """The fields of a struct that are not their defaults, as ``name value``."""
    parts = []
    for field in msgspec.structs.fields(value):
        it = getattr(value, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if it == default or (default is None and it == []):
            continue
        if isinstance(it, msgspec.Struct):
            parts.append(f"{field.name} ({said(it) or 'plain'})")
        elif isinstance(it, list) and it and isinstance(it[0], msgspec.Struct):
            parts.append(f"{field.name} " + " ".join(f"({said(each) or 'plain'})" for each in it))
        else:
            parts.append(f"{field.name} {it!r}" if isinstance(it, str | bytes | list) else f"{field.name} {it}")
    return ", ".join(parts)
