"""What becomes of those who wait for an adapter when its load ends, or ends a worker. A room above the books."""

from __future__ import annotations

from typing import NamedTuple

from ..proto.codec import BadFrame
from ..proto.losses import MAX_LOSSES
from ..proto.messages import AdapterReady
from ..proto.work import Adapter
from .adapter_names import Wish
from .books import Books
from .replica import Replica

LOAD_LIMIT_S = 300.0
"""Those who wait for an adapter are told after so long that it cannot be loaded."""


class Answer(NamedTuple):
    """What one who wished for an adapter is to be told."""

    wish: Wish
    status: int = 200
    error: str = ""


def load_ended(books: Books, replica: Replica, message: AdapterReady) -> list[Answer]:
    """An adapter is ready, or cannot be: then those who wait for it fail, unless another replica has it. Raises
    BadFrame where the message cannot be right."""
    if replica.adapters is None:
        raise BadFrame("it has no slots for adapters, and one is ready")
    adapter = replica.adapters.loaded(message)
    if not message.error:
        books.adapter_losses.pop(adapter.digest, None)
        return [Answer(wish) for wish in books.names.granted(adapter.digest)]
    if any(other.adapters is not None and other.adapters.has(adapter) for other in books.replicas.values()):
        replica.adapters.note_failed(adapter, books.clock())
        return []
    status = message.status if 400 <= message.status < 600 else 500
    return _fail(books, adapter, status, message.error)


def loads_lost(books: Books, loading: list[Adapter]) -> list[Answer]:
    """A worker died while it loaded these. One that is the cause again and again is not tried for ever."""
    answers = []
    for adapter in loading:
        count = books.adapter_losses[adapter.digest] = books.adapter_losses.get(adapter.digest, 0) + 1
        if count >= MAX_LOSSES:
            del books.adapter_losses[adapter.digest]
            text = (
                f"A worker died {count} times while it loaded lora adapter '{adapter.name}'; it is taken for the cause."
            )
            answers += _fail(books, adapter, 500, text)
    return answers


def loads_overdue(books: Books, replica: Replica) -> list[Answer]:
    """Nobody waits longer than the limit for a load that hangs."""
    if replica.adapters is None:
        return []
    answers = []
    for adapter in replica.adapters.overdue(books.clock() - LOAD_LIMIT_S):
        text = f"lora adapter '{adapter.name}' was not loaded within {LOAD_LIMIT_S:g} s from {adapter.path}; try again."
        answers += _fail(books, adapter, 503, text)
    return answers


def _fail(books: Books, adapter: Adapter, status: int, text: str) -> list[Answer]:
    """End all requests that no replica runs, or could run now, for want of ``adapter``."""
    for request in [r for r in books.requests.values() if r.adapter is not None and r.adapter.digest == adapter.digest]:
        if not any(seq.replica >= 0 for seq in request.live):
            books.fail(request, status, text, "model")
    return [Answer(wish, status, text) for wish in books.names.granted(adapter.digest)]
