"""How models mark their thoughts, by the names of ``--reasoning-parser``, and how a thought is held to a budget."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import msgspec

from .config_error import ConfigError


class Marks(NamedTuple):
    """Texts that begin and end a thought. ``always``: an answer begins with a thought even where nothing says so.

    ``forced``: what ends a thought that is over its budget; the first of ``ends`` where it is empty. ``around`` are
    marks that stand around the answer and are no part of it. Behind a thought stands ``then``, and before an answer
    that is no call ``header``.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    always: bool = False
    forced: str = ""
    around: tuple[str, ...] = ()
    then: str = ""
    header: str = ""

    @property
    def pair(self) -> tuple[str, str] | None:
        """The two marks of families that have no others; None where there are more."""
        alone = len(self.starts) == len(self.ends) == 1 and not self.around
        return (self.starts[0], self.ends[0]) if alone else None


_THINK = Marks(("<think>",), ("</think>",))
_COMMAND = Marks(("<|START_THINKING|>",), ("<|END_THINKING|>",), around=(
    "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"))  # fmt: skip
HARMONY = Marks(
    ("<|channel|>analysis<|message|>",), ("<|end|>",), then="<|start|>assistant", header="<|channel|>final<|message|>"
)
MARKS = {
    "deepseek_r1": _THINK._replace(always=True),
    "qwen3": _THINK,
    "glm45": _THINK,
    "glm47": _THINK,
    "deepseek_v3": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": _THINK._replace(always=True),
    "step3": _THINK._replace(always=True),
    "step3p5": _THINK._replace(always=True),
    "olmo3": _THINK,
    "holo2": _THINK,
    "mimo": _THINK,
    "deepseek_v4": _THINK,
    "nemotron_v3": _THINK,
    "ernie45": _THINK._replace(always=True, around=("<response>", "</response>")),
    "hunyuan_a13b": _THINK._replace(around=("<answer>", "</answer>")),
    "seed_oss": Marks(("<seed:think>",), ("</seed:think>",)),
    "gemma4": Marks(("<|channel>thought",), ("<channel|>",)),
    "cohere_command3": _COMMAND,
    "cohere_command4": _COMMAND,
    "granite": Marks(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "mistral": Marks(("[THINK]",), ("[/THINK]",)),
    "openai_gptoss": HARMONY,
    "gpt-oss": HARMONY,
}
"""By the names of reasoning parsers, which are vLLM's."""

_MARK = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])$")


class Thinking(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A budget of thinking tokens, as a worker needs to know it.

    ``budget`` counts the tokens of all thoughts of one answer. ``end`` are the ids that are drawn where it is used up.
    """

    budget: int
    end: list[int]
    starts: list[str]
    ends: list[str]
    open: bool  # the prompt ends within a thought
    spent: int = 0  # tokens of that thought which are part of the prompt


def parser_of(named: str | None, template: str) -> str | None:
    """The reasoning parser that is ``named``, or of gpt-oss where the chat template is of its kind: its answers cannot
    be told from its thoughts otherwise."""
    return named or ("openai_gptoss" if "<|channel|>" in template and "<|message|>" in template else None)


def marks_of(parser: str | None, config: str | None) -> Marks | None:
    """The marks of ``--reasoning-parser`` and of ``--reasoning-config``, which goes before it; None: neither is given.

    An ``reasoning_end_str`` may say more than the mark: the words with which a thought is to end. Raises ConfigError.
    """
    known = MARKS.get(parser or "")
    given = _config(config)
    if not given:
        return known
    start, end = given.get("reasoning_start_str"), given.get("reasoning_end_str")
    known = known or Marks((), ())
    if end:
        found = _MARK.search(end)
        known = known._replace(forced=end, ends=known.ends or (found[0] if found else end,))
    if start:
        known = known._replace(starts=(start,))
    if not known.starts or not known.ends:
        raise ConfigError(
            "reasoning_config needs reasoning_start_str and reasoning_end_str where no --reasoning-parser is given."
        )
    return known


def _config(text: str | None) -> dict[str, str]:
    try:
        given: Any = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"reasoning_config must be a JSON object: {error}.") from None
    names = ("reasoning_start_str", "reasoning_end_str")
    if not isinstance(given, dict):
        raise ConfigError(f"reasoning_config must be a JSON object, got {text!r:.80}.")
    for name, value in given.items():
        if name not in names:
            raise ConfigError(f"reasoning_config may hold {' and '.join(names)}, got {name!r:.80}.")
        if not isinstance(value, str | None):
            raise ConfigError(f"reasoning_config's {name} must be a string, got {value!r:.80}.")
    return {name: value for name, value in given.items() if value}
