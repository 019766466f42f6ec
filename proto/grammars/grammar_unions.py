"""``oneOf`` whose branches exclude each other: it is then the ``anyOf`` that llguidance can honour.

llguidance finds some of these itself, but looks into no ``$ref``, which is how most schemas name their branches. What
is said here of two branches follows from keywords that both are held to, whatever else they say.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any
from urllib.parse import unquote

MAX_BRANCHES = 256
_DEPTH = 3
_REFS = 8
_KINDS = {"null", "boolean", "object", "array", "number", "string"}


def exclusive(branches: Any, root: dict[str, Any]) -> bool:
    """Whether no value is valid under two of ``branches``, as far as can be seen. Pointers count from ``root``."""
    if not isinstance(branches, list) or len(branches) > MAX_BRANCHES:
        return False
    found = [_resolved(branch, root) for branch in branches]
    return all(_apart(one, other, root, _DEPTH) for one, other in combinations(found, 2))


def _apart(one: Any, other: Any, root: dict[str, Any], depth: int) -> bool:
    """Whether no value is valid under both, which are resolved."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    kinds = _kinds(one), _kinds(other)
    if not kinds[0] & kinds[1]:
        return True
    values, others = _constants(one), _constants(other)
    if values is not None and others is not None:
        return not any(value in others for value in values)
    if not depth or kinds != ({"object"}, {"object"}):
        return False
    return any(_told_by(name, one, other, root, depth) for name in {*_required(one), *_required(other)})


def _told_by(name: str, one: dict[str, Any], other: dict[str, Any], root: dict[str, Any], depth: int) -> bool:
    """Whether property ``name``, which one of the objects must have, tells them apart."""
    properties = [schema["properties"] if isinstance(schema.get("properties"), dict) else {} for schema in (one, other)]
    for schema, named, against in ((one, properties[0], other), (other, properties[1], one)):
        closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
        if closed and name not in named and name in _required(against):
            return True
    if name not in _required(one) or name not in _required(other):
        return False
    sides = [_resolved(named.get(name), root) for named in properties]
    return _apart(sides[0], sides[1], root, depth - 1)


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types of JSON that values may have; an integer is a number."""
    named = schema.get("type", [*_KINDS])
    kinds = {"number" if kind == "integer" else kind for kind in (named if isinstance(named, list) else [named])
             if isinstance(kind, str)}  # fmt: skip
    values = _constants(schema)
    return kinds if values is None else kinds & set(map(_kind, values))


def _kind(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (str, "string"), (dict, "object"), (list, "array"), (type(None), "null")):
        if isinstance(value, kind):
            return name
    return "number"


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _required(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _resolved(schema: Any, root: dict[str, Any]) -> Any:
    """What a ``$ref`` within the document stands for; None where it cannot be told."""
    for _ in range(_REFS):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = at_pointer(schema["$ref"], root)
    return None


def at_pointer(ref: Any, root: dict[str, Any]) -> Any:
    """The subschema that a JSON pointer names; None where there is none."""
    if ref == "#":
        return root
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    here: Any = root
    for part in unquote(ref[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(here, list):
            here = here[int(name)] if name.isdecimal() and int(name) < len(here) else None
        else:
            here = here.get(name) if isinstance(here, dict) else None
    return here
