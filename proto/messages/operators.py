"""What operators and frontends ask of the scheduler about its workers, and the figures it answers with."""

from __future__ import annotations

import msgspec

from .base import Message


class Manage(Message):
    """operator -> scheduler. ``action`` is "list", "drain" or "remove" (drain with no patience); "force-drain" and
    "force-remove" also let the last worker go that could run what is open."""

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
    """frontend -> scheduler, for an administrator. ``action`` is "sleep", "wake_up", "ask", "reset_prefix_cache",
    "start_profile" or "stop_profile". Sent again after a loss on the way, it does nothing twice."""

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


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of ``WorkStats.steps``."""
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names: everything is there; a sleep of level 1; of level 2."""
REQUEST_PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)
"""Upper bounds of the buckets of ``WorkStats.requests``."""


BLOCK_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200,
                 1800)  # fmt: skip
"""Upper bounds of the buckets of ``BlockTimes``."""


class Binned(msgspec.Struct, array_like=True, gc=False):
    """Seconds that were measured. Buckets are not cumulative; the last has no upper bound."""

    counts: list[int]
    sum: float = 0.0


class BlockTimes(msgspec.Struct, array_like=True, gc=False):
    """Of KV blocks that were followed until they were handed out again."""

    lifetime: Binned  # since they were handed out
    idle: Binned  # since they were last used
    reuse_gap: Binned  # between one use and the next


class WorkStats(msgspec.Struct, array_like=True, gc=False):
    """How the scheduler does its work. Buckets are not cumulative; the last of each has no upper bound."""

    block_size: int
    prefix_caching: bool
    deferred: int  # of the sequences that wait, those that wait for something else than room
    steps: list[int]  # by tokens computed
    step_tokens: int  # of all steps
    requests: list[int]  # those that ended, by how often their sequences had been preempted
    request_preemptions: int  # of all that ended
    corrupted: int = 0  # requests that failed because what the model gave were not numbers
    sleep_state: str = "awake"  # of SLEEP_STATES, or "" where the weights are awake and the cache is not
    block_times: BlockTimes | None = None  # where --kv-cache-metrics is given


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
    work: WorkStats | None = None


class AdapterStats(Stats):
    """The same where workers have slots for adapters."""

    max_loras: int = 0  # slots of the worker that has the most
    running_adapters: list[str] = []  # names that requests run with, sorted
    waiting_adapters: list[str] = []  # names that requests wait to run with, sorted
