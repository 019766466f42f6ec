"""Whether sequences go on faster with drafts or without: as measured, by how many of them decode together.

A worker knows what its model and its drafts take, and drafts less where that does not pay. It does not see what else a
verification costs: the next plan has to wait for what this one keeps, and whoever may be drafted for is kept ready for
it. So the scheduler measures both ways, from result to result. It takes the quicker one, and tries the other again at
times. Nor does the worker see who comes: it is also here that the first requests of a burst are known as such.
"""

from __future__ import annotations

from collections import deque

from .step import Step

TRY, SKIP = 64, 12
"""Steps in which the slower way is tried again, and how many of these are left out: they begin with what the other way
has left, and what drafts has to catch up first."""
SURE = 192
"""So many steps more of a way that was the quicker one in those, before it is taken for long: a few dozen steps of one
kind take 10% more or less than as many others."""
GAIN = 1.05
"""So much faster a row must go on with drafts: what they take of others' cores is not seen here."""
LEAST_STAY, MOST_STAY = 1024, 8192
"""Steps of the quicker one until then: the least where it has just become that, twice as many each time it stays so;
fewer where little is known yet."""
WINDOW = 256
"""So many steps, the last ones, are what is known of a way."""
PAST = 16
"""No more of those count when it is taken again."""
ODD = 3.0
"""A step that took more times what they take at the median counts as so much: where a core is shared, a few take much
longer than others of their kind. Those in which drafts catch up take twice as long, and are not odd."""
SOON = 16
"""Plans in which a burst comes: its requests may be some milliseconds apart."""
MOST_PAUSE = 2.0
"""A result that comes after more times what its step took waited for something else; it counts as so much."""


class Trial:
    """Of about one number of rows. ``drafts``: the way that is taken now."""

    __slots__ = ("_left", "_looks", "_skip", "_stay", "_steps", "drafts")

    def __init__(self) -> None:
        self.drafts, self._looks = True, 0  # 1: it is tried, 2: until it is sure that it is the quicker one
        self._left, self._stay = TRY + SKIP, LEAST_STAY // 16
        self._skip = 2 * SKIP  # the first steps of all are slow
        # Without and with drafts: a row's tokens, and seconds.
        self._steps = [deque[tuple[float, float]](maxlen=WINDOW) for _ in (False, True)]

    def ended(self, drafts: bool, tokens: float, seconds: float) -> None:
        """A step gave each row so many tokens; it may have been planned before the way was changed."""
        if drafts is not self.drafts:
            return
        if self._skip:
            self._skip -= 1
        elif self._left <= WINDOW:  # what came before would be forgotten
            self._steps[drafts].append((tokens, seconds))
        self._left -= 1
        if not self._left or (self._left == TRY // 2 and drafts and not self._gives_more()):
            self._decide()

    def _gives_more(self) -> bool:
        """Whether a row gets more tokens in a step with drafts. Else they cannot pay, whatever the times seem to say,
        for such a step does all that one without does."""
        plain, drafted = (sum(tokens for tokens, _ in steps) / max(1, len(steps)) for steps in self._steps)
        return drafted > GAIN * (plain or 1.0)

    def _decide(self) -> None:
        if not self._looks:
            self._looks, self._left = 1, TRY
            self._go(not self.drafts)
            return
        (plain, plain_s), (drafted, drafted_s) = map(usual, self._steps)
        won = self.drafts is (self._gives_more() and drafted * plain_s > GAIN * plain * drafted_s)
        if won and self._looks == 1:
            self._looks, self._left = 2, SURE
            return
        self._looks, self._stay = 0, LEAST_STAY if won else min(2 * self._stay, MOST_STAY)
        self._left = self._stay
        if not won:
            self._go(not self.drafts)

    def _go(self, drafts: bool) -> None:
        self.drafts, self._skip = drafts, SKIP
        steps = self._steps[drafts]
        while len(steps) > PAST:
            steps.popleft()


def usual(steps: deque[tuple[float, float]]) -> tuple[float, float]:
    """The mean of the tokens of some steps, at least one, and of their seconds, where odd ones count for less."""
    seconds = sorted(took for _, took in steps)
    most = ODD * seconds[len(seconds) // 2]
    return sum(tokens for tokens, _ in steps) / len(steps), sum(min(took, most) for took in seconds) / len(seconds)


class Bursts:
    """Whether those who begin where nobody runs are soon more than ``rows``. Drafts for the first of a burst are in
    vain, and what drafts computes its prompt; so where there was a burst the last time, it is seen first whether this
    is one."""

    __slots__ = ("_burst", "_plans", "_rows")

    def __init__(self, rows: int):
        self._rows, self._burst = rows, False
        self._plans = SOON  # since somebody began where nobody ran; SOON: it is known what came of it

    @property
    def expected(self) -> bool:
        """It may be one that has begun."""
        return self._burst and self._plans < SOON

    def planned(self, rows: int, first: bool) -> None:
        """A step of ``rows`` is planned; ``first``: nobody else ran before."""
        if first:
            if self._plans < SOON:  # who began the last time stayed among few
                self._burst = False
            self._plans = 0
        elif self._plans < SOON:
            self._plans += 1
            if self._plans == SOON:
                self._burst = False
        if rows > self._rows:
            if 0 < self._plans < SOON:  # where all come at once nothing is in vain
                self._burst = True
            self._plans = SOON


class DraftWorth:
    """Of a replica that drafts for at most ``rows`` sequences together. ``always``: nothing is tried, it drafts."""

    def __init__(self, rows: int, always: bool = False):
        self._rows, self._bursts = rows, Bursts(rows)
        self._trials = [] if always or not rows else [Trial() for _ in range((rows - 1).bit_length() + 1)]

    def drafts(self, rows: int) -> bool:
        """Whether ``rows`` sequences that decode together are drafted for."""
        few = 0 < rows <= self._rows
        return few and (not self._trials or (not self._bursts.expected and self._of(rows).drafts))

    def planned(self, rows: int, first: bool) -> bool:
        """Whether the ``rows`` of a plan, and of those who come next, are likely to be drafted for; as ``Bursts`` has
        it."""
        self._bursts.planned(rows, first)
        return self.drafts(rows)

    def ended(self, step: Step, tokens: int, took: float, since: float) -> None:
        """The result of ``step`` has come with ``tokens``, ``took`` seconds after it could begin and ``since`` seconds
        after the result before it. Steps of prompts, of beams or of both ways say nothing."""
        verified, decoded = len(step.verifications), step.decodes.count
        rows = verified or decoded
        if not (self._trials and 0 < rows <= self._rows) or step.chunks or step.searches or (verified and decoded):
            return
        self._of(rows).ended(verified > 0, tokens / rows, min(since, MOST_PAUSE * took))

    def _of(self, rows: int) -> Trial:
        """1, 2, 3 to 4, 5 to 8, ... rows have one each."""
        return self._trials[(rows - 1).bit_length()]
