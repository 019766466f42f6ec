"""What is left of requests after the last of them has ended: nothing may be, in any process that runs."""

from __future__ import annotations

from typing import Any


def leftovers(world: Any) -> list[str]:
    """Lines of what processes still hold: requests, rows, blocks, steps, places in line, accounts, time limits."""
    found: list[tuple[str, Any]] = []
    scheduler = world.scheduler
    if scheduler is not None and scheduler.host.alive:
        found += _of_scheduler(scheduler.membership.core)
        if not any(what for _, what in found):
            scheduler.membership.core.check_integrity()
    for each in world.detokenizers:
        if each is not None and each.host.alive:
            core = each.core
            found += [(f"{each.name}: requests", list(core.requests)), (f"{each.name}: prompts", core.queued),
                      (f"{each.name}: bytes of prompts", core.queued_bytes)]  # fmt: skip
    for each in world.frontends:
        if each is not None and each.host.alive:
            found += _of_frontend(each.name, each.core)
    found += _unserved(world)
    return [f"left over | {what}: expected none, got {got}" for what, got in found if got]


def _of_scheduler(core: Any) -> list[tuple[str, Any]]:
    stats = core.stats()
    found: list[tuple[str, Any]] = [
        ("scheduler: requests", list(core.requests)), ("scheduler: running", stats.running),
        ("scheduler: waiting", stats.waiting), ("scheduler: line", len(core.queue)),
        ("scheduler: new in line", core.queue.fresh_requests), ("scheduler: new tokens", core.queue.fresh_tokens),
        ("scheduler: accounts", core.accounts._accounts), ("scheduler: deadlines", core._deadlines),
    ]  # fmt: skip
    for number, replica in core.replicas.items():
        held = [replica.running, len(replica.in_flight), replica.pool.used]
        found.append((f"scheduler: rows, steps, blocks of replica {number}", held if any(held) else 0))
        found.append((f"scheduler: held, reserved of replica {number}", [*replica.held, *replica.reserved]))
    return found


def _of_frontend(name: str, core: Any) -> list[tuple[str, Any]]:
    return [
        (f"{name}: requests", list(core.open)), (f"{name}: requests not accepted", list(core._unaccepted)),
        (f"{name}: bytes not accepted", core._unaccepted_bytes),
        (f"{name}: requests that wait", [request.uid for request in core._placement.waiting]),
        (f"{name}: requests at detokenizers", [uid for link in core.links.values() for uid in link.open]),
    ]  # fmt: skip


def _unserved(world: Any) -> list[tuple[str, Any]]:
    """Frontends that would refuse or hold what is asked now, although all that it needs is there."""
    scheduler = world.scheduler
    alive = scheduler is not None and scheduler.host.alive and scheduler.membership.registry.ready
    if not alive or not any(each.host.alive and each.host.serving for each in world.detokenizers):
        return []
    return [(f"{each.name}: hindrance", not each.core.ready) for each in world.frontends if each.host.alive]
