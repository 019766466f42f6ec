"""200 and more JSON schemas of many kinds, each of which some output meets: ``schemas()``."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_NAMES = [
    "name",
    "id",
    "x",
    "y",
    "items",
    "kind",
    "größe",
    "with space",
    'quote"d',
    "a/b",
    "$ref_",
    "type",
    "名前",
    "0",
]
_WORDS = ["red", "green", "blue", "", "ja", "naïve", "a\nb", 'say "hi"', "back\\slash", "😀", "null", "12"]
_PATTERNS = [
    "^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "^(foo|bar)+$", "^[A-Z][a-z]*( [A-Z][a-z]*)?$", "^#[0-9a-f]{6}$", "x", "^a",
    "z$", "^[^\\s\"]{1,6}$", "^v\\d+\\.\\d+$",
]  # fmt: skip
_FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration", "uri"]


def schemas() -> list[Schema]:
    """At least 200 schemas, always the same."""
    found = [*_scalars(), *_strings(), *_arrays(), *_objects(), *_unions(), *_references(), *_documents()]
    draw = random.Random(20)
    while len(found) < 220:
        found.append(_random(draw, 3))
    return found


def _scalars() -> list[Schema]:
    numbers: list[Schema] = [
        {"minimum": 0}, {"maximum": -1}, {"minimum": -5, "maximum": 5}, {"exclusiveMinimum": 3, "maximum": 1000},
        {"minimum": 10, "exclusiveMaximum": 11}, {"multipleOf": 5}, {"minimum": 100, "maximum": 200, "multipleOf": 25},
    ]  # fmt: skip
    return [
        {}, {"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}, {"type": "string"},
        {"type": ["string", "null"]}, {"type": ["integer", "boolean", "array"]}, {"const": 7}, {"const": "a\"b\\c"},
        {"const": {"deep": [1, {"er": None}]}}, {"const": -1.5}, {"enum": [1, "one", None, True, [1], {"o": 1}]},
        {"enum": _WORDS}, {"enum": list(range(-50, 50))}, {"type": "string", "enum": ["only"]},
        *({"type": "integer", **limits} for limits in numbers),
        *({"type": "number", **limits} for limits in numbers[:5]),
        {"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "exclusiveMinimum": 0, "maximum": 0.25},
        {"type": "number", "minimum": -0.5, "maximum": 0.5}, {"type": "number", "multipleOf": 0.5},
    ]  # fmt: skip


def _strings() -> list[Schema]:
    return [
        *({"type": "string", "pattern": pattern} for pattern in _PATTERNS),
        *({"type": "string", "format": name} for name in _FORMATS),
        {"type": "string", "minLength": 3}, {"type": "string", "maxLength": 4},
        {"type": "string", "minLength": 2, "maxLength": 2}, {"type": "string", "maxLength": 0},
        {"type": "string", "pattern": "^[ab]+$", "minLength": 3, "maxLength": 9},
        {"type": "string", "title": "T", "description": "d", "default": "x", "examples": ["y"]},
    ]  # fmt: skip


def _arrays() -> list[Schema]:
    plain: list[Schema] = [{}, {"type": "integer"}, {"type": "string", "maxLength": 3}, {"enum": ["a", "b"]},
                           {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]  # fmt: skip
    bounds: list[Schema] = [{}, {"minItems": 1}, {"maxItems": 3}, {"minItems": 2, "maxItems": 4}, {"maxItems": 0}]
    return [
        *({"type": "array", "items": items, **limits} for items in plain for limits in bounds),
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "minItems": 2, "items": {"const": 1}},
        {"type": "array", "prefixItems": [{"enum": ["p"]}], "minItems": 1, "maxItems": 2},
        {"type": "array", "items": {"type": "array", "items": {"type": "number", "minimum": 0}, "minItems": 1}},
    ]


def _objects() -> list[Schema]:
    some = {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}, "c": {"type": "boolean"}}
    return [
        {"type": "object"}, {"type": "object", "additionalProperties": False},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        {"type": "object", "additionalProperties": {"enum": [1, 2]}, "minProperties": 1},
        *(
            {"type": "object", "properties": some, "required": required, "additionalProperties": more}
            for required in ([], ["a"], ["c"], ["a", "b", "c"])
            for more in (True, False, {"type": "null"})
        ),
        {"type": "object", "properties": some, "required": ["z"], "additionalProperties": {"type": "integer"}},
        {"type": "object", "patternProperties": {"^n_": {"type": "number"}, "^s_": {"type": "string"}},
         "additionalProperties": False},
        {"type": "object", "properties": {"id": {"type": "integer"}}, "patternProperties": {"^x-": {"type": "boolean"}},
         "required": ["id"], "additionalProperties": False},
        {"type": "object", "properties": {name: {"type": "integer", "minimum": 0} for name in _NAMES},
         "required": _NAMES, "additionalProperties": False},
        {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(40)},
         "additionalProperties": False},
        {"properties": {"a": {"type": "integer"}}},
        {"type": "object", "properties": {"a\n": {"const": 1}, "é": {"const": 2}},
         "additionalProperties": {"const": 3}},
    ]  # fmt: skip


def _unions() -> list[Schema]:
    cat = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer", "maximum": 9}},
           "required": ["kind"], "additionalProperties": False}  # fmt: skip
    dog = {"type": "object", "properties": {"kind": {"const": "dog"}, "good": {"const": True}},
           "required": ["kind", "good"], "additionalProperties": False}  # fmt: skip
    return [
        {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "null"}, "maxItems": 3}]},
        {"anyOf": [cat, dog]}, {"oneOf": [cat, dog]}, {"type": "array", "items": {"oneOf": [cat, dog]}, "minItems": 1},
        {"oneOf": [{"type": "integer"}, {"type": "string"}]}, {"oneOf": [{"const": 1}, {"const": 2}, {"const": "3"}]},
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
        {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
        {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
        {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}]},
        {"type": "object", "properties": {"v": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, "required": ["v"]},
        {"type": ["string", "integer"], "minLength": 2, "maxLength": 3, "minimum": 5, "maximum": 8},
    ]  # fmt: skip


def _references() -> list[Schema]:
    tree = {"type": "object", "properties": {"v": {"type": "integer"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
            "required": ["v"], "additionalProperties": False}  # fmt: skip
    linked = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"const": 1}},
              "required": ["n", "next"], "additionalProperties": False}]}  # fmt: skip
    expr = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 2,
            "maxItems": 2}]}  # fmt: skip
    return [
        {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}, linked, {"$defs": {"e": expr}, "$ref": "#/$defs/e"},
        {"definitions": {"p": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/definitions/p"}},
        {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 3},
        {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}},
         "required": ["a", "b"], "additionalProperties": False},
        {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "maxItems": 1},
                   "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "additionalProperties": False}},
         "$ref": "#/$defs/a"},
        {"$id": "http://example.com/s", "$defs": {"w": {"$anchor": "word", "enum": ["w"]}}, "$ref": "#word"},
        {"$defs": {"a~b/c d": {"const": 5}}, "$ref": "#/$defs/a~0b~1c%20d"},
    ]  # fmt: skip


def _documents() -> list[Schema]:
    """What applications ask for."""
    text: Schema = {"type": "string", "maxLength": 20}
    person = {"type": "object", "properties": {"name": text, "age": {"type": "integer", "minimum": 0, "maximum": 150},
              "email": {"type": "string", "format": "email"}}, "required": ["name", "age"],
              "additionalProperties": False}  # fmt: skip
    call = {"type": "object", "properties": {"name": {"enum": ["search", "open"]}, "arguments": {"type": "object",
            "properties": {"query": text, "limit": {"type": "integer", "minimum": 1, "maximum": 20}},
            "required": ["query"], "additionalProperties": False}}, "required": ["name", "arguments"],
            "additionalProperties": False}  # fmt: skip
    return [
        person, call, {"type": "array", "items": person, "minItems": 1, "maxItems": 2},
        {"type": "array", "items": call, "maxItems": 2},
        {"type": "object", "properties": {"steps": {"type": "array", "items": {"type": "object", "properties":
         {"explanation": text, "output": text}, "required": ["explanation", "output"], "additionalProperties": False},
         "minItems": 1, "maxItems": 3}, "final_answer": text}, "required": ["steps", "final_answer"],
         "additionalProperties": False},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Invoice", "type": "object",
         "properties": {"number": {"type": "string", "pattern": "^INV-\\d{4}$"}, "date": {"type": "string",
         "format": "date"}, "lines": {"type": "array", "items": {"type": "object", "properties": {"what": text,
         "price": {"type": "number", "minimum": 0}}, "required": ["what", "price"], "additionalProperties": False},
         "minItems": 1, "maxItems": 2}, "paid": {"type": ["boolean", "null"]}},
         "required": ["number", "date", "lines", "paid"], "additionalProperties": False},
        {"type": "object", "properties": {"sentiment": {"enum": ["good", "bad"]}, "score": {"type": "number",
         "minimum": 0, "maximum": 1}}, "required": ["sentiment", "score"], "additionalProperties": False},
    ]  # fmt: skip


def _random(draw: random.Random, depth: int) -> Schema:
    """A nested schema of everything above."""
    kind = draw.choice(["object", "object", "array", "any", "leaf"] if depth else ["leaf"])
    if kind == "leaf":
        return draw.choice([
            {"type": "integer", "minimum": -draw.randrange(100), "maximum": draw.randrange(1, 5000)},
            {"type": "string", "maxLength": draw.randrange(1, 8)}, {"type": "boolean"}, {"type": "null"},
            {"type": "string", "pattern": draw.choice(_PATTERNS[:5])}, {"enum": draw.sample(_WORDS, 3)},
            {"type": "number", "minimum": 0, "maximum": draw.randrange(1, 50)}, {"const": draw.choice(_WORDS)},
        ])  # fmt: skip
    if kind == "array":
        low = draw.randrange(3)
        return {
            "type": "array",
            "items": _random(draw, depth - 1),
            "minItems": low,
            "maxItems": low + draw.randrange(3),
        }
    if kind == "any":
        return {"anyOf": [_random(draw, depth - 1) for _ in range(draw.randrange(1, 4))]}
    names = draw.sample(_NAMES, draw.randrange(1, 5))
    return {
        "type": "object", "properties": {name: _random(draw, depth - 1) for name in names},
        "required": [name for name in names if draw.random() < 0.6], "additionalProperties": False,
    }  # fmt: skip
