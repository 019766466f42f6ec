"""The line of figures every ten seconds in which requests run."""

from __future__ import annotations

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
