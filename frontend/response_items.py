"""The items of a response of OpenAI's Responses API, and the typed events that tell of them while they are made."""

from __future__ import annotations

import uuid
from typing import Any

from .tools import Arguments, Begin, Content, Delta


class Items:
    """What a model's answer comes to: a reasoning, a message and calls of functions, in the order in which they come.

    Events have neither their number nor their response yet; ``Told`` (``responses.py``) adds those.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = ""  # the type of the item that is being told
        self._text = ""

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of one delta."""
        if isinstance(delta, Begin):
            events = [*self.close(), *self._begin_call(delta.name)]
        elif isinstance(delta, Arguments):
            events = [self._event("response.function_call_arguments.delta", delta=delta.text)]
        else:
            kind = "message" if isinstance(delta, Content) else "reasoning"
            events = [] if kind == self._open else [*self.close(), *self._begin_text(kind)]
            events.append(self._piece(delta.text))
        self._text += "" if isinstance(delta, Begin) else delta.text
        return events

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """The events of the end of the item that is being told; none where there is none."""
        kind, self._open, text, self._text = self._open, "", self._text, ""
        if not kind:
            return []
        item = self.items[-1]
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            part = item["content"][0]
            part["text"] = text
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events = [
                self._event(f"response.{part['type']}.done", content_index=0, text=text, **more),
                self._event("response.content_part.done", content_index=0, part=dict(part)),
            ]
        return [*events, {"type": "response.output_item.done", "output_index": self._place, "item": item}]

    @property
    def _place(self) -> int:
        return len(self.items) - 1

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        return {"type": type, "item_id": self.items[-1]["id"], "output_index": self._place, **fields}

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        self._open = item["type"]
        self.items.append(item)
        return {"type": "response.output_item.added", "output_index": self._place, "item": dict(item)}

    def _begin_call(self, name: str) -> list[dict[str, Any]]:
        ids = {"id": new_id("fc"), "call_id": new_id("call")}
        return [self._added({"type": "function_call", **ids, "name": name, "arguments": "", "status": "in_progress"})]

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

    def _piece(self, text: str) -> dict[str, Any]:
        if self._open == "message":
            return self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[])
        return self._event("response.reasoning_text.delta", content_index=0, delta=text)


def new_id(kind: str) -> str:
    """An id as OpenAI writes them."""
    return f"{kind}_{uuid.uuid4().hex[:24]}"


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was answered, as messages of a chat, for the turns after it."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for item in items:
        if item["type"] == "message":
            message["content"] = (message["content"] or "") + item["content"][0]["text"]
        elif item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return [message] if message["content"] is not None or "tool_calls" in message else []
