"""What operators and frontends ask of the scheduler about its workers, and the figures it answers with."""

from __future__ import annotations

import msgspec

from .base import Message


class Manage(Message):
    """operator -> scheduler. ``action`` is "list", "drain" or "remove" (drain with no patience)."""

    token: int
    action: str
    worker: str = ""  # its incarnation, a unique beginning of it, or its replica's number
    timeout: float = -1.0  # seconds that a drain may take; negative: --drain-timeout


class WorkerInfo(msgspec.Struct, array_like=True, gc=False):
    """One worker as the scheduler sees it. ``state``: loading, configuring, ready, draining."""

    worker: str
    replica: int
    state: str
    device: str
    pid: int
    running: int
    blocks: int
    blocks_used: int
    last_step: int


class Managed(Message):
    """scheduler -> operator, answering Manage: every worker after it, and what was wrong with it ("" for nothing)."""

    token: int
    workers: list[WorkerInfo]
    error: str = ""


class Sleep(Message):
    """frontend -> scheduler, for an administrator. ``action`` is "sleep", "wake_up" or "ask". Sent again after a loss
    on the way, it does nothing twice."""

    token: int
    action: str
    level: int = 1  # of sleep: 1 keeps the weights in the host's memory, 2 drops them
    mode: str = "keep"  # of sleep, what becomes of open requests: "abort", "wait" until they have ended, "keep" them
    tags: list[str] = []  # of wake_up: "weights", "kv_cache"; none: both


class Sleeping(Message):
    """scheduler -> frontend, answering Sleep when every worker has done it. ``tags`` are still away; none: awake."""

    token: int
    tags: list[str]
    error: str = ""


class GetStats(Message):
    """frontend -> scheduler."""

    token: int = 0


class ReplicaStats(msgspec.Struct, array_like=True, gc=False):
    """One replica as the scheduler sees it."""

    replica: int
    state: str
    device: str
    running: int
    blocks: int
    blocks_used: int
    last_step: int


class TierStats(msgspec.Struct, array_like=True, gc=False):
    """What was kept outside of devices' caches. Tokens are of prompts, bytes of blocks as caches hold them."""

    queries: int = 0  # tokens that a device's cache lacked, looked up
    host_hits: int = 0  # tokens loaded from host memory
    disk_hits: int = 0
    host_load_bytes: int = 0
    host_store_bytes: int = 0
    disk_load_bytes: int = 0
    disk_store_bytes: int = 0
    host_evictions: int = 0  # blocks
    disk_evictions: int = 0
    failed_loads: int = 0  # blocks that were to be had and were not; they are computed


class Stats(Message):
    """scheduler -> frontend, answering GetStats. Counters count since the scheduler started."""

    token: int
    running: int
    waiting: int
    blocks: int
    blocks_used: int
    preemptions: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # of these, found
    prompt_tokens: int
    generation_tokens: int
    steps: int
    bad_frames: int
    replicas: list[ReplicaStats]
    compilations: int = 0  # of kernels, while requests were served
    drafts: int = 0  # verifications of drafted tokens
    draft_tokens: int = 0  # tokens drafted
    accepted: list[int] = []  # of the first, second, ... tokens of drafts, those that were kept
    moves: int = 0  # sequences that went on at another worker with their keys and values
    moved_tokens: int = 0  # theirs, that were not computed again
    recomputed_tokens: int = 0  # of sequences that had run before, computed again
    tiers: TierStats | None = None  # where some worker has tiers


class AdapterStats(Stats):
    """The same where workers have slots for adapters."""

    max_loras: int = 0  # slots of the worker that has the most
    running_adapters: list[str] = []  # names that requests run with, sorted
    waiting_adapters: list[str] = []  # names that requests wait to run with, sorted
