"""What objects may have, and grammars that get stuck: no answer is told as complete that is not."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hostile_schemas import hostile

from quire.gpu_worker.sampling.grammar import Grammars
from quire.proto.checkpoint.model_config import demo_model_path, load_model_config
from quire.proto.config import EngineArgs
from quire.proto.grammars import grammar as proto_grammar
from quire.proto.grammars import grammar_objects
from quire.proto.grammars.grammar import GrammarError, grammar_of, start_matcher, token_table
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams
from quire.proto.work import Generate

COUNT = int(os.environ.get("QUIRE_SCHEMAS", "100"))
"""Random schemas that are tried; a long run is QUIRE_SCHEMAS=2000."""
ANSWERS, LONGEST = 8, 400
ENDS = {*load_model_config(str(demo_model_path())).eos_token_ids}
BOOLEAN = {"type": "boolean"}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_model_config(str(demo_model_path())), EngineArgs())


@pytest.fixture(scope="module")
def table() -> Any:
    model = load_model_config(str(demo_model_path()))
    return token_table(model.path, model)


def answer(grammars: Grammars, table: Any, form: StructuredOutputsParams, draw: random.Random) -> tuple[str, str]:
    """A text drawn at random from what may come, and how it ended: stop, length, or what was wrong."""
    params = SamplingParams(structured_outputs=form, max_tokens=LONGEST)
    grammars.admit(0, Generate(params, 0), 1, np.array([1], np.int32))
    ids: list[int] = []
    while len(ids) < LONGEST:
        mask, failed = grammars.fill([0])
        if failed:
            return table.decode_str(ids), failed[0][2]
        may = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
        closing = [each for each in may if table.decode_str([int(each)]).strip()[:1] in tuple('"}],:')]
        ends = ENDS & set(may.tolist())
        if ends and (len(ends) == len(may) or draw.random() < 0.7):
            return table.decode_str(ids), "stop"
        ids.append(int(draw.choice(closing if closing and draw.random() < 0.5 else sorted({*may.tolist()} - ends))))
        grammars.advance([0], ids[-1:])
    return table.decode_str(ids), "length"


def valid(text: str, schema: Any) -> bool:
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": BOOLEAN}, "required": ["a"], "patternProperties": {"^a$": BOOLEAN}},
        {"properties": {"a": BOOLEAN, "b": BOOLEAN}, "required": ["a"], "patternProperties": {"^(a|b)$": BOOLEAN}},
        {"properties": {"a": BOOLEAN}, "required": ["a"], "patternProperties": {"^[^\\s\\S]$": BOOLEAN}},
    ],
    ids=["the named one", "the named ones", "no name"],
)
def test_a_pattern_that_leaves_no_name_is_not_offered(grammars: Grammars, table: Any, schema: dict[str, Any]) -> None:
    whole = {"type": "object", "additionalProperties": False, **schema}
    draw = random.Random(1)
    for _ in range(16):
        text, end = answer(grammars, table, StructuredOutputsParams(json=whole), draw)
        assert end == "stop" and valid(text, whole), (text, end)


def test_a_string_that_cannot_be_is_no_item(grammars: Grammars, table: Any) -> None:
    schema = {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 1,
              "items": {"type": "string", "pattern": "^aaa$", "maxLength": 2}}  # fmt: skip
    draw = random.Random(2)
    for _ in range(8):
        text, end = answer(grammars, table, StructuredOutputsParams(json=schema), draw)
        assert end in ("stop", "length") and (end == "length" or valid(text, schema)), (text, end)


def test_a_grammar_that_is_stuck_fails_its_request(grammars: Grammars, table: Any) -> None:
    """Whatever gets stuck is no normal end: an output that only its grammar's author could tell from a whole one."""
    form = StructuredOutputsParams(grammar='start: "a" ("," B)?\nB: /b/ & /c/')
    ends = {answer(grammars, table, form, random.Random(seed))[1] for seed in range(12)}
    assert ends == {"stop", f"structured_outputs cannot be honoured: {proto_grammar.NO_TOKEN}"}


def closes(schema: Any, value: Any, **rules: bool) -> bool:
    """Whether ``value`` may be written."""
    matcher = start_matcher(_bytes(), grammar_of(StructuredOutputsParams(json=schema, **rules)))
    return matcher.consume_tokens(list(json.dumps(value).encode())) and matcher.is_accepting()


def _bytes() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
OPEN = {"a": 1, "z": 2}


@pytest.mark.parametrize(
    ("schema", "may", "may_not"),
    [
        (A, [{"a": 1}, {}], [OPEN]),
        ({"type": "array", "items": A}, [[{"a": 1}]], [[OPEN]]),
        ({"properties": {"o": A}}, [{"o": {"a": 1}}], [{"o": OPEN}]),
        ({**A, "additionalProperties": True}, [OPEN], []),
        ({**A, "additionalProperties": {"type": "integer"}}, [OPEN], [{"z": "x"}]),
        ({**A, "patternProperties": {"^z": {}}}, [OPEN], []),
        ({"type": "object"}, [OPEN], []),
        ({**A, "required": ["a", "z"]}, [OPEN], [{**OPEN, "y": 1}]),
        ({**A, "required": ["a"], "minProperties": 1}, [{"a": 1}], [OPEN]),
        ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [OPEN]),
        ({**A, "allOf": [B]}, [{"a": 1, "b": 2}], [OPEN]),
        ({**A, "allOf": [{"additionalProperties": True}]}, [OPEN], []),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, OPEN]),
        ({**A, "anyOf": [{"required": ["a"]}, B]}, [{"a": 1, "b": 1}], [OPEN]),
        ({"$defs": {"d": A}, "$ref": "#/$defs/d"}, [{"a": 1}], [OPEN]),
        ({"$defs": {"d": A}, "allOf": [{"$ref": "#/$defs/d"}, B]}, [{"a": 1, "b": 2}], [OPEN]),
        ({"$defs": {"d": A}, **B, "$ref": "#/$defs/d"}, [{"b": 2, "a": 1}], [OPEN]),
        ({"properties": {"a": {"$ref": "#"}}}, [{"a": {"a": {}}}], [{"a": {"z": {}}}]),
    ],
)
def test_objects_have_what_their_schema_names(schema: Any, may: list[Any], may_not: list[Any]) -> None:
    for value in may:
        assert closes(schema, value), value
        assert closes(schema, value, allow_additional_properties=True), value
    for value in may_not:
        assert not closes(schema, value), value
    if OPEN in may_not:
        assert closes(schema, OPEN, allow_additional_properties=True)


def of(**named: Any) -> dict[str, Any]:
    """An object whose named properties must all be there."""
    return {"type": "object", "properties": named, "required": list(named)}


INT = {"type": "integer"}
BOTH = {"x": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [of(x=of(a=INT)), of(x=of(b=INT))]}, BOTH),
        ({"$defs": {"d": of(x=of(a=INT))}, "$ref": "#/$defs/d", "properties": {"x": of(b=INT)}}, BOTH),
        ({**of(x=of(a=INT)), "anyOf": [of(x=of(b=INT)), of(x=of(c=INT))]}, BOTH),
        (
            {
                "$defs": {"a": of(a=INT), "b": of(b=INT)},
                "allOf": [of(x={"$ref": "#/$defs/a"}), of(x={"$ref": "#/$defs/b"})],
            },
            BOTH,
        ),
        ({"allOf": [{"items": of(a=INT)}, {"items": of(b=INT)}], "type": "array", "minItems": 1}, [BOTH["x"]]),
        ({**of(x=of(a=INT)), "patternProperties": {"^x": of(b=INT)}}, BOTH),
        ({"allOf": [{"$ref": "#/definitions/P%3CA%3E"}, of(b=INT)], "definitions": {"P<A>": of(a=INT)}}, BOTH["x"]),
        ({"$defs": {"d": {"$anchor": "base", **of(a=INT)}}, "allOf": [{"$ref": "#base"}, of(b=INT)]}, BOTH["x"]),
        ({"$defs": {"d": A}, "$ref": "#/$defs/d", "additionalProperties": True}, OPEN),
        ({"allOf": [A], "patternProperties": {"^z": INT}}, OPEN),
        ({"anyOf": [A, B], "additionalProperties": INT}, OPEN),
        ({"type": "object", "properties": {"a": INT}, "const": OPEN}, OPEN),
    ],
)
def test_what_is_said_in_several_places_is_not_closed(schema: Any, value: Any) -> None:
    """Each of these says of one value in two places what it has: closed alone, neither could be met."""
    assert closes(schema, value)


def test_definitions_of_openapi_are_closed() -> None:
    schema = {"components": {"schemas": {"P": of(a=INT, q={"$ref": "#/components/schemas/Q"}), "Q": of(b=INT)}},
              "$ref": "#/components/schemas/P"}  # fmt: skip
    given = json.loads(json.dumps(schema))
    assert closes(schema, {"a": 1, "q": {"b": 2}}) and schema == given
    assert not closes(schema, {"a": 1, "q": {"b": 2, "z": 3}}) and not closes(schema, {"a": 1, "q": {"b": 2}, "z": 3})


def test_an_id_is_one_only_as_a_keyword() -> None:
    schema = {"$id": "http://x.y/s", "description": "of '$id' and '$id'", **A}
    assert not closes(schema, OPEN)


def test_many_names_and_patterns_are_no_work() -> None:
    schema = {"type": "object", "properties": {f"p{n}": INT for n in range(300)},
              "patternProperties": {f"^q{n}_": INT for n in range(100)}, "additionalProperties": False}  # fmt: skip
    calls = without_empty_calls(schema)
    assert len(calls) == 100 and not any(names for _, names in calls)


def without_empty_calls(schema: Any) -> list[tuple[str, tuple[str, ...]]]:
    """What is compiled to see which patterns leave a name."""
    calls: list[tuple[str, tuple[str, ...]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_objects, "_leaves", lambda pattern, names: calls.append((pattern, names)) or True)
        grammar_objects.without_empty(schema)
    return calls


def test_random_schemas_are_met_or_refused(grammars: Grammars, table: Any) -> None:
    refused = lengths = 0
    for seed in range(COUNT):
        schema, draw = hostile(seed), random.Random(seed)
        form = StructuredOutputsParams(json=schema)
        try:
            start_matcher(table, grammar_of(form))
        except GrammarError:
            refused += 1
            continue
        for _ in range(ANSWERS):
            text, end = answer(grammars, table, form, draw)
            lengths += end == "length"
            assert end in ("stop", "length"), (seed, schema, text, end)
            assert end == "length" or valid(text, schema), (seed, schema, text)
    assert refused < 0.6 * COUNT and lengths < 2 * COUNT, "most should run to their end"
