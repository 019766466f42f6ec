"""The line of figures in the log: every ten seconds in which requests ran, as users of vLLM look for it. No IO."""

from __future__ import annotations

from collections.abc import Callable

from ..proto.messages import Stats

PERIOD_S = 10.0


class Figures:
    """Looks at the counters once in ``PERIOD_S``; ``due`` is when to look again, by the clock that it is given."""

    def __init__(self, stats: Callable[[], Stats], clock: Callable[[], float]):
        self._stats, self._clock = stats, clock
        self._then, self._before = clock(), stats()
        self.due = self._then + PERIOD_S

    def line(self) -> str | None:
        """What happened since the last look; None where nothing did."""
        now, stats = self._clock(), self._stats()
        then, before = self._then, self._before
        self._then, self._before, self.due = now, stats, now + PERIOD_S
        prompt = stats.prompt_tokens - before.prompt_tokens
        generation = stats.generation_tokens - before.generation_tokens
        if not (prompt or generation or stats.running or stats.waiting):
            return None
        seconds = max(now - then, 1e-3)
        queries, hits = stats.prefix_queries - before.prefix_queries, stats.prefix_hits - before.prefix_hits
        return (
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generation / seconds:.1f} tokens/s, "
            f"Running: {stats.running} reqs, Waiting: {stats.waiting} reqs, "
            f"KV cache usage: {100 * stats.blocks_used / max(stats.blocks, 1):.1f}%, "
            f"Prefix cache hit rate: {100 * hits / max(queries, 1):.1f}%"
        )
