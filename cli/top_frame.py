"""What ``quire top`` shows: one frame, made of two readings of a server's figures, by rich."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..proto.log_lines import printable
from .figures import Reading, percentiles, rate, share, smallest

KEPT = 60
"""Readings that the lines of bars go back."""
WINDOW_S = 30.0
"""How far back shares and percentiles look."""
BARS = " ▁▂▃▄▅▆▇█"
TIMES = (
    ("time to first token", "time_to_first_token_seconds"),
    ("between tokens", "inter_token_latency_seconds"),
    ("whole request", "e2e_request_latency_seconds"),
    ("in the queue", "request_queue_time_seconds"),
)
SHARES = (0.5, 0.9, 0.99)


@dataclass
class View:
    """What is known of a server. ``workers``: a dict each, as ``/server_info`` tells them; None where it tells none,
    and then ``hint`` says why, and ``again`` when
    to ask again (of ``time.monotonic``). ``trouble``: why the last reading failed."""

    url: str
    readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=KEPT + 1))
    workers: list[dict[str, Any]] | None = None
    hint: str = ""
    again: float = 0.0
    health: str = ""
    trouble: str = ""

    def window(self) -> tuple[Reading, Reading]:
        """The newest reading, and the oldest that is not over WINDOW_S older, or the one before it."""
        *before, new = self.readings
        near = (old for old in before if new.at - old.at <= WINDOW_S)
        return next(near, before[-1] if before else new), new

    def rates(self, name: str) -> list[float]:
        """A counter's growth a second between each two readings."""
        return [rate(name, old, new) or 0.0 for old, new in itertools.pairwise(self.readings)]


def frame(view: View) -> Group:
    """The whole of it."""
    new = view.readings[-1]
    head = Text.assemble(
        ("quire top", "bold"), "  ", (view.url, "cyan"), "  ", printable(new.label("kv_cache_usage_perc", "model_name"))
    )
    head.append(f"  {view.health}", "green" if view.health == "ready" else "yellow")
    parts: list[Any] = [head]
    if view.trouble:
        parts.append(Text(view.trouble, "red"))
    return Group(*parts, Text(), _counts(view), Text(), _times(view), Text(), _workers(view))


def _counts(view: View) -> Table:
    """Requests, tokens, cache."""
    old, new = view.window()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    reasons = {name: count for name, count in new.by("num_requests_waiting_by_reason", "reason").items() if count}
    why = f" ({', '.join(f'{name} {count:.0f}' for name, count in reasons.items())})" if reasons else ""
    ended = new.by("request_success_total", "finished_reason")
    ways = ", ".join(f"{name} {count:,.0f}" for name, count in ended.items() if count)
    running, waiting = _number(new.total("num_requests_running")), _number(new.total("num_requests_waiting"))
    table.add_row("requests", f"{running} running, {waiting} waiting{why}; {sum(ended.values()):,.0f} ended")
    if ways:
        table.add_row("", f"{ways}; {_number(new.total('num_preemptions_total'))} preemptions")
    for label, name in (("tokens/s out", "generation_tokens_total"), ("tokens/s in", "prompt_tokens_total")):
        rates = view.rates(name)
        table.add_row(label, Text.assemble(f"{rates[-1] if rates else 0:>9,.1f}  ", (bars(rates), "green")))
    used = new.total("kv_cache_usage_perc")
    blocks = new.total("kv_blocks")
    told = f", {_number(new.total('kv_blocks_in_use'))} of {blocks:,.0f} blocks" if blocks else ""
    table.add_row("KV cache", Text.assemble((gauge(used), _colour(used)), f" {_percent(used)} in use{told}"))
    found = share("prefix_cache_hits_total", "prefix_cache_queries_total", old, new)
    table.add_row("prefix cache", f"{_percent(found)} of prompt tokens found{_last(old, new)}")
    if new.total("spec_decode_num_draft_tokens_total") is not None:
        kept = share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total", old, new)
        table.add_row("speculation", f"{_percent(kept)} of drafted tokens kept{_last(old, new)}")
    return table


def _times(view: View) -> Table:
    """Percentiles of latencies."""
    old, new = view.window()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"latency{_last(old, new)}", style="dim", no_wrap=True)
    for portion in SHARES:
        table.add_column(f"p{100 * portion:.0f}", justify="right", min_width=8)
    for label, name in TIMES:
        found = percentiles(name, old, new, SHARES)
        least = smallest(name, new)
        table.add_row(label, *(["-"] * len(SHARES) if found is None else (_within(each, least) for each in found)))
    return table


def _workers(view: View) -> Table | Text:
    if view.workers is None:
        return Text(f"workers: {view.hint}", "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("replica", "phase", "running", "KV blocks", "memory", "step", "device"):
        table.add_column(name, justify="right" if name in ("running", "KV blocks", "memory", "step") else "left")
    for worker in view.workers:
        state, blocks = str(worker["state"]), worker["blocks"]
        memory = f"{worker['memory'] / 2**30:.2f} GiB" if worker.get("memory") else "-"
        table.add_row(
            str(worker["replica"]), Text(state, "green" if state == "ready" else "yellow"), f"{worker['running']}",
            f"{worker['blocks_used']:,}/{blocks:,}" if blocks else "-", memory, f"{worker['last_step']:,}",
            Text(printable(str(worker["device"]))),
        )  # fmt: skip
    return table


def _within(seconds: float, least: float) -> str:
    """A percentile. Within the first bucket all that is known of it is that it is less: half of 100 ms may be none."""
    return f"<{duration(least)}" if seconds < least else duration(seconds)


def bars(values: Sequence[float]) -> str:
    """A line of bars, the highest a full one."""
    top = max(values, default=0.0)
    return "".join(BARS[1 + round((len(BARS) - 2) * each / top)] if each > 0 else "▁" for each in values)


def gauge(share: float | None, width: int = 30) -> str:
    """A share as a bar."""
    full = round(width * min(1.0, max(0.0, share or 0.0)))
    return "█" * full + "░" * (width - full)


def duration(seconds: float) -> str:
    """As few digits as say something."""
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f} ms"
    return f"{seconds:.{2 if seconds < 10 else 0}f} s"


def _colour(share: float | None) -> str:
    return "red" if share and share > 0.95 else "yellow" if share and share > 0.8 else "green"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _last(old: Reading, new: Reading) -> str:
    return f", last {new.at - old.at:.0f} s"
