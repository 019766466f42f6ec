"""A Submit becomes a Request, or is refused with the numbers: nothing inconsistent gets past this file.

A room above the books.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection

from ..proto.codec import BadFrame, from_i32
from ..proto.errors import Refused
from ..proto.hashing import HASH_SIZE, hash_blocks
from ..proto.losses import MAX_LOSSES
from ..proto.messages import Failed, Submit
from ..proto.work import BACKGROUND, Pool, embeds_of, thought_end
from .beam_group import BeamGroup
from .books import Books, losses_text
from .request import Request, Sequence

INT32, INT64 = 2**31, 2**63


def take_in(books: Books, owner: str, message: Submit) -> None:
    """Queue a request, or answer Failed. A higher attempt replaces a lower one, a lower one is ignored."""
    earlier = books.requests.get(message.uid)
    if earlier is not None:
        if message.attempt <= earlier.attempt:
            return
        books.drop(earlier)
    try:
        request = read_request(
            owner, message, books.config.block_size, books.vocab_size, books.config.scheduling_policy == "priority"
        )
        if message.losses >= MAX_LOSSES:
            raise Refused(losses_text(message.uid, message.losses), status=500)
        _check_request(books, request)
        if not message.attempt:
            _check_load(books, request)
    except Refused as no:
        failed = Failed(message.uid, message.attempt, no.status, str(no), no.param, no.retry_after)
        books.outbox.put(owner, failed)
    except BadFrame as error:
        books.count_bad()
        text = f"The request does not make sense: {error}."
        books.outbox.put(owner, Failed(message.uid, message.attempt, 400, text))
    else:
        books.enter(request)


def check_waiting(books: Books) -> None:
    """What the replicas hold has become known: requests that waited to know it are checked now."""
    for request in [r for r in books.requests.values() if not r.started]:
        try:
            _check_request(books, request)
        except Refused as no:
            books.fail(request, no.status, str(no), no.param)


def _check_load(books: Books, request: Request) -> None:
    """Raise Refused where too many requests are there already, with the seconds until likely fewer are."""
    now, key, queue = books.clock(), request.account, books.queue
    full = books.accounts.full(key, now)
    if full is None and (why := queue.full(request.prompt_len)) is not None:
        full = f"The server is full: {why}", queue.retry_after(request.prompt_len, now)
    if full is not None:
        raise Refused(full[0] + ". Please try again later.", status=429, retry_after=full[1])


def _check_request(books: Books, request: Request) -> None:
    """Raise Refused where the replicas cannot hold the request, as far as that is known."""
    config, replicas = books.config, books.replicas.values()
    check_width(request, config.max_num_seqs)
    if replicas:
        if not books.loading:
            check_kind(request, {r.pools for r in replicas})
            check_adapter(request, any(r.adapters is not None for r in replicas))
        check_fits(
            request, books.max_model_len, None if books.loading else max(r.pool.num_blocks for r in replicas),
            config.block_size, config.token_budget(),
            config.enable_chunked_prefill and not any(r.whole for r in replicas),
        )  # fmt: skip


def read_request(owner: str, message: Submit, block_size: int, vocab_size: int, by_priority: bool) -> Request:
    """The request of ``message`` with its live sequences, none queued yet. ``vocab_size`` 0: not known yet.

    Raises BadFrame where the message contradicts itself, Refused where it is sound but cannot be run.
    """
    if not -INT64 <= message.uid < INT64 or not 0 <= message.attempt < INT32:
        raise BadFrame(f"uid {message.uid} or attempt {message.attempt} is out of range")
    if not math.isfinite(message.arrival):
        raise BadFrame(f"arrival is {message.arrival}")
    if len(message.root) != HASH_SIZE:
        raise BadFrame(f"the root of the hashes has {len(message.root)} bytes")
    prompt_len = len(from_i32(message.ids))
    if not prompt_len:
        raise Refused("The prompt is empty; give at least one token.", param="prompt")
    if not 0 <= message.prompt_logprobs_from <= prompt_len:
        raise BadFrame(f"prompt_logprobs_from is {message.prompt_logprobs_from} of {prompt_len} prompt tokens")
    _check_ids(from_i32(message.ids), vocab_size, "prompt")
    _check_work(message, prompt_len, vocab_size)
    if len(message.hashes) == prompt_len // block_size * HASH_SIZE:
        hashes = [message.hashes[i : i + HASH_SIZE] for i in range(0, len(message.hashes), HASH_SIZE)]
    elif not message.hashes:  # of one who did not know the block size yet
        hashes = hash_blocks(message.ids, block_size, message.root)
    else:
        raise BadFrame(f"{len(message.hashes)} bytes of hashes for {prompt_len} tokens in blocks of {block_size}")
    heeded = by_priority or message.priority == BACKGROUND
    request = Request(owner, message, hashes, message.priority if heeded else 0)
    request.live.extend(_sequences(request, message, vocab_size))
    return request


def _check_work(message: Submit, prompt_len: int, vocab_size: int) -> None:
    """Raise BadFrame where what is to be done is not resolved, Refused where it names ids that no model has."""
    work = message.work
    if isinstance(work, Pool):
        if work.params.pooling is None or message.children:
            raise BadFrame("a pooling request is not resolved, or has children")
        if not -1 <= work.token_type_start <= prompt_len:
            raise BadFrame(f"token_type_start is {work.token_type_start} of {prompt_len} prompt tokens")
        return
    if work.params.max_tokens is None:
        raise BadFrame("max_tokens is not resolved")
    if (embeds := embeds_of(work)) is not None and (embeds.count != prompt_len or embeds.first):
        raise BadFrame(f"a prompt of {prompt_len} tokens has {embeds.count} embeddings from {embeds.first} on")
    _check_ids(from_i32(work.suppressed_ids), vocab_size, "min_tokens")
    for word in work.bad_words:
        if not word:
            raise BadFrame("a bad word without tokens")
        _check_ids(word, vocab_size, "bad_words")
    if (end := thought_end(work)) is None:
        raise BadFrame("a budget of thoughts without marks")
    _check_ids(end, vocab_size, "thinking_token_budget")


def _sequences(request: Request, message: Submit, vocab_size: int) -> list[Sequence]:
    key = (request.priority, request.arrival, request.uid)
    if request.pools:
        return [Sequence(request, 0, array("i"), (*key, 0), message.losses)]
    if request.params.use_beam_search:  # starts again whole, whatever children were live
        return [BeamGroup(request, (*key, 0), message.losses)]
    n = request.params.n
    if not message.children:
        return [Sequence(request, i, array("i"), (*key, i), message.losses) for i in range(n)]
    sequences = {}
    for child in message.children:
        if not 0 <= child.index < n or child.index in sequences:
            raise BadFrame(f"child {child.index} of n={n} is out of range or named twice")
        outputs = array("i", from_i32(child.ids))
        _check_ids(outputs, vocab_size, "resume")
        sequences[child.index] = Sequence(request, child.index, outputs, (*key, child.index), message.losses)
    return [sequences[index] for index in sorted(sequences)]


def _check_ids(tokens: Collection[int], vocab_size: int, param: str) -> None:
    if not tokens:
        return
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= (vocab_size or INT32):
        bad = low if low < 0 else high
        has = f", which has {vocab_size} tokens" if vocab_size else ""  # 0: no worker has told yet
        raise Refused(f"Token id {bad} is out of vocabulary{has}.", param=param)


def check_width(request: Request, max_num_seqs: int) -> None:
    """Raise Refused where a beam search is wider than a step."""
    for seq in request.live:
        if isinstance(seq, BeamGroup) and seq.width > max_num_seqs:
            raise Refused(
                f"A beam search of width {seq.width} runs as many sequences at once, and max_num_seqs is "
                f"{max_num_seqs}; search fewer beams, or raise that flag.",
                param="best_of",
            )


def check_kind(request: Request, pools: Collection[bool]) -> None:
    """Raise Refused where no replica is there for requests of this kind. ``pools``: of each, whether it pools."""
    if pools and request.pools not in pools:
        does, asked = ("generate", "pool") if request.pools else ("pool", "generate")
        raise Refused(
            f"The workers here {does} and do not {asked}: they were started with another --runner than the detokenizer."
        )


def check_adapter(request: Request, enabled: bool) -> None:
    """Raise Refused where the request asks for an adapter and no replica takes any."""
    if request.adapter is not None and not enabled:
        raise Refused(
            f"Got lora_request '{request.adapter.name}' but LoRA is not enabled! Start the workers with --enable-lora.",
            param="model",
        )


def check_fits(
    request: Request, max_model_len: int, blocks: int | None, block_size: int, budget: int, chunked: bool
) -> None:
    """Fix how long the sequences may grow, and raise Refused where no replica could ever hold one.

    ``blocks`` is the size of the largest replica (None: not known yet), ``budget`` the most tokens one step can run.
    """
    pools = request.pools
    if request.prompt_len >= max_model_len + pools:
        why = "" if pools else ", which leaves no room for output"
        raise Refused(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{request.prompt_len} input tokens{why}. Please reduce the length of the input prompt.",
            param="prompt",
        )
    if not chunked and request.prompt_len > budget:
        why, remedy = "with chunked prefill off", "shorten it, raise that flag, or drop --no-enable-chunked-prefill"
        if pools:
            why, remedy = "and runs a prompt whole", "shorten it (truncate_prompt_tokens), or raise that flag"
        raise Refused(
            f"The prompt has {request.prompt_len} tokens and a step runs at most max_num_batched_tokens={budget} "
            f"{why}; {remedy}.",
            param="prompt",
        )
    limit = request.set_limit(max_model_len)
    need = max((seq.most_blocks(block_size) for seq in request.live if seq.total < limit or pools), default=0)
    if blocks is not None and need > blocks:
        beams = fewer = ""
        if isinstance(seq := request.live[0], BeamGroup):
            beams, fewer = f" in each of {seq.width} beams", "search fewer beams, "
        raise Refused(
            f"{request.prompt_len} prompt tokens and up to {limit - request.prompt_len} output tokens{beams} need "
            f"{need} KV blocks of {block_size} tokens, and the largest replica has {blocks}; shorten the prompt, lower "
            f"max_tokens, {fewer}or give the workers more memory.",
            param="max_tokens",
        )
