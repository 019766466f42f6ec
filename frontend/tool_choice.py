"""What a chat asks of tools and of thoughts: the checks, how its answer is demanded, and how it is read."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ..proto.call_arguments import object_of
from ..proto.grammars.thought_formats import (
    THOUGHTS,
    after_thought,
    free_after_thought,
    headed,
    structural,
    waiting,
)
from ..proto.params import SamplingParams
from ..proto.structured import StructuredOutputsParams
from ..proto.thinking import MARKS
from .errors import ApiError
from .parsing import kind_of
from .tools import Arguments, Begin, Content, Delta, Reader, Reasoning
from .tools.forms import FORMS, PLAIN, demanded, free

MAX_TOOLS = 1024
MAX_NAME = 256
JSON_LIST = "json_list"
"""The parser of calls that are demanded as a list, for models whose own form cannot be."""

_PLAIN_NAME = re.compile(r"[\w.-]+")
_ALLOWED = (
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": '
    '{"name": "my_function"}}]}}'
)
_USAGE = '{"type": "function", "function": {"name": "my_function"}}'


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. ``strict``: its schema must be honoured exactly."""

    name: str
    schema: dict[str, Any] | bool
    strict: bool


@dataclass(frozen=True)
class Reading:
    """How the answers of one chat are read. ``parser`` and ``reasoning`` are names of parsers, or None."""

    parser: str | None
    reasoning: str | None
    tools: dict[str, Tool] = field(default_factory=dict)
    one: bool = False  # a single call is wanted
    thoughts: bool = True  # they are wanted
    form: StructuredOutputsParams | None = None  # the answer's, in place of the request's own
    demanded: bool = False  # the answer is nothing but calls and thoughts
    said: str = ""  # the end of the prompt, where it is echoed and the answer goes on with it

    def bind(self, params: SamplingParams) -> None:
        """Have ``params`` draw an answer that can be read: the marks of many families are special tokens."""
        params.skip_special_tokens = False
        if self.form is not None:
            params.structured_outputs = self.form

    def after(self, said: str) -> Reading:
        """The same for an answer that goes on with what the assistant has ``said``: with text that has no marks of a
        thought its thought is over, also where answers always begin with one."""
        marks = MARKS[self.reasoning] if self.reasoning is not None else None
        if marks is None or not marks.always or any(mark in said for mark in (*marks.starts, *marks.ends)):
            return self
        return replace(self, reasoning=None)

    def reader(self, prompt: str | None) -> ChoiceReader:
        """What reads one choice; ``prompt`` is the rendered one."""
        return ChoiceReader(self, prompt)


def tools_of(given: list[Any] | None) -> dict[str, Tool]:
    """The tools by name. Raises ApiError."""
    if given is None:
        return {}
    if not given or len(given) > MAX_TOOLS:
        raise ApiError(
            400, f"tools must hold 1 to {MAX_TOOLS} tools, got {len(given)}; leave it out for none.", "tools"
        )
    found = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(given)]
    return {tool.name: tool for tool in found}


def _tool(given: Any, where: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or given.get("type", "function") != "function":
        raise ApiError(400, f"{where} must be an object with type 'function' and a function.", "tools")
    name, schema, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME or not name.isprintable():
        raise ApiError(
            400, f"{where}.function.name must be a string of 1 to {MAX_NAME} printable characters, got {name!r:.80}.",
            "tools",
        )  # fmt: skip
    if not isinstance(schema, dict | bool | None):
        raise ApiError(400, f"{where}.function.parameters must be a JSON schema, got {kind_of(schema)}.", "tools")
    if not isinstance(strict, bool | None):
        raise ApiError(400, f"{where}.function.strict must be true or false, got {kind_of(strict)}.", "tools")
    return Tool(name, {"type": "object"} if schema is None else schema, bool(strict))


def shown(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as its model is told of it: ``strict`` is for us."""
    return {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}


def allowed_of(tools: list[Any] | None, choice: Any) -> tuple[list[Any] | None, Any]:
    """Tools and tool_choice, with OpenAI's ``allowed_tools`` as the tools that it leaves and its mode.
    Raises ApiError."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    told = choice.get("allowed_tools")
    if not isinstance(told, dict) or not isinstance(told.get("tools"), list):
        raise ApiError(400, f"tool_choice.allowed_tools must be an object with mode and tools; as in {_ALLOWED}.",
                       "tool_choice")  # fmt: skip
    if (mode := told.get("mode", "auto")) not in ("auto", "required"):
        raise ApiError(
            400, f"tool_choice.allowed_tools.mode must be auto or required, got {mode!r:.80}.", "tool_choice"
        )
    names = {_name_of(each) for each in told["tools"]}
    left = [tool for tool in tools or () if _name_of(tool) in names]
    if not left or len({_name_of(tool) for tool in left}) < len(names):
        raise ApiError(
            400, "tool_choice.allowed_tools.tools must name some of the tools, and no others.", "tool_choice"
        )
    return left, mode


def _name_of(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def choice_of(given: Any, tools: dict[str, Tool]) -> str | Tool:
    """``none``, ``auto``, ``required``, or the tool that must be called. Raises ApiError."""
    if given is None:
        return "auto" if tools else "none"
    if given == "none":
        return "none"
    if given not in ("auto", "required") and not isinstance(given, dict):
        said = f'Invalid value for `tool_choice`: {given!r:.80}! Only named tools, "none", "auto" or "required" are'
        raise ApiError(400, said + " supported.", "tool_choice")
    if not tools:
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(given, str):
        return given
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, f"tool_choice must name a function, as in {_USAGE}.", "tool_choice")
    if name not in tools:
        raise ApiError(
            400, f"The tool specified in `tool_choice` ({name!r:.80}) does not match any of the specified `tools`.",
            "tool_choice",
        )  # fmt: skip
    return tools[name]


def reading_of(
    tools: dict[str, Tool], choice: str | Tool, one: bool, thoughts: bool, own: StructuredOutputsParams | None,
    parser: str | None, reasoning: str | None, thinks: bool = True,
) -> Reading | None:  # fmt: skip
    """How a chat's answer is read; None: as text, as it comes.

    ``parser`` and ``reasoning`` are the server's, None where it has none. ``own`` is a form that the request wants: it
    binds the whole answer, but for a thought before it where a grammar can let one go. ``thinks`` is false where the
    model is told not to: then no demanded form has a thought before it. Raises ApiError.
    """
    if isinstance(choice, Tool) or choice == "required":
        if isinstance(choice, Tool):
            tools, one = {choice.name: choice}, True
        known = FORMS.get(parser or "")
        if known is not None and known.plain and not all(_PLAIN_NAME.fullmatch(name) for name in tools):
            known = None
        format = demanded(known or PLAIN, _schemas(tools), one)
        parser = parser if known else JSON_LIST
        reasoning = reasoning if reasoning in THOUGHTS and thinks else None
        if reasoning is not None and known is None:
            format = headed(format, reasoning)
        return Reading(parser, reasoning, tools, one, thoughts, _form(_thinking(format, reasoning)), True)
    if choice == "auto" and parser is None:
        raise ApiError(
            400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set, because '
            'the chat template shows no form of calls that is known; or use tool_choice "required".', "tool_choice",
        )  # fmt: skip
    form = None
    if own is not None and reasoning is not None:
        with _refused():
            form = waiting(own, reasoning) if thinks else None
        reasoning = reasoning if form is not None else None
    if choice == "none":
        return None if reasoning is None else Reading(None, reasoning, thoughts=thoughts, form=form)
    shape = FORMS.get(parser or "")
    if own is None and shape is not None and shape.trigger is not None:
        found = free(shape, _schemas(tools), one)
        form = _form(free_after_thought(found, reasoning) if reasoning in THOUGHTS else found)
    return Reading(parser, reasoning, tools, one, thoughts, form)


def _thinking(format: dict[str, Any], reasoning: str | None) -> dict[str, Any]:
    return format if reasoning is None else after_thought(format, reasoning)


def _form(format: dict[str, Any]) -> StructuredOutputsParams:
    """A form of ``format``."""
    with _refused():
        return StructuredOutputsParams(structural_tag=structural(format))


@contextmanager
def _refused() -> Iterator[None]:
    """Raises ApiError where a form cannot be made."""
    try:
        yield
    except RecursionError:
        raise ApiError(400, "tools hold a schema that is nested too deeply.", "tools") from None
    except ValueError as error:
        said = str(error).replace("structured_outputs has", "the schemas of tools have")
        raise ApiError(400, said, "tools") from error


def _schemas(tools: dict[str, Tool]) -> dict[str, tuple[Any, bool]]:
    return {name: (tool.schema, tool.strict) for name, tool in tools.items()}


def call_id() -> str:
    """A call's name, unlike any other's."""
    return "call_" + uuid.uuid4().hex[:24]


class ChoiceReader:
    """The text of one choice to what a chat answers: deltas as they come, or one message."""

    def __init__(self, reading: Reading, prompt: str | None):
        schemas = {name: tool.schema for name, tool in reading.tools.items() if isinstance(tool.schema, dict)}
        self._said = reading.said
        if self._said and prompt is not None:  # what comes before says whether a thought is open
            prompt = prompt.rstrip().removesuffix(self._said.strip())
        self._reader = Reader(reading.parser, reading.reasoning, schemas, prompt)
        self._reading = reading
        self._short = reading.parser == "mistral"  # whose templates want ids of nine characters
        self.calls = 0
        self.thought_tokens = 0  # of the tokens whose text was read, about how many were of thoughts
        self._untold = 0  # tokens whose text is held back
        self.broken = False  # a call that was told is not whole: it was cut off, or its arguments are no object
        self._open: list[str] | None = None  # the arguments of the call that is being told
        self._told = -1  # the index of the call that was told last

    def deltas(self, text: str, last: bool, tokens: int = 0) -> list[Delta]:
        """What is new and wanted, in order, of a text of so many tokens. ``last``: the text ends here."""
        found = self._reader.feed(self._said + text)
        self._said = ""
        if last:
            found += self._reader.end()
        self._untold += tokens
        if found:
            self._count_thoughts(found)
        out: list[Delta] = []
        for delta in found:
            if isinstance(delta, Begin):
                self.calls += 1
            if isinstance(delta, Begin | Arguments):
                wanted = self.calls == 1 or not self._reading.one
            elif isinstance(delta, Content):  # beside calls that are demanded, it is the begin of one that was cut off
                wanted = not self._reading.demanded
            else:
                wanted = self._reading.thoughts
            if wanted:
                out.append(delta)
                self._note(delta)
        if last:
            self._settle()
        return out

    def _count_thoughts(self, deltas: list[Delta]) -> None:
        """Share out the tokens of ``deltas`` by their characters: one token is nearly always of one delta."""
        thought = sum(len(delta.text) for delta in deltas if isinstance(delta, Reasoning))
        every = sum(len(delta.name if isinstance(delta, Begin) else delta.text) for delta in deltas)
        self.thought_tokens += round(self._untold * thought / every) if every else 0
        self._untold = 0

    def _note(self, delta: Delta) -> None:
        """Keep what the open call has for arguments, until it is settled."""
        if isinstance(delta, Begin):
            self._settle()
            self._open = []
        elif isinstance(delta, Arguments) and self._open is not None:
            self._open.append(delta.text)

    def _settle(self) -> None:
        """The open call has ended: is it whole?"""
        if self._open is None:
            return
        arguments, self._open = "".join(self._open), None
        self.broken = self.broken or not arguments or object_of(arguments) is None

    def delta(self, text: str, last: bool, tokens: int = 0) -> dict[str, Any]:
        """The same as one delta of OpenAI's; empty where nothing is certain yet."""
        found: dict[str, Any] = {}
        for delta in self.deltas(text, last, tokens):
            if isinstance(delta, Begin):
                called = {"name": delta.name, "arguments": ""}
                place = self._told = self._told + 1
                call = {"index": place, "id": delta.id or self._id(), "type": "function", "function": called}
                found.setdefault("tool_calls", []).append(call)
            elif isinstance(delta, Arguments):
                pieces = found.setdefault("tool_calls", [])
                if not pieces:
                    pieces.append({"index": self._told, "function": {"arguments": ""}})
                pieces[-1]["function"]["arguments"] += delta.text
            else:
                for name in ("content",) if isinstance(delta, Content) else ("reasoning", "reasoning_content"):
                    found[name] = found.get(name, "") + delta.text
        return found

    def _id(self) -> str:
        return call_id()[5:14] if self._short else call_id()

    def message(self, text: str, tokens: int = 0) -> dict[str, Any]:
        """The fields of the whole answer's message, a text of so many tokens."""
        found = self.delta(text, last=True, tokens=tokens)
        for call in found.get("tool_calls", ()):
            del call["index"]
        message: dict[str, Any] = {"content": found.get("content") or (None if self.calls else "")}
        return {**message, **{name: value for name, value in found.items() if name != "content"}}

    def reason(self, reason: str) -> str:
        """finish_reason, where the engine's is ``reason``: calls are told as complete only where all of them are."""
        return "tool_calls" if self.calls and not self.broken and reason == "stop" else reason
