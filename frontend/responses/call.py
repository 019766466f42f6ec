"""One response on its way: what a model says as items, told in typed events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...client.results import RequestError, StreamEvent
from ..calls import Call, Choice
from ..extras import ChatLogprobs
from ..sse import to_json
from ..tool_choice import ChoiceReader, Reading
from ..tools import Content, Delta
from .items import Items, Logprobs
from .store import RUNNING, Journal


class Silent:
    """A sink that keeps nothing: the events are in a journal, or nobody wants them."""

    opened = True
    behind = False

    def write(self, data: bytes) -> None: ...

    async def open(self) -> None: ...

    async def catch_up(self) -> None: ...


class ResponseCall(Call):
    """A call that is told in items. ``response`` is the whole answer, as far as it has got; ``keep`` is called once
    when it has ended. With a ``journal`` the events go there; ``quiet``: nobody reads them."""

    def __init__(self, reading: Reading | None, custom: set[str], response: dict[str, Any], *args: Any):
        super().__init__(*args)
        self._reading = reading or Reading(None, None)
        self._reader: ChoiceReader | None = None
        self._items = Items(custom)
        self._number = 0
        self._render = self._events
        self._logprobs = ChatLogprobs(self._extras) if self._extras is not None else None
        self._waiting: Logprobs = []  # of tokens whose text is held back
        self.response = response
        self.response["output"] = self._items.items
        self.keep: Callable[[], None] = lambda: None
        self.journal: Journal | None = None
        self.quiet = False

    async def whole(self) -> dict[str, Any]:
        """The answer, when it has ended. Raises RequestError."""
        self.quiet = True
        choice = self._choices[0][0]

        def give(events: list[StreamEvent]) -> bool:
            for event in events:
                self._events(choice, event)
            return True

        self._continuous = False
        try:
            await self._streams[0].forward(give)
        except RequestError as error:
            raise self._body.own_words(error) from error
        finally:
            self.release()
        return self.response

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, once it is accepted."""
        accepted = self._streams[0].accepted
        return len(accepted.prompt_ids) if accepted else 0

    def begin(self) -> bytes:
        """The first event; of a response in the background also that it waits."""
        told = self._state("created")
        return told + self._state("queued") if self.response["status"] == "queued" else told

    def cancel(self) -> None:
        """End it now, with what it has so far. Nothing is done where it has ended."""
        if self.response["status"] in RUNNING:
            for event in self._end("cancelled"):
                self._told(event)
            self.abort()

    # -- what is said

    def _read(self, event: StreamEvent, last: bool) -> list[dict[str, Any]]:
        """The events of more text."""
        if self._reader is None:
            accepted = self._streams[0].accepted  # the prompt's end tells how its answer begins
            self._reader = self._reading.reader(accepted.prompt if accepted else None)
        if self._logprobs is not None and (found := self._logprobs.of(event.logprobs)) is not None:
            self._waiting += found["content"]
        deltas = self._reader.deltas(event.text, last, len(event.tokens))
        return [told for delta in deltas for told in self._items.take(delta, self._logprobs_of(delta))]

    def _logprobs_of(self, delta: Delta) -> Logprobs:
        """The logprobs of the tokens that a message's text came in; those of marks before it are not told."""
        if not isinstance(delta, Content) or not self._waiting:
            return []
        names = [each["token"] for each in self._waiting]
        start = max(0, "".join(names).rfind(delta.text))
        end, at = start + len(delta.text), 0
        found: Logprobs = []
        for n, name in enumerate(names):
            if at >= end:
                self._waiting = self._waiting[n:]  # of what is held back
                return found
            at += len(name)
            if at > start:
                found.append(self._waiting[n])
        self._waiting = []
        return found

    def _end(self, status: str, error: dict[str, Any] | None = None, by_length: bool = False) -> list[dict[str, Any]]:
        """The answer is whole, as far as it goes. The events of its last item. OpenAI has no reason for what is
        incomplete because a stop string was met within a call."""
        told = self._items.close("completed" if status == "completed" else "incomplete")
        stream = self._streams[0]
        prompt, output = self.prompt_tokens, len(stream.children[0].tokens)
        thought = self._reader.thought_tokens if self._reader is not None else 0
        self.response |= {
            "status": status, "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if by_length else None,
            "completed_at": int(time.time()) if status == "completed" else None,
            "usage": {
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": stream.cached_tokens},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": min(output, thought)},
                "total_tokens": prompt + output,
            },
        }  # fmt: skip
        self.keep()
        return told

    # -- events

    def _events(self, choice: Choice, event: StreamEvent) -> bytes:
        opening = b""
        if not choice.opened:
            choice.opened = True
            opening = self.begin() if not self._number else b""
            self.response["status"] = "in_progress"
            opening += self._state("in_progress")
        reason, _, _ = self._taken(choice, event)
        told = self._read(event, reason is not None)
        if reason is None:
            return opening + b"".join(map(self._told, told))
        cut = reason == "length" or (self._reader is not None and self._reader.broken)
        status = "incomplete" if cut else "completed"
        told += self._end(status, by_length=reason == "length")
        return opening + b"".join(map(self._told, told)) + self._state(status)

    def _state(self, state: str) -> bytes:
        return self._told({"type": f"response.{state}", "response": self.response})

    def _told(self, event: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        if self.quiet:
            return b""
        data = to_json({"type": event["type"], "sequence_number": number, **event})
        data = b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)
        if self.journal is None:
            return data
        self.journal.add(data)
        return b""

    def _ending(self, include_usage: bool) -> bytes:
        """Only what was cancelled ends without a last event of the model's; there is none of its own for that."""
        return self._state("incomplete") if self.response["status"] == "cancelled" else b""

    def _failure(self, error: RequestError) -> bytes:
        fault = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message[:600]}
        if self.response["status"] not in RUNNING:  # it was cancelled meanwhile
            return self._ending(False)
        return b"".join(map(self._told, self._end("failed", fault))) + self._state("failed")
