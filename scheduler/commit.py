"""A step's result: tokens appended, full blocks registered, ends found. No IO."""

from __future__ import annotations

from collections.abc import Container
from itertools import pairwise
from typing import TYPE_CHECKING

from ..proto.codec import BadFrame, from_i32
from ..proto.messages import Finish, PromptLogprobs, SlotPooled, StepResult
from .beams import BeamGroup, Scores, advance, read_scores
from .logprobs import count_logprobs, skip_logprobs
from .replica import Replica, Step
from .request import Sequence

if TYPE_CHECKING:
    from .core import Scheduler


def commit(core: Scheduler, replica: Replica, result: StepResult) -> None:
    """Apply the result of the oldest step in flight.

    Raises BadFrame, having changed nothing, where the result cannot be that step's: the lease must end then.
    """
    step, tokens = _check(replica, result)
    scores = _check_beams(replica, step, result) if step.searches() else {}
    pooled = _check_pooled(step, result) if replica.pools or result.pooled else {}
    core.outbox.flush()
    replica.in_flight.popleft()
    core.steps += 1
    if step.prompts or result.failed or result.logprobs:
        _pass_on(core, step, result, scores)
    sink = None
    for seq, generation, token in zip(step.decodes, step.generations, tokens, strict=False):
        if seq.generation != generation:
            continue  # it left while this step was in flight
        known = seq.computed = seq.known
        known += 1
        seq.known = known
        seq.outputs.append(token)
        if seq.sink is not sink:
            sink = seq.sink
            put_seq, put_token = sink.seqs.append, sink.tokens.append
        put_seq(seq)
        put_token(token)
        if known >= seq.milestone or token in seq.stops:
            _look(core, replica, seq, token)
    if step.chunks:
        _commit_chunks(core, replica, step, tokens, pooled)
    if scores:
        _commit_beams(core, replica, step, scores)


def _check(replica: Replica, result: StepResult) -> tuple[Step, list[int]]:
    if not replica.in_flight or result.step != replica.in_flight[0].number:
        expected = replica.in_flight[0].number if replica.in_flight else "none"
        raise BadFrame(f"result of step {result.step} where {expected} was expected")
    step = replica.in_flight[0]
    tokens = from_i32(result.tokens)
    if len(tokens) != step.samples():
        raise BadFrame(f"{len(tokens)} tokens for the {step.samples()} sample slots of step {step.number}")
    if result.counts and from_i32(result.counts) != [1] * len(tokens):
        raise BadFrame(f"step {step.number} draws one token for each slot")
    if result.failed:
        _check_failed(result, tokens)
    if tokens and not 0 <= min(tokens) <= max(tokens) < replica.vocab_size:
        raise BadFrame(f"tokens {min(tokens)} to {max(tokens)} of a vocabulary of {replica.vocab_size}")
    if result.logprobs or result.logprob_slots:
        _check_logprobs(result, len(tokens))
    if step.prompts or result.prompts:
        _check_prompts(step, result)
    return step, tokens


def _check_failed(result: StepResult, tokens: list[int]) -> None:
    """Failed slots must be slots; what stands there for a token means nothing."""
    for failed in result.failed:
        if not 0 <= failed.slot < len(tokens):
            raise BadFrame(f"slot {failed.slot} of {len(tokens)} failed")
        tokens[failed.slot] = 0


def _check_logprobs(result: StepResult, slots: int) -> None:
    """Records of one token each, for slots that exist, in rising order."""
    given = from_i32(result.logprob_slots)
    if len(given) != len(result.logprobs) or any(a >= b for a, b in pairwise([-1, *given, slots])):
        raise BadFrame(f"{len(result.logprobs)} logprobs for the slots {given[:8]} of {slots}")
    for record in result.logprobs:
        if count_logprobs(record) != 1:
            raise BadFrame("logprobs of one token were expected")


def _check_prompts(step: Step, result: StepResult) -> None:
    """Prompt logprobs that this step computes, each row's in one piece or several that join. Where some are missing,
    the request fails in the end; the worker may say why when the row first draws.
    """
    wanted = {at: (first, end) for _, at, first, end in step.prompts}
    for piece in result.prompts:
        first, end = wanted.get(piece.at, (0, 0))
        stop = piece.start + count_logprobs(piece.logprobs)
        if piece.start != first or stop > end:
            raise BadFrame(
                f"logprobs of prompt tokens {piece.start} to {stop} of compute row {piece.at}, not {first} to {end}"
            )
        wanted[piece.at] = stop, end


def _check_beams(replica: Replica, step: Step, result: StepResult) -> dict[int, Scores]:
    """The log-probs of every beam's slot, but for the failed."""
    given = dict(zip(from_i32(result.logprob_slots), result.logprobs, strict=True))
    failed = {failed.slot for failed in result.failed}
    return {
        slot: read_scores(given.get(slot), seq.request, replica.vocab_size)
        for slot, (seq, _) in enumerate(step.slots())
        if isinstance(seq, BeamGroup) and slot not in failed
    }


def _check_pooled(step: Step, result: StepResult) -> dict[int, SlotPooled]:
    """What each slot of a pooling request answers with, but for the failed."""
    given = {found.slot: found for found in result.pooled}
    failed = {failed.slot for failed in result.failed}
    wanted = {
        slot: seq.request.prompt_len
        for slot, (seq, _) in enumerate(step.slots())
        if seq.request.pooling is not None and slot not in failed
    }
    if len(given) < len(result.pooled) or given.keys() - failed != wanted.keys():
        raise BadFrame(f"slots {sorted(given)[:8]} are pooled where {sorted(wanted)[:8]} were expected")
    for slot, prompt_len in wanted.items():
        rows, size = given[slot].rows, len(given[slot].data)
        if rows not in (0, prompt_len) or not size or size % (4 * max(rows, 1)):
            raise BadFrame(f"{size} bytes in {rows} rows were pooled of {prompt_len} tokens")
    return given


def _pass_on(core: Scheduler, step: Step, result: StepResult, beams: Container[int]) -> None:
    """What comes beside tokens, for the few who asked for it: prompt logprobs first, as they go out before tokens."""
    requests = {at: request for request, at, _, _ in step.prompts}
    for piece in result.prompts:
        request = requests[piece.at]
        stop = piece.start + count_logprobs(piece.logprobs)
        if core.requests.get(request.uid) is request and piece.start <= request.prompt_done < stop:
            record = skip_logprobs(piece.logprobs, request.prompt_done - piece.start)
            message = PromptLogprobs(request.uid, request.attempt, request.prompt_done, record)
            core.outbox.put(request.owner, message)
            request.prompt_done = stop
    slots = step.slots()
    for failed in result.failed:
        seq, generation = slots[failed.slot]
        if seq.generation == generation:
            core.fail(seq.request, min(max(failed.status, 400), 599), failed.message, failed.param)
    for request, _, _, end in step.prompts:
        if core.requests.get(request.uid) is request and request.prompt_done < end == request.prompt_len:
            core.fail(request, 500, "The worker did not send the logprobs of the whole prompt.")
    for slot, record in zip(from_i32(result.logprob_slots), result.logprobs, strict=True):
        seq, generation = slots[slot]
        if seq.generation == generation and slot not in beams:
            seq.sink.logprobs[seq] = record


def _commit_chunks(
    core: Scheduler, replica: Replica, step: Step, tokens: list[int], pooled: dict[int, SlotPooled]
) -> None:
    """Prompts' chunks, and siblings forked from them."""
    at = len(step.decodes) + sum(beams for _, _, beams in step.groups)
    for seq, generation, computed, draws in step.chunks:
        if seq.generation == generation:
            seq.computed = computed
            if draws and seq.request.pooling is not None:
                _register(replica, seq)
                core.answer(seq, pooled[at])
            elif draws and not isinstance(seq, BeamGroup):
                token = tokens[at]
                seq.known += 1
                seq.outputs.append(token)
                seq.sink.seqs.append(seq)
                seq.sink.tokens.append(token)
                _look(core, replica, seq, token)
            else:
                _register(replica, seq)
        at += draws


def _commit_beams(core: Scheduler, replica: Replica, step: Step, scores: dict[int, Scores]) -> None:
    """Last of all, because a search that ends closes the batch of tokens."""
    found: dict[BeamGroup, list[Scores]] = {}
    for slot, (seq, generation) in enumerate(step.slots()):
        if isinstance(seq, BeamGroup) and seq.generation == generation:
            found.setdefault(seq, []).append(scores[slot])
    for group, of_beams in found.items():
        group.computed = group.planned
        _clear(replica, group)
        advance(core, group, of_beams)


def _look(core: Scheduler, replica: Replica, seq: Sequence, token: int) -> None:
    """At a milestone or a stop token: register the blocks that are full, or end the sequence."""
    _register(replica, seq)
    if token in seq.stops:
        finish, stop_id = seq.request.finish_of(token, len(seq.outputs))
        if finish is not Finish.NONE:
            core.end(seq, finish, stop_id)
            return
    if seq.known >= seq.limit:
        core.end(seq, Finish.LENGTH, -1)
    else:
        full_at = (seq.registered + 1) * replica.block_size + 1
        seq.milestone = 0 if seq.losses and seq.suspect else min(seq.limit, full_at)


def _register(replica: Replica, seq: Sequence) -> None:
    """Offer committed full blocks to the prefix cache."""
    _clear(replica, seq)
    full, pool = seq.computed // replica.block_size, replica.pool
    if full > seq.registered and pool.caching:
        hashes = seq.hash_blocks(full, replica.block_size)
        for slot in range(seq.registered, full):
            pool.register(seq.blocks[slot], hashes[slot])
    seq.registered = full


def _clear(replica: Replica, seq: Sequence) -> None:
    """A suspect that got past its mark is none."""
    if replica.suspects and seq in replica.suspects and not seq.suspect:
        replica.suspects.remove(seq)
