"""A step's result: tokens appended, full blocks registered, ends found. A room above the books. No IO."""

from __future__ import annotations

from collections.abc import Container
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ..proto.codec import BadFrame, from_i32, i32
from ..proto.messages import Finish, Pooled, PromptLogprobs, SlotPooled, SpeculativeResult, StepResult
from .beam_group import BeamGroup, Scores, read_scores
from .beams import advance
from .books import Books
from .columns import Ints, as_u32
from .logprobs import count_logprobs, first_logprobs, skip_logprobs
from .replica import Replica
from .request import Sequence
from .step import Step

_ONE = i32([1])


def commit_result(books: Books, replica: Replica, result: StepResult) -> None:
    """Apply the result of the oldest step in flight.

    Raises BadFrame, having changed nothing, where the result cannot be that step's: the lease must end then.
    """
    step, tokens, kept = _check(replica, result)
    scores = _check_beams(replica, step, result) if step.others and step.of_beams() else {}
    pooled = _check_pooled(step, result) if replica.pools or result.pooled else {}
    books.outbox.flush()
    books.finish_step(replica, len(result.tokens) // 4)
    if step.verifications and isinstance(result, SpeculativeResult):
        counts, slots = from_i32(result.counts), step.verified
        books.speculation.count(from_i32(result.drafted), counts[slots.start : slots.stop])
    if step.prompts or result.failed or result.logprobs:
        _pass_on(books, step, result, scores, kept)
    drew = _commit_decodes(books, replica, step, tokens)
    if kept:
        drew += _commit_verifications(books, replica, step, kept)
    if step.chunks:
        _commit_chunks(replica, step)
    if step.others:
        drew += _commit_others(books, step, tokens, pooled)
    for last in drew:
        _end_by(books, *last)
    if scores:
        _commit_beams(books, replica, step, scores)


Kept = dict[int, list[int]]
"""By slot, what verifications gave to sequences that have not left since, without what comes after the end."""


def _check(replica: Replica, result: StepResult) -> tuple[Step, Ints, Kept]:
    """The step, and the first token of each slot."""
    if not replica.in_flight or result.step != replica.in_flight[0].number:
        expected = replica.in_flight[0].number if replica.in_flight else "none"
        raise BadFrame(f"result of step {result.step} where {expected} was expected")
    step = replica.in_flight[0]
    tokens, slots, places = as_u32(result.tokens), step.samples(), None  # so that a negative one is too large
    if step.verifications:
        places = _check_counts(replica, step, result, len(tokens))
    elif isinstance(result, SpeculativeResult):
        raise BadFrame(f"step {step.number} verifies nothing, and its result says what was drafted")
    elif len(tokens) != slots:
        raise BadFrame(f"{len(tokens)} tokens for the {slots} sample slots of step {step.number}")
    elif result.counts and result.counts != _ONE * len(tokens):
        raise BadFrame(f"step {step.number} draws one token for each slot")
    if result.failed:
        tokens, failed = tokens.copy(), _failed_slots(result, slots)
        # What stands there for a token means nothing.
        tokens[failed if places is None else [places[slot] for slot in failed]] = 0
    if len(tokens) and (highest := tokens.item(tokens.argmax())) >= replica.vocab_size:
        raise BadFrame(f"token {highest} of a vocabulary of {replica.vocab_size}")
    if result.logprobs or result.logprob_slots:
        _check_logprobs(result, slots)
    if result.prompts:
        _check_prompts(step, result)
    if places is None:
        return step, tokens.view(np.int32), {}
    kept = _kept(step, tokens.tolist(), places)
    return step, (tokens if len(tokens) == slots else tokens[places[:-1]]).view(np.int32), kept


def _check_counts(replica: Replica, step: Step, result: StepResult, tokens: int) -> list[int]:
    """Where each slot's tokens begin, and where the last one's end: one, or as many as a verification may give."""
    counts, verified = from_i32(result.counts), step.verified
    if not isinstance(result, SpeculativeResult) or len(counts) != step.samples() or sum(counts) != tokens:
        raise BadFrame(f"{tokens} tokens and {len(counts)} counts for the {step.samples()} slots of step {step.number}")
    if not min(counts) == max(counts) == 1:
        _check_most(replica, step, result, counts)
    drafted = from_i32(result.drafted)
    if len(drafted) != len(verified) or not 0 <= min(drafted) <= max(drafted) <= replica.drafts:
        raise BadFrame(f"{drafted[:8]} tokens were drafted for {len(verified)} rows of step {step.number}")
    return [0, *accumulate(counts)]


def _check_most(replica: Replica, step: Step, result: StepResult, counts: list[int]) -> None:
    """No slot may have more tokens than it was asked for."""
    failed = {each.slot for each in result.failed}
    for slot, count in enumerate(counts):
        most = 1
        if slot in step.verified and slot not in failed:
            seq, generation, first, stop = step.verifications[slot - step.verified_from]
            start = max(first, seq.computed) if seq.generation == generation else first
            most = min(stop - start, 1 + replica.drafts)
        if not 1 <= count <= most:
            raise BadFrame(f"slot {slot} of step {step.number} draws {count} tokens, not 1 to {most}")


def _kept(step: Step, tokens: list[int], places: list[int]) -> Kept:
    """Up to the token that ends its sequence, where one does."""
    kept: Kept = {}
    for slot, (seq, generation, _, _) in zip(step.verified, step.verifications, strict=True):
        if seq.generation != generation:
            continue
        drawn = tokens[places[slot] : places[slot + 1]]
        for count, token in enumerate(drawn, 1):
            if token in seq.stops and seq.request.finish_of(token, seq.output_len + count)[0] is not Finish.NONE:
                del drawn[count:]
                break
        kept[slot] = drawn
    return kept


def _failed_slots(result: StepResult, slots: int) -> list[int]:
    """Failed slots must be slots."""
    for failed in result.failed:
        if not 0 <= failed.slot < slots:
            raise BadFrame(f"slot {failed.slot} of {slots} failed")
    return [failed.slot for failed in result.failed]


def _check_logprobs(result: StepResult, slots: int) -> None:
    """Records of all tokens of slots that exist, in rising order."""
    given = from_i32(result.logprob_slots)
    if len(given) != len(result.logprobs) or any(a >= b for a, b in pairwise([-1, *given, slots])):
        raise BadFrame(f"{len(result.logprobs)} logprobs for the slots {given[:8]} of {slots}")
    counts = from_i32(result.counts)
    for slot, record in zip(given, result.logprobs, strict=True):
        if count_logprobs(record) != (counts[slot] if counts else 1):
            raise BadFrame(f"logprobs of another number of tokens than slot {slot} has")


def _check_prompts(step: Step, result: StepResult) -> None:
    """Prompt logprobs that this step computes, each row's in one piece or several that join. Where some are missing,
    the request fails in the end; the worker may say why when the row first draws.
    """
    wanted = {span.at: (span.first, span.end) for span in step.prompts}
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
        number: read_scores(given.get(number), slot.seq.request, replica.vocab_size)
        for number, slot in enumerate(step.slots())
        if isinstance(slot.seq, BeamGroup) and number not in failed
    }


def _check_pooled(step: Step, result: StepResult) -> dict[int, SlotPooled]:
    """What each slot of a pooling request answers with, but for the failed."""
    given = {found.slot: found for found in result.pooled}
    failed = {failed.slot for failed in result.failed}
    wanted = {
        number: slot.seq.request.prompt_len
        for number, slot in enumerate(step.slots())
        if slot.seq.request.pools and number not in failed
    }
    if len(given) < len(result.pooled) or given.keys() - failed != wanted.keys():
        raise BadFrame(f"slots {sorted(given)[:8]} are pooled where {sorted(wanted)[:8]} were expected")
    for slot, prompt_len in wanted.items():
        rows, size = given[slot].rows, len(given[slot].data)
        if rows not in (0, prompt_len) or not size or size % (4 * max(rows, 1)):
            raise BadFrame(f"{size} bytes in {rows} rows were pooled of {prompt_len} tokens")
    return given


def _pass_on(books: Books, step: Step, result: StepResult, beams: Container[int], kept: Kept) -> None:
    """What comes beside tokens, for the few who asked for it: prompt logprobs first, as they go out before tokens."""
    requests = {span.at: span.request for span in step.prompts}
    for piece in result.prompts:
        request = requests[piece.at]
        stop = piece.start + count_logprobs(piece.logprobs)
        if books.requests.get(request.uid) is request and piece.start <= request.prompt_done < stop:
            record = skip_logprobs(piece.logprobs, request.prompt_done - piece.start)
            message = PromptLogprobs(request.uid, request.attempt, request.prompt_done, record)
            books.outbox.put(request.owner, message)
            request.prompt_logprobs_sent(stop)
    for failed in result.failed:
        seq = step.drawn_for(failed.slot)
        if seq is not None:
            if failed.corrupted:
                books.tally.corrupt()
            books.fail(seq.request, min(max(failed.status, 400), 599), failed.message, failed.param)
    for request, _, _, end in step.prompts:
        if books.requests.get(request.uid) is request and request.prompt_done < end == request.prompt_len:
            books.fail(request, 500, "The worker did not send the logprobs of the whole prompt.")
    for number, record in zip(from_i32(result.logprob_slots), result.logprobs, strict=True):
        seq = step.drawn_for(number)
        if seq is not None and number not in beams:
            books.outbox.logprobs(seq, first_logprobs(record, len(kept[number])) if number in kept else record)


class Last(NamedTuple):
    """A sequence's last token, and its place in its detokenizer's batch."""

    seq: Sequence
    token: int
    place: int


def _commit_decodes(books: Books, replica: Replica, step: Step, tokens: Ints) -> list[Last]:
    """One token more for each decode whose sequence has not left while the step was in flight. Returns those that may
    end: they are as long as they may grow, or drew what ends somebody."""
    batch, starts, ends, tokens = step.decoded(tokens)
    if not batch.count:
        return []
    seqs = batch.seqs
    due = replica.columns.decoded(batch.rows, ends, tokens)
    books.outbox.decoded(batch, starts - batch.before_output, tokens)
    last = replica.stop_ids.among(tokens)
    if len(due):
        longest = replica.commit_decodes(batch, due, ends)
        last = sorted({*last, *longest}) if last else longest
    if not last:
        return []
    return [Last(seqs[at], tokens.item(at), batch.place(at)) for at in last]


def _commit_verifications(books: Books, replica: Replica, step: Step, kept: Kept) -> list[Last]:
    """What was drafted and is right, and one token more, for each whose sequence has not left. Returns the last."""
    drew = []
    for slot, (seq, generation, _, _) in zip(step.verified, step.verifications, strict=True):
        if seq.generation == generation:
            tokens, before = kept[slot], seq.computed
            seq.verified(tokens, replica.drafts)
            replica.commit(seq, before, before + len(tokens))
            drew.append(Last(seq, tokens[-1], books.outbox.tokens(seq, before + 1 - seq.prompt_len, tokens)))
    return drew


def _commit_chunks(replica: Replica, step: Step) -> None:
    """The chunks of prompts that are computed."""
    for chunk in step.chunks:
        seq = chunk.seq
        if seq.generation == chunk.generation:
            before = seq.computed
            seq.commit(chunk.end)
            replica.commit(seq, before, chunk.end)


def _commit_others(books: Books, step: Step, tokens: Ints, pooled: dict[int, SlotPooled]) -> list[Last]:
    """What was drawn or pooled from the logits of prompts, for siblings forked from them as well. Returns what was
    drawn."""
    drew, verified = [], step.verified
    for number, slot in enumerate(step.others, len(step.decodes)):
        seq, request = slot.seq, slot.seq.request
        if seq.generation != slot.generation or isinstance(seq, BeamGroup) or number in verified:
            continue
        if request.pools:
            found = pooled[number]
            books.answer(seq, Pooled(request.uid, request.attempt, found.rows, found.data))
        else:
            token = tokens.item(number)
            seq.begin_output(token)
            drew.append(Last(seq, token, books.outbox.token(seq, token)))
    return drew


def _commit_beams(books: Books, replica: Replica, step: Step, scores: dict[int, Scores]) -> None:
    """Last of all, because a search that ends closes the batch of tokens."""
    found: dict[BeamGroup, list[Scores]] = {}
    for number, slot in enumerate(step.slots()):
        if isinstance(slot.seq, BeamGroup) and slot.seq.generation == slot.generation:
            found.setdefault(slot.seq, []).append(scores[number])
    for group, of_beams in found.items():
        group.commit(group.scheduled)
        replica.update_quarantine(group)
        advance(books, group, of_beams)


def _end_by(books: Books, seq: Sequence, token: int, place: int) -> None:
    """End ``seq`` where its last token, at this place in its detokenizer's batch, is one to stop at, or the last that
    it may grow to."""
    if token in seq.stops:
        finish, stop_id = seq.request.finish_of(token, seq.output_len)
        if finish is not Finish.NONE:
            books.end(seq, finish, stop_id, place)
            return
    if seq.total >= seq.limit:
        books.end(seq, Finish.LENGTH, -1, place)
