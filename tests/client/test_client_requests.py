"""A request's logprobs, best_of, beams and times, through losses and duplicates at every point."""

import asyncio
import dataclasses
import itertools
import math
import random

import pytest
from open_requests import in_turns

from quire.client.best import choose, from_wire, to_wire
from quire.client.generation import OpenGeneration
from quire.client.logprobs import by_row, unpack
from quire.client.offline.outputs import Logprob, to_dict
from quire.client.request import OpenRequest
from quire.client.results import Prompt, RequestError, RequestMetrics, TokenLogprobs
from quire.client.stream import RequestStream, Turn
from quire.proto import messages as m
from quire.proto.codec import BadFrame, f32, from_i32, i32
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

PROMPT = [5, 6, 7, 8, 9, 10]


def record(tokens, k=2, salt=0):
    """A Logprobs message whose every value follows from the token and its place."""
    ids, values, texts, raw = [], [], [], {}
    for place, token in enumerate(tokens):
        for other in range(k + 1):
            if other:
                raw.update({len(ids): b"\xe2"} if (token + other) % 3 == 0 else {})
            ids.append(token + other)
            values.append(-0.1 * (token % 7) - 0.01 * other - 0.001 * place - salt)
            texts.append(f"<{token + other}>")
    return m.Logprobs(i32(ids), f32(values), i32([1 + token % 4 for token in tokens]), texts, raw)


class World:
    """What the model would say: for each child its tokens, each with a text of one letter; and how it ends."""

    def __init__(self, lengths, finish=m.Finish.STOP, cut=0):
        self.tokens = [[100 * index + place for place in range(n)] for index, n in enumerate(lengths)]
        self.finish, self.cut = finish, cut

    def logprobs(self, index, start, end, k):
        return unpack(record(self.tokens[index], k, salt=index % 3))[start:end]

    def rows(self, index, start, size, k):
        """Rows of one child from ``start``, ``size`` tokens each; the last has ``cut`` tokens too many."""
        tokens, k = self.tokens[index], -1 if k is None else k
        for at in range(start, max(len(tokens), start + 1), size):
            new = tokens[at : at + size]
            last = at + size >= len(tokens)
            extra = [9] * self.cut if last else []
            found = self.logprobs(index, at, at + size, k) if k >= 0 else []
            found += [TokenLogprobs([9], [-50.0], 1, ["x"], {}) for _ in extra] if k >= 0 else []
            finish = self.finish if last else m.Finish.NONE
            text = "".join(chr(97 + token % 26) for token in new)
            yield index, at, new + extra, text, finish, None, len(tokens) if last else -1, found


def open_request(params, ids=PROMPT):
    work = Generate(to_wire(params), 7)
    request = OpenGeneration(m.Tokenize(1, 0, work, 0.0, ids=i32(ids)), work, params, 1e9)
    return request, RequestStream(request, lambda uid: None, lambda uid: None, Turn())


def accept(request, max_tokens=30):
    params = request.message.work.params.clone()
    params.max_tokens = max_tokens
    request.accept(m.Accepted(request.uid, request.attempt, i32(PROMPT), "hi", Generate(params, 7)))


def run(params, world, rng, trouble):
    """Drive a request to its end with losses and duplicates drawn by ``rng``; its events and final children."""
    request, stream = open_request(params)
    wire = request.message.work.params
    clock = itertools.count(int(request.metrics.arrival_time) + 1)
    events, again = [], request.message
    while not request.done:
        accept(request)
        if rng.random() < 0.8:
            request.start(float(next(clock)), 4)
        lost = False
        if params.prompt_logprobs is not None:
            found = unpack(record(PROMPT, params.prompt_logprobs))
            start = max(1, again.prompt_logprobs_from - (rng.randrange(3) if trouble else 0))
            for at in range(max(1, start), len(PROMPT), 2):
                if trouble and rng.random() < 0.3:
                    lost = True
                    break
                assert request.take_prompt(at, found[at : at + 2])
                if trouble:
                    assert request.take_prompt(max(1, at - 1), found[max(1, at - 1) : at + 1])
        resumed = {each.index: len(from_i32(each.ids)) for each in again.resume} if again.resume else None
        queues = []
        for index in range(len(request.children)):
            if resumed is None or index in resumed:
                size = 99 if wire.use_beam_search else rng.randrange(1, 4)
                queues.append(list(world.rows(index, (resumed or {}).get(index, 0), size, wire.logprobs)))
        while any(queues) and not lost:
            queue = rng.choice([queue for queue in queues if queue])
            row = queue.pop(0)
            if trouble and rng.random() < 0.15:
                lost = True
                break
            for _ in range(2 if trouble and rng.random() < 0.3 else 1):
                index, at, tokens, text, finish, *rest, found = row
                now, plain = float(next(clock)), len(tokens) == 1 and not finish and not found
                if request.done or (plain and request.take_one(index, at, tokens[0], text, now)):
                    continue  # Engine forgets it when it is done
                assert request.take(index, at, list(tokens), text, finish, *rest, now, list(found))
            if rng.random() < 0.4:
                events += stream.get_ready()
        if request.done:
            break
        assert request.lost(counts=False)
        again = request.again()
        if wire.use_beam_search:
            assert not again.resume
    return events + stream.get_ready(), request, stream


CASES = [
    ({"logprobs": 2}, [9]),
    ({"logprobs": 0, "n": 3, "prompt_logprobs": 1}, [4, 9, 1]),
    ({"prompt_logprobs": 0}, [5]),
    ({"n": 2, "best_of": 5}, [3, 7, 2, 9, 5]),
    ({"n": 2, "best_of": 4, "logprobs": 3, "prompt_logprobs": 2}, [8, 1, 6, 6]),
    ({"use_beam_search": True, "best_of": 4, "n": 2, "temperature": 0.0}, [6, 8]),
    ({"use_beam_search": True, "n": 3, "temperature": 0.0, "logprobs": 4, "prompt_logprobs": 1}, [5, 5, 2]),
    ({"n": 2}, [0, 3]),
    ({"n": 3}, [9, 1, 12]),
]


@pytest.mark.parametrize("cut", [0, 2])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_losses_and_duplicates_change_nothing(case, cut):
    fields, lengths = CASES[case]
    params, world = SamplingParams(**fields), World(lengths, cut=cut)
    _, expected, _ = run(params, world, random.Random(0), trouble=False)
    for seed in range(25):
        events, request, stream = run(params, world, random.Random(seed), trouble=True)
        assert list(map(whole, stream.children)) == list(map(whole, expected.children))
        assert request.prompt_logprobs == expected.prompt_logprobs
        assert len(stream.children) == params.n and stream.params.n == params.n
        for index, child in enumerate(stream.children):
            mine = [event for event in events if event.index == index]
            assert [token for event in mine for token in event.tokens] == child.tokens
            assert [each for event in mine for each in event.logprobs] == child.logprobs
            assert "".join(event.text for event in mine) == "".join(child.parts)
            assert len(child.logprobs) == (0 if params.logprobs is None else len(child.tokens))
            assert mine[-1].finish == m.Finish.STOP and mine[-1].length == len(child.tokens)
            if params.best_of or params.use_beam_search:
                assert len(mine) == 1
        check_times(request.metrics)


def whole(child):
    return dataclasses.replace(child, parts=["".join(child.parts)])


def check_times(times: RequestMetrics):
    line = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time]
    known = [value for value in line if value is not None]
    assert known == sorted(known)
    if times.first_scheduled_time is not None:
        assert times.time_in_queue == times.first_scheduled_time - times.arrival_time
    assert times.finished_time is not None and times.finished_time >= times.arrival_time


def test_what_was_asked_for_is_what_is_shown():
    world = World([6])
    for fields, shown, summed in [({}, 0, False), ({"logprobs": 0}, 6, True)]:
        _, request, _ = run(SamplingParams(**fields), world, random.Random(1), trouble=False)
        (child,) = request.children
        assert len(child.logprobs) == shown and (child.cumulative is not None) == summed
    total = 0.0
    for each in world.logprobs(0, 0, 6, 0):
        total += each.values[0]
    assert child.cumulative == total


def test_best_of_takes_the_n_best_in_order_and_is_gone_on_the_wire():
    params = SamplingParams(n=2, best_of=4, prompt_logprobs=1)
    wire = to_wire(params)
    assert (wire.n, wire.best_of, wire.logprobs, wire.prompt_logprobs) == (4, None, 0, 1)
    back = from_wire(wire, params)
    assert (back.n, back.best_of, back.logprobs) == (2, 4, None)
    assert to_wire(SamplingParams(n=2, best_of=4, logprobs=-1)).logprobs == -1
    plain, beams = SamplingParams(n=3), SamplingParams(use_beam_search=True, n=3, best_of=5, temperature=0)
    assert to_wire(plain) is plain and from_wire(plain, plain) is plain
    assert (to_wire(beams).n, to_wire(beams).best_of, to_wire(beams).logprobs) == (3, 5, 0)
    request, stream = open_request(params)
    accept(request)
    assert request.take_prompt(1, unpack(record(PROMPT[1:], 1)))
    assert [child.tokens for child in stream.children] == [[], []]
    for index, value in enumerate([-3.0, -1.0, -2.0, -1.0]):
        assert stream.get_ready() == [] and not request.done
        found = [TokenLogprobs([index], [value], 1, ["x"], {})]
        assert request.take(index, 0, [index], "x", m.Finish.LENGTH, None, 1, 2e9, found)
    assert [(child.tokens, child.cumulative) for child in stream.children] == [([1], -1.0), ([3], -1.0)]
    assert [(event.index, event.tokens, event.logprobs) for event in stream.get_ready()] == [(0, [1], []), (1, [3], [])]
    assert choose("abcd", [None, math.nan, -math.inf, -5.0], 4) == ["d", "a", "b", "c"]


def test_a_token_that_is_not_plain_is_left_to_take():
    request, stream = open_request(SamplingParams(n=2))
    accept(request)
    assert not request.take_one(0, 0, 4, "a", 2e9)  # the first: times begin with it
    assert request.take(0, 0, [4], "a", m.Finish.NONE, None, -1, 2e9, [])
    for index, offset in ((2, 0), (-1, 0), (0, 0), (0, 2)):  # no such child, a duplicate, one that is missing
        assert not request.take_one(index, offset, 5, "b", 3e9)
    assert request.take_one(0, 1, 5, "b", 3e9) and request.take_one(0, 2, 6, "", 4e9)
    assert [(event.tokens, event.text) for event in stream.get_ready()] == [([4, 5, 6], "ab")]
    assert (request.children[0].chars, request.metrics.last_token_time) == (2, 4e9)
    assert request.take(0, 3, [], "", m.Finish.STOP, None, 3, 5e9, [])
    assert not request.take_one(0, 3, 7, "c", 6e9)


def test_forward_gives_what_came_in_a_turn_at_once_and_pauses_where_it_is_told():
    given, goes_on = [], [True]

    def give(events):
        given.append([(event.tokens, event.text) for event in events])
        return goes_on[0]

    async def consume():
        request, stream = open_request(SamplingParams())
        accept(request)
        forwarding = asyncio.ensure_future(stream.forward(give))
        for place, text in enumerate("abcdef"):
            assert request.take(0, place, [place], text, m.Finish.NONE, None, -1, 2e9, [])
            if place % 2:
                await asyncio.sleep(0)
        assert given == [[([0, 1], "ab")], [([2, 3], "cd")], [([4, 5], "ef")]]
        goes_on[0] = False
        request.take_one(0, 6, 6, "g", 3e9)
        await asyncio.sleep(0)
        request.take_one(0, 7, 7, "h", 3e9)
        assert await forwarding is False
        assert len(given) == 4
        goes_on[0] = True
        forwarding = asyncio.ensure_future(stream.forward(give))
        await asyncio.sleep(0)
        assert given[4:] == [[([7], "h")]]
        assert request.take(0, 8, [], "i", m.Finish.STOP, None, 8, 4e9, [])
        assert await forwarding is True
        assert given[5:] == [[([], "i")]]

    in_turns(consume())


def test_forward_raises_the_request_s_error_after_what_came_before_it_and_what_give_raises():
    given = []

    async def consume():
        request, stream = open_request(SamplingParams())
        accept(request)
        assert request.take(0, 0, [4], "a", m.Finish.NONE, None, -1, 2e9, [])
        request.end(3e9, RequestError(503, "no"))
        with pytest.raises(RequestError, match="no"):
            await stream.forward(lambda events: given.append(events) is None)
        assert len(given) == 1

        request, stream = open_request(SamplingParams())
        forwarding = asyncio.ensure_future(stream.forward(lambda events: 1 / 0))
        await asyncio.sleep(0)
        assert request.take(0, 0, [4], "a", m.Finish.NONE, None, -1, 2e9, [])
        with pytest.raises(ZeroDivisionError):
            await forwarding

    in_turns(consume())


def test_an_end_before_its_time_shows_no_events_and_n_children():
    request, stream = open_request(SamplingParams(n=2, best_of=3))
    accept(request)
    assert request.take(1, 0, [4], "x", m.Finish.STOP, None, 1, 2e9, [TokenLogprobs([4], [-1.0], 1, [], {})])
    request.end(3e9)
    assert stream.get_ready() == [] and len(stream.children) == 2


def test_what_is_out_of_step_is_a_loss():
    one = unpack(record([3]))
    request, _ = open_request(SamplingParams(logprobs=2))
    accept(request)
    end = ("x", m.Finish.NONE, None, -1, 2e9)
    assert not request.take(0, 0, [3], *end, [])  # none
    assert not request.take(0, 0, [3, 4], *end, one)  # too few
    assert not request.take(0, 0, [4], *end, one)  # another token's
    assert request.take(0, 0, [3], *end, one) and request.children[0].logprobs == one
    request, _ = open_request(SamplingParams(prompt_logprobs=2))
    found = unpack(record(PROMPT))
    assert not request.take_prompt(1, found[1:])  # not accepted yet
    accept(request)
    assert not request.take_prompt(2, found[2:])  # a gap
    assert not request.take_prompt(1, found[2:])  # of other tokens
    assert not request.take_prompt(1, found[1:] + found[:1])  # more than there are
    assert request.take_prompt(1, found[1:4])
    assert not request.take(0, 0, [3], *end, [])  # not all of the prompt's
    assert request.again().prompt_logprobs_from == 4
    assert request.take_prompt(1, found[1:]) and request.prompt_logprobs == [None, *found[1:]]
    assert request.take(0, 0, [3], *end, one) and request.children[0].logprobs == []  # not asked for: left aside
    request, _ = open_request(SamplingParams())
    assert request.take_prompt(1, found[1:]) and request.prompt_logprobs is None


def batch(counts, rows, records):
    return m.TextBatch(*[b""] * 4, i32(counts), b"", [], b"", [], b"", logprob_rows=i32(rows), logprobs=records)


def test_columns_that_do_not_fit_are_refused():
    good = record([1, 2])
    assert by_row(batch([1, 2], [1], [good]), [1, 2]) == {1: good}
    one, two = unpack(good)
    assert one.ids == [1, 2, 3] and two.texts == ["<2>", "<3>", "<4>"] and two.rank == 3
    assert (one.raw, two.raw) == ({2: b"\xe2"}, {1: b"\xe2"})
    bare = m.Logprobs(good.ids, good.values, good.ranks)
    assert [each.texts for each in unpack(bare)] == [[], []] and unpack(m.Logprobs(b"", b"", b"")) == []
    bad = [
        batch([2], [0, 0], [good]), batch([2], [1], [good]), batch([2], [-1], [good]), batch([3], [0], [good]),
        batch([0], [0], [good]), batch([2], [0], [m.Logprobs(good.ids[4:], good.values, good.ranks)]),
        batch([2], [0], [m.Logprobs(good.ids[1:], good.values[1:], good.ranks)]),
        batch([2], [0], [m.Logprobs(good.ids[4:], good.values[4:], good.ranks)]),
        batch([2], [0], [m.Logprobs(good.ids, good.values, good.ranks, ["a"])]),
        batch([2], [0], [m.Logprobs(good.ids, good.values, good.ranks, [], {6: b"x"})]),
        batch([2], [0], [m.Logprobs(b"", b"", good.ranks)]),
    ]  # fmt: skip
    for each in bad:
        with pytest.raises(BadFrame):
            by_row(each, from_i32(each.counts))


def test_dicts_of_logprobs_have_strict_ranks():
    found = TokenLogprobs([5, 7, 5, 9, 3], [-1.0, -0.5, -1.0, -1.0, -2.0], 2, list("abacd"), {})
    assert list(to_dict(found, 3).items()) == [
        (5, Logprob(-1.0, 2, "a")), (7, Logprob(-0.5, 1, "b")), (9, Logprob(-1.0, 2, "c")),
    ]  # fmt: skip
    assert list(to_dict(found, 0)) == [5] and list(to_dict(found, -1)) == [5, 7, 9, 3]
    assert to_dict(found, -1)[3].rank == 4
    found.texts = []
    assert repr(to_dict(found, 0)) == "{5: Logprob(logprob=-1.0, rank=2, decoded_token=None)}"


def test_what_a_request_has_spent_is_its_prompt_and_its_output_and_when_it_ended_is_known_once_it_has():
    request = OpenRequest(m.Tokenize(uid=1, attempt=0, arrival=5.0, work=Generate(SamplingParams(), seed=1)), 5.0)
    assert (request.spent, request.ended_at) == (0, 0.0)  # nothing is known of its prompt yet
    request.accepted = Prompt(PROMPT, None)
    assert (request.reached, request.spent) == (0, len(PROMPT))
    request.metrics.finished_time = 7.5
    assert request.ended_at == 7.5

    class Reached(OpenRequest):
        reached = 4

    further = Reached(m.Tokenize(uid=1, attempt=0, arrival=5.0, work=Generate(SamplingParams(), seed=1)), 5.0)
    assert further.spent == 4
    further.accepted = Prompt(PROMPT, None)
    assert further.spent == len(PROMPT) + 4
