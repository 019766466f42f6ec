"""Where a prompt ends: within a thought, after one, or before the model says whether it thinks."""

from __future__ import annotations

from ..proto.errors import Refused
from ..proto.grammars.structural_tags import placed
from ..proto.messages import Tokenize
from ..proto.params import SamplingParams
from ..proto.structured import StructuredOutputsParams
from ..proto.thinking import Marks, Thinking
from ..proto.work import Generate, ThinkingGenerate
from .tokenizer import TextTokenizer

TAIL = 200
"""Characters at a prompt's end that are looked at; a reasoning parser looks at as many."""

_BUDGET = "thinking_token_budget"


class Thoughts:
    """What a process knows of its model's thoughts. Thread-safe: it holds no state."""

    def __init__(self, tokenizer: TextTokenizer | None, marks: Marks | None):
        self._tokenizer, self._marks = tokenizer, marks
        self._end = tokenizer.encode(marks.forced or marks.ends[0], False) if tokenizer and marks else []

    def place(self, params: SamplingParams, prompt: str | None, ids: list[int]) -> None:
        """Have a form with a thought in it begin where the prompt has got to."""
        form = params.structured_outputs
        if form is not None and form.structural_tag is not None and '"thought"' in form.structural_tag:
            changed = placed(form.structural_tag, self._tail(prompt, ids))
            if changed != form.structural_tag:
                named = {name: getattr(form, name) for name in form.__struct_fields__}
                params.structured_outputs = StructuredOutputsParams(**{**named, "structural_tag": changed})

    def held(self, work: Generate, message: Tokenize, prompt: str | None, ids: list[int], vocab_size: int) -> Generate:
        """``work`` with its budget of thinking tokens resolved; the same where it has none. Raises Refused."""
        budget = work.params.thinking_token_budget
        if budget is None:
            return work
        if isinstance(message.work, ThinkingGenerate):  # sent again: its prompt is known as ids alone by now
            thinking = message.work.thinking
        else:
            thinking = self._thinking(budget, message, prompt, ids)
            if max(thinking.end) >= vocab_size:
                raise Refused(f"{_BUDGET}: the model's vocabulary lacks the mark that ends a thought.", _BUDGET)
        given = {name: getattr(work, name) for name in Generate.__struct_fields__}
        return ThinkingGenerate(**given, thinking=thinking)

    def _thinking(self, budget: int, message: Tokenize, prompt: str | None, ids: list[int]) -> Thinking:
        marks = self._marks
        if marks is None or not self._end:
            raise Refused(
                f"{_BUDGET} needs a server that knows how the model marks its thoughts; start it with "
                "--reasoning-parser, or with --reasoning-config.",
                _BUDGET,
            )
        text, open = self._decode(ids) if prompt is None else prompt, False
        if message.messages is not None:  # earlier turns' marks say nothing: what the template wrote last does
            said = _continued(message)
            tail = text.rstrip().removesuffix(said)[-TAIL:].rstrip()
            open, text = tail.endswith(marks.starts) or (marks.always and not tail.endswith(marks.ends)), said
        at, mark = max((text.rfind(each), each) for each in marks.starts)
        if at != (ended := max(text.rfind(each) for each in marks.ends)):
            open = at > ended
        spent = len(self._encode(text[at + len(mark) :] if at >= 0 else text)) if open else 0
        return Thinking(budget, self._end, list(marks.starts), list(marks.ends), open, spent)

    def _tail(self, prompt: str | None, ids: list[int]) -> str:
        return (self._decode(ids[-TAIL:]) if prompt is None else prompt)[-TAIL:].rstrip()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, False) if self._tokenizer is not None else ""

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, False) if self._tokenizer is not None and text.strip() else []


def _continued(message: Tokenize) -> str:
    """The text of the last message, without blanks around it, where the answer goes on with it; "" otherwise."""
    if not message.messages or not (message.template or {}).get("continue_final_message"):
        return ""
    content = message.messages[-1].get("content")
    part = content[-1] if isinstance(content, list) and content else content
    text = part.get("text") if isinstance(part, dict) else part
    return text.strip() if isinstance(text, str) else ""
