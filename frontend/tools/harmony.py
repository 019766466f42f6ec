"""gpt-oss' form ("harmony"): messages with a channel and, where they are calls, with whom they are for.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{...}<|call|>``. Analysis is the model's thought; what is for nobody is for the user.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from .reader import Parser, Wait

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_TO, _IN = re.compile(r"\bto=([\w.-]+)"), re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


class Harmony(Parser):
    """Thought, answers and calls at once: one parser is both the tools' and the thought's."""

    def read(self) -> Wait:
        thought = said = False
        mark = yield from self.upto((_START, _CHANNEL), self.content)
        while True:
            head = [mark]
            yield from self.upto((_MESSAGE,), head.append)
            text = "".join(head)
            to, channel = _TO.search(text), _IN.search(text)
            if to is not None and to[1].startswith(_FUNCTIONS):
                mark = yield from self._call(to[1].removeprefix(_FUNCTIONS))
            elif to is not None or (channel is not None and channel[1] == "analysis"):
                self.thought("\n" if thought else "")
                thought = True
                mark = yield from self.upto(_ENDS, self.thought)
            else:
                self.content("\n" if said else "")
                said = True
                mark = yield from self.upto(_ENDS, self.content)
            if mark not in (_START, _CHANNEL):
                mark = yield from self.upto((_START, _CHANNEL), self.content)

    def _call(self, name: str) -> Generator[None, None, str]:
        """Arguments are given as they stand; none at all are an empty object."""
        self.begin(name)
        given = False

        def give(text: str) -> None:
            nonlocal given
            if not given:
                text = text.lstrip()
                given = bool(text)
            self.arguments(text)

        mark = yield from self.upto(_ENDS, give)
        if not given:
            self.arguments("{}")
        return mark
