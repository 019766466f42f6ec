"""What the processes of one replica tell each other (``gpu_worker/parallel/group_link.py``): beside what comes of the
scheduler (Assign, Rest, Configure, StepPlan, SpeculativePlan, Move, Take, Give, Forget) and its answers (Loaded,
Rested, Tiers, Ready, Moved, Taken, NotMoved), how they meet."""

from __future__ import annotations

from .messages import (
    AdapterReady,
    Assign,
    Bye,
    Configure,
    Drain,
    DropAdapter,
    Forget,
    Give,
    Heartbeat,
    LoadAdapter,
    Loaded,
    Message,
    Move,
    Moved,
    NotMoved,
    Profile,
    Profiled,
    Ready,
    Rest,
    Rested,
    SpeculativePlan,
    StepPlan,
    Take,
    Taken,
    Tiers,
)  # fmt: skip


class Join(Message):
    """another process -> leader, first on a connection."""

    protocol: int
    number: int
    pid: int
    settings: dict[str, str]  # what all must have alike, by flag
    endpoint: str = ""  # where it takes pages of other workers


class Meet(Message):
    """leader -> every other process, once all are there: where torch.distributed's store is."""

    file: str  # "" for one at ``port``
    port: int


FromLeader = (
    Meet | Assign | Rest | Configure | StepPlan | SpeculativePlan | Move | LoadAdapter | DropAdapter | Take | Give
    | Forget | Profile | Drain | Heartbeat | Bye
)  # fmt: skip
"""leader -> another process. Drain: the replica is done, end with code 0."""

ToLeader = Join | Loaded | Rested | Profiled | Tiers | Ready | Moved | AdapterReady | Taken | NotMoved | Drain | Bye
"""another process -> leader. Drain: it was asked to end."""
