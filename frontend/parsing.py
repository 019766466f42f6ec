"""Bytes of a request to a struct, and the refusal of everything else by the name of its field.

A body is decoded once to plain objects, so that fields which are known but not honoured yet can be refused by name
and unknown ones be said to be unknown; then it is converted to a struct, which checks types strictly: no ``true`` for
an integer, and no ``"5"`` for a 5 unless `leniency.py` is told to take it. JSON has one kind of number: ``5.0`` is a 5.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from .bounds import check_size
from .errors import ApiError
from .leniency import STRICT, Bodies
from .shapes import Shape, shape_of

_PATH = re.compile(r"(?P<what>.*?) - at `\$(?P<path>.*)`$", re.S)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NAMES = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
          "object": "an object", "null": "null"}  # fmt: skip


class Request(msgspec.Struct):
    """The fields of a request. None means: not given. ``not_yet`` are fields that are refused by name, and the values
    (beside null) of each that ask for nothing. ``without_effect`` are fields that are known to change no answer here.
    ``inside`` are the shapes of objects in fields that are no structs.
    ``names_all``: it has all fields that its route knows; else the others are for another struct to look at.
    """

    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {}
    without_effect: ClassVar[tuple[str, ...]] = ()
    names_all: ClassVar[bool] = True
    inside: ClassVar[Mapping[str, Shape]] = {}

    def check(self) -> None:
        """Refuse combinations that mean nothing. Raises ApiError."""


def check_salt(salt: Any) -> None:
    """Raises ApiError, in vLLM's words."""
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ApiError(400, "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")


R = TypeVar("R", bound=Request)


def parse(body: bytes, kind: type[R], rules: Bodies = STRICT) -> R:
    """Bytes of a request to its struct, checked. Raises ApiError 400 naming the field."""
    body = body.removeprefix(codecs.BOM_UTF8)  # which some clients on Windows put before everything they write
    try:
        raw = msgspec.json.decode(body)
    except msgspec.ValidationError:
        raw = _decode_typed(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _half_character(body) or ApiError(400, f"the body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise _too_deep(rules.max_depth) from error
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, got {kind_of(raw)}.")
    check_size(raw, len(body), rules.context())
    if body.count(b"[") + body.count(b"{") > rules.max_depth and _is_deeper(raw, rules.max_depth):
        raise _too_deep(rules.max_depth)
    request = converted(raw, kind, rules)
    request.check()
    return request


def _half_character(body: bytes) -> ApiError | None:
    """The refusal of a body that is JSON but for half of a pair of surrogates, which the decoder tells in words of its
    own; None where that is not what is wrong."""
    if _SURROGATE.search(body) is None:
        return None
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return None
    fields = raw.items() if isinstance(raw, dict) else ()
    name = next((name for name, value in fields if not (_is_text(name) and _is_text(value))), None)
    if name is None:
        return None
    shown, param = (name, name) if _is_text(name) else (f"the name {name!a:.80}", None)
    return ApiError(
        400, f"{shown} holds a lone surrogate, half of a character's escape, which is no text; send the other half "
        "too, or leave it out.", param,
    )  # fmt: skip


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects lie more than ``depth`` deep in each other. Looked at level by level, without
    recursion."""
    level: list[Any] = [value]
    for _ in range(depth):  # JSON's own two types, told the quick way: a body may hold a million of them
        level = [one for each in level for one in (each.values() if type(each) is dict else each)
                 if type(one) is dict or type(one) is list]  # fmt: skip
        if not level:
            return False
    return True


def _too_deep(limit: int) -> ApiError:
    return ApiError(400, f"the body is nested over {limit} levels deep; nest it less, or raise --max-json-depth.")


def converted(raw: dict[str, Any], kind: type[R], rules: Bodies = STRICT) -> R:
    """An object to its struct; combinations are left to who knows the whole. Raises ApiError 400 naming the field."""
    _refuse_not_yet(raw, kind.not_yet)
    if kind.names_all and not raw.keys() <= (known := _known(kind)):
        rules.check_names(raw, known)
    if (shape := shape_of(kind)).inside:
        rules.check_within(raw, shape)
    return _convert(raw, kind, rules)


@functools.cache
def _known(kind: type[Request]) -> frozenset[str]:
    """The names of fields that a request of a kind may have."""
    return frozenset((*kind.__struct_encode_fields__, *kind.not_yet, *kind.without_effect))


def _convert(raw: dict[str, Any], kind: type[R], rules: Bodies) -> R:
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError:
        floats = {name: value for name, value in raw.items() if type(value) is float and value.is_integer()}
    try:
        whole = {**raw, **{name: int(value) for name, value in floats.items()}}
        return msgspec.convert(rules.loosened(whole, kind), kind, strict=True)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error


def _decode_typed(body: bytes, kind: type[Any]) -> Any:
    """A number too large to decode: decoding into the struct tells in which field it is."""
    try:
        msgspec.json.decode(body, type=kind)
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    for name, value in raw.items():
        try:
            msgspec.json.decode(value)
        except msgspec.ValidationError as error:
            raise ApiError(400, f"{name} holds a number that is out of range.", name) from error
    raise ApiError(400, "the body holds a number that is out of range.")


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """msgspec's words as ours: which field, what was expected, what came."""
    match = _PATH.fullmatch(str(error))
    if match is None:
        return ApiError(400, f"the body is not valid: {error}.")
    path = match["path"].removeprefix(".")
    param = re.split(r"[.\[]", path, maxsplit=1)[0] or None
    what = match["what"]
    if types := re.fullmatch(r"Expected `(.*)`, got `(.*)`", what):
        kinds = [kind for kind in types[1].split(" | ") if kind != "null"]
        if "int" in kinds:  # where true is taken for 1, it is not what to recommend
            kinds = [kind for kind in kinds if kind != "bool"]
        wanted = [_NAMES.get(kind, kind) for kind in kinds]
        what = f"must be {' or '.join(wanted)}, got {_NAMES.get(types[2], types[2])}"
    else:
        what = f"is not valid: {what[:1].lower()}{what[1:]}"
    if path.startswith("["):
        return ApiError(400, f"a value of the body {what}.")
    return ApiError(400, f"{path} {what}.", param)


def _refuse_not_yet(raw: dict[str, Any], not_yet: dict[str, tuple[Any, ...]]) -> None:
    for name in raw.keys() & not_yet.keys():
        value = raw[name]
        if value is not None and not any(_same(value, neutral) for neutral in not_yet[name]):
            shown = repr(value)
            shown = shown if len(shown) <= 80 else shown[:80] + "..."
            raise ApiError(400, f"{name}={shown} is not supported yet by this version; leave it out.", name)


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells false from 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    names = {type(None): "null", bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
