"""Who is there, where it listens, and that it leaves."""

from __future__ import annotations

import msgspec

from .base import Message


class Hello(Message):
    """Any process -> scheduler, first on a connection. ``endpoint`` is where this process listens, if it does."""

    kind: str  # "frontend", "detokenizer", "gpu_worker"; "operator" asks and tells about workers, and is not announced
    incarnation: str
    protocol: int
    pid: int
    endpoint: str = ""
    device: str = ""
    loaded: bool = False  # a worker that kept its weights through a lost lease
    asleep: int = -1  # the level of the Rest that a worker was given last, by this scheduler or the one before it
    role: str = "both"  # a worker's: "prefill", "decode" or "both"


class Peer(msgspec.Struct, array_like=True, gc=False):
    """One live process."""

    kind: str
    incarnation: str
    endpoint: str


class Peers(Message):
    """scheduler -> front side, after Hello and on every change. ``ready``: some replica can run a request.

    The workers among ``peers`` are those that stay; one without an incarnation is on its way, and not seen yet.
    """

    epoch: int
    peers: list[Peer]
    block_size: int
    ready: bool
    max_model_len: int  # 0 until a replica is ready
    blamed: int | None = None  # the request whose submission ended the scheduler before this one: nobody else's fault


class Heartbeat(Message):
    """Both ways, every second: alive. ``last_step`` is the last finished step of a worker."""

    last_step: int = 0
    memory: int = 0  # resident bytes
    bad_frames: int = 0


class Bye(Message):
    """Both ways: the sender leaves, or the receiver must (``reason`` says why)."""

    reason: str = ""
    again: bool = False  # scheduler -> worker: only the lease is over; keep the weights and say Hello again


class Drain(Message):
    """worker -> scheduler: I must leave; take nothing new to me, and let me know when I am free.

    scheduler -> worker: you are free: finish what is planned, then Bye.
    """

    reason: str = ""
