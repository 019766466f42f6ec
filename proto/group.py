"""What the processes of one replica tell each other (``gpu_worker/parallel/group_link.py``): beside what comes of the
scheduler (Assign, Configure, StepPlan) and its answers (Loaded, Ready), how they meet. And how many there can be."""

from __future__ import annotations

from .config import ConfigError
from .messages import Assign, Bye, Configure, Drain, Heartbeat, Loaded, Message, Ready, StepPlan


class Join(Message):
    """another process -> leader, first on a connection."""

    protocol: int
    number: int
    pid: int
    settings: dict[str, str]  # what all must have alike, by flag


class Meet(Message):
    """leader -> every other process, once all are there: where torch.distributed's store is."""

    file: str  # "" for one at ``port``
    port: int


FromLeader = Meet | Assign | Configure | StepPlan | Drain | Heartbeat | Bye
"""leader -> another process. Drain: the replica is done, end with code 0."""

ToLeader = Join | Loaded | Ready | Drain | Bye
"""another process -> leader. Drain: it was asked to end."""


def check_split(heads: object, layers: object, size: int, stages: int) -> None:
    """Raises ConfigError where a model of so many attention heads and layers cannot be shared out so."""
    if isinstance(heads, int) and heads % size:
        raise ConfigError(
            f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({size})."
        )
    if isinstance(layers, int) and stages > layers:
        raise ConfigError(f"Pipeline parallel size ({stages}) must be at most the model's number of layers ({layers}).")
