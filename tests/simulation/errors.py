"""Which errors a request may end with: those that ``docs/`` names, and only where their causes were there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.client.core import NO_DETOKENIZER_RESUMED_S, NO_DETOKENIZER_S
from quire.proto.losses import MAX_LOSSES
from quire.proto.params import ParamError
from quire.scheduler.awaited import GAP_S
from quire.scheduler.books import UNPLACED_S
from quire.scheduler.fake.fake_worker import BAD
from quire.scheduler.queue import MAX_RETRY_S, MIN_RETRY_S

from . import toy
from .asks import Ask
from .oracle import prompt_ids

if TYPE_CHECKING:
    from .consumer import Consumer

NOTICED_S = 25.0
"""So long after a process or a link was lost, a peer may still find out: silence takes the longest, 20 s."""
DEADLY = ("worker", "detokenizer", "scheduler")
"""What of a request's is poison for."""
LINKS = ("cut", "one_way", "slow", "stall", "reset")
"""Faults of a link, which are noted for both of its ends, for the one after the other."""
ORDERLY = ("drain", "remove")
"""A worker that leaves gives its requests back, and nobody is blamed."""


# ---------------------------------------------------------------- what can never be served


def impossible(ask: Ask, shape: Any, blocks: int) -> str | None:
    """Why ``ask`` can never be served here, by workers of at most so many blocks; None where it can."""
    pooling = ask.pooling
    if (pooling is not None) != bool(shape.pools):
        return "it asks for the other kind of work"
    if pooling is not None:
        try:
            toy.pooler(shape.pools, shape.whole).resolve(pooling)
        except ParamError as error:
            return str(error)
    if BAD in ask.adapter:
        return "its adapter cannot be loaded"
    why = _wrong_params(ask, shape) if pooling is None else None
    return why or _too_large(ask, shape, blocks)


def _wrong_params(ask: Ask, shape: Any) -> str | None:
    params, longest = ask.params, shape.max_model_len
    if (params.max_tokens or 0) > longest or (params.truncate_prompt_tokens or 0) > longest:
        return "it names more tokens than the context has"
    asked = [each for each in (params.logprobs, params.prompt_logprobs) if each is not None]
    if any((toy.VOCAB if each < 0 else each) > toy.MAX_LOGPROBS for each in asked):
        return "too many logprobs"
    if params.use_beam_search and params.width > shape.rows:
        return "more beams than rows"
    return None


def _too_large(ask: Ask, shape: Any, blocks: int) -> str | None:
    ids = prompt_ids(ask, shape)
    room = shape.max_model_len - len(ids)
    if not ids or max(ids) >= toy.VOCAB:
        return "no prompt, or ids that the model lacks"
    if room < (ask.pooling is None):
        return "the prompt leaves no room"
    if (shape.whole or not shape.chunked) and len(ids) > shape.budget:
        return "the prompt does not fit into a step"
    if ask.pooling is not None:
        return "too few blocks" if _blocks(len(ids), shape) > blocks else None
    params = ask.params
    room = min(room, params.max_tokens or room)
    if params.min_tokens > room:
        return "min_tokens is more than there is room for"
    return "too few blocks" if _most_blocks(len(ids), room, ask, shape) > blocks else None


def _blocks(tokens: int, shape: Any) -> int:
    return -(-tokens // shape.block_size)


def _most_blocks(prompt: int, room: int, ask: Ask, shape: Any) -> int:
    """What it holds at its longest: the last token's keys and values are never written."""
    longest = _blocks(max(prompt + room - 1, prompt), shape)
    if not ask.params.use_beam_search or room < 2:
        return longest
    shared = prompt // shape.block_size
    return shared + ask.params.width * (longest - shared)


# ---------------------------------------------------------------- errors


def wrong_end(consumer: Consumer, world: Any) -> str | None:
    """What is wrong with the end of a request by the rules for errors; None for nothing."""
    error, ask, shape = consumer.error, consumer.ask, world.plan.shape
    if consumer.left or consumer.cut_off:
        return None
    sizes = getattr(world, "sizes", None) or {worker.blocks for worker in shape.workers}
    never = impossible(ask, shape, max(sizes))
    if error is None:
        never = never or (f"it kills each {ask.poison}" if ask.poison in DEADLY else None)
        return f"expected a refusal ({never}), got an answer" if never else None
    got = f"got {error.status} {error.message!r}"
    if error.status == 400:
        return None if impossible(ask, shape, min(sizes)) else f"expected an answer, {got}"
    check = {429: _overloaded, 500: _given_up, 503: _unavailable}.get(error.status)
    why = f"no such status is promised, {got}" if check is None else check(consumer, world)
    return why and f"expected {why}, {got}"


def _overloaded(consumer: Consumer, world: Any) -> str | None:
    """429: the line is as long as it may be, or the key has as many requests open as it may."""
    shape, ask = world.plan.shape, consumer.ask
    assert consumer.error is not None
    if consumer.request is not None and consumer.request.attempt:
        return "no refusal for load of one that was sent again"
    if not MIN_RETRY_S <= (consumer.error.retry_after or 0.0) <= MAX_RETRY_S:
        return f"Retry-After of {MIN_RETRY_S:g} to {MAX_RETRY_S:g} s (got {consumer.error.retry_after})"
    lag = NOTICED_S if world.blows else 0.5
    others = [each for each in world.consumers if each is not consumer and each.begun <= consumer.ended
              and (not each.over or each.ended + lag >= consumer.begun)]  # fmt: skip
    if len(others) >= shape.max_num_queued_reqs:
        return None
    most = shape.max_num_queued_tokens
    tokens = sum(len(prompt_ids(each.ask, shape)) for each in [consumer, *others])
    if most is not None and others and tokens > most:
        return None
    most = shape.max_requests_per_key
    if most is not None and ask.key and sum(each.ask.key == ask.key for each in others) >= most:
        return None
    return f"an answer, since only {len(others)} others were there"


def _given_up(consumer: Consumer, world: Any) -> str | None:
    """500: three losses without progress. Deaths by poison count twice at most for those who were beside it."""
    if consumer.ask.poison in DEADLY:
        return None
    count = possible_losses(consumer, world)
    return None if count >= MAX_LOSSES else f"an answer, since at most {count} losses can have counted to it"


def possible_losses(consumer: Consumer, world: Any) -> int:
    """The losses that can have counted to a request since it last got further."""
    last = consumer.begun
    request = consumer.request
    if request is not None and consumer.ask.params.n == 1 and not consumer.held:
        last = max(last, request.metrics.last_token_time or last)
    return _losses_since(last, consumer, world)


def miscounted(consumer: Consumer, world: Any) -> str | None:
    """Why the losses that its client has counted to a request are too many: there were not so many that could be."""
    request = consumer.request
    if request is None or consumer.ask.poison in DEADLY:
        return None
    count, most = request.losses.count, _losses_since(consumer.begun, consumer, world)
    return f"expected at most {most} losses, got {count}" if count > most else None


def _losses_since(last: float, consumer: Consumer, world: Any) -> int:
    """What struck then, each thing once. Links that break at one moment are a loss each."""
    blows = [
        (at, kind, target)
        for at, until, kind, target in world.blows
        if at <= consumer.ended and until + NOTICED_S >= last and kind not in ORDERLY
    ]
    ends = [blow for blow in blows if blow[1] in LINKS]
    links = set(zip(ends[::2], ends[1::2], strict=True))
    others = {blow for blow in blows if blow[1] not in LINKS}
    poisoned = sum(kind == "poison" for _, kind, _ in others)
    # A frontend that stands still loses its connection to each detokenizer, and finds that out of one after the other.
    own = sum(target == f"f{consumer.ask.frontend}" for _, _, target in others) * (world.plan.shape.detokenizers - 1)
    return len(links) + len(others) + own - poisoned + min(poisoned, MAX_LOSSES - 1)


def _unavailable(consumer: Consumer, world: Any) -> str | None:
    """503: nobody was there for as long as the limits say, or it waited in line for as long as it may."""
    shape, request, waited = world.plan.shape, consumer.request, consumer.ended - consumer.begun
    assert consumer.error is not None and request is not None
    message = consumer.error.message
    waited = min(waited, consumer.ended - (request.metrics.last_token_time or consumer.begun))
    if "detokenizer" in message:
        limit = NO_DETOKENIZER_RESUMED_S if request.attempt else NO_DETOKENIZER_S
        return None if waited >= limit else f"a wait of {limit:g} s before that (it was {waited:.2f})"
    if "waited for" in message:
        limit = shape.queue_timeout
        if limit is None or waited < limit:
            return f"a wait of {limit} s before that (it was {waited:.2f})"
        return None if request.metrics.first_scheduled_time is None else "no such end of one that has run"
    if "No worker is ready" in message:
        return None if waited >= GAP_S else f"a wait of {GAP_S:g} s before that (it was {waited:.2f})"
    if "No worker is left" in message:
        never = impossible(consumer.ask, shape, min(world.sizes))
        # A token that a bad connection held back is as much nearer to the end that the scheduler sent.
        late = max((fault.seconds + fault.value for fault in world.plan.faults if fault.kind in LINKS), default=0.0)
        return None if never and waited + late >= UNPLACED_S else "an answer, since a worker can hold it"
    if "closed" in message:
        place = f"f{consumer.ask.frontend}"
        ended = world.gave_up or any(each.kind == "term" and each.target == place for each in world.plan.faults)
        return None if ended else f"an answer, since nobody ends {place}"
    if world.poisoned.get(consumer.uid) == "slot":
        return None
    return "no such error"
