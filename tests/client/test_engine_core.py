"""Engine's core alone: messages in, messages out, and a clock that stands still until the test moves it."""

import numpy
import pytest
from engine_rig import EngineRig, logprobs_of, one, text_of, who_has

from quire.client import core as core_module
from quire.client.core import ACCEPT_S, NO_DETOKENIZER_RESUMED_S, NO_DETOKENIZER_S, SILENCE_S
from quire.client.placement import MAX_UNBLAMED
from quire.client.results import RequestError
from quire.proto import messages as m
from quire.proto.codec import from_i32, from_i64, i32, i64
from quire.proto.params import SamplingParams


@pytest.fixture
def rig():
    return EngineRig()


# ---------------------------------------------------------------- a request's way


def test_what_is_submitted_is_sent_with_a_number_a_seed_and_a_time(rig):
    request = rig.submit(SamplingParams(max_tokens=4), seed=9, key="k", priority=3)
    sent = one(rig).next(m.Tokenize)
    assert (sent.prompt, sent.attempt, sent.resume, sent.key, sent.priority) == ("hi", 0, [], "k", 3)
    assert (sent.uid, sent.arrival) == (request.uid, rig.core.wall_clock())
    assert rig.submit().uid == sent.uid + 1 and EngineRig().submit().uid == sent.uid  # chance is given, too
    one(rig).accept(sent)
    assert (request.accepted.prompt_ids, request.accepted.prompt, request.params.max_tokens) == ([1, 2, 3], "hi", 16)
    rig.now += 2
    one(rig).text(sent, 0, [7], "a")
    rig.now += 3
    one(rig).text(sent, 1, [8, 9], "bc", m.Finish.STOP, reason="X")
    (output,) = request.children
    assert (text_of(request), output.tokens, output.finish, output.stop_reason) == (
        "abc",
        [7, 8, 9],
        m.Finish.STOP,
        "X",
    )
    times = request.metrics
    assert (times.time_in_queue, times.first_token_time, times.finished_time) == (2.0, rig.now - 3, rig.now)
    assert request.done and request.cached_tokens == 2 and rig.core.tokens_at == rig.now
    assert len(rig.core.open) == 1


def test_what_is_pooled_is_answered_at_once(rig):
    request = rig.pool()
    sent = one(rig).next(m.Tokenize)
    one(rig).accept(sent)
    answer = numpy.array([1, 2], numpy.float32).tobytes()
    one(rig).send(m.Pooled(sent.uid, 0, 2, answer))  # a row for each token, of a prompt of three
    assert rig.core.bad_frames == 1 and not request.done
    one(rig).text(sent, 0, [1], "text, of all things")
    one(rig).send(m.Pooled(sent.uid, 0, 0, answer))
    assert request.done and request.pooled.data.tolist() == [1, 2] and request.pooled.num_cached_tokens == 2


def test_duplicates_and_lower_attempts_are_dropped(rig):
    request, words = rig.submit(), one(rig)
    sent = words.next(m.Tokenize)
    words.accept(sent)
    words.text(sent, 0, [1, 2], "ab")
    words.text(sent, 0, [1, 2], "ab")
    words.text(sent, 1, [2], "b")
    words.text(sent, 2, [3], "never", attempt=-1)
    words.send(m.Failed(sent.uid, -1, 500, "of an attempt given up"))
    words.text(sent, 2, [3], "c", m.Finish.STOP)
    assert (text_of(request), request.children[0].tokens, request.error) == ("abc", [1, 2, 3], None)


def test_a_stop_string_cuts_tokens(rig):
    request = rig.submit()
    sent = one(rig).next(m.Tokenize)
    one(rig).accept(sent)
    one(rig).text(sent, 0, [1, 2], "a")
    one(rig).text(sent, 2, [3, 4, 5], "b", m.Finish.STOP, length=3, reason="S")
    assert (text_of(request), request.children[0].tokens, request.pending[0].length) == ("ab", [1, 2, 3], 3)


def test_failed_ends_a_request_and_abort_tells_the_detokenizer(rig):
    failed, aborted = rig.submit(), rig.submit()
    sent = one(rig).next(m.Tokenize)
    one(rig).send(m.Failed(sent.uid, 0, 429, "busy", "prompt", 2.5))
    error = failed.error
    assert (error.status, error.message, error.param, error.retry_after) == (429, "busy", "prompt", 2.5)
    rig.core.abort(aborted.uid)
    rig.core.abort(aborted.uid)
    rig.carry()
    assert aborted.done and aborted.error is None and one(rig).next(m.Abort).uid == aborted.uid
    assert not one(rig).has(m.Abort) and not rig.core.open


def test_requests_go_to_the_least_busy():
    rig = EngineRig(2)
    requests = [rig.submit() for _ in range(6)]
    assert [sum(isinstance(x, m.Tokenize) for x in each.got) for each in rig.detokenizers] == [3, 3]
    rig.core.fail_all(RequestError(503, "over"))
    assert all(each.error.message == "over" for each in requests) and not rig.core.open


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt": "\ud800"}, "prompt"),
        ({"messages": [{5: "x"}]}, "messages"),
        ({"messages": [{"a": 10**30}]}, "messages"),
        ({"messages": [{"a": object()}]}, "messages"),
        ({"messages": [{}], "template": {"x": 1, "chat_template_kwargs": {"a": 10**30}}}, "chat_template_kwargs"),
        ({"prompt": "a", "params": SamplingParams(stop="\udfff")}, "stop"),
    ],
)
def test_what_the_wire_would_refuse_is_refused(rig, arguments, param):
    with pytest.raises(RequestError, match=param) as caught:
        rig.submit(**arguments)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert not rig.core.open and not rig.core.take()


def test_what_waits_to_be_tokenized_is_bounded(rig, monkeypatch):
    monkeypatch.setattr(core_module, "MAX_UNACCEPTED", 2)
    requests = [rig.submit(prompt="a") for _ in range(2)]
    with pytest.raises(RequestError, match="2 requests") as caught:
        rig.submit(prompt="b")
    assert caught.value.status == 429 and caught.value.retry_after == 1.0
    one(rig).accept(one(rig).next(m.Tokenize))
    requests.append(rig.submit(prompt="c"))
    for request in requests:
        rig.core.abort(request.uid)
    monkeypatch.setattr(core_module, "MAX_UNACCEPTED_BYTES", 2000)
    rig.submit(prompt="x" * 5000)  # alone, it may
    with pytest.raises(RequestError, match="5512 bytes"):
        rig.submit(prompt="b")


@pytest.mark.parametrize("many", [
    {"prompt": "a", "cache_salt": "s" * 5000},
    {"messages": [{"role": "user", "content": "a"}], "template": {"tools": [{"description": "t" * 5000}]}},
])  # fmt: skip
def test_what_waits_is_counted_with_its_salt_and_its_tools(rig, monkeypatch, many):
    monkeypatch.setattr(core_module, "MAX_UNACCEPTED_BYTES", 2000)
    rig.submit(**many)
    with pytest.raises(RequestError, match=r"1 requests \(5... bytes"):
        rig.submit(prompt="b")


# ---------------------------------------------------------------- logprobs


def test_logprobs_in_step_with_tokens(rig):
    request, words = rig.submit(SamplingParams(logprobs=0)), one(rig)
    sent = words.next(m.Tokenize)
    words.accept(sent)
    words.text(sent, 0, [7], "a", logprobs=[logprobs_of([7, 8])])  # does not fit: the whole frame is dropped
    assert rig.core.bad_frames == 1
    words.text(sent, 0, [7], "a", logprobs=[logprobs_of([7])])
    words.text(sent, 1, [8], "b")  # a token without: something was lost
    again = words.next(m.Tokenize)
    assert (again.attempt, [from_i32(each.ids) for each in again.resume]) == (1, [[7]])
    words.text(again, 1, [8], "b", m.Finish.STOP, logprobs=[logprobs_of([8])])
    (output,) = request.children
    assert [(each.ids, each.texts) for each in output.logprobs] == [([7], ["<7>"]), ([8], ["<8>"])]
    assert output.cumulative == -1.0


def test_best_of_prompt_logprobs_and_a_restart_in_between(rig):
    request, words = rig.submit(SamplingParams(n=1, best_of=2, prompt_logprobs=0)), one(rig)
    sent = words.next(m.Tokenize)
    params = sent.work.params
    assert (params.n, params.best_of, params.logprobs, sent.prompt_logprobs_from) == (2, None, 0, 0)
    words.accept(sent)
    words.send(m.PromptLogprobs(sent.uid, -1, 1, logprobs_of([2, 3])))  # of an attempt given up
    words.send(m.PromptLogprobs(sent.uid, 0, 1, m.Logprobs(b"abc", b"", b"")))
    words.send(m.PromptLogprobs(sent.uid, 0, 1, logprobs_of([2])))
    words.send(m.PromptLogprobs(sent.uid, 0, 3, logprobs_of([4])))  # a gap
    again = words.next(m.Tokenize)
    assert (again.attempt, again.prompt_logprobs_from, again.resume, again.work.params.n) == (1, 2, [], 2)
    words.accept(again)
    words.send(m.PromptLogprobs(sent.uid, 1, 1, logprobs_of([2, 3])))
    for index in range(2):
        assert not request.pending
        words.text(again, 0, [8], "x", m.Finish.STOP, index, logprobs=[logprobs_of([8], -1.0 - index)])
    ((index, event),) = request.pending.items()
    assert (index, event.tokens, event.finish, event.logprobs) == (0, [8], m.Finish.STOP, [])
    assert [None if each is None else each.ids for each in request.prompt_logprobs] == [None, [2], [3]]
    assert [child.cumulative for child in request.children] == [-1.0] and rig.core.bad_frames == 1


# ---------------------------------------------------------------- losses


def test_a_gap_is_a_loss_and_the_rest_is_asked_for_again(rig):
    request, words = rig.submit(), one(rig)
    sent = words.next(m.Tokenize)
    words.accept(sent)
    words.text(sent, 0, [1], "a")
    words.text(sent, 2, [3], "c")
    again = words.next(m.Tokenize)
    assert (again.attempt, again.losses, from_i32(again.ids)) == (1, 1, [1, 2, 3])
    assert [(r.index, from_i32(r.ids), r.text_sent) for r in again.resume] == [(0, [1], 1)]
    words.accept(again)
    words.text(sent, 2, [3], "late")  # the old attempt still talks
    words.text(again, 1, [2, 3], "bc", m.Finish.STOP)
    assert (text_of(request), request.children[0].tokens) == ("abc", [1, 2, 3])


def test_a_lost_detokenizer_hands_over_what_it_held():
    rig = EngineRig(2)
    request = rig.submit(SamplingParams(n=2), seed=5)
    first, second = who_has(rig)
    sent = first.next(m.Tokenize)
    first.accept(sent)
    first.text(sent, 0, [1, 2], "ab", index=0)
    first.text(sent, 0, [8], "x", m.Finish.STOP, index=1)
    first.reachable = False
    first.cut()
    again = second.next(m.Tokenize)
    assert (again.uid, again.attempt, again.work.seed, again.prompt) == (sent.uid, 1, 5, None)
    assert from_i32(again.ids) == [1, 2, 3] and again.work.params.max_tokens == 16
    assert [(r.index, from_i32(r.ids), r.text_sent) for r in again.resume] == [(0, [1, 2], 2)]
    second.accept(again, text=None)
    second.text(again, 2, [3], "c", m.Finish.LENGTH, index=0)
    assert [(text_of(request, i), c.tokens) for i, c in enumerate(request.children)] == [("abc", [1, 2, 3]), ("x", [8])]
    assert request.accepted.prompt == "hi"


def test_a_detokenizer_out_of_reach_is_tried_again_under_its_own_identity(rig):
    words = one(rig)
    old, words.reachable = words.identity, False
    words.cut()
    request = rig.submit()
    assert not rig.core.ready
    rig.wait(3)
    words.reachable = True
    rig.wait(1)
    assert rig.core.ready and words.identity not in ("", old)
    assert words.next(m.Tokenize).uid == request.uid


def test_one_that_leaves_is_not_connected_to_again(rig):
    request, words = rig.submit(), one(rig)
    words.send(m.Bye())
    assert not words.identity and not rig.core.links
    rig.peers(listed=[])
    rig.peers()  # it is back
    assert words.next(m.Tokenize).attempt == 0 and words.next(m.Tokenize).attempt == 1
    assert not request.done


def test_unknown_means_again(rig):
    request, words = rig.submit(), one(rig)
    sent = words.next(m.Tokenize)
    words.accept(sent)
    rig.wait(2)
    opened = words.next(m.Reconcile)
    assert (from_i64(opened.uids), from_i32(opened.attempts)) == ([sent.uid], [0])
    words.unknown(sent)
    again = words.next(m.Tokenize)
    words.unknown(sent)  # of the attempt before: ignored
    words.accept(again)
    words.text(again, 0, [1], "a", m.Finish.STOP)
    assert text_of(request) == "a" and not words.has(m.Tokenize)
    assert (again.attempt, again.resume, again.losses) == (1, [], 0)  # it had not started: the loss does not count


def test_the_third_loss_at_one_point_fails_the_request(rig):
    poison, innocent, words = rig.submit(prompt="poison"), rig.submit(prompt="innocent"), one(rig)
    sent = [words.next(m.Tokenize) for _ in range(2)]
    for loss in range(4):
        for tokenize in sent:
            words.accept(tokenize)
        if loss == 0:
            words.text(sent[0], 0, [1], "a")
        words.text(sent[-1], loss, [loss], "x")
        if loss < 3:
            for tokenize in sent:
                words.text(tokenize, 99, [1], "gap")
            sent = [words.next(m.Tokenize) for _ in range(2 if loss < 2 else 1)]
    assert poison.error.status == 500 and "3 times" in poison.error.message
    assert sent[0].losses == 1
    words.text(sent[0], 4, [9], "!", m.Finish.STOP)
    assert text_of(innocent) == "xxxx!"


def test_one_that_is_never_accepted_fails_at_the_third_loss(rig):
    request = rig.submit(prompt="unreadable there")
    for attempt in range(3):
        sent = one(rig).next(m.Tokenize)
        assert (sent.attempt, sent.losses) == (attempt, attempt)
        one(rig).unknown(sent)
    assert request.error.status == 500 and "3 times" in request.error.message and not rig.core.open


def test_the_last_chance_is_taken_alone(rig):
    poison, innocent, words = rig.submit(prompt="poison"), rig.submit(prompt="beside it"), one(rig)
    for attempt in range(2):
        sent = [words.next(m.Tokenize) for _ in range(2)]
        assert [(each.attempt, each.losses) for each in sent] == [(attempt, attempt)] * 2
        words.cut()
    alone, other = words.next(m.Tokenize), words.next(m.Tokenize)
    words.send(m.Quarantined(alone.uid, alone.attempt))
    assert words.next(m.Quarantined) == m.Quarantined(poison.uid, 2)
    words.cut()
    assert "3 times" in poison.error.message and not innocent.done
    again = words.next(m.Tokenize)
    assert (again.uid, again.losses, other.losses) == (innocent.uid, 2, 2)
    words.accept(again)
    words.text(again, 0, [1], "a", m.Finish.STOP)
    assert text_of(innocent) == "a"


def test_one_in_quarantine_that_had_not_begun_is_not_accused(rig):
    poison, words = rig.submit(prompt="poison"), one(rig)
    for _ in range(2):
        words.unknown(words.next(m.Tokenize))
    assert not words.has(m.Quarantined)
    for attempt in range(2, 6):
        assert (words.next(m.Tokenize).attempt, poison.losses.count) == (attempt, 2)
        words.send(m.Quarantined(poison.uid + 1, 2))  # another is the next
        words.cut()
    assert not poison.done


def test_one_that_kills_whoever_receives_it_is_given_up(rig):
    request, words = rig.submit(prompt="poison"), one(rig)
    for losses in (0, 1, *[2] * MAX_UNBLAMED):
        assert words.next(m.Tokenize).losses == losses and not request.done
        words.cut()  # before it could say which one it prepares
    words.cut()
    assert "3 times" in request.error.message


def test_deaths_before_anybody_was_prepared_alone_are_forgotten_with_the_prompt_accepted(rig):
    request, words = rig.submit(prompt="innocent"), one(rig)
    for _ in range(2 + MAX_UNBLAMED):
        words.next(m.Tokenize)
        words.cut()
    words.accept(words.next(m.Tokenize))
    assert (request.unblamed, request.losses.count) == (0, 0)


def test_of_a_detokenizer_that_dies_of_one_in_quarantine_no_other_is_accused(rig):
    running, poison, words = rig.submit(prompt="running"), rig.submit(prompt="poison"), one(rig)
    sent = words.next(m.Tokenize)
    words.accept(sent)
    words.text(sent, 0, [1], "a")
    for _ in range(2):
        words.unknown(words.next(m.Tokenize))
    assert words.next(m.Tokenize).losses == 2
    words.send(m.Quarantined(poison.uid, 2))
    words.cut()  # and made again at once
    assert words.next(m.Tokenize).losses == 0 and not running.done
    assert "3 times" in poison.error.message


# ---------------------------------------------------------------- the scheduler


def test_it_says_hello_and_what_it_holds(rig):
    assert [type(each) for each in rig.at_scheduler] == [m.Hello] and rig.at_scheduler[0].incarnation == "frontend-x"
    one(rig).send(m.Unknown(b"abc", b""))
    rig.core.heartbeat(memory=9, bad_frames=4)
    rig.carry()
    assert (rig.at_scheduler[-1].memory, rig.at_scheduler[-1].bad_frames) == (9, 5)


def test_peers_of_a_lower_epoch_are_ignored(rig):
    rig.peers(epoch=1, ready=False)
    assert rig.core.ready and rig.core.peers.max_model_len == 128


def test_a_restarted_scheduler_hits_only_what_it_had(rig):
    early, running, words = rig.submit(prompt="not accepted yet"), rig.submit(prompt="running"), one(rig)
    early_sent, sent = words.next(m.Tokenize), words.next(m.Tokenize)
    words.accept(sent)
    words.text(sent, 0, [1], "a")
    rig.core.disconnected("scheduler")
    assert not rig.core.ready
    rig.core.connected("scheduler")
    rig.peers(epoch=2000, listed=[])  # its first Peers name no detokenizer yet
    again = words.next(m.Tokenize)
    assert (again.uid, again.attempt, again.losses) == (sent.uid, 1, 1)
    rig.peers(epoch=2000)
    assert rig.core.ready and not words.has(m.Tokenize)
    words.text(again, 1, [2], "b", m.Finish.STOP)
    words.accept(early_sent)
    words.text(early_sent, 0, [5], "e", m.Finish.STOP)
    assert (text_of(running), text_of(early)) == ("ab", "e")


def test_a_new_scheduler_drops_only_whom_it_has_known(rig):
    words = one(rig)
    rig.peers(epoch=2000, listed=[])
    assert words.identity
    rig.peers(epoch=2000)
    rig.peers(epoch=2000, listed=[])
    assert not words.identity and not rig.core.links


@pytest.mark.parametrize(("blamed", "losses"), [(None, 1), ("itself", 1), (5, 0)])
def test_of_a_scheduler_that_died_of_one_request_no_other_is_accused(rig, blamed, losses):
    request, words = rig.submit(), one(rig)
    sent = words.next(m.Tokenize)
    words.accept(sent)
    words.text(sent, 0, [1], "a")
    rig.peers(epoch=2000, blamed=request.uid if blamed == "itself" else blamed)
    assert words.next(m.Tokenize).losses == losses


def test_a_refusal_is_kept(rig):
    rig.scheduler(m.Bye("later"))  # it knew this process
    assert rig.core.refused is None
    rig.scheduler(m.Bye("protocol 1 is not supported; upgrade."))
    assert rig.core.refused == "protocol 1 is not supported; upgrade." and not rig.core.ready


def test_a_core_that_is_closed_ends_what_is_open_and_hears_nothing_more(rig):
    request, words = rig.submit(), one(rig)
    rig.core.close(RequestError(503, "closed"))
    rig.carry()
    assert request.error.message == "closed" and words.has(m.Abort) and words.has(m.Bye)
    assert isinstance(rig.at_scheduler[-1], m.Bye)
    rig.peers()
    assert not rig.core.links and not rig.core.ready


# ---------------------------------------------------------------- time


def test_with_no_detokenizer_a_new_request_is_refused_in_time():
    rig = EngineRig(0)
    request = rig.submit()
    rig.wait(NO_DETOKENIZER_S)
    assert not request.done
    rig.wait(1)
    assert request.error.status == 503 and "no detokenizer" in request.error.message


def test_what_is_not_accepted_in_time_goes_to_another():
    rig = EngineRig(2)
    request = rig.submit()
    slow, other = who_has(rig)
    rig.wait(ACCEPT_S + 1)
    again, sent = other.next(m.Tokenize), slow.next(m.Tokenize)
    assert (sent.attempt, again.attempt, again.losses) == (0, 1, 0)
    assert slow.next(m.Abort).uid == sent.uid
    slow.accept(sent)
    slow.text(sent, 0, [1], "slow")
    other.accept(again)
    other.text(again, 0, [1], "a", m.Finish.STOP)
    assert text_of(request) == "a"


def test_a_silent_detokenizer_hands_over_what_it_held():
    rig = EngineRig(2)
    request = rig.submit()
    hung, other = who_has(rig)
    sent = hung.next(m.Tokenize)
    hung.accept(sent)
    hung.text(sent, 0, [1], "a")
    old, hung.heartbeats = hung.identity, False
    rig.wait(SILENCE_S)
    assert not other.has(m.Tokenize)
    rig.wait(1)
    again = other.next(m.Tokenize)
    assert (again.attempt, again.losses, from_i32(again.resume[0].ids)) == (1, 1, [1])
    rig.core.received(old, m.Failed(sent.uid, sent.attempt, 500, "late"))  # to an identity that is gone
    other.text(again, 1, [2], "b", m.Finish.STOP)
    assert text_of(request) == "ab"
    assert hung.identity not in ("", old) and not rig.core.links[hung.identity].ready  # not heard yet
    hung.heartbeats = True
    rig.wait(1)
    assert rig.core.links[hung.identity].ready


def test_what_the_only_detokenizer_held_waits_for_its_return(rig):
    taken, words = rig.submit(prompt="never accepted"), one(rig)
    sent, words.heartbeats = words.next(m.Tokenize), False
    rig.wait(SILENCE_S + 1)
    assert not rig.core.ready
    new = rig.submit(prompt="new")
    rig.wait(NO_DETOKENIZER_S + 1)
    assert "no detokenizer" in new.error.message  # a new one does not wait as long
    rig.wait(NO_DETOKENIZER_RESUMED_S - NO_DETOKENIZER_S - 1)
    assert not taken.done
    words.heartbeats = True
    rig.wait(1)
    again = words.next(m.Tokenize)
    assert (again.uid, again.attempt) == (sent.uid, 1)
    words.accept(again)
    words.text(again, 0, [1], "a", m.Finish.STOP)
    assert text_of(taken) == "a"


def test_who_stood_still_takes_nobody_for_silent(rig):
    request = rig.submit()
    sent, waiting = one(rig).next(m.Tokenize), EngineRig(0)
    late = waiting.submit()
    for each in (rig, waiting):
        each.wait(2)
        each.now += 100  # the whole process: what came meanwhile has not been read when the next heartbeat is due
        assert not each.core.ready
        each.heartbeat()
    assert rig.core.ready and not late.done
    one(rig).accept(sent)
    one(rig).text(sent, 0, [1], "a", m.Finish.STOP)
    assert text_of(request) == "a" and request.attempt == 0
    waiting.wait(NO_DETOKENIZER_S + 1)
    assert late.error.status == 503


# ---------------------------------------------------------------- frames that make no sense


def test_bad_columns_are_counted_and_dropped(rig):
    request, words = rig.submit(), one(rig)
    sent = words.next(m.Tokenize)
    words.accept(sent)
    empty = dict.fromkeys(("uids", "attempts", "indexes", "offsets", "counts", "finishes", "lengths"), b"")
    words.send(m.TextBatch(**{**empty, "uids": i64([sent.uid])}, tokens=b"", texts=[], stop_reasons=[]))
    words.send(m.TextBatch(**{**empty, "counts": i32([2])}, tokens=b"", texts=[], stop_reasons=[]))
    words.send(m.Unknown(b"abc", b""))
    assert rig.core.bad_frames == 3
    words.text(sent, 0, [1], "a", m.Finish.STOP)
    assert text_of(request) == "a"
