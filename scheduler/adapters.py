"""What becomes of those who wait for an adapter when its load ends, or ends a worker. A room above the books."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..proto.codec import BadFrame
from ..proto.losses import MAX_LOSSES
from ..proto.messages import AdapterReady
from ..proto.work import Adapter
from .adapter_names import Wish
from .adapter_slots import AdapterSlots
from .books import Books
from .placement import can_ever_hold
from .replica import Replica

LOAD_LIMIT_S, WISH_LIMIT_S = 300.0, 290.0
"""Those who wait for an adapter are told after the first that it cannot be loaded, from when a worker came to it; those
who wished for one after the second, which is less than a client waits (``Engine.register``)."""


class Answer(NamedTuple):
    """What one who wished for an adapter is to be told."""

    wish: Wish
    status: int = 200
    error: str = ""


def load_ended(books: Books, replica: Replica, message: AdapterReady) -> list[Answer]:
    """An adapter is ready, or cannot be: then those who wait for it fail, unless another replica has it or may load it.
    Raises BadFrame where the message cannot be right."""
    if replica.adapters is None:
        raise BadFrame("it has no slots for adapters, and one is ready")
    now = books.clock()
    adapter = replica.adapters.loaded(message, now)
    if not message.error:
        books.adapter_losses.pop(adapter.digest, None)
        answers = [Answer(wish) for wish in books.names.granted(adapter.digest)]
        if not answers and books.names.is_unused(adapter):  # it was unloaded meanwhile
            replica.adapters.drop(adapter)
        return answers
    replica.adapters.note_failed(adapter, now)
    status = message.status if 400 <= message.status < 600 else 500
    return _fail(books, adapter, status, message.error, lambda slots, of: slots.may_have(of, now))


def loads_lost(books: Books, loading: list[Adapter]) -> list[Answer]:
    """A worker died while it loaded the first of these, for which the others waited. One that is the cause again and
    again is not tried for ever."""
    if not loading:
        return []
    adapter = loading[0]
    count = books.adapter_losses[adapter.digest] = books.adapter_losses.get(adapter.digest, 0) + 1
    if count < MAX_LOSSES:
        return []
    del books.adapter_losses[adapter.digest]
    text = f"A worker died {count} times while it loaded lora adapter '{adapter.name}'; it is taken for the cause."
    return _fail(books, adapter, 500, text, AdapterSlots.has)


def loads_overdue(books: Books, replica: Replica) -> list[Answer]:
    """Nobody waits longer than the limit for a load that hangs, be it their own adapter's or one before it."""
    if replica.adapters is None or books.replicas.get(replica.number) is not replica:
        return []
    now = books.clock()
    hung = replica.adapters.look(now - LOAD_LIMIT_S)
    if hung is None:
        return []
    waited = [request.adapter for request in books.requests.values() if request.adapter is not None]
    answers = []

    def may_have(slots: AdapterSlots, of: Adapter) -> bool:
        return slots.may_have(of, now)

    for adapter in {each.digest: each for each in [*waited, *(wish.adapter for wish in books.names.wishes)]}.values():
        if adapter.digest == hung.digest:
            text = f"lora adapter '{hung.name}' was not loaded within {LOAD_LIMIT_S:g} s from {hung.path}; try again."
        else:
            text = f"lora adapter '{adapter.name}' waits for '{hung.name}', which was not loaded within "
            text += f"{LOAD_LIMIT_S:g} s from {hung.path}; try again."
        answers += _fail(books, adapter, 503, text, may_have)
    return answers


def wishes_overdue(books: Books) -> list[Answer]:
    """Whoever wished for an adapter is told before they stop to wait that no worker has come to load it."""
    text = f"No worker could load the lora adapter within {WISH_LIMIT_S:g} s; try again."
    return [Answer(wish, 503, text) for wish in books.names.withdrawn(books.clock() - WISH_LIMIT_S)]


def _fail(
    books: Books, adapter: Adapter, status: int, text: str, able: Callable[[AdapterSlots, Adapter], bool]
) -> list[Answer]:
    """End the requests for ``adapter`` that do not run, and for which no replica that could hold them is ``able`` to
    have it; and the wishes, where none is."""
    going = [replica for replica in books.replicas.values() if not replica.draining]
    going = [replica for replica in going if replica.takes_prompts] or going
    there = [r for r in going if r.adapters is not None and able(r.adapters, adapter)]
    for request in [r for r in books.requests.values() if r.adapter is not None and r.adapter.digest == adapter.digest]:
        runs = any(seq.replica >= 0 for seq in request.live)
        if not runs and not all(any(can_ever_hold(r, seq) for r in there) for seq in request.live):
            books.fail(request, status, text, "model")
    if there:
        return []
    for replica in books.replicas.values():
        if replica.adapters is not None:
            replica.adapters.forget_failed(adapter)
    return [Answer(wish, status, text) for wish in books.names.granted(adapter.digest)]
