"""Sequences that go from one worker to another with their blocks: two fake workers, whose pages know their content."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from scheduler_house import House

from quire.proto.codec import from_i32, from_i64, i32
from quire.proto.messages import (
    PROTOCOL,
    AdapterReady,
    Drain,
    Forget,
    Give,
    Hello,
    LoadAdapter,
    NotMoved,
    Pages,
    StepPlan,
    Submit,
    Take,
    TokenBatch,
)
from quire.proto.params import SamplingParams
from quire.proto.work import Adapter, Generate, with_adapter
from quire.scheduler import moves
from quire.scheduler.fake.fake_model import expected_tokens, tag
from quire.scheduler.fake.fake_worker import FakeWorker, SendPages


class Pair(House):
    """Workers that do what they are told, one message at a time."""

    def __init__(self, **flags: Any) -> None:
        super().__init__(**{"max_num_batched_tokens": 64, **flags})
        self.workers: dict[str, FakeWorker] = {}
        self.inboxes: dict[str, deque[Any]] = {}
        self.seen: list[Any] = []
        self.loses: Any = ()  # what does not reach "b"
        self.late: list[Any] | None = None  # pages that come later
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.tags: dict[int, int] = {}
        self.hello("d")

    def start(self, name: str, role: str = "both", blocks: int = 64, slots: int = 0) -> None:
        worker = self.workers[name] = FakeWorker(blocks, 512, 1000, adapter_slots=slots)
        worker.endpoint, worker.role = f"ipc://{name}", role
        self.inboxes[name] = deque()
        self.registry.on_worker(name, worker.hello(name))
        self.settle(only=name)

    def ask(
        self, uid: int, prompt: int = 20, max_tokens: int = 60, adapter: Adapter | None = None, **params: Any
    ) -> None:
        ids = list(range(100 * uid, 100 * uid + prompt))
        work = with_adapter(Generate(SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params), uid), adapter)
        self.tags[uid] = tag(adapter.digest) if adapter is not None else 0
        self.members.on_front("d", Submit(uid, 0, i32(ids), b"", work, float(uid)))

    def hand_out(self) -> None:
        self.registry.plans()
        messages, self.registry.to_workers = self.registry.to_workers, []
        for peer, message in messages:
            self.seen.append(message)
            if peer in self.inboxes:
                self.inboxes[peer].append(message)

    def do_next(self, name: str) -> bool:
        """The worker handles one message. False where there is none."""
        if not self.inboxes[name]:
            return False
        message = self.inboxes[name].popleft()
        if name == "b" and isinstance(message, self.loses):
            return True
        for answer in self.workers[name].handle(message):
            if isinstance(answer, SendPages):
                if self.late is not None:
                    self.late.append(answer)
                elif (peer := answer.endpoint.removeprefix("ipc://")) in self.inboxes:
                    self.inboxes[peer].append(answer.pages)
            else:
                self.registry.on_worker(name, answer)
        return True

    def turn(self) -> None:
        """Everybody does one thing."""
        self.hand_out()
        for name in list(self.workers):
            if name in self.inboxes:
                self.do_next(name)
        self.core.check_integrity()
        for _, message in self.core.outbox.take():
            if isinstance(message, TokenBatch):
                self.note(message)

    def note(self, batch: TokenBatch) -> None:
        tokens, at = from_i32(batch.tokens), 0
        columns = zip(from_i64(batch.uids), from_i32(batch.counts), batch.finishes, strict=True)
        for uid, count, finish in columns:
            self.tokens.setdefault(uid, []).extend(tokens[at : at + count])
            at += count
            if finish:
                self.ended.add(uid)

    def settle(self, only: str) -> None:
        while self.registry.workers[only].replica is None:
            self.turn()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def finish(self, *uids: int) -> None:
        """Until these have ended, with exactly their tokens."""
        for _ in range(2000):
            if self.ended.issuperset(uids):
                break
            self.turn()
        for uid in uids:
            asked = self.tokens[uid]
            prompt = list(range(100 * uid, 100 * uid + 20))
            assert asked == expected_tokens(prompt, uid, len(asked), 1000, self.tags[uid])
        assert self.ended.issuperset(uids)

    def kill(self, name: str) -> None:
        del self.workers[name], self.inboxes[name]
        self.registry.gone(name, "died")

    def replica_of(self, uid: int) -> int:
        return self.core.requests[uid].live[0].replica


@pytest.fixture
def pair() -> Pair:
    made = Pair()
    made.start("a")
    return made


def test_a_drain_moves_what_runs_and_computes_nothing_again(pair: Pair) -> None:
    for uid in (1, 2, 3):
        pair.ask(uid)
    pair.turns(12)
    pair.start("b")
    pair.registry.drain("a", "asked", 30.0)
    pair.turns(40)
    assert [pair.replica_of(uid) for uid in (1, 2, 3)] == [1, 1, 1]
    assert any(isinstance(message, Drain) for message in pair.seen)
    pair.finish(1, 2, 3)
    stats = pair.core.stats()
    assert stats.moves == 3 and stats.recomputed_tokens == 0 and stats.moved_tokens > 60
    assert [len(pair.tokens[uid]) for uid in (1, 2, 3)] == [60, 60, 60]
    assert all(isinstance(m, StepPlan) is False or not m.admits or m.admits[0].prompt_len == 20 for m in pair.seen)


def test_it_decodes_on_while_its_full_blocks_are_copied(pair: Pair) -> None:
    pair.ask(1)
    pair.turns(12)
    pair.start("b")
    pair.registry.drain("a", "asked", 30.0)
    seen = len(pair.tokens[1])
    while not any(isinstance(message, Give) for message in pair.seen):
        pair.turn()
    assert not pair.core.replicas[0].held
    while not pair.core.replicas[0].held:
        pair.turn()
    assert len(pair.tokens[1]) > seen
    gives = [message for message in pair.seen if isinstance(message, Give)]
    firsts = [give.first for give in gives]
    assert firsts == sorted(set(firsts)) and gives[0].first == 0
    pair.finish(1)


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("victim", ["a", "b"])
def test_either_side_killed_at_any_moment_changes_no_token(pair: Pair, steps: int, victim: str) -> None:
    for uid in (1, 2):
        pair.ask(uid)
    pair.turns(10)
    pair.start("b")
    pair.registry.drain("a", "asked", 30.0)
    pair.turns(steps)
    if victim in pair.registry.workers:
        pair.kill(victim)
    if victim == "b":
        pair.start("c")
    pair.finish(1, 2)


@pytest.mark.parametrize("lost", ["pages", "take"])
def test_what_is_lost_on_the_way_ends_the_move_and_not_the_sequence(pair: Pair, lost: str) -> None:
    pair.ask(1, max_tokens=200)
    pair.turns(12)
    pair.start("b")
    pair.registry.drain("a", "asked", 300.0)
    pair.loses = Pages if lost == "pages" else Take
    pair.turns(30)
    assert pair.replica_of(1) == 0
    for _ in range(7):
        pair.later(1.0)
        for worker in pair.registry.workers.values():
            worker.heartbeat_at = pair.now
        pair.turn()
    assert any(isinstance(message, Forget) for message in pair.seen)
    pair.finish(1)
    assert len(pair.tokens[1]) == 200


def test_one_that_ends_on_its_way_leaves_nothing_behind(pair: Pair) -> None:
    pair.ask(1)
    pair.turns(12)
    pair.start("b")
    pair.registry.drain("a", "asked", 30.0)
    while not pair.core.replicas[1].reserved:
        pair.turn()
    pair.core.abort(1, 0)
    pair.turns(4)
    assert not pair.core.replicas[1].reserved and not pair.core.replicas[1].pool.used
    assert any(isinstance(message, Forget) for message in pair.seen)


def test_without_room_elsewhere_it_goes_on_until_it_ends(pair: Pair) -> None:
    pair.ask(1)
    pair.turns(12)
    pair.start("b", blocks=8)
    pair.registry.drain("a", "asked", 300.0)
    pair.finish(1)
    assert not any(isinstance(message, Take) for message in pair.seen)


def test_a_shared_prefix_is_not_sent_again(pair: Pair) -> None:
    pair.ask(1, prompt=20, n=2)
    pair.turns(12)
    pair.start("b")
    pair.registry.drain("a", "asked", 30.0)
    pair.turns(60)
    takes = [message for message in pair.seen if isinstance(message, Take) and message.first == 0]
    assert len(takes) >= 2
    assert pair.core.stats().recomputed_tokens == 0


def test_prompts_are_computed_by_one_worker_and_go_on_at_another() -> None:
    pair = Pair()
    pair.start("p", role="prefill")
    pair.start("q", role="decode")
    for uid in (1, 2, 3):
        pair.ask(uid)
    pair.turns(30)
    assert [pair.replica_of(uid) for uid in (1, 2, 3)] == [1, 1, 1]
    pair.finish(1, 2, 3)
    assert pair.core.stats().moves == 3 and pair.core.stats().recomputed_tokens == 0


@pytest.mark.parametrize(("stays", "dies"), [("prefill", "decode"), ("decode", "prefill")])
def test_where_one_kind_is_gone_the_other_does_both(stays: str, dies: str) -> None:
    pair = Pair()
    pair.start("p", role=stays)
    pair.start("q", role=dies)
    for uid in (1, 2):
        pair.ask(uid)
    pair.turns(14)
    pair.kill("q")
    pair.ask(3)
    pair.finish(1, 2, 3)


def test_a_role_that_is_none_is_refused(pair: Pair) -> None:
    pair.registry.on_worker("x", Hello("gpu_worker", "x", PROTOCOL, 1, role="both ways"))
    assert "x" not in pair.registry.workers and pair.core.bad_messages == 1


@pytest.mark.parametrize("prompt", range(17, 25))
def test_one_that_decodes_on_for_long_while_its_pages_come_has_a_block_for_its_next_token(prompt: int) -> None:
    """At every offset in a block: blocks were reserved when the move began, four blocks of tokens ago."""
    pair = Pair()
    pair.start("a")
    pair.ask(1, prompt=prompt)
    pair.turns(6)
    pair.start("b")
    pair.registry.drain("a", "asked", 30.0)
    pair.late = []
    seen = len(pair.tokens[1])
    for _ in range(100):
        if len(pair.tokens[1]) < seen + 4 * 8:
            pair.turn()
    late, pair.late = pair.late, None
    for answer in late:
        pair.inboxes["b"].append(answer.pages)
    for _ in range(40):
        pair.turn()
        if (live := pair.core.requests.get(1)) is not None and live.live[0].replica == 1:
            seq = live.live[0]
            assert len(seq.blocks) * 8 >= seq.total
    assert pair.core.stats().moves == 1 and pair.core.stats().recomputed_tokens == 0
    for _ in range(200):
        pair.turn()
    assert pair.tokens[1] == expected_tokens(list(range(100, 100 + prompt)), 1, 60, 1000)


def test_a_worker_that_gives_up_what_a_plan_has_taken_over_changes_nothing(pair: Pair) -> None:
    pair.ask(1)
    pair.turns(12)
    pair.start("b")
    pair.registry.drain("a", "asked", 30.0)
    taker = pair.core.replicas[1]
    for _ in range(100):
        pair.registry.to_workers += pair.registry.moves.advance()
        if taker.landed:
            break
        pair.turn()
    (number,) = taker.reserved
    assert pair.core.plan(taker) is not None and not taker.reserved
    pair.registry.moves.heard(taker, NotMoved(taker.lease, number, "late"))
    assert pair.replica_of(1) == 1


def test_the_taker_forgets_a_move_before_its_blocks_are_anybody_elses(pair: Pair) -> None:
    """Also where that was the only thing to say of moves."""
    pair.ask(1)
    pair.turns(12)
    pair.start("b")
    pair.registry.drain("a", "asked", 30.0)
    taker = pair.core.replicas[1]
    for _ in range(100):
        if taker.reserved:
            break
        pair.turn()
    (number,) = taker.reserved
    pair.kill("a")
    pair.registry.moves.heard(taker, NotMoved(taker.lease, number, "full"))
    seen = len(pair.seen)
    pair.turn()
    kinds = [type(message) for message in pair.seen[seen:] if isinstance(message, Forget | StepPlan)]
    assert kinds[:2] == [Forget, StepPlan]
    pair.finish(1)


def named(name: str, path: str = "") -> Adapter:
    return Adapter(name, path or name, name.encode().ljust(16))


@pytest.mark.parametrize("steps", [None, 3, 9])
def test_sequences_with_adapters_move_once_the_taker_has_them(steps: int | None) -> None:
    """More adapters than it has slots, too: each goes when a slot is free. ``steps``: then the giver is killed."""
    pair = Pair()
    pair.start("a", slots=4)
    for uid, adapter in enumerate((named("x"), named("y"), named("x"), None, named("z")), 1):
        pair.ask(uid, adapter=adapter, max_tokens=40 if uid == 2 else 80)
    pair.turns(16)
    pair.start("b", slots=2)
    pair.registry.drain("a", "asked", 300.0)
    if steps is None:
        pair.finish(1, 2, 3, 4, 5)
        stats = pair.core.stats()
        assert stats.moves >= 4 and stats.recomputed_tokens == 0
        loads = [message.name for message in pair.seen if isinstance(message, LoadAdapter)]
        assert len(loads) <= 3 + 3, loads  # nothing is loaded in vain again and again
    else:
        pair.turns(steps)
        pair.kill("a")
        pair.finish(1, 2, 3, 4, 5)


def test_one_whose_adapter_cannot_be_loaded_elsewhere_ends_where_it_is() -> None:
    pair = Pair()
    pair.start("a", slots=1)
    pair.ask(1, adapter=named("x", "x-bad-adapter-elsewhere"))
    pair.workers["a"]._load = lambda message, store: (  # type: ignore[method-assign]
        store.adapters.__setitem__(message.slot, tag(message.digest)),
        AdapterReady(message.lease, message.slot, message.generation),
    )[1]
    pair.turns(12)
    pair.start("b", slots=1)
    pair.registry.drain("a", "asked", 300.0)
    pair.finish(1)
    assert pair.core.stats().moves == 0


def test_on_a_cpu_steps_stay_short_while_pages_are_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "PIECE_BYTES", 64)  # one block
    monkeypatch.setattr(moves, "BESIDE_BYTES", 128)
    for uid in (1, 2, 3):
        pair.ask(uid, max_tokens=140)
    pair.turns(30)
    pair.core.replicas[0].device = "cpu"
    pair.start("b")
    pair.registry.drain("a", "asked", 30.0)
    for _ in range(60):
        pair.turn()
        under_way = [move for move in pair.registry.moves._moves.values() if move.seq not in move.giver.held]
        assert sum(move.given - move.pages for move in under_way) <= 2
    pair.finish(1, 2, 3)
    assert pair.core.stats().moves == 3 and pair.core.stats().recomputed_tokens == 0


def test_the_taker_has_no_second_plan_while_the_last_pages_come(pair: Pair) -> None:
    """Else whoever comes would wait for that one too. Before and after it has two as ever."""
    pair.ask(1)
    pair.turns(12)
    pair.start("b")
    pair.ask(2, max_tokens=200)
    pair.turns(12)
    pair.registry.drain("a", "asked", 30.0)
    taker, most = pair.core.replicas[1], {False: 0, True: 0}
    for _ in range(60):
        pair.hand_out()
        expected = bool(taker.expected)
        for name in ("a", "b"):
            pair.do_next(name)
        if expected and taker.expected:
            assert len(taker.in_flight) <= 1 or most[True] == 0
            most[True] = 1
        most[False] = max(most[False], len(taker.in_flight))
    assert most == {True: 1, False: 2} and not taker.expected
    pair.finish(1)


def test_the_takers_next_plan_waits_for_pages_that_must_be_there_soon_and_no_longer(pair: Pair) -> None:
    pair.ask(1)
    pair.turns(12)
    pair.start("b")
    pair.ask(2, max_tokens=200)
    pair.turns(12)
    pair.registry.drain("a", "asked", 30.0)
    taker = pair.core.replicas[1]
    for _ in range(60):
        if taker.expected and pair.core.replicas[0].held:
            break
        pair.turn()
    (seq,) = pair.core.replicas[0].held
    assert seq is pair.core.requests[1].live[0]
    pair.late = []  # the last pages are on their way for long
    pair.members.tick()
    while taker.in_flight:
        pair.registry.on_worker("b", pair.workers["b"].handle(pair.inboxes["b"].popleft())[0])
    pair.registry.plans()
    assert not taker.in_flight and pair.members.timeout() == pytest.approx(moves.HOLD_S)
    pair.now += moves.HOLD_S
    pair.registry.plans()
    assert len(taker.in_flight) == 1 and pair.members.timeout() > moves.HOLD_S
