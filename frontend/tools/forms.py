"""The forms in which calls are demanded of a model: structural tags, in the words that its family uses.

Where a family's own marks are special tokens, or its form is no JSON, calls are demanded as a JSON list, as vLLM does
for all: ``[{"name": ..., "parameters": {...}}]``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ...proto.grammars.thought_formats import const
from .json_calls import JsonReader
from .reader import Wait


@dataclass(frozen=True)
class Form:
    """How calls are written: ``begin`` (with %s for the name as JSON, or ``plain``), the arguments, ``end``;
    ``separator`` between them, ``open`` and ``close`` around all; ``alone``: an answer has one at most. ``trigger``
    begins a call in free text; None: only whole answers."""

    begin: str
    end: str
    separator: str
    open: str = ""
    close: str = ""
    trigger: str | None = None
    alone: bool = False
    plain: bool = False


_LIST = Form('{"name": %s, "arguments": ', "}", ", ", "[", "]")

FORMS = {
    "hermes": Form(
        '<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>", "\n", trigger="<tool_call>"
    ),
    "llama3_json": Form('{"name": %s, "parameters": ', "}", "; "),
    "llama4_json": Form('{"name": %s, "parameters": ', "}", "; "),
    "phi4_mini_json": Form('{"name": %s, "arguments": ', "}", ", ", "functools[", "]"),
    "xlam": _LIST,
    # The end of a call is a token that ends the answer.
    "openai": Form(
        "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", "", "", alone=True, plain=True
    ),
}  # fmt: skip
FORMS["granite4"] = FORMS["ernie45"] = FORMS["hermes"]

PLAIN = Form('{"name": %s, "parameters": ', "}", ", ", "[", "]")


class JsonList(JsonReader):
    """Reads ``PLAIN``: the whole answer is a list of calls."""

    def read(self) -> Wait:
        self.mark = 0
        yield from self.guarded(self.calls(bare=True))


def demanded(form: Form, tools: dict[str, tuple[Any, bool]], one: bool) -> dict[str, Any]:
    """The format of an answer that is nothing but calls, of ``one`` or of several. ``tools`` has a schema by
    name, and whether it must be honoured exactly."""
    some = {
        "type": "tags_with_separator", "tags": _tags(form, tools), "separator": form.separator, "at_least_one": True,
        "stop_after_first": one or form.alone,
    }  # fmt: skip
    if not form.open:
        return some
    return {"type": "sequence", "elements": [const(form.open), some, const(form.close)]}


def free(form: Form, tools: dict[str, tuple[Any, bool]], one: bool) -> dict[str, Any]:
    """The format of text in which a call, once begun, has its form; ``form`` must have a trigger."""
    return {"type": "triggered_tags", "triggers": [form.trigger], "tags": _tags(form, tools), "stop_after_first": one}


def _tags(form: Form, tools: dict[str, tuple[Any, bool]]) -> list[dict[str, Any]]:
    return [
        {
            "begin": form.begin % (name if form.plain else json.dumps(name, ensure_ascii=False)),
            "content": {"type": "json_schema", "json_schema": schema, "strict": strict},
            "end": form.end,
        }
        for name, (schema, strict) in tools.items()
    ]
