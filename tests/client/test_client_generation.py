"""One request as the client keeps it: what is sent again and what is taken, a fact at a time."""

import pytest
from open_requests import LENGTH, PROMPT, STOP, accept, events, lp, opened, take

from quire.client.pooled import OpenText
from quire.client.results import RequestError, TokenLogprobs, Told
from quire.proto import messages as m
from quire.proto.codec import from_i32, i32
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate, Pool, Text

# ---------------------------------------------------------------- what is sent again


def test_before_it_is_accepted_it_is_sent_again_as_it_came():
    request = opened(accepted=False)
    request.lost(True)
    again = request.again()
    assert (again.prompt, again.ids, again.attempt, again.losses, again.resume) == ("hi", None, 1, 1, [])


def test_the_message_as_it_came_is_not_changed():
    request = opened()
    take(request, 0, [1], "a")
    request.lost(True)
    request.again()
    assert (request.message.attempt, request.message.prompt, request.message.resume) == (0, "hi", [])


def test_once_accepted_it_is_sent_as_ids_with_the_work_resolved():
    request = opened(messages=[{"role": "user", "content": "hi"}], template={"x": 1})
    request.lost(False)
    again = request.again()
    assert (again.prompt, again.messages, again.template, from_i32(again.ids)) == (None, None, None, PROMPT)
    assert again.work.params.max_tokens == 30


def test_what_has_brought_nothing_is_sent_from_the_start():
    request = opened(SamplingParams(n=2))
    request.lost(False)
    assert request.again().resume == []


@pytest.mark.parametrize(
    "row", [{"tokens": [4]}, {"tokens": [], "text": "a"}, {"tokens": [], "finish": STOP}], ids=["token", "text", "end"]
)
def test_once_anything_has_come_the_children_that_go_on_are_resumed(row):
    request = opened(SamplingParams(n=2))
    assert take(request, 0, index=1, **row)
    resumed = [(each.index, from_i32(each.ids), each.text_sent) for each in request.again().resume]
    mine = [] if "finish" in row else [(1, row["tokens"], len(row.get("text", "")))]
    assert resumed == [(0, [], 0), *mine]


def test_characters_are_counted_not_parts():
    request = opened()
    take(request, 0, [1], "abc")
    take(request, 1, [2], "")
    take(request, 2, [3], "de")
    assert [each.text_sent for each in request.again().resume] == [5]


@pytest.mark.parametrize(("have", "start"), [(0, 0), (1, 2), (2, 3)])
def test_logprobs_of_the_prompt_are_asked_for_from_the_first_that_is_missing(have, start):
    request = opened(SamplingParams(prompt_logprobs=0))
    if have:
        assert request.take_prompt(1, [lp(6), lp(7)][:have])
    assert request.again().prompt_logprobs_from == start


def test_a_beam_search_is_sent_again_whole():
    request = opened(SamplingParams(use_beam_search=True, n=2, temperature=0))
    assert take(request, 0, [4], "a", STOP, index=1, logprobs=[lp(4)])
    request.lost(True)
    assert (request.reached, request.live, request.again().resume) == (0, 2, [])


def test_what_is_no_beam_search_keeps_what_it_has():
    request = opened()
    take(request, 0, [4], "a")
    request.lost(True)
    assert request.reached == 1 and [from_i32(each.ids) for each in request.again().resume] == [[4]]


# ---------------------------------------------------------------- losses


def test_the_third_loss_at_one_point_is_one_too_many():
    request = opened()
    assert [request.lost(True) for _ in range(3)] == [True, True, False]


def test_losses_that_do_not_count_never_end_it():
    request = opened()
    assert all(request.lost(False) for _ in range(10)) and request.attempt == 10


def test_the_tokens_of_all_children_are_progress():
    request = opened(SamplingParams(n=2))
    for index in range(2):
        take(request, 0, [1, 2], index=index)
    assert request.reached == 4


def test_a_loss_ends_the_start_of_the_attempt():
    request = opened()
    request.start(150.0, 0)
    request.lost(False)
    assert not request.started


def test_it_is_in_quarantine_only_until_it_is_accepted():
    request = opened(accepted=False)
    for expected in (False, True):
        request.lost(True)
        assert request.in_quarantine == expected
    accept(request)
    assert not request.in_quarantine and request.losses.count == 0


def test_losses_after_it_was_accepted_are_no_quarantine():
    request = opened()
    request.lost(True)
    request.lost(True)
    assert not request.in_quarantine


# ---------------------------------------------------------------- being accepted, started, ended


def test_the_first_acceptance_counts():
    request = opened()
    request.lost(True)
    accept(request, [9], 99)
    assert (request.accepted.prompt_ids, request.params.max_tokens, request.losses.count) == (PROMPT, 30, 1)


def test_its_parameters_are_the_user_s_until_it_is_accepted():
    params = SamplingParams(n=2, best_of=3, max_tokens=None)
    request = opened(params, accepted=False)
    assert request.params is params
    accept(request)
    assert (request.params.n, request.params.best_of, request.params.max_tokens) == (2, 3, 30)


def test_nothing_is_cached_of_what_has_not_started():
    assert opened().cached_tokens == 0


def test_an_acceptance_of_other_work_resolves_nothing():
    request = opened(accepted=False)
    request.accept(m.Accepted(1, 0, i32(PROMPT), "hi", Pool(PoolingParams())))
    assert request.params is request.asked and isinstance(request.work, Generate)


def test_text_is_answered_by_its_acceptance():
    request = OpenText(m.Tokenize(3, 0, Text(), 0.0, prompt="hi"), 100.0)
    assert (request.uid, request.told, request.accepted) == (3, None, None)
    request.accept(m.Accepted(3, 0, i32(PROMPT), "hi", Pool(PoolingParams())))
    assert request.told is None and request.accepted is not None  # an answer to something else
    request.accept(m.Accepted(3, 0, i32(PROMPT), "hi", Text(names=["x"])))
    assert request.told == Told(PROMPT, "hi", Text(names=["x"]))


def test_an_acceptance_is_told():
    request, told = opened(accepted=False), []
    request.on_change = lambda: told.append(request.accepted is not None)
    accept(request)
    accept(request)
    assert told == [True]


def test_the_first_start_counts_for_times_and_for_what_was_cached():
    request = opened()
    request.start(150.0, 4)
    request.lost(False)
    request.start(160.0, 9)
    metrics = request.metrics
    assert (metrics.first_scheduled_time, metrics.time_in_queue, request.cached_tokens) == (150.0, 50.0, 4)
    assert request.started


def test_a_token_starts_what_nobody_said_had_started():
    request = opened()
    take(request, 0, [1], now=170.0)
    assert (request.started, request.metrics.first_scheduled_time, request.cached_tokens) == (True, 170.0, 0)


def test_text_alone_starts_nothing():
    request = opened()
    take(request, 0, [], "a", now=170.0)
    metrics = request.metrics
    assert (request.started, metrics.first_token_time, metrics.last_token_time) == (False, None, None)


def test_the_times_of_the_first_token_and_of_the_last():
    request = opened()
    for offset, now in enumerate([170.0, 180.0, 190.0]):
        take(request, offset, [1], now=now)
    assert (request.metrics.first_token_time, request.metrics.last_token_time) == (170.0, 190.0)


def test_only_the_first_end_counts():
    request, told = opened(), []
    request.on_change = lambda: told.append(request.error)
    first, second = RequestError(500, "first"), RequestError(500, "second")
    request.end(300.0, first)
    request.end(400.0, second)
    assert (request.error, request.metrics.finished_time, told) == (first, 300.0, [first])


def test_it_ends_with_its_last_child():
    request = opened(SamplingParams(n=2))
    take(request, 0, [1], finish=STOP, now=210.0)
    assert not request.done
    take(request, 0, [1], finish=LENGTH, index=1, now=220.0)
    assert request.done and request.error is None and request.metrics.finished_time == 220.0


# ---------------------------------------------------------------- what is taken


@pytest.mark.parametrize("index", [-1, 2])
def test_a_child_that_is_not_there_is_a_loss(index):
    assert not take(opened(SamplingParams(n=2)), 0, [1], index=index)


def test_what_comes_after_a_child_s_end_is_a_duplicate():
    request = opened(SamplingParams(n=2))
    take(request, 0, [1], "a", STOP)
    assert take(request, 5, [2], "b", STOP) and request.children[0].tokens == [1] and request.live == 1


@pytest.mark.parametrize(("offset", "tokens"), [(0, [1, 2]), (0, [1]), (1, [2])])
def test_tokens_that_are_here_are_a_duplicate(offset, tokens):
    request = opened()
    take(request, 0, [1, 2], "ab")
    assert take(request, offset, tokens, "?") and request.children[0].parts == ["ab"]


@pytest.mark.parametrize(("offset", "tokens"), [(3, [9]), (1, [2, 3]), (1, []), (3, [])])
def test_what_does_not_begin_where_the_child_stands_is_a_loss(offset, tokens):
    request = opened()
    take(request, 0, [1, 2], "ab")
    assert not take(request, offset, tokens, "?") and request.children[0].tokens == [1, 2]


def test_a_row_with_no_tokens_brings_its_text():
    request = opened()
    take(request, 0, [1], "a")
    assert take(request, 1, [], "b") and request.children[0].parts == ["a", "b"]
    assert request.children[0].chars == 2


def test_a_text_of_nothing_is_no_part():
    request = opened()
    take(request, 0, [1], "")
    assert request.children[0].parts == []


def test_a_child_s_end_has_its_finish_and_its_reason():
    request = opened()
    take(request, 0, [1], finish=STOP, reason="X")
    assert (request.children[0].finish, request.children[0].stop_reason) == (STOP, "X")


@pytest.mark.parametrize(
    ("length", "kept", "new"), [(4, [1, 2, 3, 4], [3, 4]), (3, [1, 2, 3], [3]), (2, [1, 2], []), (1, [1], []),
                                (0, [], []), (-1, [1, 2, 3, 4], [3, 4]), (9, [1, 2, 3, 4], [3, 4])]
)  # fmt: skip
@pytest.mark.parametrize("summed", [False, True])
def test_a_length_cuts_what_came_before_and_what_comes_with_it(length, kept, new, summed):
    request = opened(SamplingParams(logprobs=0 if summed else None))
    take(request, 0, [1, 2], logprobs=[lp(1), lp(2)] if summed else [])
    events(request)
    assert take(request, 2, [3, 4], finish=STOP, length=length, logprobs=[lp(3), lp(4)] if summed else [])
    (child,), (event,) = request.children, events(request)
    assert (child.tokens, event.tokens, event.length) == (kept, new, len(kept))
    if summed:
        assert [each.ids for each in child.logprobs] == [[token] for token in kept]
        assert [each.ids for each in event.logprobs] == [[token] for token in new]
    assert child.cumulative == (-1.0 * len(kept) if summed else None)


def test_a_length_before_the_end_means_nothing():
    request = opened()
    assert take(request, 0, [1, 2], length=1) and request.children[0].tokens == [1, 2]


def test_the_sum_is_of_the_tokens_own_logprobs():
    request = opened(SamplingParams(logprobs=1))
    found = [TokenLogprobs([4, 9], [-0.25, -7.0], 1, [], {}), TokenLogprobs([5, 9], [-0.5, -7.0], 1, [], {})]
    take(request, 0, [4], logprobs=found[:1])
    take(request, 1, [5], logprobs=found[1:])
    assert request.children[0].cumulative == -0.75 and request.children[0].logprobs == found


def test_what_is_not_summed_has_no_sum():
    request = opened()
    take(request, 0, [4], logprobs=[lp(4)])
    assert request.children[0].cumulative is None and request.children[0].logprobs == []


def test_tokens_wait_for_all_logprobs_of_the_prompt():
    request = opened(SamplingParams(prompt_logprobs=0))
    assert not take(request, 0, [1])
    assert request.take_prompt(1, [lp(6)])
    assert not take(request, 0, [1])
    assert request.take_prompt(2, [lp(7)])
    assert take(request, 0, [1])


def test_tokens_of_a_prompt_not_known_yet_are_a_loss_where_its_logprobs_are_wanted():
    assert not take(opened(SamplingParams(prompt_logprobs=0), accepted=False), 0, [1])


def test_an_end_without_tokens_waits_for_none():
    request = opened(SamplingParams(prompt_logprobs=0))
    assert take(request, 0, [], finish=STOP)


def test_logprobs_of_the_prompt_that_are_here_are_kept():
    request = opened(SamplingParams(prompt_logprobs=0))
    first, again = lp(6, -1.0), lp(6, -2.0)
    request.take_prompt(1, [first])
    assert request.take_prompt(1, [again, lp(7)]) and request.prompt_logprobs == [None, first, lp(7)]


@pytest.mark.parametrize(("start", "found"), [(0, [lp(5)]), (2, [lp(7)]), (1, [lp(7)]), (1, [lp(6), lp(7), lp(8)])])
def test_logprobs_of_the_prompt_that_do_not_follow_are_a_loss(start, found):
    request = opened(SamplingParams(prompt_logprobs=0))
    assert not request.take_prompt(start, found) and request.prompt_logprobs == [None]


def test_logprobs_of_a_prompt_not_known_yet_are_a_loss():
    assert not opened(SamplingParams(prompt_logprobs=0), accepted=False).take_prompt(1, [lp(6)])


# ---------------------------------------------------------------- one plain token


@pytest.mark.parametrize(
    "params", [SamplingParams(logprobs=0), SamplingParams(prompt_logprobs=0), SamplingParams(n=1, best_of=2)]
)
def test_one_that_wants_more_than_text_takes_no_plain_token(params):
    request = opened(params)
    if params.prompt_logprobs is not None:
        request.take_prompt(1, [lp(6), lp(7)])
    assert take(request, 0, [1], "a", logprobs=[lp(1)])
    assert not request.take_one(0, 1, 2, "b", 300.0)


def test_a_plain_token_is_not_the_first():
    request = opened()
    request.start(150.0, 0)
    assert not request.take_one(0, 0, 1, "a", 200.0)


def test_a_plain_token_is_not_the_first_of_its_attempt():
    request = opened()
    take(request, 0, [1], "a")
    request.lost(False)
    assert not request.take_one(0, 1, 2, "b", 300.0)
    request.start(250.0, 0)
    assert request.take_one(0, 1, 2, "b", 300.0)


def test_a_plain_token_is_told():
    request, told = opened(), []
    take(request, 0, [1], "a")
    request.on_change = lambda: told.append(len(request.children[0].tokens))
    request.take_one(0, 1, 2, "b", 300.0)
    assert told == [2]


def test_a_consumer_that_wants_the_end_alone_is_told_nothing_of_a_token():
    request, told = opened(), []
    take(request, 0, [1], "a")
    events(request)
    request.quiet, request.on_change = True, lambda: told.append(1)
    assert request.take_one(0, 1, 2, "b", 300.0) and take(request, 2, [3, 4], "cd")
    assert not told and not request.pending and request.children[0].tokens == [1, 2, 3, 4]


def test_events_of_plain_tokens_are_joined_by_child():
    request = opened(SamplingParams(n=2))
    for index in range(2):
        take(request, 0, [1], "a", index=index)
    assert [(each.index, each.tokens) for each in events(request)] == [(0, [1]), (1, [1])]
    request.take_one(1, 1, 2, "b", 300.0)
    request.take_one(0, 1, 3, "c", 300.0)
    request.take_one(1, 2, 4, "d", 300.0)
    found = [(each.index, each.tokens, each.text) for each in events(request)]
    assert found == [(1, [2, 4], "bd"), (0, [3], "c")]
