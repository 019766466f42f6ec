"""A failing plan made as small as it gets: what can be left out is, and what is left is made plain.

``shrink`` knows plans only as plain data, structs of msgspec with fields that are numbers, strings, lists and structs,
so a new field of a plan is made plain as well. The default of a field is its plainest value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

KEPT = frozenset(("seed", "kind", "target", "name"))
"""Fields that say which one it is, and not how much of it there is."""

Path = tuple[str | int, ...]
"""From a plan to one of its values: names of fields, and places in lists."""


class Search:
    """The smallest plan found so far. ``fails`` runs a plan and says whether it fails in the same way; it is asked at
    most ``tries`` times, and never twice about one plan."""

    def __init__(self, plan: Any, fails: Callable[[Any], bool], tries: int):
        self.plan, self.fails, self.tries = plan, fails, tries
        self.tried = 0
        self._seen = {msgspec.json.encode(plan)}

    @property
    def over(self) -> bool:
        """No try is left."""
        return self.tried >= self.tries

    def take(self, path: Path, value: Any) -> bool:
        """Put ``value`` there if the plan still fails; False where it does not, or is no plan any more."""
        try:
            smaller = put(self.plan, path, value)
            known = msgspec.json.encode(smaller)
        except (ValueError, TypeError):
            return False
        if self.over or known in self._seen:
            return False
        self._seen.add(known)
        self.tried += 1
        if not self.fails(smaller):
            return False
        self.plan = smaller
        return True


def shrink(plan: Any, fails: Callable[[Any], bool], tries: int = 2000) -> Any:
    """The smallest plan that ``fails`` as ``plan`` does and from which nothing more can be left out, or the smallest
    that was found in so many tries."""
    search = Search(plan, fails, tries)
    before = None
    while before is not search.plan and not search.over:
        before = search.plan
        _leave_out(search)
        _make_plain(search)
    _make_short(search)
    return search.plan


def _leave_out(search: Search) -> None:
    """Elements of lists: many at once while that goes, then each alone, from the end."""
    for path in [path for path, value in walk(search.plan) if isinstance(value, list)]:
        size = len(get(search.plan, path, []))
        while size:
            at = len(get(search.plan, path, []))
            while at > 0:
                values = get(search.plan, path, [])
                first = max(0, at - size)
                search.take(path, values[:first] + values[at:])
                at = first
            size //= 2


def _make_plain(search: Search) -> None:
    """Each value: the default where it will do, else as near to it as will do."""
    for path in [path for path, _ in walk(search.plan)]:
        value = get(search.plan, path, _GONE)
        if value is _GONE or path[-1] in KEPT:
            continue
        plainest = default(search.plan, path)
        if plainest is _GONE or plainest == value or search.take(path, plainest):
            continue
        for smaller in nearer(value, plainest):
            if search.take(path, smaller):
                break


def _make_short(search: Search) -> None:
    """Where the plainest value makes a long history, the least that will do."""
    for path in [path for path, _ in walk(search.plan) if path[-1] == "max_tokens"]:
        for least in (1, 2, 3, 5, 8, 13, 21):
            if search.take(path, least):
                break


def nearer(value: Any, plainest: Any) -> Iterator[Any]:
    """Values between ``plainest`` and ``value``, the plainest first."""
    if isinstance(value, bool):
        return
    if isinstance(value, str | bytes):
        for part in (0, 1, 2):
            yield value[: len(value) * part // 3 + (part == 0)]
        yield value[:-1]
    elif isinstance(value, int | float):
        low = plainest if isinstance(plainest, int | float) else 0
        if isinstance(value, int):
            yield from (near for near in (low + 1, (low + value) // 2, value - 1) if low < near < value)
        else:
            yield from (round(low + (value - low) * part, 1 + (value < 1) * 2) for part in (0.1, 0.5, 0.9))


_GONE: Any = object()


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of a plan with its path, outer ones first."""
    if path:
        yield path, value
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from walk(getattr(value, name), (*path, name))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from walk(item, (*path, at))


def get(value: Any, path: Path, otherwise: Any) -> Any:
    """The value there; ``otherwise`` where there is no such place any more."""
    for step in path:
        if isinstance(step, str) and isinstance(value, msgspec.Struct):
            value = getattr(value, step, _GONE)
        elif isinstance(step, int) and isinstance(value, list) and step < len(value):
            value = value[step]
        else:
            return otherwise
    return value


def put(plan: Any, path: Path, value: Any) -> Any:
    """A copy of the plan with ``value`` there."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        return [put(item, rest, value) if at == step else item for at, item in enumerate(plan)]
    return msgspec.structs.replace(plan, **{step: put(getattr(plan, step), rest, value)})


def default(plan: Any, path: Path) -> Any:
    """The default of the field there; ``_GONE`` where it is none or has none."""
    holder = get(plan, path[:-1], None)
    if not isinstance(holder, msgspec.Struct):
        return _GONE
    for field in msgspec.structs.fields(holder):
        if field.name == path[-1]:
            if field.default is not msgspec.NODEFAULT:
                return field.default
            if field.default_factory is not msgspec.NODEFAULT:
                return field.default_factory()
    return _GONE


def size(plan: Any) -> int:
    """How much a plan says: values that are not their defaults."""
    said = 0
    for path, value in walk(plan):
        if not isinstance(value, list | msgspec.Struct):
            said += isinstance(path[-1], int) or value != default(plan, path)
    return said
