"""A gpu_worker as a simulated process: the fake worker, with steps that take their time and can go wrong."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from quire.proto import messages as m
from quire.scheduler.fake import fake_worker, page_store

from .host import Host
from .plan import WorkerShape
from .processes import WORKERS, Killed, Process

if TYPE_CHECKING:
    from .world import World

HUNG_S = 10.0
"""As in ``gpu_worker/link.py``: dismissed for so long with a step that still runs, the process ends."""


class Worker(Process):
    """``gpu_worker/worker.py`` and ``link.py`` in one: one message at a time, heartbeats meanwhile."""

    def __init__(self, world: World, host: Host, place: str, shape: WorkerShape):
        super().__init__(world, host, place)
        self.shape, self.hung, self.drained = shape, False, False
        self.trouble: deque[tuple[str, float]] = deque()  # of the next steps: a kind of faults.WORKER, its value
        plan = world.plan.shape
        self.fake = fake_worker.FakeWorker(
            shape.blocks, plan.max_model_len, world.vocab, pools=bool(plan.pools), whole=plan.whole,
            adapter_slots=plan.adapter_slots,
            drafts=shape.drafts, draft_rows=shape.draft_rows,
            slots=shape.slots, disk=world.disks.setdefault(place, {}) if shape.disk else None, rotten=shape.rotten,
        )  # fmt: skip
        world.sizes.add(shape.blocks)
        self._dealers: dict[str, Any] = {}
        if plan.moves:
            self.fake.endpoint, self.fake.role = f"ipc:///sim/{host.name}.pages", shape.role
            world.network.listen(
                host, self.fake.endpoint, m.BetweenWorkers, lambda peer, pages: self._pages(pages), lambda event: None
            )
        self._sessions = 0
        self.core = fake_worker.FakeWorkerCore(self.fake, self._new_identity)
        self.identity = ""
        self._wire: Any = None
        self._inbox: deque[Any] = deque()
        self.load_hangs = False  # what it is told to load for the next lease, which is not its first
        self._leases = 0
        self._busy = self._dismissed = self._served = False
        self._doubled: m.StepResult | None = None
        self.later(shape.load / 2, shape.load, self._start)

    def _new_identity(self) -> str:
        self._sessions += not (self._sessions and self.shape.keeps_name)
        return f"gpu_worker-{self.name}.{self._sessions}"

    def _start(self) -> None:
        self.core.start()
        self._flush()
        self.host.every(fake_worker.HEARTBEAT_S, self._heartbeat)

    @property
    def may_hang(self) -> bool:
        """A fault waits for its next step or load: one that was stopped may come to it long after the faults stop."""
        return self.load_hangs or any(kind == "step_hangs" for kind, _ in self.trouble)

    def _heartbeat(self) -> None:
        self.core.heartbeat()
        self._flush()

    # -- what comes

    def _received(self, session: str, message: Any) -> None:
        if session != self.identity or (self._dismissed and isinstance(message, m.Bye)):
            return
        if isinstance(message, m.Heartbeat) or (isinstance(message, m.Bye) and message.again):
            self.core.received(message)  # the thread of its link takes these at once
            self._flush()
            return
        if isinstance(message, m.Bye):
            self._dismissed = True
            self.host.after(HUNG_S, self._give_up, session)
        self._inbox.append(message)
        self._next()

    def _pages(self, pages: m.Pages) -> None:
        self._inbox.append(pages)
        self._next()

    def _give(self, what: fake_worker.SendPages) -> None:
        dealer = self._dealers.get(what.endpoint)
        if dealer is None:
            dealer = self._dealers[what.endpoint] = self.world.network.dial(
                self.host, what.endpoint, m.BetweenWorkers, f"{self.name}-to-{len(self._dealers)}",
                lambda message: None, lambda event: None,
            )  # fmt: skip
        dealer.send(what.pages)

    def _event(self, session: str, event: str) -> None:
        if event == "disconnected" and session == self.identity:
            self.core.disconnected()
            self._flush()

    def _give_up(self, session: str) -> None:
        if session == self.identity and self._busy:
            self.host.end(1)

    def _next(self) -> None:
        if self._busy or not self._inbox:
            return
        self._busy = True
        message, low, high = self._inbox.popleft(), 0.0, 0.0
        late = 0.0
        if isinstance(message, m.StepPlan):
            low, high = self.shape.step_low, self.shape.step_high
            if self.trouble and self.trouble[0][0] in ("step_hangs", "step_late"):
                kind, late = self.trouble.popleft()
                if kind == "step_hangs":
                    self.hung = True
                    self.world.blow(kind, self.place)
                    return
                self.world.blow(kind, self.place, late)
        elif isinstance(message, m.Assign | m.Configure):
            self._leases += isinstance(message, m.Assign)
            if self.load_hangs and self._leases > 1 and (isinstance(message, m.Configure) or self._draw() < 0.5):
                self.hung = True
                self.world.blow("load_hangs", self.place)
                return
            low, high = self.shape.load / 8, self.shape.load / 4
        self.later(low + late, high + late, self._run, self.identity, message)

    def _run(self, session: str, message: Any) -> None:
        self._busy = False
        if session == self.identity:
            if isinstance(message, m.StepPlan):
                self._before(message)
            if isinstance(message, m.Move) and message.load_blocks:  # beside the steps that follow
                self.later(0.0, 3 * self.shape.step_high, self._loaded, session, message)
                self._next()
                return
            self.core.received(message)
            self._flush()
        self._next()

    def _loaded(self, session: str, message: m.Move) -> None:
        if session == self.identity:
            self.core.received(message)
            self._flush()

    def _before(self, plan: m.StepPlan) -> None:
        """Poison, and what the next step's trouble is."""
        poisoned = self.world.poisoned
        if poisoned and any(poisoned.get(admit.uid) == "worker" for admit in plan.admits):
            raise Killed
        if not self.trouble or (store := self.fake.store) is None:
            return
        kind, _ = self.trouble.popleft()
        if kind == "step_fails":
            self.world.blow(kind, self.place, 0.0)
            store.run = _fails  # type: ignore[method-assign]
        elif kind == "slot_fails":
            uids = [*(admit.uid for admit in plan.admits), *(row.admit.uid for row in store.rows.values())]
            if uids:
                store.failing.add(uids[0])
                self.world.poisoned.setdefault(uids[0], "slot")
        elif kind == "answers_twice":
            self.world.blow(kind, self.place)
            self._doubled = m.StepResult(plan.lease, plan.step, b"")

    # -- what goes out

    def _flush(self) -> None:
        for what in self.core.take():
            if isinstance(what, fake_worker.Connect):
                self._connect(what.identity)
            elif isinstance(what, fake_worker.Leave):
                # The fake worker does not tell one that served before from one that was never let in.
                self.host.end(1 if what.code == 78 and self._served else what.code)
                return
            elif isinstance(what, m.AdapterReady):  # it is read beside the steps
                self.later(0.0, self.shape.load, self._adapter_ready, self.identity, what)
            elif isinstance(what, fake_worker.SendPages):
                self._give(what)
            elif self._wire is not None:
                self._send(what)

    def _adapter_ready(self, session: str, message: m.AdapterReady) -> None:
        if session == self.identity and self._wire is not None:
            self._send(message)

    def _connect(self, identity: str) -> None:
        if self._wire is not None:
            self._wire.close()
        self.identity, self._dismissed = identity, False
        self._inbox.clear()
        self._wire = self.world.network.dial(
            self.host, WORKERS, m.FromSchedulerWorkers, identity,
            lambda message: self._received(identity, message), lambda event: self._event(identity, event),
        )  # fmt: skip

    def _send(self, message: Any) -> None:
        if isinstance(message, m.Ready):
            self._served = True
            self.serves()
        if isinstance(message, m.StepFailed) and _INJECTED not in message.error:
            self.world.fail(f"no worker can run the plan | {self.name}: {message.error}")
        self._wire.send(message)
        if isinstance(message, m.StepResult) and self._doubled is not None:
            self._doubled = None
            self._wire.send(message)

    def terminate(self) -> None:
        """Asked to end: it drains first."""
        if self.asked_to_end:
            self.host.end(0)
            return
        self.asked_to_end = True
        self.core.drain()
        self._flush()


_INJECTED = "the device is lost"


def _fails(plan: m.StepPlan) -> m.StepResult:
    """In place of ``PageStore.run``."""
    raise page_store.PlanError(_INJECTED)
