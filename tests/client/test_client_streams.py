"""What a consumer is shown of a request: events, streams, held requests, answers."""

import asyncio
import gc
import math

import pytest
from open_requests import ABORT, NONE, PROMPT, STOP, accept, events, in_turns, lp, opened, pooling, take

from quire.client.best import choose, from_wire, is_held, to_wire
from quire.client.results import ChildOutput, RequestError, RequestMetrics, StreamEvent
from quire.client.stream import RequestStream, Turn, answer_of
from quire.proto.codec import f32
from quire.proto.params import SamplingParams

# ---------------------------------------------------------------- events


def test_a_row_that_brings_nothing_is_no_event():
    request, told = opened(), []
    request.on_change = lambda: told.append(1)
    assert take(request, 0, []) and not request.pending and not told


def test_a_row_that_brings_nothing_is_told_with_what_waits():
    request = opened()
    take(request, 0, [1], "a")
    take(request, 1, [])
    assert [(each.tokens, each.text) for each in events(request)] == [([1], "a")]


@pytest.mark.parametrize("row", [{"tokens": [1]}, {"tokens": [], "text": "a"}, {"tokens": [], "finish": STOP}])
def test_a_row_that_brings_anything_is_an_event(row):
    request = opened()
    take(request, 0, **row)
    assert len(events(request)) == 1


def test_an_event_before_the_end_has_no_end():
    request = opened()
    take(request, 0, [1], "a")
    assert events(request) == [StreamEvent(0, "a", [1], NONE, None, -1, [])]


def test_the_last_event_has_the_end():
    request = opened()
    take(request, 0, [1], "a", STOP, reason=9, length=1)
    assert events(request) == [StreamEvent(0, "a", [1], STOP, 9, 1, [])]


def test_an_event_shares_no_list_with_the_request():
    request = opened()
    take(request, 0, [1], "a")
    take(request, 1, [2], "b")
    (event,) = events(request)
    event.tokens.append(99)
    assert request.children[0].tokens == [1, 2]


def test_who_is_cut_ends_as_aborted_where_it_goes_on():
    request = opened(SamplingParams(n=2))
    take(request, 0, [1], "a", STOP, length=1)
    take(request, 0, [2], "b", index=1)
    request.cut()
    assert [(each.index, each.text, each.finish) for each in events(request)] == [(0, "a", STOP), (1, "b", ABORT)]
    assert request.live == 0 and [child.finish for child in request.children] == [STOP, ABORT]


@pytest.mark.parametrize("silent", ["quiet", "held"])
def test_who_is_cut_says_nothing_where_the_end_alone_is_wanted(silent):
    request = opened(SamplingParams(n=1, best_of=2) if silent == "held" else None)
    request.quiet = silent == "quiet"
    request.cut()
    assert not events(request) and request.live == 0 and request.children[0].finish == ABORT


def test_a_cancelled_stream_ends_its_request_once_and_with_what_there_is():
    request = opened()
    stream, done = stream_of(request)
    stream.cancel()
    assert done["aborted"] == [request.uid] and request.children[0].finish == ABORT
    request.done = True
    stream.cancel()
    assert done["aborted"] == [request.uid]


def test_a_held_one_shows_its_best_children_at_the_end():
    request = opened(SamplingParams(n=1, best_of=2, logprobs=0))
    take(request, 0, [1], "a", STOP, logprobs=[lp(1, -2.0)])
    assert not request.pending
    take(request, 0, [2], "b", STOP, index=1, logprobs=[lp(2, -1.0)])
    assert events(request) == [StreamEvent(0, "b", [2], STOP, None, 1, [lp(2, -1.0)])]


def test_a_held_one_whose_consumer_wants_the_end_alone_shows_no_events():
    request = opened(SamplingParams(n=1, best_of=2))
    request.quiet = True
    for index in range(2):
        take(request, 0, [1], "a", STOP, index=index, logprobs=[lp(1)])
    assert request.done and not request.pending and len(request.children) == 1


def test_a_held_one_that_ends_before_its_time_shows_no_events():
    request = opened(SamplingParams(use_beam_search=True, n=2, temperature=0))
    take(request, 0, [1], "a", STOP, logprobs=[lp(1)])
    request.end(300.0)
    assert not request.pending


def test_a_beam_search_keeps_the_order_it_came_in():
    request = opened(SamplingParams(use_beam_search=True, n=2, temperature=0))
    take(request, 0, [1], "a", STOP, logprobs=[lp(1, -9.0)])
    take(request, 0, [2], "b", STOP, index=1, logprobs=[lp(2, -1.0)])
    assert [child.tokens for child in request.children] == [[1], [2]]


# ---------------------------------------------------------------- best_of


@pytest.mark.parametrize(
    ("params", "held"),
    [
        (SamplingParams(), False), (SamplingParams(n=2), False), (SamplingParams(n=1, best_of=2), True),
        (SamplingParams(use_beam_search=True, n=2, temperature=0), True),
    ],
)  # fmt: skip
def test_who_is_held(params, held):
    assert is_held(params) == held


def test_what_a_beam_search_asks_for_is_sent_as_it_is():
    params = SamplingParams(use_beam_search=True, n=2, temperature=0, logprobs=3)
    assert to_wire(params) is params


def test_best_of_is_sent_with_the_logprobs_that_it_asks_for():
    wire = to_wire(SamplingParams(n=2, best_of=4, logprobs=3))
    assert (wire.n, wire.best_of, wire.logprobs) == (4, None, 3)


def test_a_beam_search_comes_back_in_the_user_s_terms():
    params = SamplingParams(use_beam_search=True, n=2, best_of=4, temperature=0)
    back = from_wire(to_wire(params), params)
    assert (back.n, back.best_of, back.logprobs) == (2, 4, None)


def test_of_equal_scores_the_first_is_taken():
    assert choose("abcd", [-1.0, -0.5, -0.5, None], 2) == ["b", "c"]


def test_what_has_no_score_is_last():
    assert choose("abc", [None, -math.inf, -5.0], 1) == ["c"] and choose("ab", [math.nan, -1e308], 1) == ["b"]


# ---------------------------------------------------------------- streams


def stream_of(request):
    done = {"abandoned": [], "aborted": []}
    return RequestStream(request, done["abandoned"].append, done["aborted"].append, Turn()), done


def test_a_stream_shows_the_request():
    request = opened(SamplingParams(n=2, prompt_logprobs=0))
    stream, _ = stream_of(request)
    request.start(150.0, 3)
    assert (stream.uid, stream.accepted, stream.params) == (1, request.accepted, request.params)
    assert (stream.metrics, stream.cached_tokens, stream.prompt_logprobs) == (request.metrics, 3, [None])
    assert stream.children is request.children and not stream.done


def test_times_that_are_never_known_are_not_shown():
    assert "scheduler_time" not in repr(RequestMetrics(1.0)) and "model" not in repr(RequestMetrics(1.0))


def test_children_of_a_held_request_are_empty_before_its_end():
    request = opened(SamplingParams(n=2, best_of=3))
    stream, _ = stream_of(request)
    take(request, 0, [1], "a", STOP, logprobs=[lp(1)])
    assert stream.children == [ChildOutput(), ChildOutput()]
    request.end(300.0)
    assert stream.children is request.children and stream.done


def test_iteration_gives_what_came_by_child_then_ends():
    async def main():
        request = opened(SamplingParams(n=2))
        stream, _ = stream_of(request)
        take(request, 0, [1], "a", STOP, index=1)
        take(request, 0, [2], "b", STOP, index=0)
        return [(event.index, event.text) async for event in stream]

    assert in_turns(main()) == [(1, "a"), (0, "b")]


def test_iteration_waits_for_what_comes():
    async def main():
        request = opened()
        stream, _ = stream_of(request)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not waiting.done()
        take(request, 0, [1], "a")
        return await waiting

    assert in_turns(main()).text == "a"


def test_iteration_raises_the_request_s_error_after_what_came_before_it():
    async def main():
        request = opened()
        stream, _ = stream_of(request)
        take(request, 0, [1], "a")
        request.end(300.0, RequestError(500, "no"))
        assert (await anext(stream)).text == "a"
        with pytest.raises(RequestError, match="no"):
            await anext(stream)

    in_turns(main())


def test_a_stream_that_is_dropped_abandons_its_request():
    request = opened()
    stream, done = stream_of(request)
    del stream
    assert done == {"abandoned": [1], "aborted": []}


def test_a_stream_that_is_done_abandons_nothing():
    request = opened()
    stream, done = stream_of(request)
    request.end(300.0)
    del stream
    assert done == {"abandoned": [], "aborted": []}


def test_abort_and_aclose_abort():
    request = opened()
    stream, done = stream_of(request)
    stream.abort()
    in_turns(stream.aclose())
    assert done["aborted"] == [1, 1]


def test_waiting_for_the_prompt():
    async def main():
        request = opened(accepted=False)
        stream, _ = stream_of(request)
        waiting = asyncio.ensure_future(stream.wait_accepted())
        await asyncio.sleep(0)
        accept(request)
        assert (await waiting).prompt_ids == PROMPT
        request.end(300.0)
        assert (await stream.wait_accepted()).prompt_ids == PROMPT

    in_turns(main())


@pytest.mark.parametrize(("error", "status"), [(RequestError(400, "no"), 400), (None, 499)])
def test_waiting_for_the_prompt_of_one_that_ends(error, status):
    async def main():
        request = opened(accepted=False)
        stream, _ = stream_of(request)
        waiting = asyncio.ensure_future(stream.wait_accepted())
        await asyncio.sleep(0)
        request.end(300.0, error)
        with pytest.raises(RequestError) as caught:
            await waiting
        return caught.value

    found = in_turns(main())
    assert found.status == status and (error is not None or "aborted" in found.message)


def test_collect_waits_for_the_end_and_makes_no_events():
    async def main():
        request = opened()
        stream, _ = stream_of(request)
        take(request, 0, [1], "a")
        waiting = asyncio.ensure_future(stream.collect())
        await asyncio.sleep(0)
        assert not request.pending
        take(request, 1, [2], "b")
        assert not request.pending and not waiting.done()
        take(request, 2, [3], "c", STOP)
        assert await waiting is request.children

    in_turns(main())


def test_collect_raises_the_request_s_error():
    async def main():
        request = opened()
        stream, _ = stream_of(request)
        request.end(300.0, RequestError(500, "no"))
        with pytest.raises(RequestError, match="no"):
            await stream.collect()

    in_turns(main())


def test_forward_ends_with_what_came_last():
    async def main():
        request, given = opened(), []
        stream, _ = stream_of(request)
        take(request, 0, [1], "a", STOP)
        assert await stream.forward(lambda events: given.append(len(events)) is None)
        assert given == [1]
        assert await stream.forward(lambda events: given.append(len(events)) is None)
        assert given == [1]  # there is nothing more to give

    in_turns(main())


def test_forward_that_is_cancelled_gives_nothing_more():
    async def main():
        request, given = opened(), []
        stream, _ = stream_of(request)
        forwarding = asyncio.ensure_future(stream.forward(lambda events: given.append(1) is None))
        await asyncio.sleep(0)
        forwarding.cancel()
        await asyncio.sleep(0)
        take(request, 0, [1], "a")
        await asyncio.sleep(0)
        assert not given
        assert (await anext(stream)).text == "a"

    in_turns(main())


def test_after_forward_iteration_is_told_of_what_comes():
    async def main():
        request = opened()
        stream, _ = stream_of(request)
        take(request, 0, [1], "a")
        assert not await stream.forward(lambda events: False)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        take(request, 1, [2], "b")
        return await waiting

    assert in_turns(main()).text == "b"


def test_forward_that_fails_and_is_cancelled_in_one_moment_logs_nothing():
    seen = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: seen.append(context))
        request = opened()
        stream, _ = stream_of(request)
        forwarding = asyncio.ensure_future(stream.forward(lambda events: 1 / 0))
        await asyncio.sleep(0)
        take(request, 0, [1], "a")  # the error comes in the next turn,
        loop.call_soon(forwarding.cancel)  # and so does this
        with pytest.raises(asyncio.CancelledError):
            await forwarding

    in_turns(main())
    gc.collect()
    assert not seen


def test_forward_that_is_closed_in_the_midst_says_nothing():
    async def main():
        stream, _ = stream_of(opened())
        forwarding = stream.forward(lambda events: True)
        forwarding.send(None)
        forwarding.close()

    in_turns(main())


def test_an_act_is_called_once_a_turn_in_the_order_of_adding():
    async def main():
        turn, called = Turn(), []
        first, second = (lambda: called.append(1)), (lambda: called.append(2))
        for act in (second, first, second):
            turn.add(act)
        assert not called
        await asyncio.sleep(0)
        assert called == [2, 1]
        turn.add(first)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert called == [2, 1, 1]

    in_turns(main())


# ---------------------------------------------------------------- answers


def test_an_answer_is_what_was_pooled():
    async def main():
        request, aborted = pooling(), []
        answer = answer_of(request, lambda: request.pooled, aborted.append)
        request.on_change()
        assert not answer.done()
        request.take(0, f32([1]))
        request.end(300.0)
        assert (await answer) is request.pooled and not aborted

    in_turns(main())


def test_an_answer_that_fails_raises():
    async def main():
        request = pooling()
        answer = answer_of(request, lambda: request.pooled, lambda uid: None)
        request.end(300.0, RequestError(500, "no"))
        with pytest.raises(RequestError, match="no"):
            await answer

    in_turns(main())


def test_an_answer_of_one_that_is_aborted_is_cancelled():
    async def main():
        request, aborted = pooling(), []
        answer = answer_of(request, lambda: request.pooled, aborted.append)
        request.end(300.0)
        await asyncio.sleep(0)
        assert answer.cancelled() and not aborted

    in_turns(main())


def test_an_answer_that_is_given_up_aborts_its_request():
    async def main():
        request, aborted = pooling(), []
        answer = answer_of(request, lambda: request.pooled, aborted.append)
        answer.cancel()
        await asyncio.sleep(0)
        assert aborted == [1]
        request.take(0, f32([1]))
        request.end(300.0)  # too late, and put nowhere

    in_turns(main())
