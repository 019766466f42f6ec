"""Pages of reference that are made from the code: the HTTP API, quire's flags, the messages between processes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.frontend.app import make_app
from quire.frontend.fake import FakeEngine
from quire.frontend.front import Settings
from quire.frontend.openapi.document import document
from quire.proto import messages
from quire.proto.config import GROUPS, EngineArgs, flags_of

MADE = "This page is made from the code, when the site is built.\n"


def pages() -> Iterator[tuple[str, str]]:
    """Each page's path below ``docs/``, and its text."""
    yield "reference/http.md", http()
    yield "reference/flags.md", flags()
    yield "reference/messages.md", all_messages()


def cell(text: Any) -> str:
    """A text as it may stand in a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: Any) -> str:
    """The same as code, in which nothing but a bar needs care."""
    return "`" + " ".join(str(text).split()).replace("|", "\\|") + "`"


def http() -> str:
    """Every route, the fields of its body and the shape of its answer, from the OpenAPI document."""
    made = document(make_app(FakeEngine(), Settings(names=["model"], admin_api_key="key", api_key="key")))
    lines = ["# HTTP, field by field", "", MADE, "A server tells the same at `/openapi.json`, for programs.", ""]
    lines += ["## Routes", ""]
    for path, methods in made["paths"].items():
        for method, told in methods.items():
            lines += [f"### {method.upper()} {path}", "", told["summary"], "", *_operation(told), ""]
    lines += ["## Shapes", ""]
    for name, schema in sorted(made["components"]["schemas"].items()):
        lines += [f"### {name}", "", cell(schema.get("description", "").split("\n\n")[0]), "", *_fields(schema), ""]
    return "\n".join(lines)


def _operation(told: dict[str, Any]) -> Iterator[str]:
    security = told.get("security")
    if security is not None:
        yield "* asks for the administrators' key" if security else "* asks for no key"
    for each in told.get("parameters", []):
        yield f"* {each['in']} `{each['name']}`: {kind(each['schema'])}"
    for type_, content in told.get("requestBody", {}).get("content", {}).items():
        yield f"* takes {kind(content['schema']) if '$ref' in content['schema'] else ''} `{type_}`"
    for status, answer in told["responses"].items():
        for type_, content in answer.get("content", {}).items():
            yield f"* {status}: {kind(content['schema']) if content else ''} `{type_}`"


def kind(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words, with links to the shapes that it names."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(code(value) for value in schema["enum"])
    if "const" in schema:
        return code(schema["const"])
    if schema.get("type") == "array":
        return "list of " + kind(schema["items"]) if schema.get("items") else "list"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return "object of " + kind(schema["additionalProperties"])
    return schema.get("type", "anything")


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    fields = schema.get("properties", {})
    if not fields:
        yield kind(schema)
        return
    yield "| field | type | default |"
    yield "|---|---|---|"
    for name, each in fields.items():
        default = (
            "required"
            if name in schema.get("required", ())
            else code(msgspec.json.encode(each.get("default")).decode())
        )
        yield f"| `{name}` | {kind(each)} | {default} |"


def flags() -> str:
    """Every flag of ``quire serve`` and the services, in the groups of ``--help``."""
    lines = ["# Flags of quire", "", MADE, "[What becomes of each flag of vLLM](../flags.md) is another page.", ""]
    for fld in dataclasses.fields(EngineArgs):
        if fld.name in GROUPS:
            lines += [f"## {GROUPS[fld.name]}", "", "| flag | default | what it does | read by |", "|---|---|---|---|"]
        names = ", ".join(f"`{name}`" for name in flags_of(fld))
        default = "" if fld.default in (None, "") else code(fld.default)
        services = ", ".join(fld.metadata["services"])
        lines.append(f"| {names} | {default} | {cell(fld.metadata['help'])} | {services} |")
        following = [each.name for each in dataclasses.fields(EngineArgs)]
        at = following.index(fld.name) + 1
        if at < len(following) and following[at] in GROUPS:
            lines.append("")
    return "\n".join(lines)


def all_messages() -> str:
    """Every message of every socket: its docstring, its fields, what each is."""
    lines = ["# Messages", "", MADE, cell((inspect.getdoc(messages) or "").split("\n\n")[1]), ""]
    for name in sorted(messages.__all__):
        told = getattr(messages, name)
        if not (inspect.isclass(told) and issubclass(told, msgspec.Struct)):
            continue
        lines += [
            f"## {name}",
            "",
            cell(inspect.getdoc(told) or ""),
            "",
            f"In `{told.__module__.removeprefix('quire.')}`.",
        ]
        lines += ["", "| field | type | default |", "|---|---|---|"]
        for field in msgspec.structs.fields(told):
            type_ = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", inspect.formatannotation(field.type))
            default = "" if field.default is msgspec.NODEFAULT else code(repr(field.default))
            lines.append(f"| `{field.name}` | {code(type_)} | {default} |")
        lines.append("")
    return "\n".join(lines)
