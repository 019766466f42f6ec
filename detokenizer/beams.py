"""Stop strings in a beam search: the text state of every candidate, step by step.

The scheduler chooses beams and knows no text. So with stop strings it sends each step's candidates (``BeamTokens``),
and goes on when it is told which of them a stop string ends (``BeamStopped``).
"""

from __future__ import annotations

from collections.abc import Sequence

from .detokenize import Stream
from .stops import StopSet, StopWatch


class LostBeams(Exception):
    """A step's candidates follow from none that are known here."""


class BeamTexts:
    """Candidates of one group. A candidate is a copy of its parent's state (a few dozen bytes) and one token more."""

    def __init__(self, stream: Stream, stops: StopSet, min_tokens: int):
        self._root = (stream, StopWatch(stops))
        self._min = min_tokens
        self._step = 0
        self._candidates: list[tuple[Stream, StopWatch] | None] = [self._root]

    def advance(self, step: int, parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The candidates of ``step`` that a stop string ends, by index. Step 1 always begins a group anew.

        Raises LostBeams where steps are missing, or a parent does not exist or had ended.
        """
        if len(parents) != len(tokens):
            raise LostBeams(f"step {step} has {len(parents)} parents and {len(tokens)} tokens")
        if step == 1:
            self._candidates = [self._root]
        elif step != self._step + 1:
            raise LostBeams(f"step {step} came after {self._step}")
        following: list[tuple[Stream, StopWatch] | None] = []
        stopped = []
        for index, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            before = self._candidates[parent] if 0 <= parent < len(self._candidates) else None
            if before is None:
                raise LostBeams(f"candidate {index} of step {step} has the parent {parent}, which is not to be had")
            stream, watch = before[0].copy(), before[1].copy()
            _, hit = watch.feed(stream.push(token), step <= self._min)
            if hit is not None:
                stopped.append(index)
            following.append(None if hit is not None else (stream, watch))
        self._step, self._candidates = step, following
        return stopped
