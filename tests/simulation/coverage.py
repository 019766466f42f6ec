"""What histories reach: transitions of the product's state machines, and faults by the phase in which they strike.

``watched`` looks on from outside while a history runs: it stands before methods of the product, which know nothing of
it. A mark is (machine, phase before, event, phase after), or ("fault", its kind, what it strikes and in which phase).
``tables.py`` lists those that there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from quire.client.core import EngineCore
from quire.client.placement import Link
from quire.client.request import OpenRequest
from quire.client.supervisor.place import Place, State
from quire.detokenizer.core import DetokenizerCore
from quire.detokenizer.request import Request
from quire.detokenizer.step import Step
from quire.scheduler.beam_group import BeamGroup
from quire.scheduler.books import Books
from quire.scheduler.core import Scheduler
from quire.scheduler.membership import Membership
from quire.scheduler.request import Sequence
from quire.scheduler.worker_phase import Event
from quire.scheduler.worker_registry import Worker, WorkerRegistry

from .phases import phases_of
from .plan import Fault
from .world import World

Mark = tuple[str, ...]
Marks = Counter[Mark]
Old = Callable[..., Any]


class Watch:
    """Stands before methods, and counts."""

    def __init__(self, stack: ExitStack):
        self.marks: Marks = Counter()
        self._stack = stack
        self.causes: list[str] = []  # of what happens now, the innermost last

    def before(self, cls: type, name: str, look: Callable[..., Mark | None]) -> None:
        """Count what ``look`` returns, given the method's arguments, and then do as it does."""

        def make(old: Old) -> Old:
            def looked(*arguments: Any, **more: Any) -> Any:
                if (mark := look(*arguments, **more)) is not None:
                    self.marks[mark] += 1
                return old(*arguments, **more)

            return looked

        self.replace(cls, name, make)

    def cause(self, cls: type, causes: dict[str, str]) -> None:
        """Remember, while one of these methods runs, that it is the cause of what happens."""
        for name, cause in causes.items():
            self.replace(cls, name, lambda old, cause=cause: self._causing(old, cause))

    def _causing(self, old: Old, cause: str) -> Old:
        def caused(*arguments: Any, **more: Any) -> Any:
            self.causes.append(cause)
            try:
                return old(*arguments, **more)
            finally:
                self.causes.pop()

        return caused

    def why(self, otherwise: str) -> str:
        """The innermost cause."""
        return self.causes[-1] if self.causes else otherwise

    def replace(self, cls: type, name: str, make: Callable[[Old], Old]) -> None:
        """Have the method be what ``make`` makes of it, until the end."""
        old = cls.__dict__[name]
        setattr(cls, name, wraps(old)(make(old)))
        self._stack.callback(setattr, cls, name, old)


@contextmanager
def watched() -> Iterator[Marks]:
    """Count what is reached meanwhile."""
    with ExitStack() as stack:
        watch = Watch(stack)
        for machine in (_worker, _sequence, _request, _link, _text, _process, _fault):
            machine(watch)
        yield watch.marks


# -- a worker, as the scheduler sees it


def _worker(watch: Watch) -> None:
    def follow(old: Old) -> Old:
        def followed(self: Worker, event: Event, now: float) -> bool:
            before = self.phase.value
            known: bool = old(self, event, now)
            watch.marks["worker", before, event.value, self.phase.value if known else "not in the table"] += 1
            return known

        return followed

    def gone(self: WorkerRegistry, peer: str, why: str, blame: bool = True, unsent: int = 0) -> Mark | None:
        worker = self.workers.get(peer)
        return ("worker", worker.phase.value, end_of(why), "over") if worker is not None else None

    watch.replace(Worker, "follow", follow)
    watch.before(WorkerRegistry, "gone", gone)


ENDS = {
    "left": "Bye", "said Hello": "second Hello", "failed in step": "StepFailed", "is gone": "connection broken",
    "was silent": "silence", "did not end": "hung step", "it was": "hung while it loads",
}  # fmt: skip
"""How a lease ends, by what the registry says of it."""


def end_of(why: str) -> str:
    """The kind of a lease's end."""
    return next((kind for said, kind in ENDS.items() if said in why), "breach of the protocol")


# -- a sequence, as the scheduler has it


def _sequence(watch: Watch) -> None:
    watch.cause(Books, {
        "preempt": "preempted", "end_lease": "lease ended", "end": "finished", "answer": "answered", "fail": "failed",
        "take_over": "moved",
        "forget_owner": "owner forgotten", "_drop_unanswered": "answer lost",
    })  # fmt: skip
    watch.cause(WorkerRegistry, {"_let_go": "drained"})
    watch.cause(Membership, {"undelivered": "undelivered"})
    watch.cause(
        Scheduler,
        {"abort": "aborted", "stopped": "stop string", "open": "not believed in", "submit": "replaced"},
    )

    def moves(event: str, after: str) -> Callable[..., Mark]:
        return lambda seq, *_: (kind_of(seq), state_of(seq), event or watch.why("?"), after)

    watch.before(Sequence, "start", moves("given a row", "prefill"))
    watch.before(Sequence, "fork", moves("forked", "decode"))
    watch.before(Sequence, "begin_decoding", moves("prompt scheduled", "decode"))
    watch.before(BeamGroup, "begin_decoding", moves("prompt scheduled", "decode"))
    watch.before(Sequence, "requeue", moves("", "waiting"))
    watch.before(Sequence, "finish", moves("", "over"))


def kind_of(seq: Sequence) -> str:
    """Which of the machines it is."""
    return "beam search" if isinstance(seq, BeamGroup) else "pooling" if seq.request.pools else "sequence"


def state_of(seq: Sequence) -> str:
    """Where a sequence is: waiting, prefill or decode."""
    return "waiting" if seq.row < 0 else "prefill" if seq.prefilling else "decode"


# -- a request, as its client has it


def _request(watch: Watch) -> None:
    """What is marked is how a request goes from where it was marked last to where it is now."""
    watch.cause(EngineCore, {"abort": "aborted"})
    seen: WeakKeyDictionary[OpenRequest, str] = WeakKeyDictionary()

    def event(name: str) -> Callable[[Old], Old]:
        def make(old: Old) -> Old:
            def happen(*arguments: Any) -> Any:
                request = next(each for each in arguments if isinstance(each, OpenRequest))
                done, found = request.done, old(*arguments)
                if not done:
                    now = where_is(request)
                    watch.marks["request", seen.get(request, "new"), _how(watch, name, request, arguments), now] += 1
                    seen[request] = now
                return found

            return happen

        return make

    for method, name in (("accept", "accepted"), ("start", "started"), ("lost", "lost"), ("end", "ended")):
        watch.replace(OpenRequest, method, event(name))
    watch.replace(Link, "add", event("placed"))


def _how(watch: Watch, name: str, request: OpenRequest, arguments: tuple[Any, ...]) -> str:
    if name == "lost":
        return "lost, counted" if arguments[1] else "lost, not counted"
    if name == "ended":
        if request.error is not None:
            return "refused" if request.error.status < 500 else "failed"
        return watch.why("finished")
    return name


def where_is(request: OpenRequest) -> str:
    """Where a request is: it waits for a detokenizer, was sent, is accepted, runs, is over."""
    if request.done:
        return "over"
    if request.link is None:
        where = "waits" if request.accepted is None else "waits again"
    else:
        where = "sent" if request.accepted is None else "runs" if request.started else "accepted"
    return f"{where}, in quarantine" if request.in_quarantine else where


# -- a client's connection to a detokenizer


def _link(watch: Watch) -> None:
    def connect(self: EngineCore, peer: Any, silent: bool = False) -> Mark:
        return ("link", "none", "after silence" if silent else "listed", "waits to hear" if silent else "connecting")

    def use(self: EngineCore, link: Link) -> Mark:
        return ("link", _state(link), "heard" if link.silent else "connected", "ready")

    def lose(self: EngineCore, link: Link, left: bool = False, silent: bool = False) -> Mark:
        return ("link", _state(link), "it left" if left else "silence" if silent else "lost", "over")

    def unreachable(self: EngineCore, peer: str, error: Exception) -> Mark | None:
        link = self.links.get(peer)
        return ("link", _state(link), "unreachable", _state(link)) if link is not None else None

    for name, look in (("_connect", connect), ("_use", use), ("_lose", lose), ("unreachable", unreachable)):
        watch.before(EngineCore, name, look)


def _state(link: Link) -> str:
    return "ready" if link.ready else "waits to hear" if link.silent else "connecting"


# -- a request, as its detokenizer has it


def _text(watch: Watch) -> None:
    watch.cause(DetokenizerCore, {
        "_compare": "not listed", "_lose_engine": "its Engine is lost", "_tokenize": "replaced",
        "_beams": "out of step", "_tokens": "tokens missing", "_begin_alone": "let begin", "_settle": "", "_peers": "",
    })  # fmt: skip

    def state(core: DetokenizerCore, request: Request) -> str:
        if request.submitted:
            return "submitted"
        if any(request is other for other, _ in core._line):
            return "waits"
        return "asks to begin" if request is core._alone and core._asked is not None else "preparing"

    def dropped(self: DetokenizerCore, request: Request) -> Mark:
        return ("text", state(self, request), watch.why("aborted"), "over")

    def received(self: DetokenizerCore, message: Any) -> Mark | None:
        name = type(message).__name__
        request = self.requests.get(message.uid) if name in ("Failed", "Pooled") else None
        if request is None or request.attempt != message.attempt:
            return None
        return ("text", state(self, request), name, "over")

    def gone(old: Old) -> Old:
        def unknown(self: DetokenizerCore, message: Any) -> None:
            before = len(self.requests)
            old(self, message)
            watch.marks["text", "submitted", "Unknown", "over"] += before - len(self.requests)

        return unknown

    def prepared(self: DetokenizerCore, request: Request, message: Any) -> Mark:
        before = {"replaced": "new", "let begin": "asks to begin"}.get(watch.why(""), "waits")
        return ("text", before, "prepared", "preparing")

    def ended(self: Step, request: Request, index: int, by_string: bool) -> Mark:
        after = "over" if len(request.sequences) == 1 else "submitted"
        return ("text", "submitted", "stop string" if by_string else "finished", after)

    watch.before(DetokenizerCore, "_drop", dropped)
    watch.before(DetokenizerCore, "_prepare", prepared)

    def submit(old: Old) -> Old:
        def submitted(self: DetokenizerCore, request: Request, message: Any, prepared: Any) -> None:
            old(self, request, message, prepared)
            watch.marks["text", "preparing", "accepted", "submitted" if request.submitted else "over"] += 1

        return submitted

    watch.replace(DetokenizerCore, "_submit", submit)
    watch.before(DetokenizerCore, "_refuse", lambda *_: ("text", "preparing", "refused", "over"))
    watch.before(DetokenizerCore, "_on_scheduler", received)
    watch.replace(DetokenizerCore, "_gone", gone)
    watch.before(Step, "_ended", ended)


# -- a process, as its supervisor has it


def _process(watch: Watch) -> None:
    def become(self: Place[Any], state: State) -> Mark:
        return ("process", self.state.value, self.service, state.value)

    watch.before(Place, "become", become)


# -- faults


def _fault(watch: Watch) -> None:
    def strike(old: Old) -> Old:
        def struck(self: World, fault: Fault) -> None:
            for phase in phases_of(self, fault) if fault.kind != "join" else ():
                watch.marks["fault", fault.kind, phase] += 1
            old(self, fault)

        return struck

    watch.replace(World, "strike", strike)
