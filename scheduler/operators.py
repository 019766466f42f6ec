"""What operators ask of the workers: list, drain, remove. A room above the registry. No IO."""

from __future__ import annotations

import math

from ..proto.messages import Manage, Managed, WorkerInfo
from .placement import can_ever_hold
from .worker import Worker, count
from .worker_phase import GOING, Phase
from .worker_registry import WorkerRegistry

FORCED = "force-"
"""Before drain and remove: also the last worker, whatever waits for it."""
LEAST_NAME = 4
"""What is shorter is a replica's number, and of one that has left, it must not be taken for the beginning of a name."""


def manage(registry: WorkerRegistry, message: Manage) -> Managed:
    """Do what an operator asks for. A list that names a worker also says whether it was lost."""
    error, action = "", message.action.removeprefix(FORCED)
    if action in ("drain", "remove"):
        try:
            peer = _find(registry, message.worker)
            if message.action == action:
                _check_spare(registry, peer)
            patience = message.timeout if 0 <= message.timeout < math.inf else registry.config.drain_timeout
            if action == "remove":
                patience = registry.moves.patience(registry.workers[peer].replica)
            registry.workers[peer].dismiss()
            registry.drain(peer, f"an operator's {action}", patience)
        except LookupError as no:
            error = str(no)
    elif message.action == "list":
        if why := registry.lost.get(message.worker):
            error = f"{message.worker} did not leave: it {why}. One started in its place serves: drain that."
    else:
        error = f"unknown action {message.action!r}; it must be list, drain or remove."
    return Managed(message.token, [info_of(peer, worker) for peer, worker in registry.workers.items()], error)


def _check_spare(registry: WorkerRegistry, peer: str) -> None:
    """Raises LookupError where open requests would be left that no other worker could run, as far as is known."""
    worker, requests = registry.workers[peer], registry.core.requests.values()
    others = [each for each in registry.workers.values() if each is not worker and each.phase not in GOING]
    if worker.phase in GOING or any(each.replica is None for each in others):  # it leaves; what loads may hold anything
        return
    held = [each.replica for each in others if each.replica is not None]
    left = sum(any(not any(can_ever_hold(replica, seq) for replica in held) for seq in r.live) for r in requests)
    if left:
        raise LookupError(
            f"replica {worker.lease.replica} is the last worker that could run {left} of the {len(requests)} open "
            "requests; start another first, or add --force to have them fail where none comes in time."
        )


def _find(registry: WorkerRegistry, name: str) -> str:
    """The worker of a replica's number, an incarnation, or a beginning of one. Raises LookupError."""
    workers, found = registry.workers, []
    for peer, worker in workers.items():
        if name in (peer, _short(peer), str(worker.lease.replica)):
            return peer
    if len(name) >= LEAST_NAME:
        found = [peer for peer in workers if peer.startswith(name) or _short(peer).startswith(name)]
    if len(found) == 1:
        return found[0]
    many = f"{len(found)} workers begin with {name!r}" if found else f"no worker {name!r} is here"
    names = ", ".join(f"{w.lease.replica} ({_short(peer)[:8]})" for peer, w in workers.items())
    raise LookupError(f"{many}; name one of: {names}." if names else f"{many}: there are no workers.")


def _short(peer: str) -> str:
    return peer.rpartition("-")[2]


def info_of(peer: str, worker: Worker) -> WorkerInfo:
    """What operators are told of a worker."""
    state = (Phase.DRAINING if worker.phase in GOING else worker.phase).value
    replica, pid = worker.replica, count(worker.hello.pid)
    blocks = (replica.pool.num_blocks, replica.pool.used, replica.last_step) if replica is not None else (0, 0, 0)
    return WorkerInfo(peer, worker.lease.replica, state, worker.hello.device, pid, worker.running(), *blocks)
