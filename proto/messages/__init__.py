"""Every message of every socket, in closed unions, one packed frame each.

Two numbers keep histories apart. ``lease`` is in every message on a worker link: a result of any other lease than
the current one is dropped. ``attempt`` is in every message about a request: a higher attempt replaces a lower one
everywhere, and lower ones are dropped everywhere. The first is 0; a later one is never refused for load. A request
has a ``uid`` (int64, chosen by Engine, never reused); its n children are (uid, index).

One room a kind of conversation: ``requests``, ``plans`` and ``tiers`` (the worker link), ``moves`` (blocks between
workers), ``membership``, ``operators``, ``adapters``. What is sent where is told by the unions below.

Columns are little-endian arrays as bytes; the comment beside each says its item. Columns of one group have one
length unless said otherwise.
"""

from __future__ import annotations

from .adapters import (
    AdapterEntry,
    AdapterReady,
    Adapters,
    DropAdapter,
    LoadAdapter,
    Register,
    Registered,
    Unregister,
)
from .base import Logprobs, Message
from .membership import Bye, Drain, Heartbeat, Hello, Peer, Peers
from .moves import Forget, Give, NotMoved, Pages, SharedMemory, Take, Taken
from .operators import (
    AdapterStats,
    GetStats,
    Manage,
    Managed,
    ReplicaStats,
    Sleep,
    Sleeping,
    Stats,
    TierStats,
    WorkerInfo,
    WorkStats,
)
from .plans import (
    Admit,
    Assign,
    Compiled,
    Configure,
    Lease,
    Loaded,
    Profile,
    Profiled,
    PromptChunk,
    Ready,
    Rest,
    Rested,
    SlotFailed,
    SlotPooled,
    SpeculativePlan,
    SpeculativeResult,
    StepFailed,
    StepPlan,
    StepResult,
    TraceRows,
)  # fmt: skip
from .requests import (
    Abort,
    Accepted,
    BeamStopped,
    BeamTokens,
    Child,
    Failed,
    Finish,
    Pooled,
    PromptLogprobs,
    Quarantined,
    Reconcile,
    Resume,
    Stopped,
    Submit,
    TextBatch,
    TokenBatch,
    Tokenize,
    TracedSubmit,
    TracedTokenize,
    Unknown,
)  # fmt: skip
from .tiers import Move, Moved, Tiers
from .view import BlockMap, GetView, Running, StepView, View, Waiting, WorkerView

__all__ = [
    "PROTOCOL", "Abort", "Accepted", "AdapterEntry", "AdapterReady", "AdapterStats", "Adapters", "Admit", "Assign",
    "BeamStopped", "BeamTokens", "BetweenWorkers", "BlockMap", "Bye", "Child", "Compiled", "Configure", "Drain",
    "DropAdapter", "Failed", "Finish", "Forget", "FromDetokenizer", "FromSchedulerFront", "FromSchedulerWorkers",
    "GetStats", "GetView", "Give", "Heartbeat", "Hello", "Lease", "LoadAdapter", "Loaded", "Logprobs", "Manage",
    "Managed", "Message", "Move", "Moved", "NotMoved", "Pages", "Peer", "Peers", "Pooled", "Profile",
    "Profiled", "PromptChunk",
    "PromptLogprobs", "Quarantined", "Ready", "Reconcile", "Register", "Registered", "ReplicaStats", "Rest", "Rested",
    "Resume", "Running", "SharedMemory", "Sleep", "Sleeping", "SlotFailed", "SlotPooled", "SpeculativePlan",
    "SpeculativeResult", "Stats", "StepFailed", "StepPlan", "StepResult", "StepView", "Stopped", "Submit", "Take",
    "Taken", "TextBatch", "TierStats", "Tiers", "ToDetokenizer", "ToSchedulerFront", "ToSchedulerWorkers", "TokenBatch",
    "Tokenize", "TraceRows", "TracedSubmit", "TracedTokenize", "Unknown", "Unregister", "View", "Waiting", "WorkStats",
    "WorkerInfo", "WorkerView",
]  # fmt: skip

PROTOCOL = 25
"""Raised on any change of a message; a Hello of another version is answered with Bye."""

# The closed unions, one a direction of each channel:

ToDetokenizer = Tokenize | TracedTokenize | Abort | Quarantined | Reconcile | Heartbeat | Bye
"""Engine -> detokenizer."""

FromDetokenizer = Accepted | TextBatch | PromptLogprobs | Pooled | Failed | Quarantined | Unknown | Heartbeat | Bye
"""detokenizer -> Engine."""

ToSchedulerFront = (
    Hello | Submit | TracedSubmit | Abort | Stopped | BeamStopped | Reconcile | GetStats | GetView | Manage | Sleep
    | Adapters | Register | Unregister | Heartbeat | Bye
)  # fmt: skip
"""detokenizer, Engine, operator -> the scheduler's front socket."""

FromSchedulerFront = (
    Peers | TokenBatch | PromptLogprobs | BeamTokens | Pooled | Failed | Unknown | Stats | AdapterStats | View
    | Managed
    | Sleeping | Adapters | Registered | Heartbeat | Bye
)  # fmt: skip
"""the scheduler's front socket -> detokenizer, Engine, operator."""

ToSchedulerWorkers = (
    Hello | Loaded | Ready | Rested | StepResult | SpeculativeResult | StepFailed | Compiled | AdapterReady | Taken
    | Tiers | Moved | Profiled
    | NotMoved | Drain | Heartbeat | Bye
)  # fmt: skip
"""worker -> the scheduler's worker socket."""

FromSchedulerWorkers = (
    Assign | Rest | Configure | StepPlan | SpeculativePlan | TraceRows | Move | LoadAdapter | DropAdapter | Take
    | Give | Forget | Profile | Drain | Heartbeat | Bye
)  # fmt: skip
"""the scheduler's worker socket -> worker."""

BetweenWorkers = Pages
"""worker -> another worker's socket for pages."""
