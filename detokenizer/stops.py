"""Stop strings over a stream of text: found wherever tokens cut them, never leaked in part.

The first stop string to be complete wins, whatever its place in the list and however the text was cut into tokens;
of several that end at one character, the longest. (vLLM takes the first in the list that a new token completes.)
Text that could still become a stop string is held back, and no more than that.

With ``min_tokens`` a stop string counts where its last character comes from a token after the first ``min_tokens``
ones, as in vLLM: one that is complete earlier is text like any other, and one that begins earlier and ends later is
a stop string.
"""

from __future__ import annotations

import re
from collections import deque


class StopSet:
    """The stop strings of one request as an Aho-Corasick automaton: O(1) a character for any number of them.

    ``depth[state]`` is how many of the last characters begin some stop string that is not complete; ``hits[state]`` is
    the longest stop string that ends here, or None. State 0 is the start.
    """

    def __init__(self, strings: list[str], include: bool):
        self.include = include
        self.edges: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.hits: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self.fails = self._link()
        self.starts = re.compile("[" + "".join(map(re.escape, self.edges[0])) + "]").search

    def _add(self, string: str) -> None:
        state = 0
        for n, char in enumerate(string):
            if char not in self.edges[state]:
                self.edges[state][char] = len(self.edges)
                self.edges.append({})
                self.depth.append(n + 1)
                self.hits.append(None)
            state = self.edges[state][char]
        self.hits[state] = string

    def _link(self) -> list[int]:
        """For each state, the state of its longest proper suffix; breadth first, so suffixes are done before."""
        fails = [0] * len(self.edges)
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            self.hits[state] = self.hits[state] or self.hits[fails[state]]
            if not self.edges[state]:  # complete: only what its end begins can go on
                self.depth[state] = self.depth[fails[state]]
            for char, child in self.edges[state].items():
                fail = fails[state]
                while fail and char not in self.edges[fail]:
                    fail = fails[fail]
                fails[child] = self.edges[fail].get(char, 0)
                queue.append(child)
        return fails

    def next(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self.edges[state]:
            state = self.fails[state]
        return self.edges[state].get(char, 0)


class StopWatch:
    """Watches one child's text."""

    __slots__ = ("_held", "_set", "_state")

    def __init__(self, stops: StopSet):
        self._set = stops
        self._state = 0
        self._held = ""

    def copy(self) -> StopWatch:
        """An independent one that has seen the same text."""
        other = StopWatch(self._set)
        other._state, other._held = self._state, self._held
        return other

    def feed(self, text: str, quiet: bool = False) -> tuple[str, str | None]:
        """Text that may go out now, and the stop string that ended it (the text is then cut there).

        ``quiet``: this text is of the first ``min_tokens`` tokens, and stop strings complete in it are text.
        """
        stops, state = self._set, self._state
        if not state and not stops.starts(text):
            return text, None
        for n, char in enumerate(text):
            state = stops.next(state, char)
            if (hit := stops.hits[state]) is not None and not quiet:
                whole = self._held + text[: n + 1]
                return whole if stops.include else whole[: -len(hit)], hit
        self._state = state
        whole = self._held + text
        cut = len(whole) if stops.include else len(whole) - stops.depth[state]
        self._held = whole[cut:]
        return whole[:cut], None

    def rest(self) -> str:
        """At the end: what was held back is text after all."""
        held, self._held = self._held, ""
        return held
