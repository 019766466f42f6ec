"""Which fields the objects within a body may have. What a struct says of itself is read from it; what is an object or
a list of any kind is told here or beside its struct, in ``inside``. A field that has no shape holds what it likes."""

from __future__ import annotations

import functools
import heapq
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from .bounds import check_fields

MOST_OBJECTS = 20_000
"""Objects of a body that are looked at. A body that holds more is too long for any model's context."""
MOST_UNKNOWN = 5
"""Unknown names of a body that are told."""


class Shape(NamedTuple):
    """The names that an object may have, and the shapes of what is in its fields: of an object, or each of a list."""

    known: frozenset[str]
    inside: Mapping[str, Shape]


class Unknown(NamedTuple):
    """A name that an object does not have: where the object is, the name, and those that it might have been."""

    where: str
    name: str
    known: frozenset[str]


def shape(names: str, **inside: Shape) -> Shape:
    """An object of ``names`` and of the fields whose shapes are given."""
    return Shape(frozenset((*names.split(), *inside)), inside)


@functools.cache
def shape_of(kind: Any) -> Shape:
    """That of a struct, by its fields' types, its ``inside``, and its ``without_effect``."""
    inside: dict[str, Shape] = {}
    for each in msgspec.structs.fields(kind):
        union = isinstance(each.type, types.UnionType) or typing.get_origin(each.type) is typing.Union
        for one in typing.get_args(each.type) if union else (each.type,):
            if isinstance(one, type) and issubclass(one, msgspec.Struct):
                inside[each.encode_name] = shape_of(one)
    for base in reversed(kind.__mro__):
        inside |= vars(base).get("inside", {})
    return Shape(frozenset((*kind.__struct_encode_fields__, *getattr(kind, "without_effect", ()))), inside)


def unknown_within(raw: dict[str, Any], whole: Shape) -> list[Unknown]:
    """The first names in objects below ``raw`` that are not known there. The work is bounded, whatever the body is:
    an object of too many names raises ApiError."""
    found: list[Unknown] = []
    left = MOST_OBJECTS
    levels = [_within("", raw, whole)]
    while levels and left > 0 and len(found) < MOST_UNKNOWN:
        if (each := next(levels[-1], None)) is None:
            levels.pop()
            continue
        where, value, expected = each
        left -= 1
        if type(value) is list:
            levels.append(_each(where, value, expected))
        elif type(value) is dict:
            check_fields(value, where)
            if not value.keys() <= expected.known:
                names = heapq.nsmallest(MOST_UNKNOWN, value.keys() - expected.known)
                found += [Unknown(where, name, expected.known) for name in names]
            if expected.inside:
                levels.append(_within(where + ".", value, expected))
    return found[:MOST_UNKNOWN]


def _each(where: str, value: list[Any], expected: Shape) -> Iterator[tuple[str, Any, Shape]]:
    return ((f"{where}[{n}]", one, expected) for n, one in enumerate(value))


def _within(before: str, value: dict[str, Any], expected: Shape) -> Iterator[tuple[str, Any, Shape]]:
    return ((before + name, value[name], inner) for name, inner in expected.inside.items() if name in value)


# ---------------------------------------------------------------- what dialects share

CALL = shape(
    "id type index cache_control extra_content", custom=shape("name input"),
    function=shape("name arguments parsed_arguments index description"),
)  # fmt: skip
PART = shape(
    "type text refusal annotations logprobs image_url input_audio audio_url video_url file image id cache_control "
    "thinking reasoning detail file_id file_url file_data filename parsed index uuid prompt_cache_breakpoint"
)
MESSAGE = shape(
    "role name tool_call_id function_call refusal audio annotations reasoning reasoning_content reasoning_details "
    "thinking prefix partial tools tool_plan tool_name tool_responses images documents id type status phase "
    "cache_control provider_specific_fields extra_content parsed thinking_blocks",
    content=PART, tool_calls=CALL,
)  # fmt: skip
"""A message of a chat; templates of some families look for more than OpenAI's fields."""
FUNCTION = shape("name description parameters strict response return")
TOOL = shape("type cache_control defer_loading", function=FUNCTION, custom=shape("name description format"))
_NAMED = shape("type name", function=shape("name"), custom=shape("name"))
CHOICE = shape("type name mode", **_NAMED.inside, tools=_NAMED, allowed_tools=shape("mode", tools=_NAMED))
FORMAT = shape("type schema format structures triggers name description strict",
               json_schema=shape("name description schema strict"))  # fmt: skip
STREAM = shape("include_usage continuous_usage_stats include_obfuscation")
