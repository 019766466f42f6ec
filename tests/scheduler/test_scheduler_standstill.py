"""A scheduler that was stopped in the middle of a turn: nobody is held to that time, and nobody gets more than it."""

from pathlib import Path

import pytest

from quire.proto.config import EngineArgs
from quire.proto.messages import Heartbeat
from quire.scheduler.blame import Blame
from quire.scheduler.fake.fake_worker import FakeWorker
from quire.scheduler.loop import Loop
from quire.scheduler.replica import Replica


@pytest.fixture
def loop(tmp_path: Path):
    tmp_path.chmod(0o700)
    made = Loop(EngineArgs(scheduler=f"ipc://{tmp_path}", worker_timeout=15.0), 1, Blame())
    yield made
    made.close()


def test_a_stop_while_it_reads(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    now, turns, left = 1000.0, iter([0.0, 300.0] + [1.5] * 11), []
    loop.core.clock = lambda: now

    def read(*told: bool) -> None:
        """Each turn hears one worker's heartbeat, and then takes its time."""
        nonlocal now
        loop.membership.registry.on_worker("heard", Heartbeat(0))
        now += next(turns, 0.0)
        left.append(set(loop.membership.registry.workers))
        if len(left) == 14:
            loop.stop()

    for name in ("heard", "hung"):
        loop.membership.registry.on_worker(name, FakeWorker(64, 128, 100).hello(name, loaded=True))
        worker = loop.membership.registry.workers[name]
        # With a replica it is judged by its heartbeats.
        worker.replica = Replica(worker.lease.replica, worker.lease, name, 4, 64, 16, 128, 100)
        loop.core.replicas[worker.replica.number] = worker.replica
    monkeypatch.setattr(loop.turns, "_ingest", read)
    monkeypatch.setattr(loop.turns, "_send", lambda: False)  # to nobody, and with the next turn at once
    loop.run()
    assert left[2] == left[11] == {"heard", "hung"}  # 300 s, and then 13.5 s
    assert left[13] == {"heard"}  # 16.5 s
