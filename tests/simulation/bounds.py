"""What must stay within bounds although every answer is right: lines and keys as full as they may be, waits, drains,
processes that stand still, and work that is done again where nothing went wrong.

Each line is "rule | what", as those of ``checks.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from quire.client.supervisor.watch import SILENCE_S
from quire.scheduler.moves import PATIENCE_S

from .errors import LINKS, miscounted

LATE_S = 2.0
"""What is looked at once a second may come so much later."""
LEAVE_S = 5.0
"""A worker that is told to leave has loaded, or ended its step, within this time."""
MOST_ATTEMPTS = 3
"""As often one blow may have a request sent again: the loss of a process, a connection that breaks with it, and word of
what was lost that comes late."""
NOTICED_S = 5.0
"""The supervisor hears and looks often enough to find within this time that somebody has been silent too long."""


def over_limits(core: Any, shape: Any) -> list[str]:
    """More wait in the scheduler's line, or are open of one key, than may. Those sent again are never refused, and not
    counted."""
    most, tokens, of_key = shape.max_num_queued_reqs, shape.max_num_queued_tokens, shape.max_requests_per_key
    first = [request for request in core.requests.values() if not request.attempt]
    line = [request for request in first if not request.started]
    waiting = sum(request.prompt_len for request in line)
    keys = Counter(request.account for request in first if request.account)
    lines = []
    if len(line) > most:
        lines.append(f"line too long | expected at most {most} requests, got {len(line)}")
    if tokens is not None and len(line) > 1 and waiting > tokens:
        lines.append(f"line too long | expected at most {tokens} tokens, got {waiting}")
    if of_key is not None and max(keys.values(), default=0) > of_key:
        lines.append(f"key over its limit | expected at most {of_key} requests open of each, got {dict(keys)}")
    return lines


def without_cause(world: Any) -> list[str]:
    """Where nothing went wrong no request waits too long, and no worker's lease ends; where nothing did but with
    workers, no request is sent again: the scheduler has all that it needs to go on."""
    if any(blow[3][0] != "w" or blow[2] in LINKS for blow in world.blows):
        return []
    limit, lines = world.plan.shape.queue_timeout, []
    for consumer in world.consumers:
        request, name = consumer.request, consumer.ask.name
        if request is None:
            continue
        if request.attempt:
            lines.append(f"sent again | {name}: expected one attempt, got {1 + request.attempt}")
        if world.blows:
            continue
        waited = request.metrics.time_in_queue
        if limit is not None and waited is not None and waited > limit + LATE_S:
            lines.append(f"waited too long | {name}: expected 503 after {limit:g} s, and it ran after {waited:.2f}")
    lost = world.scheduler.membership.registry.lost if world.scheduler is not None and not world.blows else {}
    return lines + [f"lease ended | {worker}: expected nothing, and it {why}" for worker, why in lost.items()]


def counted_too_often(world: Any) -> list[str]:
    """Requests that were sent again more often, or that more losses count to, than what went wrong can explain: each
    blow that struck meanwhile has a request sent again ``MOST_ATTEMPTS`` times at most."""
    lines = []
    for consumer in world.consumers:
        name, attempt = consumer.ask.name, consumer.request.attempt if consumer.request is not None else 0
        most = MOST_ATTEMPTS * sum(blow[0] <= consumer.ended for blow in world.blows) if attempt else 0
        if attempt > most:
            lines.append(f"sent too often | {name}: expected at most {most} more attempts, got {attempt}")
        if (wrong := miscounted(consumer, world)) is not None:
            lines.append(f"losses miscounted | {name}: {wrong}")
    return lines


def late_to_leave(world: Any, place: str) -> list[str]:
    """A worker leaves now. Where it was asked to, and nothing else happened, that is not long after its time is up."""
    patience = {"drain": world.plan.shape.drain_timeout, "term": world.plan.shape.drain_timeout, "remove": 0.0}
    if world.plan.shape.moves:
        patience["remove"] = min(PATIENCE_S, world.plan.shape.drain_timeout)
    if any(blow[2] not in patience or blow[3] != place for blow in world.blows):
        return []
    until = max((blow[0] + patience[blow[2]] for blow in world.blows), default=world.timeline.now) + LEAVE_S
    late = world.timeline.now - until
    return (
        [f"drained too late | {place}: expected it to leave by {until:.2f} s, got {late:.2f} s more"]
        if late > 0
        else []
    )


def overlooked(world: Any, place: str, seconds: float) -> list[str]:
    """A process goes on that stood still for so long and was struck by nothing else: its supervisor, if that did not
    stand still itself, had to kill it before."""
    targets = Counter(fault.target for fault in world.plan.faults)
    if seconds < SILENCE_S + NOTICED_S or targets[place] > 1 or targets["v"]:
        return []
    return [f"not killed | {place}: expected its end after {SILENCE_S:g} s without a sign, got none in {seconds:g} s"]
