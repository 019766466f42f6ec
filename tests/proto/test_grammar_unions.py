"""``oneOf``: honoured where the branches exclude each other, by whatever says so, and refused where they may not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from quire.proto.grammars.grammar import GrammarError, grammar_of, start_matcher
from quire.proto.grammars.grammar_unions import exclusive
from quire.proto.structured import StructuredOutputsParams

BYTES = LLTokenizer("byte")
CAT = {"type": "object", "properties": {"m": {"type": "integer"}, "kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
DEFS = {"cat": CAT, "dog": DOG, "a/b": CAT, "pet": {"$ref": "#/$defs/dog"}, "loop": {"$ref": "#/$defs/loop"}}


def refs(*names: str) -> dict[str, Any]:
    return {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": DEFS}


def objects(*kinds: Any, **more: Any) -> dict[str, Any]:
    return {"oneOf": [{"type": "object", "properties": {"t": kind}, "required": ["t"], **more} for kind in kinds]}


def matcher(schema: dict[str, Any]) -> Any:
    return start_matcher(BYTES, grammar_of(StructuredOutputsParams(json=schema)))


def accepts(made: Any, value: Any) -> bool:
    text, own = json.dumps(value).encode(), made.deep_copy()
    return own.try_consume_tokens(list(text)) == len(text) and own.is_accepting()


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (refs("cat", "dog"), [{"m": 1, "kind": "cat"}, {"kind": "wolf"}], [{"kind": "bird"}, {"m": 1}]),
        (refs("cat", "pet"), [{"kind": "cat"}, {"kind": "dog"}], [{"kind": ""}]),
        (refs("a~1b", "dog"), [{"kind": "cat"}, {"kind": "dog"}], [{}]),
        (objects({"const": 1}, {"const": 2}), [{"t": 1}, {"t": 2}], [{"t": 3}]),
        (objects({"const": True}, {"const": 1}, {"type": "null"}), [{"t": True}, {"t": 1}, {"t": None}], [{"t": 2}]),
        (objects({"type": "string"}, {"type": "integer"}), [{"t": "x"}, {"t": 7}], [{"t": None}]),
        (objects(*[{"const": f"k{i}"} for i in range(60)]), [{"t": "k0"}, {"t": "k59"}], [{"t": "k60"}]),
        ({"properties": {"p": refs("cat", "dog")}, "$defs": DEFS}, [{"p": {"kind": "cat"}}], [{"p": {}}]),
        ({"oneOf": [{"const": 1}, {"enum": [2, "1"]}, {"type": ["null", "array"], "maxItems": 0}]}, [1, "1", []], [3]),
    ],
)  # fmt: skip
def test_branches_that_exclude_each_other(schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    made = matcher(schema)
    assert all(accepts(made, value) for value in valid)
    assert not any(accepts(made, value) for value in invalid)


@pytest.mark.parametrize(
    "schema",
    [
        refs("cat", "a~1b"), refs("cat", "loop"), refs("cat", "nowhere"), refs("cat", ""),
        objects({"const": 1}, {"const": 1.0}), objects({"type": "integer"}, {"type": "number"}),
        {"oneOf": [{"properties": {"t": {"const": 1}}}, {"properties": {"t": {"const": 2}}}]},
        {"oneOf": [{"type": "object", "properties": {"t": {"const": i}}} for i in (1, 2)]},
        {"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 3}]},
        {"oneOf": [True, {"const": 1}]}, {"oneOf": [{}, {"const": 1}]}, {"oneOf": 1},
    ],
)  # fmt: skip
def test_branches_that_may_meet_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        matcher(schema)


def test_a_reference_that_cannot_be_followed_tells_nothing() -> None:
    pair = refs("cat", "dog")
    assert exclusive(pair["oneOf"], pair) and not exclusive(pair["oneOf"], {})
    assert not exclusive([{"$ref": "other.json#/a"}, {"type": "null"}], pair)
    assert not exclusive([{"const": i} for i in range(300)], {})
