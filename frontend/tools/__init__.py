"""Tool calls and thoughts in what a model writes: parsers by name, each a pure incremental function of the text.

A text goes through at most two: the first takes the thought off, the second finds the calls in what is left. Names
are vLLM's.
"""

from __future__ import annotations

from typing import Any

from .families import DeepSeek, Granite, Hermes, InternLM, Llama3Json, Mistral, Phi4Mini, XLam
from .forms import JsonList
from .harmony import Harmony
from .pythonic import Llama4Pythonic, Pythonic
from .qwen_xml import QwenXml
from .reader import Arguments, Begin, Content, Delta, Parser, Reasoning
from .reasoning import DeepSeekR1, GraniteThinker, MistralThinker, Thinker

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Arguments",
    "Begin",
    "Content",
    "Delta",
    "Parser",
    "Reader",
    "Reasoning",
    "detect",
]

TOOL_PARSERS: dict[str, type[Parser]] = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "llama4_json": Llama3Json,
    "llama4_pythonic": Llama4Pythonic,
    "pythonic": Pythonic,
    "mistral": Mistral,
    "qwen3_coder": QwenXml,
    "qwen3_xml": QwenXml,
    "internlm": InternLM,
    "granite": Granite,
    "deepseek_v3": DeepSeek,
    "deepseek_v31": DeepSeek,
    "phi4_mini_json": Phi4Mini,
    "xlam": XLam,
    "openai": Harmony,
}

_OWN: dict[str, type[Parser]] = {"json_list": JsonList}
"""Of forms that are demanded and not a family's."""

REASONING_PARSERS: dict[str, type[Thinker] | type[Harmony]] = {
    "deepseek_r1": DeepSeekR1, "qwen3": Thinker, "glm45": Thinker, "deepseek_v3": Thinker, "granite": GraniteThinker,
    "mistral": MistralThinker, "openai_gptoss": Harmony, "gpt-oss": Harmony,
}  # fmt: skip

_TELLING = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|start_of_role|>", "tool_call|>")),
    ("granite", ("<|start_of_role|>", "<tool_call>")),
    ("internlm", ("<|plugin|>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama3_json", ("Environment: ipython", '"parameters"')),
    ("phi4_mini_json", ("functools",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>", '"arguments"')),
)
"""Parsers by texts that a chat template has to have."""


def detect(template: str) -> str | None:
    """The name of the tool parser whose form a chat template shows to the model; None where it shows none known."""
    if "tools" not in template:
        return None
    plain = template.replace("\\", "")  # quotes are escaped in some
    return next((name for name, marks in _TELLING if all(mark in plain for mark in marks)), None)


class Reader:
    """One choice's text on its way through the parsers.

    ``tool`` and ``reasoning`` are names, or None; ``schemas`` are the tools' by name; ``prompt`` is the rendered one.
    """

    def __init__(
        self, tool: str | None, reasoning: str | None, schemas: dict[str, dict[str, Any]], prompt: str | None = None
    ):
        thinker = REASONING_PARSERS[reasoning] if reasoning is not None else None
        caller = {**TOOL_PARSERS, **_OWN}[tool] if tool is not None else None
        self._stages: list[Parser] = []
        if thinker is not None and issubclass(thinker, Thinker):
            self._stages.append(thinker(prompt))
        if caller is not None or thinker is Harmony:
            self._stages.append((caller or Harmony)(schemas))

    def feed(self, text: str) -> list[Delta]:
        """More text; what is certain by now."""
        return self._through(0, [Content(text)]) if text else []

    def end(self) -> list[Delta]:
        """The text has ended; what was held back."""
        out: list[Delta] = []
        for place, stage in enumerate(self._stages):
            out += self._through(place + 1, stage.end())
        return out

    def _through(self, place: int, deltas: list[Delta]) -> list[Delta]:
        """What stages from ``place`` on make of ``deltas``; what is no text for the user passes them."""
        for stage in self._stages[place:]:
            out: list[Delta] = []
            for delta in deltas:
                out += stage.feed(delta.text) if isinstance(delta, Content) else [delta]
            deltas = out
        return deltas
