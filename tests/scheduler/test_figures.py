"""The line of figures every ten seconds in which requests run."""

from __future__ import annotations

import pytest

from quire.proto.messages import Stats
from quire.scheduler.figures import PERIOD_S, Figures


def stats(**counts: int) -> Stats:
    names = ("token", "running", "waiting", "blocks", "blocks_used", "preemptions", "prefix_queries", "prefix_hits",
             "prompt_tokens", "generation_tokens", "steps", "bad_frames")  # fmt: skip
    return Stats(**dict.fromkeys(names, 0) | counts, replicas=[])


def test_figures_are_of_the_time_since_the_last_line() -> None:
    now, found = [5.0], [stats(prompt_tokens=100)]
    figures = Figures(lambda: found[0], lambda: now[0])
    assert figures.due == 5.0 + PERIOD_S
    now[0] += 20.0
    found[0] = stats(prompt_tokens=300, generation_tokens=50, running=3, waiting=2, blocks=8, blocks_used=2,
                     prefix_queries=200, prefix_hits=50)  # fmt: skip
    assert figures.line() == (
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 2.5 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    )
    assert figures.due == 25.0 + PERIOD_S
    now[0] += 10.0
    assert "generation throughput: 0.0 tokens/s, Running: 3" in str(figures.line())  # stuck, which is worth a line


def test_nothing_is_said_while_nothing_runs() -> None:
    now, found = [0.0], [stats(prompt_tokens=7, blocks=8, blocks_used=4)]
    figures = Figures(lambda: found[0], lambda: now[0])
    now[0] += PERIOD_S
    assert figures.line() is None
    found[0] = stats(prompt_tokens=8, blocks=0)  # came and went between two looks
    assert "KV cache usage: 0.0%, Prefix cache hit rate: 0.0%" in str(figures.line())
    assert figures.line() is None


@pytest.mark.parametrize("counts", [{"prompt_tokens": 1}, {"generation_tokens": 1}, {"running": 1}, {"waiting": 1}])
def test_one_thing_that_happens_is_worth_a_line(counts: dict[str, int]) -> None:
    now, found = [0.0], [stats()]
    figures = Figures(lambda: found[0], lambda: now[0])
    now[0] = figures.due
    assert figures.line() is None
    found[0] = stats(**counts)
    assert figures.line() is not None


def test_a_line_is_due_every_ten_seconds_and_may_come_late_or_early() -> None:
    now, found = [100.0], [stats()]
    figures = Figures(lambda: found[0], lambda: now[0])
    assert figures.due == 110.0
    now[0], found[0] = 100.5, stats(prompt_tokens=40, generation_tokens=10)
    assert str(figures.line()).startswith("Avg prompt throughput: 80.0 tokens/s, Avg generation throughput: 20.0 ")
    assert figures.due == 110.5
    found[0] = stats(prompt_tokens=41, generation_tokens=10)  # the clock has not moved on
    assert "prompt throughput: 1000.0 tokens/s" in str(figures.line())


def test_the_hit_rate_is_of_the_time_since_the_last_line() -> None:
    found = [stats(running=1, prefix_queries=1000, prefix_hits=900)]
    figures = Figures(lambda: found[0], lambda: 0.0)
    found[0] = stats(running=1, prefix_queries=1200, prefix_hits=950)
    assert str(figures.line()).endswith("Prefix cache hit rate: 25.0%")
    assert str(figures.line()).endswith("Prefix cache hit rate: 0.0%")
