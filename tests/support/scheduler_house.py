"""A scheduler behind its membership, with both sockets replaced by lists and a clock that the test moves."""

from __future__ import annotations

from typing import Any

from quire.proto.codec import i32
from quire.proto.config import EngineArgs
from quire.proto.messages import PROTOCOL, Assign, Configure, Hello, Lease, Loaded, Ready, StepPlan, Submit
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler.core import Scheduler
from quire.scheduler.membership import Membership


class House:
    """Membership with its two sockets replaced by lists."""

    def __init__(self, **flags: Any) -> None:
        self.now = 100.0
        config = EngineArgs(**{"block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 32, **flags})
        self.core = Scheduler(config, clock=lambda: self.now)
        self.members = Membership(self.core, epoch=42)
        self.registry = self.members.registry

    def hello(self, name: str, kind: str = "detokenizer", protocol: int = PROTOCOL) -> None:
        hello = Hello(kind, name, protocol, 1, endpoint=f"ipc:///x/{name}")
        (self.registry.on_worker if kind == "gpu_worker" else self.members.on_front)(name, hello)

    def worker(self, name: str, blocks: int = 64, slots: int = 0) -> Lease:
        """A worker that is ready; its lease."""
        self.hello(name, "gpu_worker")
        (assign,) = self.sent(name, Assign)
        self.registry.on_worker(name, Loaded(assign.lease, blocks, 128, 1000, adapter_slots=slots))
        (configure,) = self.sent(name, Configure)
        assert configure.num_blocks == blocks
        self.registry.on_worker(name, Ready(assign.lease))
        return assign.lease

    def submit(self, peer: str, uid: int, attempt: int = 1, max_tokens: int = 20) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.members.on_front(peer, Submit(uid, attempt, i32([1, 2, 3]), b"", Generate(params, 1), float(uid)))

    def sent(self, worker: str, kind: type) -> list[Any]:
        """What a worker was sent since the last look; the rest is forgotten."""
        messages, self.registry.to_workers = self.registry.to_workers, []
        return [m for peer, m in messages if peer == worker and isinstance(m, kind)]

    def told(self, peer: str, kind: type) -> list[Any]:
        """The same for the front side."""
        return [m for to, m in self.core.outbox.take() if to == peer and isinstance(m, kind)]

    def plans(self, worker: str) -> list[StepPlan]:
        self.registry.plans()
        return self.sent(worker, StepPlan)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.members.tick()
