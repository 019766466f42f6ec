"""The items of a response, and the typed events that tell of them while they are made."""

from __future__ import annotations

import uuid
from collections.abc import Container
from typing import Any

from ...proto.call_arguments import object_of
from ..tools import Arguments, Begin, Content, Delta

Logprobs = list[dict[str, Any]]


class Items:
    """What a model's answer comes to: a reasoning, a message and calls of functions, in the order in which they come.

    ``custom`` are the names of tools whose input is one text. Events have neither their number nor their response yet;
    who sends them adds those.
    """

    def __init__(self, custom: Container[str] = ()) -> None:
        self.items: list[dict[str, Any]] = []
        self._custom = custom
        self._open = ""  # the type of the item that is being told
        self._text = ""
        self._logprobs: Logprobs = []

    def take(self, delta: Delta, logprobs: Logprobs | None = None) -> list[dict[str, Any]]:
        """The events of one delta; ``logprobs`` are those of a message's tokens."""
        if isinstance(delta, Begin):
            return [*self.close(), *self._begin_call(delta)]
        self._text += delta.text
        if isinstance(delta, Arguments):
            if self._open == "custom_tool_call":  # its text is within the JSON, and told when all of it is there
                return []
            return [self._event("response.function_call_arguments.delta", delta=delta.text)]
        kind = "message" if isinstance(delta, Content) else "reasoning"
        events = []
        if kind != self._open:
            self._text = self._text[: -len(delta.text)]
            events = [*self.close(), *self._begin_text(kind)]
            self._text = delta.text
        return [*events, self._piece(delta.text, logprobs or [])]

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """The events of the end of the item that is being told; none where there is none."""
        kind, self._open, text, self._text = self._open, "", self._text, ""
        if not kind:
            return []
        item = self.items[-1]
        broken = kind.endswith("_call") and not (text and object_of(text) is not None)
        item["status"] = "incomplete" if broken else status
        if kind == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", name=item["name"], arguments=text)]
        elif kind == "custom_tool_call":
            item["input"] = input_of(text)
            events = [
                self._event("response.custom_tool_call_input.delta", delta=item["input"]),
                self._event("response.custom_tool_call_input.done", input=item["input"]),
            ]
        else:
            events = self._close_text(item["content"][0], text)
        return [*events, {"type": "response.output_item.done", "output_index": self._place, "item": item}]

    def _close_text(self, part: dict[str, Any], text: str) -> list[dict[str, Any]]:
        part["text"] = text
        more: dict[str, Any] = {}
        if part["type"] == "output_text":
            part["logprobs"], self._logprobs = self._logprobs, []
            more = {"logprobs": part["logprobs"]}
        return [
            self._event(f"response.{part['type']}.done", content_index=0, text=text, **more),
            self._event("response.content_part.done", content_index=0, part=dict(part)),
        ]

    @property
    def _place(self) -> int:
        return len(self.items) - 1

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        return {"type": type, "item_id": self.items[-1]["id"], "output_index": self._place, **fields}

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        self._open = item["type"]
        self.items.append(item)
        return {"type": "response.output_item.added", "output_index": self._place, "item": dict(item)}

    def _begin_call(self, call: Begin) -> list[dict[str, Any]]:
        ids = {"id": new_id("fc"), "call_id": call.id or new_id("call")}
        kind, empty = ("custom_tool_call", "input") if call.name in self._custom else ("function_call", "arguments")
        return [self._added({"type": kind, **ids, "name": call.name, empty: "", "status": "in_progress"})]

    def _begin_text(self, kind: str) -> list[dict[str, Any]]:
        empty: dict[str, Any] = {"type": kind, "id": new_id("msg" if kind == "message" else "rs")}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            empty["role"] = "assistant"
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            empty["summary"] = []
        added = self._added({**empty, "content": [], "status": "in_progress"})
        self.items[-1]["content"] = [part]
        return [added, self._event("response.content_part.added", content_index=0, part=dict(part))]

    def _piece(self, text: str, logprobs: Logprobs) -> dict[str, Any]:
        if self._open == "message":
            self._logprobs += logprobs
            return self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        return self._event("response.reasoning_text.delta", content_index=0, delta=text)


def new_id(kind: str) -> str:
    """An id as OpenAI writes them."""
    return f"{kind}_{uuid.uuid4().hex[:24]}"


def input_of(arguments: str) -> str:
    """The text that a custom tool is called with; what was cut off is told as it stands."""
    given = (object_of(arguments) or {}).get("input")
    return given if isinstance(given, str) else arguments
