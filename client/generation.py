"""A request that generates, as the client keeps it.

text, tokens:   [0 ........ received) [received ........ finish)
                 authoritative: kept    downstream's; may be thrown away and made again by a higher attempt
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..proto.codec import i32
from ..proto.messages import Accepted, Finish, Resume, Tokenize
from ..proto.params import SamplingParams
from ..proto.work import Generate, embeds_of, with_embeds
from .best import choose, from_wire, is_held
from .request import OpenRequest
from .results import ChildOutput, StreamEvent, TokenLogprobs


class OpenGeneration(OpenRequest):
    """Each of its n children is an output of its own.

    ``work`` has the parameters as sent, ``asked`` are the user's. A held request (best_of, beam search) shows
    nothing before its end: which children are returned, and as which, is not known earlier.
    """

    def __init__(self, message: Tokenize, work: Generate, asked: SamplingParams, now: float):
        super().__init__(message, now)
        self.work = work  # resolved, once it is accepted
        self.asked, self.held = asked, is_held(asked)
        self.params = asked  # resolved, once it is accepted; in the user's terms
        self.summed = work.params.logprobs is not None  # every token comes with its logprobs
        self._begin()
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if asked.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token has none
        self.bare = not self.summed and self.prompt_logprobs is None  # tokens and text are all that comes
        self.pending: dict[int, StreamEvent] = {}
        self.quiet = False  # the consumer wants the end only

    def _begin(self) -> None:
        """Nothing has come."""
        self.live = self.work.params.n
        self.children = [ChildOutput(cumulative=0.0 if self.summed else None) for _ in range(self.live)]

    # -- towards the model

    @property
    def reached(self) -> int:
        return sum(len(child.tokens) for child in self.children)

    def again(self) -> Tokenize:
        """The message of the present attempt: the prompt's ids once they are known, and what has been received."""
        message = super().again()
        if self.accepted is not None:
            resume = [
                Resume(index=index, ids=i32(child.tokens), text_sent=child.chars)
                for index, child in enumerate(self.children)
                if child.finish == Finish.NONE
            ]
            if not any(child.tokens or child.chars or child.finish for child in self.children):
                resume = []  # all from the start, so that they share the prompt again
            changes: dict[str, Any] = {
                "prompt": None, "messages": None, "template": None, "ids": i32(self.accepted.prompt_ids),
                "work": self.work, "resume": resume,
            }  # fmt: skip
            if self.prompt_logprobs is not None and len(self.prompt_logprobs) > 1:
                changes["prompt_logprobs_from"] = len(self.prompt_logprobs)
            message = msgspec.structs.replace(message, **changes)
        return message

    def lost(self, counts: bool) -> bool:
        left = super().lost(counts)
        if self.asked.use_beam_search:  # a group is made again whole: parts of two searches do not mix
            self._begin()
        return left

    # -- from the model

    def accept(self, message: Accepted) -> None:
        if self.accepted is None and isinstance(message.work, Generate):
            self.params = from_wire(message.work.params, self.asked)
            self.work = with_embeds(message.work, embeds_of(self.work))  # which are not sent back
        super().accept(message)

    def take_prompt(self, start: int, found: list[TokenLogprobs]) -> bool:
        """Take logprobs of prompt tokens ``start``, ...; False where they do not follow what is here.

        The first copy of each is kept.
        """
        have = self.prompt_logprobs
        if have is None:
            return True
        if self.accepted is None or not 1 <= start <= len(have):
            return False
        new = found[len(have) - start :]
        if [each.ids[0] for each in new] != self.accepted.prompt_ids[len(have) : len(have) + len(new)]:
            return False
        have += new
        return True

    def take(
        self, index: int, offset: int, tokens: list[int], text: str, finish: int, reason: int | str | None,
        length: int, now: float, logprobs: list[TokenLogprobs],
    ) -> bool:  # fmt: skip
        """Take one entry of a TextBatch; False where it does not follow what is here, so that something was lost."""
        if not 0 <= index < len(self.children):
            return False
        child = self.children[index]
        have = len(child.tokens)
        if child.finish != Finish.NONE or (tokens and offset + len(tokens) <= have):
            return True  # a duplicate
        if offset != have or (tokens and not self._complete(tokens, logprobs)):
            return False
        if not self.summed:
            logprobs = []
        if finish != Finish.NONE and length >= 0:
            del tokens[max(0, length - have) :]
            del logprobs[len(tokens) :]
        child.tokens += tokens
        if logprobs:
            child.logprobs += logprobs
            child.cumulative = _sum(child.cumulative, logprobs)
        if text:
            child.parts.append(text)
            child.chars += len(text)
        if tokens:
            if not self.started:
                self.start(now, 0)
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
            self.metrics.last_token_time = now
        if finish != Finish.NONE:
            child.finish, child.stop_reason = Finish(finish), reason
            if 0 <= length < len(child.tokens):
                del child.tokens[length:], child.logprobs[length:]
                child.cumulative = _sum(0.0, child.logprobs) if self.summed else None
            self.live -= 1
        if not (self.quiet or self.held):
            self._announce(index, child, tokens, text, logprobs)
        if self.live == 0:
            self.end(now)
        return True

    def take_one(self, index: int, offset: int, token: int, text: str, now: float) -> bool:
        """``take`` for nearly every entry there is: one token of a child that goes on, with nothing beside its text.

        False, and nothing is done, where there is more to it: also where logprobs are asked for.
        """
        metrics = self.metrics
        if not (self.bare and self.started) or metrics.first_token_time is None:
            return False
        child = self.children[index] if 0 <= index < len(self.children) else None
        if child is None or child.finish or offset != len(child.tokens):
            return False
        child.tokens.append(token)
        if text:
            child.parts.append(text)
            child.chars += len(text)
        metrics.last_token_time = now
        if not self.quiet:  # a held one wants logprobs, and is not bare
            event = self.pending.get(index)
            if event is None:
                self.pending[index] = StreamEvent(index, text, [token])
            else:
                event.tokens.append(token)
                event.text += text
            self.on_change()
        return True

    def cut(self) -> None:
        """Every child that goes on ends here, as one that was aborted; the owner says that the request is done."""
        for index, child in enumerate(self.children):
            if child.finish == Finish.NONE:
                child.finish = Finish.ABORT
                if not (self.quiet or self.held):
                    self._announce(index, child, [], "", [])
        self.live = 0

    def _complete(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Whether new tokens come with all that was asked for with them, and after all that comes before them."""
        if self.summed and [each.ids[0] for each in logprobs] != tokens:
            return False
        prompt = self.prompt_logprobs
        return prompt is None or (self.accepted is not None and len(prompt) == len(self.accepted.prompt_ids))

    def _announce(
        self, index: int, child: ChildOutput, tokens: list[int], text: str, logprobs: list[TokenLogprobs]
    ) -> None:
        event = self.pending.get(index)
        if event is None:
            if not tokens and not text and child.finish == Finish.NONE:
                return
            event = self.pending[index] = StreamEvent(index)
        event.tokens += tokens
        event.text += text
        event.logprobs += logprobs
        if child.finish != Finish.NONE:
            event.finish, event.stop_reason, event.length = child.finish, child.stop_reason, len(child.tokens)
        self.on_change()

    def ended(self) -> None:
        """Of a held one, only now are the children those of the user: the best, with what was asked for."""
        if not self.held:
            return
        if not self.asked.use_beam_search:
            scores = [child.cumulative for child in self.children]
            self.children = choose(self.children, scores, self.asked.n)
        if self.asked.logprobs is None:
            for child in self.children:
                child.logprobs = []
        if self.live == 0 and not self.quiet:
            for index, child in enumerate(self.children):
                self._announce(index, child, child.tokens, "".join(child.parts), child.logprobs)


def _sum(start: float | None, logprobs: list[TokenLogprobs]) -> float:
    """``start`` and the tokens' own logprobs in double precision, term by term: the same however they came."""
    total = start or 0.0
    for each in logprobs:
        total += each.values[0]
    return total
