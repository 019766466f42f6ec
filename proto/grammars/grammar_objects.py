"""Which properties an object may have: none but those its schema names where that does not speak of others, and none
of a pattern that leaves no name.

A schema that names ``properties`` and says nothing of others permits any. A model that may write others does: whoever
calls a function with what it wrote is given arguments that it has not. So such objects are closed, also those whose
properties are named in several places that hold for one object (``allOf``, branches beside ``properties``). The values
of such properties may be described in several places too, so what lies below them stays open, and so does every schema
that some place refers to beside others.

llguidance takes the named properties out of a pattern's names by itself, but offers the comma before a name also where
none is left; the output could then never be completed.
"""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from .grammar_unions import at_pointer

_OTHERS = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
"""Keywords that speak of properties beyond the named ones."""
_ALL, _ANY = ("allOf", "anyOf", "oneOf"), ("if", "then", "else", "not")
_LISTS = (*_ALL, "items", "prefixItems")
_ONE = (*_ANY, "additionalItems", "additionalProperties", "contains", "items", "unevaluatedItems",
        "unevaluatedProperties")  # fmt: skip
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_IN_PLACE = (*_ALL, *_ANY, "dependentSchemas")
"""Keywords whose subschemas speak of the same value as the schema that has them."""
_DEFINITIONS = ("$defs", "definitions")
_HOLDERS = frozenset(("components",))
"""Where OpenAPI's documents have the schemas that they refer to."""
_MOST_PAIRS = 100_000
"""Named properties times patterns that are compared: more would take too long."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy in which every object that names properties and does not speak of others has no others; the schema itself
    where it refers to what cannot be looked up."""
    kept = _held_with_others(schema)
    if kept is None:
        return schema
    out = _close(schema, "#", True, schema, kept)
    for ref in sorted(_elsewhere(schema)):
        *way, last = ref.removeprefix("#/").split("/")
        holder: Any = at_pointer("#/" + quote("/".join(way)), out) if way else out
        if isinstance(holder, dict):  # a part of the copy, for nothing else has looked at it
            holder[_plain(last)] = _close(at_pointer("#" + quote(ref[1:]), schema), ref, True, schema, kept)
    return out


def _close(node: Any, path: str, alone: bool, root: dict[str, Any], kept: set[str]) -> Any:
    """``alone``: nothing else is said of the values of this schema. ``kept``: schemas of which that is not so."""
    if not isinstance(node, dict):
        return node
    alone = alone and path not in kept
    out, mixed = dict(node), _is_mixed(node)
    if alone and ("properties" in node or mixed):
        named = _Named(root)
        named.look(node)
        least = node.get("minProperties")
        few = isinstance(least, int) and least > len(named.names)
        if named.names and named.some and not named.speaks and not few:
            own = node["properties"] if isinstance(node.get("properties"), dict) else {}
            out["properties"] = {**own, **{name: True for name in named.names if name not in own}}
            out["additionalProperties"] = False

    def inner(key: str, child: Any, at: str) -> Any:
        return _close(child, f"{path}/{key}{at}", _stays_alone(key, node, alone and not mixed), root, kept)

    for key in _MAPS:
        if isinstance(node.get(key), dict):
            out[key] = {**out[key], **{n: inner(key, each, f"/{_escaped(n)}") for n, each in node[key].items()}}
    for key in _LISTS:
        if isinstance(node.get(key), list):
            out[key] = [inner(key, each, f"/{n}") for n, each in enumerate(node[key])]
    for key in _ONE:
        if isinstance(node.get(key), dict):
            out[key] = inner(key, node[key], "")
    for key in _HOLDERS & node.keys():  # OpenAPI's place of definitions
        out[key] = copy.deepcopy(node[key])
    return out


def _stays_alone(key: str, node: dict[str, Any], alone: bool) -> bool:
    """Whether what stands below ``key`` is all that is said of its values, where ``alone`` says so of the node's."""
    if key in _DEFINITIONS:
        return True
    both = key in ("properties", "patternProperties") and "properties" in node and "patternProperties" in node
    return alone and not both


def _plain(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def _elsewhere(root: dict[str, Any]) -> set[str]:
    """Pointers of schemas that are referred to and stand where no keyword has schemas, as in OpenAPI's documents."""
    return {ref for ref in _references(root) if ref.split("/")[1:2] and ref.split("/")[1] in _HOLDERS}


def has_inner_id(schema: dict[str, Any]) -> bool:
    """Whether a schema within this one has an ``$id``, which pointers there may count from."""
    waiting: list[Any] = list(schema.values())
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$id"), str):
                return True
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return False


def _references(root: dict[str, Any]) -> set[str]:
    """Every ``$ref``, as a pointer without escapes of a URL."""
    found: set[str] = set()
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(ref := node.get("$ref"), str):
                found.add(unquote(ref))
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return found


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _in_place(node: dict[str, Any]) -> list[Any]:
    """The subschemas that speak of the same value."""
    found = [each for key in _ALL if isinstance(node.get(key), list) for each in node[key]]
    found += [node[key] for key in _ANY if isinstance(node.get(key), dict)]
    if isinstance(node.get("dependentSchemas"), dict):
        found += node["dependentSchemas"].values()
    return found


def _is_mixed(node: dict[str, Any]) -> bool:
    """Whether properties of one object are named in several places: not where the schema only chooses between others,
    or has just one beside what says nothing of properties."""
    inner = _in_place(node)
    own = [key for key in ("properties", "required", "minProperties", *_OTHERS) if key in node]
    if "$ref" in node:
        return bool(inner or own)
    if not inner:
        return False
    places = sum(key in node for key in _IN_PLACE)
    chooses = places == 1 and ("anyOf" in node or "oneOf" in node or len(inner) == 1)
    return bool(own) or not chooses


class _Named:
    """The properties that a schema and what holds beside it name. ``some``: a ``properties`` is among them, ``speaks``:
    something is said of others, or cannot be looked up."""

    def __init__(self, root: dict[str, Any]):
        self.names: dict[str, None] = {}
        self.some = self.speaks = False
        self._root, self._seen = root, set[str]()

    def look(self, node: Any) -> None:
        """Take a schema's names, and those of what it stands for."""
        if not isinstance(node, dict):
            return
        self.speaks |= any(key in node for key in (*_OTHERS, "const", "enum"))  # a value names its own properties
        if isinstance(node.get("properties"), dict):
            self.some = True
            self.names |= dict.fromkeys(map(str, node["properties"]))
        if isinstance(node.get("required"), list):
            self.names |= dict.fromkeys(name for name in node["required"] if isinstance(name, str))
        ref = node.get("$ref")
        if isinstance(ref, str) and ref not in self._seen:
            self._seen.add(ref)
            target = at_pointer(ref, self._root)
            self.speaks |= not isinstance(target, dict | bool)
            self.look(target)
        for each in _in_place(node):
            self.look(each)


def _held_with_others(root: dict[str, Any]) -> set[str] | None:
    """Pointers of the schemas that some place refers to beside something else about the same value. Closed, they would
    refuse what is named there. None where a reference cannot be looked up."""
    found: set[str] = set()
    looked: set[str] = set()
    waiting: list[tuple[Any, bool]] = [(root, True)]
    while waiting:
        node, alone = waiting.pop()
        if not isinstance(node, dict):
            continue
        mixed = _is_mixed(node)
        if isinstance(ref := node.get("$ref"), str):
            target, plain = at_pointer(ref, root), unquote(ref)
            if not isinstance(target, dict | bool):
                return None
            held = mixed or not alone
            if plain not in (found if held else looked | found):
                (found if held else looked).add(plain)
                waiting.append((target, not held))
        for key in {*_MAPS, *_LISTS, *_ONE} & node.keys():
            inner = node[key]
            if isinstance(inner, dict):
                children = list(inner.values()) if key in _MAPS else [inner]
            else:
                children = inner if isinstance(inner, list) else []
            waiting += [(child, _stays_alone(key, node, alone and not mixed)) for child in children]
    return found


# ---------------------------------------------------------------- patterns


def without_empty(schema: dict[str, Any]) -> dict[str, Any] | None:
    """``patternProperties`` without the patterns that leave no name beside the named properties; None where all are
    as they were."""
    patterns, named = schema.get("patternProperties"), schema.get("properties")
    if not isinstance(patterns, dict):
        return None
    names = list(map(str, named)) if isinstance(named, dict) else []
    if len(names) * len(patterns) > _MOST_PAIRS:
        return None
    left = {
        pattern: each for pattern, each in patterns.items()
        if _leaves(str(pattern), tuple(name for name in names if _matches(str(pattern), name)))
    }  # fmt: skip
    return None if len(left) == len(patterns) else left


def with_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy in which named properties whose name a pattern matches meet that pattern's schema too."""
    patterns, named = schema.get("patternProperties"), schema.get("properties")
    if not isinstance(patterns, dict) or not isinstance(named, dict) or not patterns:
        return schema
    found = dict(named)
    for pattern, more in patterns.items():
        for name in named if more not in (True, {}) else ():
            if _matches(str(pattern), str(name)) and found[name] != more:
                found[name] = more if found[name] in (True, {}) else {"allOf": [found[name], more]}
    return {**schema, "properties": found}


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # llguidance says what it cannot read
        return False


def is_empty_string(schema: dict[str, Any]) -> bool:
    """Whether a schema of strings alone is met by none, as its ``pattern`` and its lengths contradict each other."""
    if schema.get("type") != "string" or "pattern" not in schema:
        return False
    told = {key: schema[key] for key in ("type", "pattern", "minLength", "maxLength", "format") if key in schema}
    return _starts(msgspec.json.encode(told), b'"') is False


@lru_cache(maxsize=4096)
def _leaves(pattern: str, names: tuple[str, ...]) -> bool:
    """Whether an object may have a property by this pattern that has none of ``names``. True where llguidance cannot
    read the pattern, which it then says itself."""
    named = dict.fromkeys(names, False)
    told = {"type": "object", "properties": named, "patternProperties": {pattern: True}, "additionalProperties": False}
    return _starts(msgspec.json.encode(told), b'{"') is not False


@lru_cache(maxsize=4096)
def _starts(schema: bytes, text: bytes) -> bool | None:
    """Whether an output may begin so; None where there is no telling."""
    from llguidance import LLMatcher

    table = _byte_table()
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema.decode(), overrides={"whitespace_flexible": False})
    except ValueError:
        return None
    matcher = LLMatcher(table, grammar, log_level=0)
    if matcher.is_error():
        return None
    return matcher.try_consume_tokens(table.tokenize_bytes(text)) == len(text)


@lru_cache(maxsize=1)
def _byte_table() -> Any:
    """A vocabulary of single bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
