"""What can go wrong, and what operators do: each fault of a plan strikes by its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.proto import messages as m

from . import bounds
from .host import Host
from .plan import WORKER, Fault
from .processes import FRONT

if TYPE_CHECKING:
    from .world import World

DEATHS = (
    "kill",
    "term",
    "vanish",
    "drain",
    "remove",
    "shrinks",
    "ends",
    "hang",
    "stop",
    "step_hangs",
    "load_hangs",
    "answers_twice",
    "poison",
)
"""Kinds whose effect lasts until another process serves in that place, or the same again."""

EVENT_OF = {
    b"StepPlan": "plan", b"SpeculativePlan": "plan", b"StepResult": "result", b"SpeculativeResult": "result",
    b"Submit": "submit", b"Tokenize": "tokenize",
    b"Accepted": "accepted", b"TextBatch": "text", b"Hello": "hello", b"Ready": "ready", b"Unknown": "unknown",
    b"Reconcile": "reconcile", b"Abort": "abort",
    b"Manage": "manage", b"Drain": "drain", b"Assign": "assign", b"Configure": "configure",
    b"Rest": "rest", b"Rested": "rested",
    b"TokenBatch": "tokens", b"BeamTokens": "beams", b"Quarantined": "quarantined",
}  # fmt: skip
"""The tags of messages that faults may wait for: those of ``plan.EVENTS``, and those that scenes know."""


def strike(world: World, fault: Fault) -> None:
    """Have it happen now. One whose target is not there, or not alive, does nothing."""
    if fault.kind in _LINKS:
        _link(world, fault)
    elif fault.target == "v":
        _stop(world, fault, world.supervisor)
    elif fault.kind == "join":
        _join(world, fault)
    else:
        process = world.processes.get(fault.target)
        if process is not None and process.host.alive:
            world.say(f"! {fault.kind} {process.name}")
            _KINDS[fault.kind](world, fault, process)


# -- processes


def _kill(world: World, fault: Fault, process: Any) -> None:
    world.blow("kill", fault.target)
    process.host.end(-9)


def _vanish(world: World, fault: Fault, process: Any) -> None:
    world.blow("vanish", fault.target)
    world.network.vanish(process.host)


def _term(world: World, fault: Fault, process: Any) -> None:
    world.blow("term", fault.target)
    process.host.do(process.terminate)


def _stop(world: World, fault: Fault, process: Any) -> None:
    blow = world.blow(fault.kind, fault.target, fault.seconds)
    host: Host = process.host
    host.stop() if fault.kind == "stop" else host.hang()
    world.timeline.after(fault.seconds, _go_on, world, host, blow)


def _go_on(world: World, host: Host, blow: list[Any]) -> None:
    if host.alive and host.stopped:
        world.say(f"! {host.name} goes on")
        host.go_on()
        for line in bounds.overlooked(world, blow[3], world.timeline.now - blow[0]) if host.serving else ():
            world.fail(line)


def _clock(world: World, fault: Fault, process: Any) -> None:
    """The clock of its machine is set; the next scheduler there begins with what it says."""
    world.wall_offsets[fault.target] = process.host.wall_offset + fault.value
    process.host.wall_offset += fault.value
    if fault.target == "s":
        _kill(world, fault, process)


# -- workers


def _trouble(world: World, fault: Fault, process: Any) -> None:
    """Of its next step, whenever that comes."""
    process.trouble.append((fault.kind, fault.value))


def _load_hangs(world: World, fault: Fault, process: Any) -> None:
    """Of the next lease that it loads for, whenever that comes."""
    process.load_hangs = True


def _shrinks(world: World, fault: Fault, process: Any) -> None:
    """It dies, and its next process has less memory."""
    shape = world.shapes[fault.target]
    world.shapes[fault.target] = type(shape)(
        max(1, int(shape.blocks * fault.value)), shape.step_low, shape.step_high, shape.load, shape.keeps_name
    )
    _kill(world, fault, process)


# -- users


def _leaves(world: World, fault: Fault, process: Any) -> None:
    """All clients of a frontend leave."""
    process.host.do(process.leave)


# -- operators


def _manage(world: World, fault: Fault, process: Any) -> None:
    """An operator comes, says what is to become of a worker, and goes."""
    process.drained = True
    world.blow(fault.kind, fault.target)
    name = f"operator-{fault.name}"
    host = Host(world.timeline, "operator", name, machine=name)
    wire = world.network.dial(host, FRONT, m.FromSchedulerFront, name, lambda message: None, lambda event: None)
    wire.send(m.Hello("operator", name, m.PROTOCOL, 1))
    wire.send(m.Manage(1, f"force-{fault.kind}", process.identity))
    host.after(2.0, host.end, 0)


def _sleep(world: World, fault: Fault, process: Any) -> None:
    """An administrator has the workers sleep for a while."""
    world.blow("sleep", fault.target, fault.seconds)
    tell(world, fault.name, m.Sleep(1, "sleep", int(fault.value), "keep"))
    world.timeline.after(fault.seconds, wake, world, fault.name)


def wake(world: World, name: str) -> None:
    """They are to serve again."""
    world.say("! an administrator wakes the workers")
    tell(world, f"{name}-over", m.Sleep(2, "wake_up"))


def tell(world: World, name: str, message: Any) -> None:
    """Somebody comes, says one thing, and goes."""
    world.tellers += 1
    name = f"{name}-{world.tellers}"
    host = Host(world.timeline, "operator", name, machine=name)
    wire = world.network.dial(host, FRONT, m.FromSchedulerFront, name, lambda message: None, lambda event: None)
    wire.send(m.Hello("operator", name, m.PROTOCOL, 1))
    wire.send(message)
    host.after(2.0, host.end, 0)


def _join(world: World, fault: Fault) -> None:
    """A process that no supervisor here has started."""
    world.say(f"! {fault.target} joins")
    world.join(fault.target)


# -- links


def _link(world: World, fault: Fault) -> None:
    a, b, net = fault.target, fault.other, world.network
    world.say(f"! {fault.kind} {a} {b}")
    world.links.add((a, b))
    lasts = 0.0 if fault.kind == "reset" else fault.seconds
    for place in (a, b):
        world.blow(fault.kind, place, lasts)
    if fault.kind == "slow":
        net.slow(a, b, fault.value)
    else:
        _LINKS[fault.kind](net, a, b)
    if lasts:
        world.timeline.after(lasts, net.heal, a, b)


_LINKS: dict[str, Callable[[Any, str, str], None]] = {
    "cut": lambda net, a, b: net.cut(a, b),
    "one_way": lambda net, a, b: net.cut_one_way(a, b),
    "stall": lambda net, a, b: net.stall(a, b),
    "reset": lambda net, a, b: net.reset(a, b),
    "slow": lambda net, a, b: None,
}
_KINDS: dict[str, Callable[[World, Fault, Any], None]] = {
    "kill": _kill, "vanish": _vanish, "term": _term, "stop": _stop, "hang": _stop, "clock": _clock,
    "shrinks": _shrinks, "load_hangs": _load_hangs, "leaves": _leaves, "drain": _manage, "remove": _manage,
    "sleep": _sleep,
    **{kind: _trouble for kind in WORKER if kind != "shrinks"},
}  # fmt: skip
