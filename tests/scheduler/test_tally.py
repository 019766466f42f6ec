"""Steps by their tokens, requests by their preemptions, and what came of drafts."""

from __future__ import annotations

import pytest

from quire.proto.config import EngineArgs
from quire.proto.messages.operators import REQUEST_PREEMPTIONS, STEP_TOKENS, WorkStats
from quire.scheduler.tally import Speculation, Tally


def stats(tally: Tally) -> WorkStats:
    return tally.stats(EngineArgs(block_size=8), 3, "awake", None)


def bins(counts: list[int], bounds: tuple[int, ...]) -> dict[float, int]:
    """Those that are not empty, by their upper bound."""
    return {bound: count for bound, count in zip((*bounds, float("inf")), counts, strict=True) if count}


def test_steps_are_counted_by_tokens_to_any_size() -> None:
    tally = Tally()
    for tokens in (1, 2, 8, 9, 16384, 16385, 10**6):
        tally.step(tokens)
    found = stats(tally)
    assert bins(found.steps, STEP_TOKENS) == {1: 1, 8: 2, 16: 1, 16384: 1, float("inf"): 2}
    assert found.step_tokens == 1 + 2 + 8 + 9 + 16384 + 16385 + 10**6


def test_requests_are_counted_when_they_end_however_often_they_were_preempted() -> None:
    tally = Tally()
    for uid, times in enumerate((0, 1, 3, 51)):
        for _ in range(times):
            tally.preempted(uid)
    assert bins(stats(tally).requests, REQUEST_PREEMPTIONS) == {}
    for uid in range(4):
        tally.ended(uid)
    found = stats(tally)
    assert bins(found.requests, REQUEST_PREEMPTIONS) == {0: 1, 1: 1, 5: 1, float("inf"): 1}
    assert found.request_preemptions == 55
    tally.ended(3)  # another of that uid
    assert stats(tally).requests[0] == 2 and stats(tally).request_preemptions == 55


def test_what_else_is_told() -> None:
    tally = Tally()
    tally.corrupt()
    tally.corrupt()
    found = tally.stats(EngineArgs(block_size=8, enable_prefix_caching=False), 3, "discard_all", None)
    assert (found.block_size, found.prefix_caching, found.deferred) == (8, False, 3)
    assert (found.corrupted, found.sleep_state, found.block_times) == (2, "discard_all", None)
    assert stats(tally).prefix_caching


@pytest.mark.parametrize(
    ("drafted", "counts", "found"),
    [
        ([3], [1], (1, 3, [0, 0, 0])),  # the token of the step itself, and no drafted one
        ([3], [3], (1, 3, [1, 1, 0])),
        ([3], [4], (1, 3, [1, 1, 1])),
        ([2, 0, 1], [3, 1, 1], (2, 3, [1, 1, 0])),  # a row for which nothing was drafted is none
        ([1], [9], (1, 1, [1, 0, 0])),
    ],
)
def test_drafts_are_counted_by_place(drafted: list[int], counts: list[int], found: tuple) -> None:
    speculation = Speculation()
    speculation.expect(2)
    speculation.expect(3)
    speculation.expect(1)  # another worker drafts fewer
    speculation.count(drafted, counts)
    assert (speculation.drafts, speculation.draft_tokens, speculation.accepted) == found
