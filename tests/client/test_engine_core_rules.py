"""The rules of Engine's core, one at a time, each at its very limit."""

import random

import pytest
from engine_rig import EngineRig, accepted, one

from quire.client import core as core_module
from quire.client.core import (
    SCHEDULER,
    SILENCE_S,
    Connect,
    Disconnect,
    EngineCore,
)
from quire.client.results import RequestError
from quire.proto import messages as m
from quire.proto.codec import f32, from_i64, i32, i64
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Adapter, Generate, Pool, Text

ROWS = ("uids", "attempts", "indexes", "offsets", "counts", "finishes", "lengths")


@pytest.fixture
def rig():
    return EngineRig()


def count_of(detokenizer, kind):
    return sum(isinstance(each, kind) for each in detokenizer.got)


# ---------------------------------------------------------------- numbers and times


class AllOnes(random.Random):
    def getrandbits(self, k):
        return 2**k - 1


def test_uids_fit_an_int64_column_whatever_chance_gives():
    core = EngineCore(m.Hello("frontend", "x", m.PROTOCOL, 1), lambda: 0.0, lambda: 0.0, AllOnes())
    work = Pool(PoolingParams())
    uids = [core.pool(m.Tokenize(0, 0, work, 0.0, prompt="a"), work).uid for _ in range(3)]
    assert uids == [2**63 - 2**32 + each for each in (1, 2, 3)] and from_i64(i64(uids)) == uids


def test_uids_of_two_processes_are_apart_by_as_many_as_one_can_use():
    first, second = (random.Random(seed).getrandbits(31) << 32 for seed in (1, 2))
    assert abs(first - second) >= 2**32


@pytest.mark.parametrize("kind", ["submit", "pool"])
def test_the_wall_clock_gives_the_arrival_of_what_comes_without(rig, kind):
    getattr(rig, kind)()
    assert one(rig).next(m.Tokenize).arrival == rig.core.wall_clock()


@pytest.mark.parametrize("kind", ["submit", "pool"])
def test_an_arrival_that_is_given_is_kept(rig, kind):
    work = Generate(SamplingParams(), 1) if kind == "submit" else Pool(PoolingParams())
    getattr(rig.core, kind)(m.Tokenize(0, 0, work, 12.5, prompt="a"), work)
    rig.carry()
    assert one(rig).next(m.Tokenize).arrival == 12.5


@pytest.mark.parametrize("kind", ["submit", "pool"])
def test_a_request_s_own_times_are_of_the_clock(rig, kind):
    request = getattr(rig, kind)()
    assert (request.metrics.arrival_time, request.since) == (rig.now, rig.now)


def test_no_tokens_have_come_at_the_beginning(rig):
    assert rig.core.tokens_at == 0.0


def test_what_only_ends_a_child_brings_no_tokens(rig):
    _, sent = accepted(rig)
    one(rig).text(sent, 0, [7], "a")
    before, rig.now = rig.now, rig.now + 1
    one(rig).text(sent, 1, [], "", m.Finish.STOP)
    assert rig.core.tokens_at == before


def test_what_is_pooled_counts_as_tokens_that_came(rig):
    rig.pool()
    sent = one(rig).next(m.Tokenize)
    one(rig).accept(sent)
    rig.now += 1
    one(rig).send(m.Pooled(sent.uid, 0, 0, f32([1.0])))
    assert rig.core.tokens_at == rig.now


def test_text_alone_is_answered_by_its_acceptance_and_waits_for_nothing_else(rig, monkeypatch):
    request = rig.core.text(m.Tokenize(0, 0, Text(), 0.0, prompt="hi"))
    rig.carry()
    sent = one(rig).next(m.Tokenize)
    one(rig).send(m.Accepted(sent.uid, 0, i32([1, 2]), "hi", Text()))
    assert request.done and request.error is None and request.told.ids == [1, 2]
    assert request.uid not in rig.core.open
    monkeypatch.setattr(core_module, "MAX_UNACCEPTED_BYTES", 10)
    rig.submit()
    with pytest.raises(RequestError, match="1 requests"):
        rig.core.text(m.Tokenize(0, 0, Text(), 0.0, prompt="hi"))


# ---------------------------------------------------------------- what may wait to be tokenized


def test_a_request_that_fills_the_bytes_to_the_limit_is_let_in(rig, monkeypatch):
    monkeypatch.setattr(core_module, "MAX_UNACCEPTED_BYTES", 2 * 513)
    for _ in range(2):
        rig.submit(prompt="a")  # 513 bytes each
    with pytest.raises(RequestError, match="2 requests"):
        rig.submit(prompt="")


def test_bytes_are_free_again_when_a_request_is_accepted(rig, monkeypatch):
    monkeypatch.setattr(core_module, "MAX_UNACCEPTED_BYTES", 2 * 513)
    for _ in range(5):
        rig.submit(prompt="a")
        one(rig).accept(one(rig).next(m.Tokenize))
    rig.submit(prompt="a")
    rig.submit(prompt="a")
    with pytest.raises(RequestError, match=r"2 requests \(1026 bytes\)"):
        rig.submit(prompt="a")


def test_one_that_is_accepted_again_frees_nothing_twice(rig, monkeypatch):
    monkeypatch.setattr(core_module, "MAX_UNACCEPTED", 1)
    _, sent = accepted(rig)
    one(rig).accept(sent)
    rig.submit()
    with pytest.raises(RequestError, match=r"1 requests \(514 bytes\)"):
        rig.submit()


def test_bytes_are_free_again_when_a_request_ends_unaccepted(rig, monkeypatch):
    monkeypatch.setattr(core_module, "MAX_UNACCEPTED_BYTES", 513)
    for _ in range(3):
        rig.core.abort(rig.submit(prompt="a").uid)


def test_one_that_is_refused_leaves_nothing_behind(rig, monkeypatch):
    monkeypatch.setattr(core_module, "MAX_UNACCEPTED", 1)
    request, _ = rig.submit(), one(rig)
    for _ in range(3):
        with pytest.raises(RequestError, match="1 requests"):
            rig.submit()
    assert list(rig.core.open) == [request.uid]
    rig.core.abort(request.uid)
    rig.submit()


# ---------------------------------------------------------------- ready


def test_ready_needs_the_scheduler(rig):
    assert rig.core.ready
    rig.core.disconnected(SCHEDULER)
    assert not rig.core.ready


def test_ready_needs_a_replica(rig):
    rig.peers(ready=False, epoch=1001)
    assert not rig.core.ready


def test_ready_needs_a_detokenizer():
    assert not EngineRig(0).core.ready


def test_ready_needs_a_scheduler_that_is_heard(rig):
    rig.now += SILENCE_S - 0.5
    assert rig.core.ready
    rig.now += 0.5
    assert not rig.core.ready


# ---------------------------------------------------------------- the end


def test_closing_says_goodbye_once_to_each():
    rig = EngineRig(2)
    rig.core.close(RequestError(503, "closed"))
    rig.carry()
    assert [count_of(each, m.Bye) for each in rig.detokenizers] == [1, 1]
    assert sum(isinstance(each, m.Bye) for each in rig.at_scheduler) == 1


def test_a_core_that_is_closed_says_no_more_to_the_scheduler(rig):
    rig.core.close(RequestError(503, "closed"))
    rig.core.take()
    rig.core.heartbeat(0, 0)
    assert not rig.core.take()


def test_an_abort_names_the_request_and_its_attempt(rig):
    request, sent = accepted(rig)
    one(rig).text(sent, 0, [1], "a")
    one(rig).unknown(sent)
    rig.core.abort(request.uid)
    rig.carry()
    abort = one(rig).next(m.Abort)
    assert (abort.uid, abort.attempt) == (sent.uid, 1)


def test_who_ended_a_request_is_not_told_of_its_end(rig):
    _, sent = accepted(rig)
    one(rig).text(sent, 0, [1], "a", m.Finish.STOP)
    _, sent = accepted(rig)
    one(rig).send(m.Failed(sent.uid, 0, 500, "no"))
    assert not one(rig).has(m.Abort)


def test_one_that_fails_for_its_losses_is_aborted_where_it_was_accepted(rig):
    request, sent = accepted(rig)
    for _ in range(3):
        one(rig).text(sent, 99, [1], "gap")
        sent = one(rig).next(m.Tokenize) if not request.done else sent
    assert "3 times" in request.error.message
    abort = one(rig).next(m.Abort)
    assert (abort.uid, abort.attempt) == (request.uid, 3)


def test_a_uid_that_is_not_open_aborts_nothing(rig):
    request = rig.submit()
    rig.core.abort(request.uid + 1)
    assert not rig.core.take() and not request.done


def test_the_end_is_at_the_clock_s_time(rig):
    request = rig.submit()
    rig.now += 4
    rig.core.abort(request.uid)
    assert request.metrics.finished_time == rig.now


def test_a_quarantine_of_an_attempt_given_up_is_not_agreed_to(rig):
    request = rig.submit()
    sent = one(rig).next(m.Tokenize)
    one(rig).unknown(sent)
    one(rig).send(m.Quarantined(sent.uid, sent.attempt))
    assert not one(rig).has(m.Quarantined)
    one(rig).send(m.Quarantined(sent.uid, request.attempt))
    assert one(rig).next(m.Quarantined) == m.Quarantined(sent.uid, 1)


def test_a_quarantine_of_any_engine_s_request_protects_all_others_until_it_is_over(rig):
    innocent, words = rig.submit(prompt="beside it"), one(rig)
    running = words.next(m.Tokenize)
    words.accept(running)
    words.text(running, 0, [1], "a")
    words.send(m.Quarantined(99, 2))
    words.cut()
    assert not words.has(m.Quarantined)
    again = words.next(m.Tokenize)
    assert (again.attempt, again.losses) == (1, 0)
    words.accept(again)
    words.text(again, 1, [1], "a")
    words.send(m.Quarantined(99, 2))
    words.send(m.Quarantined(0, 0))
    words.cut()
    assert words.next(m.Tokenize).losses == 1 and not innocent.done


# ---------------------------------------------------------------- connections


def test_who_is_connected_is_sent_a_heartbeat(rig):
    assert isinstance(one(rig).got[0], m.Heartbeat)


def test_a_connection_that_nobody_asked_for_is_ignored(rig):
    rig.core.connected("frontend-x.99")
    assert not rig.core.take()


def test_one_that_is_not_connected_yet_is_not_lost_by_a_disconnection(rig):
    rig = EngineRig(0)
    rig.core.received(SCHEDULER, m.Peers(1000, [m.Peer("detokenizer", "d", "d")], 16, True, 128))
    ((identity, what),) = [each for each in rig.core.take() if isinstance(each[1], Connect)]
    assert what == Connect("d")
    rig.core.disconnected(identity)
    assert list(rig.core.links) == [identity] and not rig.core.take()


def test_a_connection_that_breaks_is_closed(rig):
    old = one(rig).identity
    rig.core.disconnected(old)
    assert (old, Disconnect()) in rig.core.take()


def test_a_connection_that_is_gone_may_break_again(rig):
    old = one(rig).identity
    one(rig).cut()
    rig.core.disconnected(old)
    assert len(rig.core.links) == 1 and rig.core.ready


def test_each_connection_has_an_identity_of_its_own(rig):
    seen = [one(rig).identity]
    for _ in range(3):
        one(rig).cut()
        seen.append(one(rig).identity)
    assert len(set(seen)) == 4 and all(each.startswith("frontend-x.") for each in seen)


def test_one_out_of_reach_is_tried_at_each_heartbeat_and_logged_once(rig, caplog):
    words = one(rig)
    words.reachable = False
    words.cut()
    asked = []
    for _ in range(3):
        rig.core.heartbeat(0, 0)
        asked += [what for _, what in rig.core.take() if isinstance(what, Connect)]
        (identity,) = rig.core.links
        rig.core.unreachable(identity, OSError("too many open files"))
    assert asked == [Connect("detokenizer-0")] * 3
    assert sum("cannot connect to detokenizer" in record.getMessage() for record in caplog.records) == 1


def test_one_that_is_being_connected_is_not_asked_for_again(rig):
    words = one(rig)
    words.reachable = False
    words.cut()
    rig.core.heartbeat(0, 0)
    assert any(isinstance(what, Connect) for _, what in rig.core.take())
    rig.core.heartbeat(0, 0)  # nothing has come of it yet
    assert not any(isinstance(what, Connect) for _, what in rig.core.take())


def test_one_out_of_reach_that_nobody_knows_is_ignored(rig):
    rig.core.unreachable("frontend-x.99", OSError("x"))
    rig.core.heartbeat(0, 0)
    assert not any(isinstance(what, Connect) for _, what in rig.core.take())


def test_only_detokenizers_are_connected_to():
    rig = EngineRig(0)
    rig.core.received(SCHEDULER, m.Peers(1000, [m.Peer("frontend", "f", "f")], 16, True, 128))
    assert not rig.core.links and not rig.core.take()


# ---------------------------------------------------------------- the scheduler


def test_who_is_listed_again_is_not_connected_to_twice(rig):
    before = one(rig).identity
    rig.peers()
    assert list(rig.core.links) == [before] == [one(rig).identity]


def test_one_that_the_scheduler_drops_is_left_with_what_it_held():
    rig = EngineRig(2)
    request = rig.submit()
    holder = next(each for each in rig.detokenizers if each.has(m.Tokenize))
    other = next(each for each in rig.detokenizers if each is not holder)
    rig.peers(listed=[other])
    assert not holder.identity and other.next(m.Tokenize).uid == request.uid


def test_one_that_a_new_scheduler_has_named_is_dropped_when_it_drops_it(rig):
    rig.peers(epoch=2000)
    rig.peers(epoch=3000, listed=[])
    assert one(rig).identity  # only the one before had named it
    rig.peers(epoch=3000)
    rig.peers(epoch=3000, listed=[])
    assert not one(rig).identity


def test_one_not_connected_yet_goes_with_the_scheduler_that_named_it():
    rig = EngineRig(0)
    rig.core.received(SCHEDULER, m.Peers(1000, [m.Peer("detokenizer", "d", "d")], 16, True, 128))
    rig.core.received(SCHEDULER, m.Peers(2000, [], 16, True, 128))
    assert not rig.core.links


def test_the_first_scheduler_is_no_restart(caplog):
    rig = EngineRig()
    rig.peers(epoch=1000)
    assert "restarted" not in caplog.text
    rig.peers(epoch=1001)
    assert "the scheduler was restarted; sending 0 requests again" in caplog.text


def test_a_restart_does_not_count_for_what_had_not_started(rig):
    _, sent = accepted(rig)
    rig.peers(epoch=2000)
    again = one(rig).next(m.Tokenize)
    assert (again.uid, again.attempt, again.losses) == (sent.uid, 1, 0)


def test_a_restart_leaves_alone_what_waits_for_a_detokenizer(rig):
    request, sent = accepted(rig)
    words = one(rig)
    words.reachable = False
    words.cut()
    assert request.attempt == sent.attempt + 1
    rig.peers(epoch=2000)
    assert request.attempt == sent.attempt + 1


def test_a_bye_without_a_reason_is_no_refusal(rig):
    rig.core.disconnected(SCHEDULER)
    rig.scheduler(m.Bye())
    assert rig.core.refused is None


def test_after_a_bye_the_scheduler_is_not_there(rig):
    rig.scheduler(m.Bye("later"))
    assert rig.core.peers is None
    rig.core.heartbeat(0, 0)
    assert not [each for peer, each in rig.core.take() if peer == SCHEDULER]


def test_a_heartbeat_of_the_scheduler_changes_nothing_but_when_it_was_heard(rig):
    before = rig.core.peers
    rig.now += SILENCE_S
    rig.scheduler(m.Heartbeat())
    assert rig.core.ready and rig.core.peers is before


# ---------------------------------------------------------------- names of adapters


def test_a_scheduler_that_may_know_nothing_is_told_names_and_asked_again():
    chosen = Adapter("a", "/adapters/a", bytes(16))
    told = lambda rig: [  # noqa: E731
        each for each in rig.at_scheduler if isinstance(each, m.Adapters | m.Register | m.Unregister)
    ]
    rig = EngineRig()
    assert told(rig) == []
    entry = m.AdapterEntry("a", 2, chosen)
    rig.scheduler(m.Adapters([entry]))
    rig.scheduler(m.Adapters([m.AdapterEntry("a", 1, None)]))  # older than what is known
    assert rig.core.adapters.get("a") == chosen and rig.core.adapters.get("b") is None
    assert rig.core.ask_adapter(m.Unregister(0, "a")) == 1
    rig.carry()
    assert told(rig) == [m.Unregister(1, "a")]
    rig.peers(epoch=1000)  # it is the one that was asked
    assert len(told(rig)) == 1
    rig.at_scheduler.clear()
    rig.peers(epoch=2000)
    assert told(rig) == [m.Adapters([entry]), m.Unregister(1, "a", again=True)]
    rig.core.adapters.answered(1)
    rig.scheduler(m.Bye())
    rig.at_scheduler.clear()
    assert rig.core.ask_adapter(m.Register(0, chosen)) == 2
    rig.carry()
    assert told(rig) == []  # nobody is there to be asked
    rig.peers(epoch=2000)
    assert told(rig) == [m.Adapters([entry]), m.Register(2, chosen, again=True)]
    assert [each.name for each in rig.core.adapters] == ["a"]
    rig.scheduler(m.Adapters([m.AdapterEntry("a", 3, None)]))
    assert rig.core.adapters.get("a") is None and list(rig.core.adapters) == []
    assert told(EngineRig()) == []
