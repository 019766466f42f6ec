"""gpt-oss' form ("harmony"): messages with a channel and, where they are calls, with whom they are for.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{...}<|call|>``. Analysis is the model's thought; what is for nobody is for the user.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import suppress

from .json_values import ValueReader
from .reader import Broken, Wait

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_TO, _IN = re.compile(r"\bto=([\w.-]+)"), re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


class Harmony(ValueReader):
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
        """Arguments that are blank are an empty object; any that are no object are none, and the call is not whole."""
        self.begin(name)
        said: list[str] = []
        if (yield from self.glyph()) == "{":
            with suppress(Broken):
                yield from self.value(self.arguments)
            said.append("{")
        mark = yield from self.upto(_ENDS, said.append)
        if not "".join(said).strip():
            self.arguments("{}")
        return mark
