"""Families that write a call as a JSON object, each between marks of its own."""

from __future__ import annotations

from .json_calls import JsonReader
from .reader import Broken, Wait, drop


class Hermes(JsonReader):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, of Hermes 2 Pro, Qwen2.5, Qwen3 and many others."""

    def read(self) -> Wait:
        while True:
            yield from self.upto(("<tool_call>",), self.content, keep=True)
            yield from self.guarded(self._tagged(), "</tool_call>")

    def _tagged(self) -> Wait:
        yield from self.calls()
        yield from self.follows("</tool_call>")


class Marked(JsonReader):
    """Calls as objects or as lists of them, each or all behind ``OPEN``, and before ``CLOSE`` where that is written."""

    OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
    ALSO: tuple[str, ...] = ()
    """Other marks that stand for ``OPEN``."""

    def read(self) -> Wait:
        while True:
            yield from self.upto((self.OPEN, *self.ALSO), self.content, keep=True)
            yield from self.guarded(self._several(), *filter(None, (self.CLOSE,)))

    def _several(self) -> Wait:
        yield from self.calls()
        while not self.CLOSE or not (yield from self.follows(self.CLOSE)):
            if not (yield from self.follows("{")):
                return
            self.at -= 1
            yield from self.calls()


class LongCat(Marked):
    """``<longcat_tool_call>{...}</longcat_tool_call>``, of LongCat-Flash."""

    OPEN, CLOSE = "<longcat_tool_call>", "</longcat_tool_call>"


class Granite20B(Marked):
    """``<function_call> {...}``, once for each call, of Granite-20B-FunctionCalling."""

    OPEN, CLOSE = "<function_call>", ""


class Cohere(Marked):
    """``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>``, of Command."""

    OPEN, CLOSE, NAMES = "<|START_ACTION|>", "<|END_ACTION|>", ("tool_name",)


class GigaChat3(Marked):
    """``function call<|role_sep|>{...}``, of GigaChat 3, and ``<|function_call|>{...}``, of 3.1."""

    OPEN, CLOSE = "<|function_call|>", ""
    ALSO = ("<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>")


class Apertus(Marked):
    """``<|tools_prefix|>[{"name": {...}}]<|tools_suffix|>``, of Apertus: an object's one key is the name."""

    OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"

    def call(self, bare: bool = False) -> Wait:
        yield from self.expect("{")
        if (yield from self.glyph()) != '"':
            raise Broken
        name = yield from self.decoded()
        yield from self.expect(":")
        if not name or (yield from self.glyph()) != "{":
            raise Broken
        self.begin(name)
        yield from self.value(self.arguments)
        yield from self.expect("}")


class KimiK2(JsonReader):
    """``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` between the marks of
    a section, of Kimi K2. What names a call is its id too; one that is a number alone is of the only tool there is."""

    _SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    _SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    _CALL, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

    def read(self) -> Wait:
        while True:
            yield from self.upto(self._SECTIONS, self.content, keep=True)
            yield from self.guarded(self._section(), *self._SECTION_ENDS)

    def _section(self) -> Wait:
        yield from self.expect(self._CALL)
        while True:
            head: list[str] = []
            yield from self.upto((self._ARGUMENTS,), head.append)
            yield from self._call("".join(head).strip())
            ends = (self._CALL, *self._SECTION_ENDS)
            if (yield from self.upto(ends, drop)) in self._SECTION_ENDS:
                if self.mark is not None:
                    raise Broken
                return

    def _call(self, id: str) -> Wait:
        name, colon, number = id.removeprefix("functions.").rpartition(":")
        if not colon and id.isdecimal() and len(self.schemas) == 1:
            name, number = next(iter(self.schemas)), id
        if not name or not number.isdecimal():
            return  # a call of nothing
        if (yield from self.glyph()) != "{":
            return
        self.begin(name, id)
        try:
            yield from self.value(self.arguments)
        except Broken:  # the next call may be one all the same
            return


class Llama3Json(JsonReader):
    """``{"name": ..., "parameters": {...}}``, of Llama 3.1 to 3.3: bare, ``;`` between several, or behind
    ``<|python_tag|>``. An object in text is a call where it has a name and arguments and nothing else."""

    def read(self) -> Wait:
        while True:
            if (yield from self.upto(("<|python_tag|>", "{"), self.content, keep=True)) == "{":
                self.at -= 1
            yield from self._text_or_calls()

    def _text_or_calls(self) -> Wait:
        """What begins as a call and is none is text up to its brace, so that a call in its midst is still found."""
        try:
            yield from self._several()
        except Broken:
            if self.mark is not None:
                self.at = self.mark + (1 if self.text[self.mark] == "{" else len("<|python_tag|>"))
                self.give_up()
        self.mark = None

    def _several(self) -> Wait:
        yield from self.call(bare=True)
        while (yield from self.follows(";")):
            if (yield from self.glyph()) != "{":
                return
            yield from self.call(bare=True)


class InternLM(JsonReader):
    """``<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>``, of InternLM 2 and later."""

    def read(self) -> Wait:
        while True:
            yield from self.upto(("<|action_start|>",), self.content, keep=True)
            yield from self.guarded(self._action(), "<|action_end|>")

    def _action(self) -> Wait:
        yield from self.expect("<|plugin|>")
        yield from self.call()
        yield from self.follows("<|action_end|>")


class Granite(JsonReader):
    """``<|tool_call|>[{"name": ..., "arguments": {...}}]``, of Granite 3.0; later ones write ``<tool_call>``."""

    def read(self) -> Wait:
        while True:
            yield from self.upto(("<|tool_call|>", "<tool_call>"), self.content, keep=True)
            yield from self.guarded(self._list(), "</tool_call>")

    def _list(self) -> Wait:
        yield from self.calls()
        yield from self.follows("</tool_call>")


class Phi4Mini(JsonReader):
    """``functools[{"name": ..., "arguments": {...}}]``, of Phi-4-mini."""

    def read(self) -> Wait:
        while True:
            yield from self.upto(("functools[",), self.content, keep=True)
            self.at -= 1
            yield from self.guarded(self.calls(bare=True), "]")


class XLam(JsonReader):
    """A list of ``{"name": ..., "arguments": {...}}``, of xLAM: bare where the answer or what follows a thought begins
    with it, in a fence, or behind the marks of other families."""

    _MARKS = ("[TOOL_CALLS]", "<tool_call>", "```", "</think>")
    _ENDS = ("</tool_call>", "```")

    def read(self) -> Wait:
        self.mark = 0
        yield from self.guarded(self._list("["), "]")
        while True:
            mark = yield from self.upto(self._MARKS, self.content, keep=True)
            if mark == "</think>":
                self.give_up()
                self.mark = self.at
            elif mark == "```":
                yield from self.follows("json")
            yield from self.guarded(self._list("[" if mark == "</think>" else "[{"), *self._ENDS)

    def _list(self, first: str) -> Wait:
        if (yield from self.glyph()) not in first:
            raise Broken
        yield from self.calls(bare=True)
        for end in self._ENDS:
            if (yield from self.follows(end)):
                return


class Mistral(JsonReader):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``, of Mistral's models up to 2024; since version 11 of its
    tokenizers ``[TOOL_CALLS]name{...}``, with ``[CALL_ID]id`` and ``[ARGS]`` between in some."""

    def read(self) -> Wait:
        while True:
            yield from self.upto(("[TOOL_CALLS]",), self.content, keep=True)
            yield from self.guarded(self._calls())

    def _calls(self) -> Wait:
        if (yield from self.glyph()) in "[{":
            yield from self.calls()
            return
        name: list[str] = []
        mark = yield from self.upto(("[CALL_ID]", "[ARGS]", "{"), name.append)
        if mark == "[CALL_ID]":
            mark = yield from self.upto(("[ARGS]", "{"), drop)
        if mark == "{":
            self.at -= 1
        words = "".join(name).split()
        if len(words) != 1 or (yield from self.glyph()) != "{":
            raise Broken
        self.begin(words[0])
        yield from self.value(self.arguments)


class DeepSeek(JsonReader):
    """``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name`` and arguments in a fence, of DeepSeek
    V3 and R1; V3.1 has ``name<｜tool▁sep｜>{...}``."""

    _CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    _ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

    def read(self) -> Wait:
        while True:
            yield from self.upto((self._ALL,), self.content, keep=True)
            yield from self.guarded(self._calls(), self._ALL_END)

    def _calls(self) -> Wait:
        yield from self.expect(self._CALL)
        while True:
            head: list[str] = []
            yield from self.upto((self._SEP,), head.append)
            name = "".join(head).strip()
            if (yield from self.glyph()) != "{":
                head = []
                yield from self.upto(("\n",), head.append)
                name = "".join(head).strip()
                yield from self.follows("```json")
            if not name or (yield from self.glyph()) != "{":
                raise Broken
            self.begin(name)
            yield from self.value(self.arguments)
            yield from self.upto((self._END, self._ALL_END), drop)
            if self.text.endswith(self._ALL_END, 0, self.at) or (yield from self.follows(self._ALL_END)):
                return
            yield from self.expect(self._CALL)
