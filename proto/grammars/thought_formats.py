"""A form of structured output that comes after a thought, as a format of `structural_tags`."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec

from ..structured import RULES, StructuredOutputsParams
from ..thinking import MARKS

THOUGHTS = {name: marks for name, marks in MARKS.items() if marks.pair}
"""Marks of thoughts that a grammar can let go before what is demanded, by parsers."""


def format_of(form: StructuredOutputsParams) -> dict[str, Any] | None:
    """A form of structured outputs as a format; None for a grammar, which cannot be part of another."""
    if form.json is not None:
        schema = form.json
        with suppress(msgspec.DecodeError):  # what is no JSON is refused by who reads it
            schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
        return {"type": "json_schema", "json_schema": schema}
    if form.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if form.regex is not None:
        return {"type": "regex", "pattern": form.regex}
    if form.choice is not None:
        return {"type": "or", "elements": [const(each) for each in form.choice]}
    return None


def after_thought(format: dict[str, Any], reasoning: str) -> dict[str, Any]:
    """The format of a thought, as the parser ``reasoning`` reads it, and then ``format``."""
    return {"type": "after_thought", "thought": _thought(reasoning), "content": format}


def headed(format: dict[str, Any], reasoning: str) -> dict[str, Any]:
    """The format of an answer that is no call, with what its family writes before one."""
    header = THOUGHTS[reasoning].header
    return {"type": "sequence", "elements": [const(header), format]} if header else format


def free_after_thought(format: dict[str, Any], reasoning: str) -> dict[str, Any]:
    """The format ``format``, which must be ``free``'s, with a thought before it in which nothing begins a call. It may
    be left out, and the text may end within it."""
    return {**format, "thought": _thought(reasoning)}


def _thought(reasoning: str) -> dict[str, Any]:
    marks = THOUGHTS[reasoning]
    thought: dict[str, Any] = {"begin": marks.starts[0], "end": marks.ends[0]}
    return thought | ({"always": True} if marks.always else {}) | ({"then": marks.then} if marks.then else {})


def structural(format: dict[str, Any]) -> str:
    """The structural tag of a format. Marks that are special tokens of the model may be written as such."""
    return json.dumps({"type": "structural_tag", "special_tokens": True, "format": format}, ensure_ascii=False)


def waiting(form: StructuredOutputsParams, reasoning: str) -> StructuredOutputsParams | None:
    """``form`` after a thought; None where a grammar cannot let the thought go, or is one that holds no other."""
    format = format_of(form) if reasoning in THOUGHTS else None
    if format is None:
        return None
    rules = {name: getattr(form, name) for name in RULES}
    return StructuredOutputsParams(
        structural_tag=structural(after_thought(headed(format, reasoning), reasoning)), **rules
    )


def const(value: str) -> dict[str, Any]:
    """The format of just this text."""
    return {"type": "const_string", "value": value}
