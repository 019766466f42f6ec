"""Placement: who goes where, who waits, and whom the loss of a detokenizer counts against."""

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


@pytest.mark.parametrize(
    ("losses", "accepted", "started", "quarantined", "blamed"),
    [
        (0, False, False, None, True),  # it may have died of any that it had not accepted
        (0, True, False, None, False),
        (0, True, True, None, True),
        (MAX_LOSSES - 1, False, False, None, False),  # in quarantine, and not begun
        (MAX_LOSSES - 1, False, False, 1, True),
        (MAX_LOSSES - 1, False, False, 2, False),
        (0, False, False, 2, False),  # nothing was prepared but another
        (0, True, True, 2, False),
    ],
)
def test_whom_the_loss_of_a_detokenizer_counts_against(placement, losses, accepted, started, quarantined, blamed):
    each = request(1, losses, accepted)
    each.started = started
    link = placement.place(each)
    link.quarantined = quarantined
    assert link.blames(each) == blamed
