"""What is counted of the scheduler's work since its start, for /metrics. No IO."""

from __future__ import annotations

from bisect import bisect_left

from ..proto.config import EngineArgs
from ..proto.messages import WorkStats
from ..proto.messages.operators import REQUEST_PREEMPTIONS, STEP_TOKENS, BlockTimes


class Tally:
    """Steps by their tokens, and requests by how often they were preempted. One bisection a step and a request."""

    def __init__(self) -> None:
        self._steps = [0] * (len(STEP_TOKENS) + 1)
        self._requests = [0] * (len(REQUEST_PREEMPTIONS) + 1)
        self._step_tokens = self._request_preemptions = self._corrupted = 0
        self._open: dict[int, int] = {}  # preemptions of requests that have not ended, by uid; none is 0

    def step(self, tokens: int) -> None:
        """A step that computed so many tokens has ended."""
        self._steps[bisect_left(STEP_TOKENS, tokens)] += 1
        self._step_tokens += tokens

    def preempted(self, uid: int) -> None:
        """A sequence of this request was put back for want of blocks."""
        self._open[uid] = self._open.get(uid, 0) + 1

    def ended(self, uid: int) -> None:
        """Nothing is left of this request."""
        times = self._open.pop(uid, 0)
        self._requests[bisect_left(REQUEST_PREEMPTIONS, times)] += 1
        self._request_preemptions += times

    def corrupt(self) -> None:
        """A request fails because what the model gave are not numbers."""
        self._corrupted += 1

    def stats(self, config: EngineArgs, deferred: int, sleep_state: str, block_times: BlockTimes | None) -> WorkStats:
        """All of it. ``deferred``: sequences that wait for something else than room."""
        return WorkStats(
            config.block_size, config.enable_prefix_caching, deferred, list(self._steps), self._step_tokens,
            list(self._requests), self._request_preemptions, self._corrupted, sleep_state,
            block_times,
        )  # fmt: skip


class Speculation:
    """What came of drafts since the start."""

    def __init__(self) -> None:
        self.drafts = self.draft_tokens = 0
        self.accepted: list[int] = []  # by place in the draft

    def expect(self, drafts: int) -> None:
        """Some worker drafts so many tokens at most."""
        self.accepted += [0] * (drafts - len(self.accepted))

    def count(self, drafted: list[int], counts: list[int]) -> None:
        """Verifications of so many drafted tokens each that gave so many tokens each."""
        for tried, drawn in zip(drafted, counts, strict=True):
            if tried:
                self.drafts += 1
                self.draft_tokens += tried
                for place in range(min(drawn - 1, tried)):
                    self.accepted[place] += 1
