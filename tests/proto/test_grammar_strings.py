"""Strings of JSON schemas: patterns, formats and constants are honoured to the character, or refused."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest
from llguidance import LLTokenizer

from quire.proto.grammars.grammar import GrammarError, grammar_of, start_matcher
from quire.proto.grammars.grammar_strings import narrow_strings, writable
from quire.proto.structured import StructuredOutputsParams

BYTES = LLTokenizer("byte")
ASCII = [chr(code) for code in range(128)]
WRITTEN = [char for char in ASCII if (char >= " " and char != "\x7f") or char in "\b\t\n\f\r"]
"""What can stand in a string without an escape of the form \\uXXXX."""


def matcher(schema: Any) -> Any:
    return start_matcher(BYTES, grammar_of(StructuredOutputsParams(json=schema)))


def accepts(made: Any, value: Any) -> bool:
    text = value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()
    own = made.deep_copy()
    return own.try_consume_tokens(list(text)) == len(text) and own.is_accepting()


@pytest.mark.parametrize(
    "one",
    [
        '[^"]', "[^\\\\]", '[^"\\\\]', '[^"a-z]', '[^"\\n]', "[\\x00-\\x1f]", "[\\x00-!#-\\x7f]", "[^]a]",
        "[^[:alpha:]]", "\\P{P}", "\\W", "\\D", "\\S", ".", "[\\s\\S]", "[\\w-]", "[^\\W\\d]", "\\x41", "\\u0041",
        "\\x01", "\\v", '[!-#"]', "[\\]\\[^-]", "a|[^'\"]", "\x01|b", "(?i)[^A\"]", "(?:[^\"\\\\]|\\\\\")",
    ],
)  # fmt: skip
def test_a_pattern_takes_what_it_says_and_nothing_else(one: str) -> None:
    same = one.replace("[:alpha:]", "A-Za-z").replace("\\P{P}", "[^!-#%-*,-/:;?@[-\\]_{}]")
    try:
        made = matcher({"type": "string", "pattern": f"^(?:{one})$"})
    except GrammarError:
        assert not any(re.fullmatch(same, char, re.ASCII) for char in WRITTEN)
        return
    for char in WRITTEN:
        assert accepts(made, char) == bool(re.fullmatch(same, char, re.ASCII)), char
    assert not accepts(made, "")
    assert not accepts(made, '"a') and not accepts(made, "ab")


def test_a_lost_character_makes_no_shorter_string() -> None:
    for pattern in ("^a\\x01b$", "^a\x01b$", "^a\\u007fb$", "^a[\\x02]b$"):
        with pytest.raises(GrammarError):
            matcher({"type": "string", "pattern": pattern})
    made = matcher({"type": "string", "pattern": "^a(\\x01|c)b$"})
    assert accepts(made, "acb") and not accepts(made, "ab")


def test_names_follow_patterns_to_the_character_too() -> None:
    made = matcher(
        {"type": "object", "patternProperties": {'^[^"]$': {"type": "integer"}}, "additionalProperties": False}
    )
    assert accepts(made, {"a": 1}) and not accepts(made, {'"': 1})


def test_patterns_that_need_no_change_are_told_as_they_are() -> None:
    for pattern in ("^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "^(\\w+\\.)*[\\w.-]+$", "^[\\]\\[]$", "(", "[", "\\", ""):
        assert writable(pattern) == pattern
    schema = {"type": "string", "format": "uuid", "minLength": 3}
    out = dict(schema)
    narrow_strings(schema, out)
    assert out == schema


@pytest.mark.parametrize(
    "constant", ["a\0", "\x1f", {"a": ["\x7f"]}, ["x", {"b": "a\x01b"}]],
)  # fmt: skip
@pytest.mark.parametrize("key", ["const", "enum"])
def test_constants_that_cannot_be_written_are_refused(key: str, constant: Any) -> None:
    schema = {"properties": {"p": {key: constant if key == "const" else ["ok", constant]}}}
    with pytest.raises(GrammarError, match=f"{key} has the control character U\\+00"):
        matcher(schema)
    assert accepts(matcher({"const": {"a\x01": "\n"}}), b'{"a\\u0001":"\\n"}')


def test_dates_are_those_of_the_calendar() -> None:
    made = matcher({"type": "string", "format": "date"})
    for year in (0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, 2100, 9999):
        for day in ("01-01", "02-28", "02-29", "02-30", "04-31", "12-31", "13-01", "00-10", "06-00"):
            text = f"{year:04}-{day}"
            try:
                right = bool(datetime.date.fromisoformat(text))
            except ValueError:
                right = False
            assert accepts(made, text) == right, text


def test_times_and_formats_with_company() -> None:
    moment = matcher({"type": "string", "format": "date-time"})
    assert accepts(moment, "2024-02-29T23:59:59.123456Z") and accepts(moment, "2023-02-28t00:00:00-12:30")
    for text in ("2023-02-29T00:00:00Z", "2024-01-01T23:59:60Z", "2024-01-01T24:00:00Z", "2024-01-01T00:00:00"):
        assert not accepts(moment, text)
    assert not accepts(matcher({"type": "string", "format": "time"}), "23:59:60Z")
    both = matcher({"type": ["string", "null"], "format": "date", "pattern": "^202", "allOf": [{"pattern": "9$"}]})
    assert accepts(both, "2024-02-29") and accepts(both, None)
    assert not accepts(both, "2023-02-29") and not accepts(both, "1999-01-09") and not accepts(both, "2024-02-28")
    some = matcher({"format": "date", "enum": ["2023-02-29", "2024-02-29"]})
    assert accepts(some, "2024-02-29") and not accepts(some, "2023-02-29")
    assert accepts(matcher({"type": "integer", "format": "date"}), 5)


def test_durations() -> None:
    made = matcher({"type": "string", "format": "duration"})
    good = ("P1D", "PT5M", "P4DT12H30M5S", "P1Y2M3D", "P2W", "PT36H", "P1YT31536000S", "P0D", "PT0S")
    bad = (
        "P",
        "PT",
        "P1",
        "1D",
        "P1Y2W",
        "P1WT1H",
        "PT1D",
        "P2D1Y",
        "PT1S1M",
        "P1DT",
        "P0.5D",
        "P-1D",
        "PT1234567890S",
    )
    assert all(accepts(made, text) for text in good)
    assert not any(accepts(made, text) for text in bad)


@pytest.mark.parametrize("form", ["password", "binary", "path", "file-path", "directory-path"])
def test_formats_that_every_string_has(form: str) -> None:
    made = matcher({"type": "string", "format": form, "maxLength": 4})
    assert accepts(made, "a b") and not accepts(made, "abcde") and not accepts(made, 1)


@pytest.mark.parametrize(
    "nothing",
    [
        {"uniqueItems": False}, {"not": False}, {"dependentRequired": {}}, {"dependentSchemas": {}},
        {"dependencies": {}}, {"propertyNames": True}, {"unevaluatedProperties": {}},
        {"unevaluatedItems": True}, {"minProperties": 0},
    ],
)  # fmt: skip
def test_keywords_that_demand_nothing_are_no_hindrance(nothing: dict[str, Any]) -> None:
    made = matcher({"type": ["object", "array"], "properties": {"a": {"type": "integer"}}, **nothing})
    assert accepts(made, {"a": 1}) and accepts(made, {}) and accepts(made, [1, 1]) and not accepts(made, 1)
