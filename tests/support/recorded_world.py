"""The world of ``scheduler_members`` with a flight recorder between: all that happens there comes in by one door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler_members import MembersWorld

from quire.proto.messages import Abort
from quire.scheduler.inputs import Inputs
from quire.scheduler.recorder import Recorder, TurnClock
from quire.scheduler.recording import Ring


class Facade:
    """Some calls lead to the recorder, the rest to what stands behind."""

    def __init__(self, behind: Any, **calls: Any):
        self.__dict__.update(calls, behind=behind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


class Workers(Facade):
    """A registry whose messages are taken through the recorder."""

    @property
    def to_workers(self) -> list[Any]:
        return self.inputs.to_workers()

    @to_workers.setter
    def to_workers(self, rest: list[Any]) -> None:
        """They were taken."""


class RecordedWorld(MembersWorld):
    """``taken`` counts turns; the history begins to be recorded when its first workers are there."""

    def __init__(self, seed: int, path: Path, megabytes: float = 1.0, tokens: bool = False):
        self.inputs: Inputs | None = None
        super().__init__(seed)
        assert self.members is not None
        core, members = self.core, self.members
        clock = core.clock = TurnClock(lambda: self.now)
        self.ring = Ring(str(path), megabytes, tokens)
        self.recorder = Recorder(members, self.ring, clock, tokens)
        inputs = self.inputs = self.recorder
        self.behind = Workers(
            members.registry, inputs=inputs, on_worker=inputs.worker, gone=inputs.worker_gone, plans=inputs.plans
        )
        self.members = Facade(members, notice=inputs.notice, tick=inputs.tick, on_front=inputs.front)
        self.core = Facade(
            core,
            submit=inputs.front,
            abort=lambda uid, attempt: inputs.front("detok", Abort(uid, attempt)),
            stopped=lambda message: inputs.front("detok", message),
            beam_stopped=lambda message: inputs.front("detok", message),
            outbox=Facade(core.outbox, take=inputs.to_front),
        )

    @property
    def registry(self) -> Any:
        return super().registry if self.inputs is None else self.behind

    def actions(self) -> list[Callable[[], None]]:
        return [action for action in super().actions() if action != self.preempt]  # which nobody can ask for
