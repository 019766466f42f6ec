"""What a request is to do: ``Generate`` tokens after its prompt, or ``Pool`` the prompt into vectors.

One of the two goes the whole way of a request. Engine sends it in Tokenize as it is asked for; the detokenizer resolves
it and tells Engine in Accepted; Submit, the scheduler's request and the worker's row carry that on as it is. So what a
worker must know of a new parameter is a field here or in its params, and nothing between copies it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from .params import SamplingParams
from .pooling import PoolingParams


class Adapter(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A low-rank adapter (LoRA) of the model, as a request carries it. Two of the same ``digest`` are the same.

    A request has all that a worker needs to load it, so nobody on its way has to know the name.
    """

    name: str
    path: str  # of its folder, as workers see it (one folder, mounted alike on every machine)
    digest: bytes  # of its files, 16 bytes; see ``adapter_digest``


class Generate(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=0):
    """Draw tokens. Resolved, ``params.max_tokens`` is a number, and ``params.n`` counts the children that are run
    (best_of of them, where that is asked for), but for a beam search, where it counts those that are returned.
    """

    params: SamplingParams
    seed: int  # a random one where the client gives none; see ``child_seed``
    # What the detokenizer adds:
    eos: list[int] = []  # ids that end a sequence with no stop reason; none with ignore_eos
    suppressed_ids: bytes = b""  # i32, not to be drawn before min_tokens: every EOS and stop id; empty without it
    bad_words: list[list[int]] = []  # token ids of each form of each bad word


class Pool(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=1):
    """Make vectors of the prompt; nothing is drawn, and the request ends with its prompt. Resolved, no field of
    ``params`` but ``dimensions`` is None.
    """

    params: PoolingParams
    pair: str | None = None  # the second text of a pair, whose first is Tokenize's prompt
    # What the detokenizer adds:
    token_type_start: int = -1  # where the tokens of type 1 begin, those of a pair's second text; -1: nowhere


# An adapter is no field of the two above: one that is not used would cost a byte in each of their messages.


class AdaptedGenerate(Generate, frozen=True, tag=2):
    """Generate with an adapter. To a worker it goes as the slot of its own that holds the adapter."""

    adapter: Adapter | None = None
    slot: int = -1


class AdaptedPool(Pool, frozen=True, tag=3):
    """Pool with an adapter."""

    adapter: Adapter | None = None
    slot: int = -1


Work = Generate | Pool | AdaptedGenerate | AdaptedPool
W = TypeVar("W", Generate, Pool, Work)


def adapter_of(work: Work) -> Adapter | None:
    """The adapter that ``work`` is done with; None for the model itself."""
    return work.adapter if isinstance(work, AdaptedGenerate | AdaptedPool) else None


def with_adapter(work: W, adapter: Adapter | None, slot: int = -1) -> W:
    """The same work done with ``adapter``, or with what is in a worker's ``slot``."""
    if adapter is None and slot < 0:
        return work
    plain, kind = (Generate, AdaptedGenerate) if isinstance(work, Generate) else (Pool, AdaptedPool)
    made: Any = kind(**{name: getattr(work, name) for name in plain.__struct_fields__}, adapter=adapter, slot=slot)
    return made


def child_seed(seed: int, index: int) -> int:
    """What child ``index`` of a request with ``seed`` draws with."""
    return (seed + index) % 2**64
