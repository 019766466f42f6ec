"""What Engine's core makes of answers, losses and time, one rule at a time, each at its very limit."""

from itertools import chain
from random import Random

import pytest
from engine_rig import EngineRig, accepted, logprobs_of, one, text_of, who_has

from quire.client.core import (
    ACCEPT_S,
    NO_DETOKENIZER_RESUMED_S,
    NO_DETOKENIZER_S,
    RECONCILE_EVERY,
    SCHEDULER,
    SILENCE_S,
    STOOD_STILL_S,
    Connect,
    EngineCore,
)
from quire.proto import messages as m
from quire.proto.codec import f32, from_i32, from_i64, i8, i32, i64
from quire.proto.params import SamplingParams


@pytest.fixture
def rig():
    return EngineRig()


# ---------------------------------------------------------------- what a loss counts for


def test_the_loss_of_a_detokenizer_counts_for_what_had_started(rig):
    _, sent = accepted(rig)
    one(rig).text(sent, 0, [1], "a")
    one(rig).cut()
    assert one(rig).next(m.Tokenize).losses == 1


def test_the_loss_of_a_detokenizer_does_not_count_for_what_was_accepted_and_had_not_started(rig):
    accepted(rig)
    one(rig).cut()
    assert one(rig).next(m.Tokenize).losses == 0


def test_the_loss_of_a_detokenizer_counts_for_what_it_had_not_accepted(rig):
    rig.submit()
    one(rig).next(m.Tokenize)
    one(rig).cut()
    assert one(rig).next(m.Tokenize).losses == 1


def test_unknown_counts_for_what_had_started(rig):
    _, sent = accepted(rig)
    one(rig).text(sent, 0, [1], "a")
    one(rig).unknown(sent)
    assert one(rig).next(m.Tokenize).losses == 1


def test_an_attempt_has_not_started_before_it_is_said_so(rig):
    _, sent = accepted(rig)
    one(rig).text(sent, 0, [1], "a")
    one(rig).unknown(sent)
    again = one(rig).next(m.Tokenize)
    one(rig).unknown(again)
    assert (one(rig).next(m.Tokenize).losses, again.losses) == (1, 1)


def test_unknown_from_one_that_does_not_have_it_means_nothing():
    rig = EngineRig(2)
    rig.submit()
    holder, other = who_has(rig)
    other.unknown(holder.next(m.Tokenize))
    assert not holder.has(m.Tokenize) and not other.has(m.Tokenize)


@pytest.mark.parametrize(("uids", "attempts"), [([1, 2], [0]), ([1], []), ([], [0])])
def test_unknown_names_pairs(rig, uids, attempts):
    one(rig).send(m.Unknown(i64(uids), i32(attempts)))
    assert rig.core.bad_frames == 1


def test_the_log_says_how_many_requests_a_detokenizer_held(rig, caplog):
    one(rig).cut()
    assert "lost detokenizer" not in caplog.text
    rig.submit()
    one(rig).cut()
    assert "lost detokenizer detokenizer-0; sending 1 requests again" in caplog.text


def test_what_was_lost_before_it_was_accepted_is_forgotten_then(rig):
    rig.submit()
    one(rig).unknown(one(rig).next(m.Tokenize))
    sent = one(rig).next(m.Tokenize)
    one(rig).accept(sent)
    one(rig).text(sent, 0, [1], "a")
    one(rig).text(sent, 9, [1], "gap")
    assert (sent.losses, one(rig).next(m.Tokenize).losses) == (1, 1)


def test_an_accepted_request_stays_with_its_detokenizer():
    rig = EngineRig(2)
    rig.submit()
    holder, other = who_has(rig)
    sent = holder.next(m.Tokenize)
    holder.accept(sent)
    for _ in range(2):
        rig.submit(prompt="more")
    holder.text(sent, 9, [1], "gap")
    assert any(each.uid == sent.uid for each in holder.got if isinstance(each, m.Tokenize))
    assert not any(each.uid == sent.uid for each in other.got if isinstance(each, m.Tokenize))


def test_an_unaccepted_request_goes_to_the_least_busy_after_a_loss():
    rig = EngineRig(2)
    for _ in range(3):
        rig.submit()
    busy, other = sorted(rig.detokenizers, key=lambda each: -len(rig.core.links[each.identity].open))
    first = busy.next(m.Tokenize)
    other.send(m.Failed(other.next(m.Tokenize).uid, 0, 400, "no"))
    busy.unknown(first)
    assert other.next(m.Tokenize).uid == first.uid


# ---------------------------------------------------------------- what a detokenizer says


def test_any_word_of_a_silent_one_makes_it_ready_again(rig):
    words = one(rig)
    words.heartbeats = False
    rig.wait(SILENCE_S + 1)
    assert not rig.core.ready
    words.send(m.Unknown(b"", b""))
    assert rig.core.ready


def test_one_that_leaves_hands_over_what_it_held():
    rig = EngineRig(2)
    request = rig.submit()
    holder, other = who_has(rig)
    holder.send(m.Bye())
    assert other.next(m.Tokenize).uid == request.uid and not holder.identity


@pytest.mark.parametrize(
    "answer",
    [
        lambda uid: m.Failed(uid, 1, 500, "no"),
        lambda uid: m.Accepted(uid, 1, i32([9]), "no", None),
        lambda uid: m.Pooled(uid, 1, 0, f32([1.0])),
    ],
)
def test_an_answer_of_another_attempt_means_nothing(rig, answer):
    request = rig.submit()
    message = answer(request.uid)
    if isinstance(message, m.Accepted):
        message.work = request.work
    one(rig).send(message)
    assert not request.done and request.accepted is None


def test_an_answer_to_nobody_means_nothing(rig):
    one(rig).send(m.Failed(77, 0, 500, "no"))
    assert not rig.core.open and rig.core.bad_frames == 0


def test_vectors_for_one_that_generates_mean_nothing(rig):
    request, sent = accepted(rig)
    one(rig).send(m.Pooled(sent.uid, 0, 0, f32([1.0])))
    assert not request.done and rig.core.tokens_at == 0.0


def test_logprobs_of_the_prompt_for_one_that_pools_mean_nothing(rig):
    request = rig.pool()
    sent = one(rig).next(m.Tokenize)
    one(rig).accept(sent)
    one(rig).send(m.PromptLogprobs(sent.uid, 0, 1, logprobs_of([2])))
    assert (request.attempt, rig.core.bad_frames, one(rig).has(m.Tokenize)) == (0, 0, False)


def test_a_second_acceptance_changes_nothing(rig):
    request, sent = accepted(rig)
    one(rig).accept(sent, ids=(9, 9), text="other")
    assert (request.accepted.prompt_ids, request.accepted.prompt) == ([1, 2, 3], "hi")


# ---------------------------------------------------------------- a batch of text


def batch(rig, rows, **columns):
    """``rows``: (uid, attempt, index, offset, tokens, text, finish)."""
    uids, attempts, indexes, offsets, tokens, texts, finishes = zip(*rows, strict=True)
    given = {
        "uids": i64(uids), "attempts": i32(attempts), "indexes": i32(indexes), "offsets": i32(offsets),
        "counts": i32(map(len, tokens)), "tokens": i32(chain.from_iterable(tokens)), "texts": list(texts),
        "finishes": i8(finishes), "stop_reasons": [None] * len(rows), "lengths": i32([-1] * len(rows)),
    }  # fmt: skip
    one(rig).send(m.TextBatch(**{**given, **columns}))


def test_each_row_has_its_own_tokens(rig):
    requests = [rig.submit(SamplingParams(n=2)), rig.submit()]
    for _ in requests:
        one(rig).accept(one(rig).next(m.Tokenize))
    first, second = (each.uid for each in requests)
    rows = [(first, 0, 1, 0, [1, 2], "ab", 0), (77, 0, 0, 0, [9], "?", 0), (second, 5, 0, 0, [9], "?", 0),
            (second, 0, 0, 0, [3], "c", 0), (first, 0, 0, 0, [], "d", 0), (first, 0, 1, 2, [4], "e", 0)]  # fmt: skip
    batch(rig, rows)
    assert [child.tokens for each in requests for child in each.children] == [[], [1, 2, 4], [3]]
    assert [text_of(requests[0], 0), text_of(requests[0], 1), text_of(requests[1])] == ["d", "abe", "c"]
    assert [each.attempt for each in requests] == [0, 0]


def test_a_row_with_tokens_for_one_that_pools_means_nothing(rig):
    request = rig.pool()
    one(rig).accept(one(rig).next(m.Tokenize))
    batch(rig, [(request.uid, 0, 0, 0, [1], "a", 0)])
    assert (request.attempt, request.done, rig.core.bad_frames) == (0, False, 0)


@pytest.mark.parametrize(
    ("counts", "tokens"), [([2, 0], [1]), ([1, 1], [1, 2, 3]), ([2, -1], [1]), ([-1, 2], [1]), ([-1, 1], [])]
)
def test_counts_that_do_not_agree_with_the_tokens_are_a_bad_frame(rig, counts, tokens):
    request, _ = accepted(rig)
    batch(rig, [(request.uid, 0, 0, 0, [], "a", 0), (request.uid, 0, 0, 0, [], "b", 0)],
          counts=i32(counts), tokens=i32(tokens))  # fmt: skip
    assert (rig.core.bad_frames, text_of(request), rig.core.tokens_at) == (1, "", 0.0)


@pytest.mark.parametrize("short", ["uids", "attempts", "indexes", "offsets", "finishes", "lengths"])
def test_a_column_that_is_too_short_is_a_bad_frame(rig, short):
    request, _ = accepted(rig)
    batch(rig, [(request.uid, 0, 0, 0, [1], "a", 0)], **{short: b""})
    assert rig.core.bad_frames == 1


@pytest.mark.parametrize(("uids", "cached"), [([1], []), ([], [1]), ([1, 2], [1])])
def test_who_has_started_comes_in_pairs(rig, uids, cached):
    request, _ = accepted(rig)
    batch(rig, [(request.uid, 0, 0, 0, [1], "a", 0)], started_uids=i64(uids), started_cached=i32(cached))
    assert rig.core.bad_frames == 1


def test_who_has_started_is_noted_with_its_time_and_what_was_cached(rig):
    request, _ = accepted(rig)
    rig.now += 2
    batch(rig, [(request.uid, 0, 0, 0, [], "", 0)], started_uids=i64([77, request.uid]), started_cached=i32([1, 3]))
    assert (request.started, request.cached_tokens, request.metrics.time_in_queue) == (True, 3, 2.0)
    assert rig.core.bad_frames == 0


def test_a_plain_token_is_no_plain_one_where_it_has_logprobs(rig):
    request, sent = accepted(rig, params=SamplingParams(logprobs=0))
    for at, token in enumerate([7, 8]):
        one(rig).text(sent, at, [token], "x", logprobs=[logprobs_of([token])])
    assert [each.ids for each in request.children[0].logprobs] == [[7], [8]]


def test_logprobs_that_were_not_asked_for_are_left_aside(rig):
    request, sent = accepted(rig)
    for at in range(2):
        one(rig).text(sent, at, [7], "x", logprobs=[logprobs_of([7])])
    assert (request.children[0].tokens, request.children[0].logprobs, request.attempt) == ([7, 7], [], 0)


def test_logprobs_of_one_row_only(rig):
    request, _ = accepted(rig, params=SamplingParams(n=2, logprobs=0))
    rows = [(request.uid, 0, 0, 0, [7], "a", 0), (request.uid, 0, 1, 0, [8], "b", 0)]
    batch(rig, rows, logprob_rows=i32([1, 0]), logprobs=[logprobs_of([8]), logprobs_of([7])])
    assert [child.logprobs[0].ids for child in request.children] == [[7], [8]]


@pytest.mark.parametrize("columns", [{"logprobs": [logprobs_of([7])]}, {"logprob_rows": i32([0])}])
def test_each_record_has_its_row(rig, columns):
    request, _ = accepted(rig)
    batch(rig, [(request.uid, 0, 0, 0, [7], "a", 0)], **columns)
    assert rig.core.bad_frames == 1


def test_one_whose_children_have_all_ended_is_open_no_longer(rig):
    request, _ = accepted(rig, params=SamplingParams(n=2))
    batch(rig, [(request.uid, 0, 0, 0, [7], "a", m.Finish.STOP)])
    assert list(rig.core.open) == [request.uid]
    batch(rig, [(request.uid, 0, 1, 0, [7], "a", m.Finish.LENGTH)])
    assert not rig.core.open and request.done and request.error is None


# ---------------------------------------------------------------- heartbeats


def test_the_scheduler_hears_from_it_while_it_is_there(rig):
    rig.core.heartbeat(memory=3, bad_frames=0)
    assert [what for peer, what in rig.core.take() if peer == SCHEDULER] == [m.Heartbeat(memory=3)]
    rig.core.disconnected(SCHEDULER)
    rig.core.heartbeat(memory=3, bad_frames=0)
    assert not [what for peer, what in rig.core.take() if peer == SCHEDULER]


def test_reconcile_comes_with_every_second_heartbeat(rig):
    _, sent = accepted(rig)
    seen = []
    for _ in range(4):
        rig.core.heartbeat(0, 0)
        seen.append([type(what).__name__ for peer, what in rig.core.take() if peer != SCHEDULER])
    assert RECONCILE_EVERY == 2 and seen == [["Heartbeat"], ["Heartbeat", "Reconcile"]] * 2
    assert sent.attempt == 0


def test_reconcile_names_what_is_held_there_and_no_more():
    rig = EngineRig(2)
    requests = [rig.submit() for _ in range(3)]
    rig.wait(2)
    seen = {}
    for each in rig.detokenizers:
        opened = each.next(m.Reconcile)
        seen |= dict.fromkeys(from_i64(opened.uids), each)
        assert list(rig.core.links[each.identity].open) == from_i64(opened.uids)
        assert from_i32(opened.attempts) == [0] * len(from_i64(opened.uids))
    assert sorted(seen) == [request.uid for request in requests]


def test_who_is_not_connected_gets_no_heartbeat(rig):
    words = one(rig)
    words.reachable = False
    words.cut()
    rig.core.heartbeat(0, 0)
    assert [type(what) for peer, what in rig.core.take() if peer != SCHEDULER] == [Connect]


def test_a_detokenizer_may_be_silent_for_so_long_and_no_longer(rig):
    old = one(rig).identity
    one(rig).heartbeats = False
    rig.wait(SILENCE_S)
    assert one(rig).identity == old
    rig.wait(1)
    assert one(rig).identity != old


def test_a_word_of_a_detokenizer_ends_its_silence(rig):
    old = one(rig).identity
    one(rig).heartbeats = False
    rig.wait(SILENCE_S)
    one(rig).send(m.Unknown(b"", b""))
    rig.wait(SILENCE_S)
    assert one(rig).identity == old


def test_one_that_was_silent_is_ready_when_heard_and_not_when_connected(rig):
    words = one(rig)
    words.heartbeats = False
    rig.wait(SILENCE_S + 1)
    assert words.identity and not rig.core.links[words.identity].ready
    rig.core.connected(words.identity)
    assert not rig.core.links[words.identity].ready


def test_one_that_is_connected_again_was_just_heard(rig):
    rig.now += 500
    one(rig).cut()
    rig.core.heartbeat(0, 0)
    rig.carry()
    assert rig.core.links[one(rig).identity].heard == rig.now


@pytest.mark.parametrize(("gap", "silent"), [(STOOD_STILL_S, True), (STOOD_STILL_S + 0.5, False)])
def test_a_late_heartbeat_of_its_own_is_a_standstill_or_not(rig, gap, silent):
    old = one(rig).identity
    one(rig).heartbeats = False
    rig.wait(SILENCE_S - 1)
    rig.now += gap
    rig.heartbeat()
    assert (one(rig).identity != old) == silent


def test_a_standstill_before_the_first_heartbeat_is_none_of_ours(rig):
    rig.now += 100
    rig.core.heartbeat(0, 0)
    assert not rig.core.ready


def test_a_standstill_before_the_scheduler_was_ever_heard():
    core = EngineCore(
        m.Hello("frontend", "x", m.PROTOCOL, 1), iter([1.0, 500.0, 501.0]).__next__, lambda: 0.0, Random()
    )
    core.heartbeat(0, 0)
    core.heartbeat(0, 0)
    assert not core.ready and not core.take()


def test_a_standstill_before_a_detokenizer_was_ever_heard():
    rig = EngineRig(0)
    rig.core.received(SCHEDULER, m.Peers(1000, [m.Peer("detokenizer", "d", "d")], 16, True, 128))
    rig.core.heartbeat(0, 0)
    rig.now += 100
    rig.core.heartbeat(0, 0)
    ((identity, link),) = rig.core.links.items()
    rig.core.connected(identity)
    assert link.ready and link.heard == rig.now


def test_who_stood_still_holds_no_request_to_the_time():
    rig = EngineRig(2)
    rig.submit()
    slow, other = who_has(rig)
    rig.wait(ACCEPT_S)
    rig.now += 100
    for each in rig.detokenizers:
        each.send(m.Heartbeat())
    rig.heartbeat()
    assert not other.has(m.Tokenize)
    rig.wait(1)
    assert other.has(m.Tokenize) and slow.has(m.Abort)


# ---------------------------------------------------------------- what has waited too long


def test_a_request_that_was_sent_before_waits_longer_for_a_detokenizer(rig):
    request, words = rig.submit(), one(rig)
    words.reachable = False
    words.cut()
    rig.wait(NO_DETOKENIZER_RESUMED_S)
    assert not request.done
    rig.wait(1)
    error = request.error
    assert (error.status, error.retry_after) == (503, NO_DETOKENIZER_RESUMED_S) and "for 120 s" in error.message


def test_a_new_one_is_told_when_to_try_again():
    rig = EngineRig(0)
    request = rig.submit()
    rig.wait(NO_DETOKENIZER_S + 1)
    error = request.error
    assert (error.status, error.retry_after) == (503, NO_DETOKENIZER_S) and "for 10 s" in error.message
    assert not rig.core.open


def test_one_that_its_detokenizer_does_not_accept_has_so_long_and_no_longer():
    rig = EngineRig(2)
    rig.submit()
    _, other = who_has(rig)
    rig.wait(ACCEPT_S)
    assert not other.has(m.Tokenize)
    rig.wait(1)
    assert other.has(m.Tokenize)


def test_the_time_to_accept_begins_again_with_each_detokenizer():
    rig = EngineRig(2)
    rig.submit()
    first, second = who_has(rig)
    rig.wait(ACCEPT_S + 1)
    first.got.clear()
    rig.wait(ACCEPT_S)
    assert not first.has(m.Tokenize)
    rig.wait(1)
    assert first.has(m.Tokenize) and second.has(m.Abort)


def test_the_time_to_accept_begins_when_a_waiting_request_is_placed():
    rig = EngineRig(2)
    for each in rig.detokenizers:
        each.reachable = False
        each.cut()
    rig.submit()
    rig.wait(NO_DETOKENIZER_S - 1)
    for each in rig.detokenizers:
        each.reachable = True
    rig.wait(1)
    _, other = who_has(rig)
    rig.wait(ACCEPT_S)
    assert not other.has(m.Tokenize)
    rig.wait(1)
    assert other.has(m.Tokenize)


def test_an_accepted_request_may_take_its_time():
    rig = EngineRig(2)
    rig.submit()
    holder, other = who_has(rig)
    holder.accept(holder.next(m.Tokenize))
    rig.wait(5 * ACCEPT_S)
    assert not holder.has(m.Tokenize) and not other.has(m.Tokenize) and not holder.has(m.Abort)


def test_with_one_detokenizer_there_is_none_to_move_to(rig):
    rig.submit()
    one(rig).next(m.Tokenize)
    rig.wait(5 * ACCEPT_S)
    assert not one(rig).has(m.Tokenize) and not one(rig).has(m.Abort)


def test_a_move_to_another_detokenizer_is_no_loss():
    rig = EngineRig(2)
    rig.submit()
    _, other = who_has(rig)
    rig.wait(ACCEPT_S + 1)
    moved = other.next(m.Tokenize)
    assert (moved.attempt, moved.losses) == (1, 0)
