"""Placement: who goes where, who waits, and that a request in quarantine is read alone."""

import pytest

from quire.client.generation import OpenGeneration
from quire.client.placement import Link, Placement
from quire.proto import messages as m
from quire.proto.codec import i32
from quire.proto.losses import MAX_LOSSES, Losses
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

WORK = Generate(SamplingParams(max_tokens=4), 0)


def request(uid, losses=0, accepted=False):
    message = m.Tokenize(uid=uid, attempt=0, work=WORK, arrival=0.0, prompt="hi")
    made = OpenGeneration(message, WORK, WORK.params, 0.0)
    made.losses = Losses(losses, 0)
    if accepted:
        accept(made)
    return made


def accept(each):
    each.accept(m.Accepted(each.uid, 0, i32([1]), "hi", WORK))
    if each.link is not None:
        each.link.release(each)


@pytest.fixture
def placement():
    made = Placement()
    for name in "ab":
        made.links[name] = Link(name, name, "", 0, False)
        made.links[name].ready = True
    return made


def placed(placement):
    return [(each.uid, link.incarnation) for each, link in placement.place_waiting()]


def test_the_least_busy_that_is_ready(placement):
    assert [placement.place(request(uid)).incarnation for uid in range(4)] == ["a", "b", "a", "b"]
    placement.links["a"].ready = False
    assert placement.place(request(4)).incarnation == "b"
    placement.links["a"].ready = True
    last = request(5)
    assert placement.place(last, besides=placement.links["a"]).incarnation == "b"
    placement.forget(last)
    del placement.links["b"]
    assert placement.place(last, besides=placement.links["a"]).incarnation == "a"  # there is no other


def test_who_finds_none_waits_in_order(placement):
    for link in placement.links.values():
        link.ready = False
    new, resumed, gone = [request(uid) for uid in range(3)], request(3, accepted=True), request(4, accepted=True)
    assert placement.place(gone) is None
    placement.forget(gone)
    assert [placement.place(each) for each in [*new, resumed]] == [None] * 4
    assert [each.uid for each in placement.waiting] == [3, 0, 1, 2]
    placement.forget(new[1])
    placement.links["a"].ready = True
    assert placed(placement) == [(3, "a"), (0, "a"), (2, "a")] and not placement.waiting


def test_one_in_quarantine_is_alone(placement):
    first, second = placement.place(request(1)), request(2, MAX_LOSSES - 1)
    assert first.incarnation == "a" and placement.place(second).incarnation == "b"  # nothing is looked at there
    assert placement.place(request(3)).incarnation == "a"  # not beside the one in quarantine
    third, fourth = request(4, MAX_LOSSES - 1), request(5)
    assert placement.place(third) is None and placement.place(fourth) is None  # and nobody overtakes
    resumed = request(6, MAX_LOSSES - 1, accepted=True)
    assert placement.place(resumed).incarnation == "b"  # what has been read once is not what kills its reader
    accept(second)
    assert placed(placement) == [(4, "b"), (5, "a")]
    last = request(7, MAX_LOSSES - 1)
    assert placement.place(last) is None
    for each in list(first.open.values()):
        assert not placed(placement)
        accept(each)
    assert placed(placement) == [(7, "a")]


@pytest.mark.parametrize("end", ["forget", "lose"])
def test_a_quarantine_that_ends_lets_the_next_one_in(placement, end):
    del placement.links["b"]
    poison, innocent = request(1, MAX_LOSSES - 1), request(2, MAX_LOSSES - 1)
    placement.place(poison)
    assert placement.place(innocent) is None
    if end == "lose":
        poison.link.remove(poison)
    else:
        placement.forget(poison)
    assert placed(placement) == [(2, "a")] and innocent.link.quarantined == 2
