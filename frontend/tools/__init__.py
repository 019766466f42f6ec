"""Tool calls and thoughts in what a model writes: parsers by name, each a pure incremental function of the text.

A text goes through at most two: the first takes the thought off, the second finds the calls in what is left. Names
are vLLM's.
"""

from __future__ import annotations

from typing import Any

from ...proto.checkpoint.chat_templates import names_tools
from ...proto.thinking import HARMONY, MARKS
from .families import (
    Apertus,
    Cohere,
    DeepSeek,
    GigaChat3,
    Granite,
    Granite20B,
    Hermes,
    InternLM,
    KimiK2,
    Llama3Json,
    LongCat,
    Marked,
    Mistral,
    Phi4Mini,
    XLam,
)  # fmt: skip
from .forms import JsonList
from .gemma import FunctionGemma, Gemma4
from .harmony import Harmony
from .pythonic import Lfm2, Llama4Pythonic, Olmo3, Pythonic
from .reader import Arguments, Begin, Content, Delta, Parser, Reasoning
from .reasoning import Thinker
from .tags import DeepSeekV4, DeepSeekV32, Glm, MiniMaxM2, SeedOss, Step3, Tags

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
    "qwen3_coder": Tags,
    "qwen3_xml": Tags,
    "step3p5": Tags,
    "seed_oss": SeedOss,
    "minimax_m2": MiniMaxM2,
    "mimo": Tags,
    "deepseek_v32": DeepSeekV32,
    "deepseek_v4": DeepSeekV4,
    "step3": Step3,
    "glm45": Glm,
    "glm47": Glm,
    "kimi_k2": KimiK2,
    "internlm": InternLM,
    "granite": Granite,
    "granite4": Hermes,
    "granite-20b-fc": Granite20B,
    "ernie45": Hermes,
    "longcat": LongCat,
    "gigachat3": GigaChat3,
    "apertus": Apertus,
    "jamba": Marked,
    "hunyuan_a13b": Marked,
    "minimax": Marked,
    "cohere_command3": Cohere,
    "cohere_command4": Cohere,
    "functiongemma": FunctionGemma,
    "gemma4": Gemma4,
    "lfm2": Lfm2,
    "olmo3": Olmo3,
    "deepseek_v3": DeepSeek,
    "deepseek_v31": DeepSeek,
    "phi4_mini_json": Phi4Mini,
    "xlam": XLam,
    "openai": Harmony,
}

_OWN: dict[str, type[Parser]] = {"json_list": JsonList}
"""Of forms that are demanded and not a family's."""

REASONING_PARSERS = tuple(MARKS)

_TELLING = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("deepseek_v4", ("｜DSML｜tool_calls",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("gigachat3", ("<|role_sep|>", "function call")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("glm45", ("<arg_key>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("step3", ("steptml:invoke",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("jamba", ("<tool_calls>",)),
    ("olmo3", ("<function_calls>",)),
    ("granite-20b-fc", ("<function_call>",)),
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
    if not names_tools(template):
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
        marks = MARKS[reasoning] if reasoning is not None else None
        caller = {**TOOL_PARSERS, **_OWN}[tool] if tool is not None else None
        self._stages: list[Parser] = []
        if marks is HARMONY and caller is not Harmony:
            self._stages.append(Harmony(schemas))
        elif marks is not None and marks is not HARMONY:
            self._stages.append(Thinker(marks, prompt))
        if caller is not None:
            self._stages.append(caller(schemas))

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
