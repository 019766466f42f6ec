"""The form that a request wants its output to have, said in any of the ways there are."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from ..proto.structured import StructuredOutputsParams
from .errors import ApiError
from .parsing import kind_of

_GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}  # fmt: skip

FORMAT, OBJECT = "response_format", "structured_outputs"


class Formed(Protocol):
    """A request that may ask for a form."""

    response_format: Any
    structured_outputs: dict[str, Any] | None
    guided_json: Any
    guided_regex: Any
    guided_choice: Any
    guided_grammar: Any
    guided_json_object: bool | None
    guided_whitespace_pattern: str | None


def form_field(request: Formed) -> str | None:
    """The name of the request's field that asks for a form; None where none does. Raises ApiError for several."""
    asked = [name for name in _GUIDED if getattr(request, name) is not None]
    if request.guided_json_object is False:
        asked.remove("guided_json_object")
    if request.structured_outputs is not None:
        asked.append(OBJECT)
    if request.response_format is not None and _of_format(request.response_format) is not None:
        asked.append(FORMAT)
    if request.guided_whitespace_pattern and not asked:
        text = "guided_whitespace_pattern means nothing without a form such as guided_json."
        raise ApiError(400, text, "guided_whitespace_pattern")
    if len(asked) > 1:
        raise ApiError(
            400, f"give one of {', '.join(asked)}, not several: each says what form the output has.", asked[-1]
        )
    return asked[0] if asked else None


def form_of(request: Formed) -> StructuredOutputsParams | None:
    """The form asked for. Raises ApiError naming the field that asks for it."""
    name = form_field(request)
    if name is None:
        return None
    if name == FORMAT:
        fields = _of_format(request.response_format) or {}
    else:
        fields = dict(request.structured_outputs or {}) if name == OBJECT else {_GUIDED[name]: getattr(request, name)}
    for unknown in [key for key in fields if key not in StructuredOutputsParams.__struct_fields__]:
        if fields.pop(unknown):
            raise ApiError(400, f"{name} has the field {unknown[:80]!r}, which is not supported.", name)
    if request.guided_whitespace_pattern:
        fields["whitespace_pattern"] = request.guided_whitespace_pattern
    try:
        return StructuredOutputsParams(**fields)
    except ValueError as error:
        raise ApiError(400, str(error), OBJECT) from error


def _of_format(given: Any) -> dict[str, Any] | None:
    """OpenAI's response_format as fields of StructuredOutputsParams; None for plain text."""
    if not isinstance(given, dict):
        raise _bad(f" must be an object with a type, got {kind_of(given)}")
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            if (schema := given.get("schema")) is None or schema == {}:
                return {"json_object": True}
            if not isinstance(schema, dict | bool):
                raise _bad(f".schema must be a JSON schema, got {kind_of(schema)}")
            return {"json": schema}  # as llama.cpp and others have it
        case "json_schema":
            return {"json": _schema(given.get("json_schema"))}
        case "structural_tag":
            return {"structural_tag": msgspec.json.encode(given).decode()}
    raise _bad(f".type must be text, json_object, json_schema or structural_tag, got {given.get('type')!r:.80}")


def _schema(named: Any) -> dict[str, Any] | bool:
    if not isinstance(named, dict):
        raise _bad(f" of type json_schema must hold json_schema, an object with name and schema; got {kind_of(named)}")
    for key, kind, called in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(named.get(key), kind | None):
            raise _bad(f".json_schema.{key} must be {called}, got {kind_of(named[key])}")
    schema = named.get("schema")
    if not isinstance(schema, dict | bool):
        raise _bad(f".json_schema.schema must be a JSON schema, got {kind_of(schema)}")
    return schema


def _bad(what: str) -> ApiError:
    return ApiError(400, f"{FORMAT}{what}.", FORMAT)
