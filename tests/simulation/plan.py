"""What is going to happen in one history, as plain data: the cluster's shape, what users ask, what goes wrong.

A plan is drawn from its seed alone (``draw.py``). Whatever chance decides later (how long a message takes, or a step)
is a hash of the seed and of what it is about, so that to leave out a part of a plan changes nothing else: that is how a
failing one is made smaller. Every field's default is its plainest value.
"""

from __future__ import annotations

import msgspec

from quire.proto.config import EngineArgs

from .asks import Ask


class WorkerShape(msgspec.Struct, omit_defaults=True):
    """One worker: its blocks, how long a step takes it (seconds) and how long its weights. ``keeps_name``: it comes
    back under the identity that it had, and with what it was doing. ``drafts``, ``draft_rows``: as in Loaded."""

    blocks: int = 64
    step_low: float = 0.004
    step_high: float = 0.004
    load: float = 0.1
    keeps_name: bool = False
    role: str = "both"
    drafts: int = 0
    draft_rows: int = 2
    slots: int = 0
    """Blocks that it keeps in host memory."""
    disk: bool = False
    rotten: int = 0
    """Of so many loads from disk one fails; 0: none."""


class Shape(msgspec.Struct, omit_defaults=True):
    """The cluster, with the scheduler's flags under their names."""

    frontends: int = 1
    detokenizers: int = 1
    workers: list[WorkerShape] = msgspec.field(default_factory=lambda: [WorkerShape()])
    max_model_len: int = 64
    pools: str = ""
    """"embed" or "classify": this cluster pools, and generates nothing."""
    whole: bool = False
    adapter_slots: int = 0
    block_size: int = 8
    rows: int = 8
    budget: int = 256
    prefix_caching: bool = True
    chunked: bool = True
    policy: str = "fcfs"
    max_num_queued_reqs: int = 2048
    max_num_queued_tokens: int | None = None
    max_requests_per_key: int | None = None
    queue_timeout: float | None = None
    worker_timeout: float = 15.0
    step_timeout: float = 30.0
    drain_timeout: float = 30.0
    moves: bool = False
    """Workers take pages of one another."""

    def args(self) -> EngineArgs:
        """The scheduler's flags."""
        return EngineArgs(
            block_size=self.block_size, max_num_seqs=self.rows, max_num_batched_tokens=self.budget,
            enable_prefix_caching=self.prefix_caching, enable_chunked_prefill=self.chunked,
            scheduling_policy=self.policy, max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens, max_requests_per_key=self.max_requests_per_key,
            queue_timeout=self.queue_timeout, worker_timeout=self.worker_timeout, step_timeout=self.step_timeout,
            drain_timeout=self.drain_timeout,
        )  # fmt: skip

    def places(self) -> list[str]:
        """The names of all places for processes."""
        counts = {"w": len(self.workers), "d": self.detokenizers, "f": self.frontends}
        return ["s", *(f"{letter}{at}" for letter, count in counts.items() for at in range(count))]


class Fault(msgspec.Struct, omit_defaults=True):
    """One thing that goes wrong, or that somebody does to the cluster. ``faults.py`` has the kinds.

    It strikes at ``when`` (seconds), or so long after the ``nth`` message of the kind ``after`` is sent.
    """

    name: str
    kind: str
    target: str = ""
    other: str = ""
    when: float = 0.0
    after: str = ""
    nth: int = 0
    seconds: float = 0.0
    value: float = 0.0


class Plan(msgspec.Struct, omit_defaults=True):
    """One history. ``early``: users and faults come while the server starts; else once it is ready."""

    seed: int
    early: bool = False
    shape: Shape = msgspec.field(default_factory=Shape)
    asks: list[Ask] = []
    faults: list[Fault] = []


EVENTS = {
    "plan": 6.0, "result": 6.0, "submit": 1.0, "tokenize": 1.0, "accepted": 1.0, "text": 5.0, "hello": 0.7,
    "ready": 0.2, "unknown": 0.1, "reconcile": 0.3, "abort": 0.2,
}  # fmt: skip
"""Messages that a fault may wait for, by what they are, and about how many of each a request takes."""

PROCESS = ("kill", "kill", "kill", "stop", "stop", "hang", "vanish", "term")
LINK = ("cut", "cut", "one_way", "slow", "stall", "reset", "reset")
WORKER = ("step_fails", "step_hangs", "step_late", "answers_twice", "shrinks", "slot_fails")
OPERATOR = ("drain", "remove", "join", "clock")
LOADS = ("load_hangs",)
USERS = ("leaves",)
ADMINISTRATOR = ("sleep",)
FAMILIES = (PROCESS, LINK, WORKER, OPERATOR)
"""Those of which most histories have some. Of the others only scenes have any (``scenes.py``)."""
