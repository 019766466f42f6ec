"""JSON schemas of all keywords in any mixture, many of which contradict themselves: ``hostile(seed)``."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_NAMES = ["a", "b", "ab", "aa", "c"]
_PATTERNS = ["^a$", "^(a|b)$", "^[ab]+$", "a", "^a", "b$", "^[^\\s\\S]$", "^c?$", "^x{2}$", "^[a-c]{1,2}$"]
_TEXTS = ["^a{3}$", "^[^\\s\\S]$", "b", "^(x|yy)$", "^\\d{2}$"]


def hostile(seed: int) -> Schema:
    """A schema, always the same for one seed."""
    draw = random.Random(seed)
    return {"$defs": {"d": _object(draw, 1)}, **_any(draw, 3)}


def _any(draw: random.Random, depth: int) -> Schema:
    kinds = [_object, _object, _object, _array, _union, _all, _refers] if depth else [_leaf]
    return draw.choice([*kinds, _leaf])(draw, depth - 1)


def _leaf(draw: random.Random, depth: int) -> Schema:
    low = draw.randrange(4)
    return draw.choice([
        {"type": "boolean"}, {"type": "null"}, {"const": draw.choice([1, "x", None, True])}, {"enum": ["p", "q", 3]},
        {"type": "integer", "minimum": low, "maximum": low + draw.randrange(-1, 5)},
        {"type": "string", "minLength": low, "maxLength": low + draw.randrange(-1, 3)},
        {"type": "string", "pattern": draw.choice(_TEXTS), **({"maxLength": 2} if draw.random() < 0.3 else {})},
        {"type": ["string", "null"], "maxLength": 2}, {"type": "number", "exclusiveMinimum": 0, "maximum": low},
    ])  # fmt: skip


def _object(draw: random.Random, depth: int) -> Schema:
    depth = max(depth, 0)
    schema: Schema = {"type": "object"} if draw.random() < 0.9 else {}
    names = draw.sample(_NAMES, draw.randrange(4))
    if draw.random() < 0.8:
        schema["properties"] = {name: _any(draw, depth) for name in names}
    if draw.random() < 0.6:
        schema["required"] = draw.sample(
            _NAMES if draw.random() < 0.2 else names, draw.randrange(min(3, len(names) + 1))
        )
    if draw.random() < 0.4:
        patterns = draw.sample(_PATTERNS, draw.randrange(1, 3))
        if names and draw.random() < 0.5:  # no other names are left
            patterns = [f"^({'|'.join(names)})$"]
            schema["properties"] = {name: _any(draw, depth) for name in names}
            schema["additionalProperties"] = False
        schema["patternProperties"] = {pattern: _any(draw, depth) for pattern in patterns}
    more = draw.choice([None, None, False, True, "schema"])
    if more is not None and "additionalProperties" not in schema:
        schema["additionalProperties"] = _leaf(draw, 0) if more == "schema" else more
    if draw.random() < 0.15:
        schema["maxProperties"] = draw.randrange(4)
    if draw.random() < 0.15:
        schema["minProperties"] = draw.randrange(3)
    return schema


def _array(draw: random.Random, depth: int) -> Schema:
    depth = max(depth, 0)
    schema: Schema = {"type": "array", "maxItems": draw.randrange(4)}
    if draw.random() < 0.8:
        schema["items"] = _any(draw, depth) if draw.random() < 0.8 else False
    if draw.random() < 0.3:
        schema["prefixItems"] = [_any(draw, depth) for _ in range(draw.randrange(1, 3))]
    if draw.random() < 0.4:
        schema["minItems"] = draw.randrange(3)
    return schema


def _union(draw: random.Random, depth: int) -> Schema:
    kind = draw.choice(["anyOf", "anyOf", "oneOf"])
    schema: Schema = {kind: [_any(draw, max(depth, 0)) for _ in range(draw.randrange(1, 4))]}
    if draw.random() < 0.3:
        schema |= {"type": "object", "properties": {"a": _leaf(draw, 0)}}
    return schema


def _all(draw: random.Random, depth: int) -> Schema:
    return {"allOf": [_object(draw, max(depth, 0)) for _ in range(draw.randrange(1, 3))]}


def _refers(draw: random.Random, depth: int) -> Schema:
    beside = {"properties": {"a": _leaf(draw, 0)}} if draw.random() < 0.3 else {}
    return {"$ref": "#/$defs/d", **beside}
