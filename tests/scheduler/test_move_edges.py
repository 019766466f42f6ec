"""Moves of sequences between replicas, one rule at a time: who goes where, how much is asked for, and what ends it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from adapter_rig import adapter
from scheduler_rig import Rig

from quire.proto.codec import from_i32, i32
from quire.proto.hashing import hash_blocks, root_of
from quire.proto.messages import Forget, Give, NotMoved, Take, Taken
from quire.scheduler import moves
from quire.scheduler.moves import HOLD_S, PATIENCE_S, SPARE_BLOCKS, TOGETHER_S, Moves
from quire.scheduler.replica import STALL_S, Landing, Replica
from quire.scheduler.request import Sequence

MIB = 2**20


class MovesRig(Rig):
    """A replica where sequences run, and others that come later: what workers would say the tests say."""

    def __init__(self, role: str = "both", block_bytes: int = MIB, blocks: int = 200, **flags: Any):
        defaults = {"max_num_batched_tokens": 512, "max_model_len": 1000, "device": "gpu"}
        super().__init__(**{"blocks": blocks, **defaults, **flags})
        self.block_bytes = block_bytes
        self.replica.set_place(role, "ipc://0", "kv", block_bytes)
        self.moves = Moves(self.core)

    def join(
        self, number: int = 1, role: str = "both", blocks: int = 200, kv_format: str = "kv", **more: Any
    ) -> Replica:
        replica = self.add(number, blocks)
        replica.set_place(role, more.get("endpoint", f"ipc://{number}"), kv_format, self.block_bytes)
        return replica

    def decoding(self, prompt: int = 20, tokens: int = 2, **params: Any) -> Sequence:
        """One that decodes at the first replica."""
        uid = self.submit(prompt, **{"max_tokens": 60, **params})
        while len(self.tokens.get((uid, 0), [])) < tokens:
            self.step()
        return self.core.requests[uid].live[0]

    def advance(self, *kinds: type) -> list[Any]:
        """What is sent, of these kinds."""
        sent = self.moves.advance()
        self.core.check_integrity()
        return [message for _, message in sent if not kinds or isinstance(message, kinds)]

    def begun(self) -> list[tuple[int, int]]:
        """Uid and replica of those that begin to move."""
        takes = [message for message in self.advance(Take) if not message.first]
        return [(self.moves._moves[take.move].seq.uid, take.lease.replica) for take in takes]

    def taken(self, pages: int, slots: int = 999, move: int = 1, number: int = 1) -> None:
        replica = self.core.replicas[number]
        self.moves.heard(replica, Taken(replica.lease, move, slots, pages))


def drained(prompt: int = 20) -> tuple[MovesRig, Sequence, Replica]:
    """A sequence whose replica drains, and another that may take it."""
    rig = MovesRig()
    seq = rig.decoding(prompt)
    rig.replica.drain()
    return rig, seq, rig.join()


def slots(gives: list[Give]) -> list[tuple[int, int]]:
    """First and length of each."""
    return [(give.first, len(from_i32(give.blocks))) for give in gives]


# ---------------------------------------------------------------- how much is asked for


def test_pages_are_asked_for_piece_by_piece_within_a_window() -> None:
    rig = MovesRig()
    seq = rig.decoding(400)
    rig.replica.drain()
    taker = rig.join()
    sent = rig.moves.advance()
    (peer, take), gives = sent[0], [message for _, message in sent[1:]]
    reserved = taker.reserved[1].blocks
    assert (peer, take) == ("w1", Take(taker.lease, 1, 0, i32(reserved), 0))
    assert len(reserved) == 51 + SPARE_BLOCKS and {peer for peer, _ in sent[1:]} == {"w0"}
    assert slots(gives) == [(first, 4) for first in range(0, 32, 4)]
    assert gives[1] == Give(rig.replica.lease, 1, 4, i32(seq.blocks[4:8]), "ipc://1", taker.lease)
    assert rig.advance() == []
    rig.taken(33)  # more than were asked for: it cannot be
    assert rig.advance() == []
    rig.taken(6)
    assert slots(rig.advance()) == [(32, 4), (36, 2)]
    rig.taken(2)  # it said more before
    assert rig.advance() == []
    rig.taken(38)
    assert slots(rig.advance()) == [(38, 4), (42, 4), (46, 4)]


def test_pages_go_to_blocks_that_the_taker_knows() -> None:
    rig, seq, taker = drained()
    rig.advance()
    while len(seq.blocks) < 7:
        rig.step()
    (take, *gives) = rig.advance()
    assert (take.first, len(from_i32(take.blocks)), slots(gives)) == (5, 1 + SPARE_BLOCKS, [(2, 3)])
    assert len(taker.reserved[1].blocks) == 6 + SPARE_BLOCKS
    rig.taken(2, slots=5)
    assert rig.advance() == []
    rig.taken(2, slots=6)
    assert slots(rig.advance()) == [(5, 1)]


@pytest.mark.parametrize(("block_bytes", "first"), [(2**30, [(0, 1)]), (8 * MIB, [(0, 1), (1, 1), (2, 1), (3, 1)])])
def test_of_large_blocks_one_at_least_is_asked_for(block_bytes: int, first: list[tuple[int, int]]) -> None:
    rig = MovesRig(block_bytes=block_bytes)
    rig.decoding(80)
    rig.replica.drain()
    rig.join()
    assert slots(rig.advance(Give)) == first


def test_on_a_cpu_those_that_decode_on_share_what_is_asked_for_beside_them() -> None:
    rig = MovesRig(device="cpu", block_bytes=MIB // 8)
    rig.decoding(48), rig.decoding(80)
    rig.replica.drain()
    rig.join()
    sent = rig.advance(Give)
    assert [(give.move, *slots([give])[0]) for give in sent] == [(1, 0, 6), (2, 0, 2)]
    rig.taken(4)
    assert [(give.move, *slots([give])[0]) for give in rig.advance(Give)] == [(2, 2, 4)]
    rig.taken(6, move=2)
    assert [(give.move, *slots([give])[0]) for give in rig.advance(Give)] == [(2, 6, 4)]
    rig.taken(6)
    rig.taken(9, move=2)
    rig.now += 2 * HOLD_S
    sent = rig.advance(Give)  # they are held: what is left of them is no part of it
    assert len(rig.replica.held) == 2
    assert [(give.move, *slots([give])[0]) for give in sent] == [(1, 6, 1), (2, 10, 1)]


@pytest.mark.parametrize(("step_s", "blocks"), [(0.0, 8), (0.001, 8), (0.01, 40), (10.0, 256)])
def test_on_a_cpu_with_long_steps_more_is_asked_for_beside_them(step_s: float, blocks: int) -> None:
    rig = MovesRig(device="cpu", block_bytes=MIB // 8, blocks=1000, max_model_len=5000, max_num_batched_tokens=4000)
    rig.decoding(3000)
    rig.replica.pace._before = rig.replica.pace._last = step_s
    rig.replica.drain()
    rig.join(blocks=1000)
    assert sum(count for _, count in slots(rig.advance(Give))) == blocks


# ---------------------------------------------------------------- to its end


def test_a_move_from_its_first_page_to_its_first_plan_elsewhere() -> None:
    rig, seq, taker = drained()
    assert rig.moves.due
    rig.advance()
    assert seq not in rig.replica.held
    rig.plan()
    rig.taken(2)
    assert rig.advance() == [] and seq not in rig.replica.held
    rig.plan()
    assert seq.scheduled > seq.computed + 1
    assert slots(rig.advance()) == [(2, 1)] and seq in rig.replica.held  # behind two plans with it
    hashes = hash_blocks(i32(rig.prompt(20, 1)), 8, root_of(""))
    assert taker.pool.find(hashes, 9) == taker.reserved[1].blocks[:2]
    assert taker.expected == {1: rig.now + HOLD_S} and not taker.landed
    rig.taken(3)
    rig.advance()
    assert not taker.landed  # two steps of it are in flight
    rig.work()
    rig.advance()
    assert not taker.landed
    rig.work()
    rig.advance()
    (landing,) = taker.landed
    assert (landing.move, landing.seq, landing.generation) == (1, seq, 0) and taker.expected == {}
    assert rig.advance() == [] and len(taker.landed) == 1
    plan = rig.core.plan(taker)
    assert plan is not None and [admit.uid for admit in plan.admits] == [1] and seq.replica == 1
    assert len(seq.blocks) == 3 and taker.pool.used == 3 and rig.replica.pool.used == 0
    assert rig.advance() == [Forget(taker.lease, 1)] and not rig.moves._moves and not rig.moves._moving
    assert (rig.core.moves, rig.core.moved_tokens, rig.core.recomputed_tokens) == (1, 23, 0)


def test_a_prompt_that_was_computed_elsewhere_is_no_part_of_a_move() -> None:
    rig = MovesRig()
    prompt = rig.prompt(20, 1)
    rig.decoding(20)
    rig.replica.drain()
    taker = rig.join()
    blocks = taker.pool.allocate_many(2)
    taker.pool.register_many(blocks, hash_blocks(i32(prompt), 8, root_of("")))
    taker.pool.release_table(blocks)
    (take,) = rig.advance()
    assert take.pages == 2 and from_i32(take.blocks)[:2] == blocks and len(from_i32(take.blocks)) == 3 + SPARE_BLOCKS
    rig.now += 2 * HOLD_S
    assert slots(rig.advance()) == [(2, 1)] and taker.pool.used == 5


@pytest.mark.parametrize("caching", [True, False])
def test_without_a_prefix_cache_nothing_is_found_there(caching: bool) -> None:
    rig = MovesRig(enable_prefix_caching=caching)
    seq = rig.decoding(20)
    rig.replica.drain()
    taker = rig.join()
    rig.advance()
    rig.taken(2)
    rig.advance()
    assert bool(taker.pool.find(seq.hash_blocks(2, 8), 9)) == caching


def test_the_blocks_of_a_prompt_follow_each_chunk_and_it_does_not_decode_there() -> None:
    rig = MovesRig("prefill", max_num_batched_tokens=16)
    taker = rig.join(role="decode")
    uid = rig.submit(44, max_tokens=60)
    rig.plan()
    (seq,) = rig.core.requests[uid].live
    take, *gives = rig.advance()
    assert slots(gives) == [(0, 2)] and len(from_i32(take.blocks)) == 6 + SPARE_BLOCKS  # of a plan that was sent
    rig.work()
    rig.plan()
    assert slots(rig.advance()) == [(2, 2)]
    rig.taken(4)
    rig.work()
    rig.advance()
    assert taker.pool.find(seq.hash_blocks(5, 8), 9) == taker.reserved[1].blocks[:4]
    rig.plan()
    assert seq in rig.replica.held and seq in rig.replica.leaving and rig.plan() is None
    assert slots(rig.advance()) == [(4, 2)] and not taker.landed
    rig.work()
    rig.taken(6)
    rig.advance()
    assert len(taker.landed) == 1
    rig.core.plan(taker)
    assert not rig.replica.leaving and not rig.replica.held and seq.replica == 1


# ---------------------------------------------------------------- who goes


def test_so_many_move_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "AT_ONCE", 4)
    rig = MovesRig(max_num_seqs=16)
    for _ in range(6):
        rig.decoding(8)
    rig.replica.drain()
    rig.join()
    assert [uid for uid, _ in rig.begun()] == [1, 2, 3, 4] and rig.begun() == []
    rig.core.abort(2, 0)
    rig.core.abort(3, 0)
    assert rig.begun() == []
    assert [uid for uid, _ in rig.begun()] == [5, 6]


def test_from_a_worker_for_prefills_all_move_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "AT_ONCE", 4)
    rig = MovesRig("prefill", max_num_seqs=8)
    rig.join(role="decode")
    uids = [rig.submit(8, max_tokens=60) for _ in range(6)]
    rig.plan()
    assert [uid for uid, _ in rig.begun()] == uids and len(rig.replica.held) == 6


def together() -> tuple[MovesRig, Sequence, Sequence, Replica]:
    """Two that go to the same replica, and two plans with both in flight. Of one all full blocks have come."""
    rig = MovesRig()
    short, long = rig.decoding(20), rig.decoding(48)
    rig.replica.drain()
    taker = rig.join()
    rig.advance()
    rig.plan(), rig.plan()
    rig.taken(2)
    return rig, short, long, taker


def test_those_that_go_the_same_way_are_held_together() -> None:
    rig, short, long, taker = together()
    assert rig.advance() == [] and not rig.replica.held
    rig.taken(4, move=2)  # two full blocks of six are still to come
    assert rig.advance() == [] and not rig.replica.held and taker.expected == {2: rig.now + HOLD_S}
    assert taker.has_enough(rig.core.clock)
    rig.taken(5, move=2)  # the one that is left goes with the last
    assert slots(rig.advance(Give)) == [(2, 2), (6, 1)] and rig.replica.held == {short, long}


def test_one_whose_pages_have_come_waits_for_others_no_longer_than_that() -> None:
    rig, short, long, _ = together()
    rig.now += TOGETHER_S
    rig.taken(2)
    assert rig.advance() == [] and not rig.replica.held
    rig.now += TOGETHER_S / 100
    assert slots(rig.advance(Give)) == [(2, 2)] and rig.replica.held == {short}
    rig.taken(5, move=2)
    rig.advance()
    assert rig.replica.held == {short, long}


def test_one_that_has_waited_for_others_is_held_whatever_its_giver_does() -> None:
    """Although more is asked for all the time, and no plan is behind another."""
    rig = MovesRig()
    short, long = rig.decoding(20), rig.decoding(48)
    rig.replica.drain()
    rig.join()
    rig.advance()
    rig.taken(2)
    rig.plan()
    for _ in range(3):
        rig.now += TOGETHER_S / 2
        rig.moves._moves[2].asked_at = rig.now
        rig.taken(2)
        rig.advance()
    assert rig.replica.held == {short} and long not in rig.replica.held


def test_a_drain_of_little_time_has_them_wait_for_less() -> None:
    rig = MovesRig(drain_timeout=1.0)
    short, _ = rig.decoding(20), rig.decoding(48)
    rig.replica.drain()
    rig.join()
    rig.advance()
    rig.taken(2)
    rig.now += 0.24
    rig.advance()
    assert not rig.replica.held
    rig.now += 0.02
    rig.advance()
    assert rig.replica.held == {short}


def test_what_is_left_of_one_that_is_held_waits_for_no_word_of_the_takers() -> None:
    """However far it came while its pages were copied: blocks are reserved ahead."""
    rig, seq, taker = drained()
    rig.advance()
    for blocks in range(2, 8):
        while len(seq.blocks) <= blocks:
            rig.step()
        rig.taken(blocks - 2, slots=len(taker.reserved[1].blocks))
        rig.moves._moves[1].asked_at = rig.now
        rig.advance()
        assert not rig.replica.held and len(taker.reserved[1].blocks) > len(seq.blocks) - 1
    rig.taken(rig.moves._moves[1].given, slots=len(taker.reserved[1].blocks))
    rig.plan(), rig.plan()
    sent = rig.advance()
    assert rig.replica.held == {seq} and {type(message) for message in sent} == {Give}


def test_a_burst_of_prompts_floods_nobody() -> None:
    """Workers that are busy let some messages wait, and then take their sender for broken."""
    for prompt, block_bytes in ((20, 1024), (100, MIB), (600, MIB)):
        rig = MovesRig("prefill", max_num_seqs=256, max_num_batched_tokens=2**17, blocks=2**15, block_bytes=block_bytes)
        rig.join(role="decode", blocks=2**15)
        for _ in range(256):
            rig.submit(prompt, max_tokens=60)
        rig.plan()
        sent = [rig.moves.advance() for _ in range(3)]
        to = [peer for messages in sent for peer, _ in messages]
        assert 0 < to.count("w0") <= 72 and 0 < to.count("w1") <= 64
        gives = [message for messages in sent for _, message in messages if isinstance(message, Give)]
        assert sum(len(from_i32(give.blocks)) for give in gives) * block_bytes <= 36 * MIB


def test_children_of_one_request_find_their_prompt_where_the_first_went() -> None:
    rig = MovesRig(max_num_seqs=16)
    uid = rig.submit(80, n=4, temperature=1.0, max_tokens=60)
    while any(len(rig.tokens.get((uid, at), [])) < 2 for at in range(4)):
        rig.step()
    rig.replica.drain()
    taker = rig.join()
    assert [each for each, _ in rig.begun()] == [uid]
    rig.taken(5)
    assert rig.begun() == []
    rig.taken(10)
    rig.advance()  # the taker's cache has the prompt from here on
    takes = rig.advance(Take)
    assert [take.pages for take in takes] == [10, 10, 10]
    assert taker.pool.used == 11 + SPARE_BLOCKS + 3 * (1 + SPARE_BLOCKS)


def test_a_taker_that_runs_another_alone_is_not_waited_for() -> None:
    rig, seq, taker = drained()
    rig.advance()
    rig.taken(2)
    rig.now += 2 * HOLD_S
    rig.advance()
    assert seq in rig.replica.held
    taker.quarantined.append(seq)
    assert rig.moves.advance() == [("w1", Forget(taker.lease, 1))] and seq not in rig.replica.held


def test_two_takers_do_not_wait_for_each_other() -> None:
    rig = MovesRig()
    first, _ = rig.decoding(20), rig.decoding(48)
    rig.replica.drain()
    rig.join(1, blocks=10), rig.join(2)  # the first has room for one
    assert [number for _, number in rig.begun()] == [1, 2]
    rig.plan(), rig.plan()
    rig.taken(2)
    rig.advance()
    assert rig.replica.held == {first}


def test_a_taker_does_not_wait_for_more_than_comes_soon() -> None:
    """Its steps go on while many pages are on the way, and while some are still to be asked for."""
    rig = MovesRig()
    rig.decoding(80)
    rig.replica.drain()
    taker = rig.join()
    rig.advance()
    rig.taken(4)  # five of ten, and one that may follow
    rig.advance()
    assert taker.expected == {}
    rig.taken(5)
    rig.advance()
    assert taker.expected == {1: rig.now + HOLD_S}
    rig = MovesRig(device="cpu")
    rig.decoding(40)
    rig.replica.drain()
    taker = rig.join()
    for pages in (0, 1, 2):
        rig.taken(pages)
        rig.advance()
        assert taker.expected == {}  # one page at a time is asked for
    rig.taken(3)
    rig.advance()
    assert taker.expected == {1: rig.now + HOLD_S}


def test_who_draws_no_token_more_stays() -> None:
    """A prompt whose one token is drawn with it, and one whose last token is in flight."""
    rig = MovesRig("prefill", max_num_batched_tokens=16)
    rig.join(role="decode")
    rig.submit(24, max_tokens=1)
    rig.plan()
    assert rig.begun() == []  # half of its prompt is scheduled
    rig.plan()
    assert rig.begun() == []  # all of it
    rig = MovesRig("prefill", max_num_batched_tokens=16)
    rig.join(role="decode")
    uid = rig.submit(24, max_tokens=2)
    rig.plan()
    assert [each for each, _ in rig.begun()] == [uid]
    rig = MovesRig()
    seq = rig.decoding(8, tokens=2, max_tokens=4)
    rig.replica.drain()
    rig.plan()
    assert seq.scheduled == seq.end - 1
    rig.plan()
    rig.join()
    assert seq.scheduled == seq.end and rig.begun() == []


def test_who_is_bound_stays() -> None:
    rig = MovesRig()
    rig.submit(8, n=2, use_beam_search=True, temperature=0.0, max_tokens=30)
    rig.step()
    rig.submit(60, max_tokens=30)
    rig.replica.drain()
    rig.join()
    assert rig.begun() == []  # a search; the other waits
    rig = MovesRig(max_num_batched_tokens=16)
    rig.submit(40, max_tokens=30)
    rig.step()
    rig.replica.drain()
    rig.join()
    assert rig.begun() == []  # its prompt is not done
    rig = MovesRig("prefill", max_num_batched_tokens=16)
    rig.submit(40, attempt=1, losses=2, max_tokens=30)
    rig.plan()
    rig.join(role="decode")
    assert rig.replica.quarantined and rig.begun() == []


def test_nobody_moves_where_nobody_leaves() -> None:
    rig = MovesRig()
    rig.decoding()
    rig.join()
    assert rig.begun() == [] and not rig.moves.due
    rig = MovesRig()
    rig.replica.set_place("both", "ipc://0", "", 0)  # its blocks stay
    rig.decoding()
    rig.replica.drain()
    rig.join(kv_format="")
    assert rig.begun() == []


# ---------------------------------------------------------------- where to


def chosen(*others: dict[str, Any], role: str = "both", **changes: Any) -> int | None:
    """The replica to which the only one that decodes moves, of these."""
    rig = MovesRig(role)
    rig.decoding(20)
    if not changes.get("stays"):
        rig.replica.drain()
    for number, other in enumerate(others, 1):
        plain = {name: value for name, value in other.items() if name in ("role", "blocks", "kv_format", "endpoint")}
        replica = rig.join(number, **plain)
        if other.get("drains"):
            replica.drain()
        for at in range(other.get("running", 0)):
            replica.reserve(100 + at, [], 0)
    begun = rig.begun()
    return begun[0][1] if begun else None


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([{}, {}], 1), ([{"running": 2}, {"running": 1}], 2), ([{"running": 1}, {"running": 2}], 1),
        ([{"role": "prefill"}, {"running": 3}], 2), ([{"role": "prefill"}], 1), ([{"role": "decode"}], 1),
        ([{"drains": True}], None), ([{"kv_format": "other"}], None), ([{"endpoint": ""}], None), ([], None),
        ([{"endpoint": ""}, {"running": 3}], 2), ([{"running": 8}], None), ([{"running": 7, "blocks": 200}], 1),
    ],
)  # fmt: skip
def test_the_least_loaded_of_those_that_decode_is_taken(others: list[dict[str, Any]], found: int | None) -> None:
    assert chosen(*others) == found


def test_a_worker_for_prefills_gives_to_none_of_its_kind() -> None:
    assert chosen({"role": "prefill"}, role="prefill", stays=True) is None
    assert chosen({"role": "prefill"}, {"role": "both"}, role="prefill", stays=True) == 2
    assert chosen({"role": "prefill"}, role="prefill") == 1  # it drains


@pytest.mark.parametrize(("free", "moves"), [(6, False), (7, True)])
def test_there_must_be_room_for_what_it_has_and_spare_blocks(free: int, moves: bool) -> None:
    """22 tokens in three blocks, two to spare, and more than one for the row that is held there."""
    rig = MovesRig()
    rig.decoding(20)
    rig.replica.drain()
    taker = rig.join()
    taker.reserve(99, [], 200 - free)
    assert (len(rig.moves.advance()) > 0) == moves


@pytest.mark.parametrize(("losses", "after", "moves"), [(0, STALL_S, True), (0, STALL_S + 0.1, False), (2, 0.0, False)])
def test_who_stalls_or_has_a_suspect_takes_nobody(losses: int, after: float, moves: bool) -> None:
    rig = MovesRig()
    rig.decoding(20)
    rig.replica.drain()
    rig.join()
    rig.submit(8, attempt=1, losses=losses, max_tokens=30)
    rig.plan(1)
    rig.now += after
    assert rig.begun() == ([(1, 1)] if moves else [])


# ---------------------------------------------------------------- how it ends early


def test_a_move_that_gets_no_further_is_given_up_and_those_two_are_left_alone() -> None:
    rig, seq, taker = drained(40)
    assert rig.begun() == [(1, 1)]
    rig.now += PATIENCE_S
    assert rig.advance() == []
    rig.taken(1)  # it gets further
    rig.now += PATIENCE_S
    assert rig.advance() == []
    rig.now += 0.1
    assert rig.advance() == [Forget(taker.lease, 1)] and not taker.reserved and taker.pool.used == 0
    assert not rig.moves._moves and seq not in rig.replica.held
    rig.now += PATIENCE_S - 0.1
    assert rig.begun() == []
    other = rig.join(2)
    assert rig.begun() == [(1, 2)]
    rig.moves.heard(other, NotMoved(other.lease, 2, "full"))
    rig.now += 0.1
    assert rig.begun() == [(1, 1)]  # with the first it may be tried again
    assert list(rig.moves._apart) == [(1, 2), (1, 3)]
    rig.now += PATIENCE_S
    rig.taken(3, move=3)
    rig.now += 2 * PATIENCE_S
    rig.moves.heard(rig.replica, NotMoved(rig.replica.lease, 3, "no"))
    assert list(rig.moves._apart) == [(1, 2)]  # what is over is forgotten


def test_one_that_owes_no_answer_may_take_its_time() -> None:
    rig = MovesRig()
    rig.decoding(20)
    rig.replica.drain()
    rig.join()
    rig.plan()
    rig.advance()
    for pages in (2, 3):
        rig.taken(pages)
        rig.now += 2 * HOLD_S
        rig.advance()
    for _ in range(3):
        rig.now += PATIENCE_S  # its step takes long
        assert rig.advance() == []


def test_only_those_two_may_say_that_it_cannot_be_done() -> None:
    for speaker, ends in ((0, True), (1, True), (2, False)):
        rig = MovesRig()
        seq = rig.decoding(20)
        rig.replica.drain()
        rig.join()
        rig.begun()
        replica = rig.core.replicas[speaker] if speaker < 2 else rig.join(2)
        rig.moves.heard(replica, NotMoved(replica.lease, 9, "of another"))
        rig.moves.heard(replica, NotMoved(replica.lease, 1, "no"))
        assert bool(rig.moves._moves) != ends and rig.moves.due
        assert seq.state.value == "running" and seq.replica == 0
    rig = MovesRig()
    rig.decoding(20)
    rig.replica.drain()
    rig.join(), rig.join(2)
    rig.begun()
    rig.taken(2, number=2)  # it is not the taker
    assert rig.moves._moves[1].pages == 0


def test_what_was_held_goes_on_where_it_is() -> None:
    rig, seq, taker = drained()
    rig.advance()
    rig.taken(2)
    rig.now += 2 * HOLD_S
    rig.advance()
    assert seq in rig.replica.held and rig.plan() is None
    taker.drain()
    assert rig.advance(Forget) == [Forget(taker.lease, 1)] and seq not in rig.replica.held
    assert rig.plan() is not None


def test_a_taker_that_is_gone_is_told_nothing() -> None:
    rig = MovesRig()
    rig.decoding(20)
    rig.replica.drain()
    taker = rig.join()
    rig.begun()
    rig.core.end_lease(taker)
    assert rig.advance() == [] and not rig.moves._moves
    rig.join()  # another with its number
    assert rig.begun() == [(1, 1)]


def test_one_that_has_ended_or_was_preempted_is_forgotten() -> None:
    for ends in (True, False):
        rig = MovesRig()
        seq = rig.decoding(20)
        rig.replica.drain()
        taker = rig.join()
        rig.begun()
        if ends:
            rig.core.abort(1, 0)
        else:
            rig.core.preempt(seq)
        assert rig.advance() == [Forget(taker.lease, 1)] and taker.pool.used == 0 and not taker.reserved


def test_one_for_which_there_is_no_room_any_more_stays() -> None:
    rig, seq, taker = drained()
    rig.advance()
    taker.reserve(99, [], taker.pool.free_count - 3)
    while seq.computed < 48:
        rig.step()
    assert [take.first for take in rig.advance(Take)] == [5]  # two blocks are left, for the two rows that are held
    while seq.computed < 56:
        rig.step()
    assert rig.advance() == [Forget(taker.lease, 1)] and seq.replica == 0


def test_one_for_whose_next_token_there_is_no_room_does_not_land() -> None:
    rig, seq, taker = drained()
    rig.advance()
    taker.reserve(99, [], taker.pool.free_count - 1)
    while seq.computed < 40:
        rig.step()
    rig.advance()
    rig.now += 2 * HOLD_S
    rig.taken(5)  # all that is computed is there, and its next token begins a block
    assert rig.advance() == [Forget(taker.lease, 1)]
    assert not taker.landed and not taker.expected and not rig.replica.held


# ---------------------------------------------------------------- how long one that leaves at once may take


@pytest.mark.parametrize(("drain_timeout", "patience"), [(2.0, 2.0), (60.0, PATIENCE_S)])
def test_how_long_one_that_is_to_leave_may_give_things_away(drain_timeout: float, patience: float) -> None:
    rig = MovesRig(drain_timeout=drain_timeout)
    moves, giver = rig.moves, rig.replica
    assert moves.patience(None) == 0.0 and moves.patience(giver) == 0.0
    taker = rig.join(kv_format="other")
    assert moves.patience(giver) == 0.0
    taker.set_place("both", "ipc://1", "kv", MIB)
    assert moves.patience(giver) == patience
    taker.drain()
    assert moves.patience(giver) == 0.0
    rig.join(2)
    giver.set_place("both", "", "", 0)
    assert moves.patience(giver) == 0.0


def test_what_is_to_be_said_of_moves() -> None:
    rig = MovesRig()
    assert not rig.moves.due
    taker = rig.join(role="prefill")
    assert rig.moves.due
    taker.set_place("both", "ipc://1", "kv", MIB)
    rig.decoding(20)
    rig.replica.drain()
    rig.begun()
    rig.replica.draining = False
    assert rig.moves.due  # one is under way
    rig.moves.heard(taker, NotMoved(taker.lease, 1, "full"))
    assert rig.moves.due and [type(m) for m in rig.advance()] == [Forget] and not rig.moves.due


def test_a_taker_that_does_not_say_that_it_knows_its_blocks_is_not_waited_for() -> None:
    rig, seq, taker = drained()
    rig.advance()
    while seq.computed < 48:
        rig.step()
    assert [take.first for take in rig.advance(Take)] == [5]
    rig.taken(4, slots=5)
    rig.now += PATIENCE_S
    assert rig.advance() == []
    rig.now += 0.1
    assert rig.advance() == [Forget(taker.lease, 1)]


def test_one_that_was_preempted_and_runs_elsewhere_is_forgotten() -> None:
    rig, seq, taker = drained()
    rig.begun()
    rig.core.preempt(seq)
    rig.join(2)
    rig.plan(2)
    assert seq.replica == 2
    assert rig.advance() == [Forget(taker.lease, 1)] and seq in rig.core.replicas[2].sequences()


def test_what_a_taker_says_of_one_that_a_plan_took_over_is_late() -> None:
    rig = MovesRig()
    rig.decoding(20)
    rig.replica.drain()
    taker = rig.join()
    rig.advance()
    for pages in (2, 3):
        rig.taken(pages)
        rig.now += 2 * HOLD_S
        rig.advance()
    assert taker.landed and rig.core.plan(taker) is not None
    rig.taken(3)
    assert rig.advance() == [Forget(taker.lease, 1)]


def test_an_adapter_is_needed_and_room_for_it() -> None:
    rig = MovesRig(adapter_slots=1)
    seq = rig.decoding(20)
    seq.request.adapter = adapter("A")
    rig.replica.drain()
    rig.adapter_slots = 0
    rig.join()
    assert rig.moves.advance() == []
    seq.request.adapter = None


def test_from_one_that_prefills_what_decodes_is_held_at_once() -> None:
    rig = MovesRig("prefill")
    seq = rig.decoding(20)
    rig.join(role="decode")
    rig.begun()
    assert seq in rig.replica.held and rig.plan() is None


def test_the_takers_next_plan_waits_a_moment_for_the_last_pages_of_what_has_drawn_its_last_token() -> None:
    rig = MovesRig()
    rig.decoding(20)
    rig.replica.drain()
    taker = rig.join()
    rig.advance()
    rig.taken(2)
    rig.now += 2 * HOLD_S
    assert rig.moves.wake_at < rig.now
    rig.advance()
    rig.submit(8)
    until = rig.now + HOLD_S
    assert taker.expected == {1: until} and rig.moves.wake_at == until and rig.core.plan(taker) is None
    rig.now += HOLD_S / 2
    rig.advance()
    assert taker.expected == {1: until} and rig.core.plan(taker) is None
    rig.now = until
    rig.advance()
    assert rig.moves.wake_at == math.inf and rig.core.plan(taker) is not None and rig.core.plan(taker) is None


def test_a_pause_is_measured_from_when_the_last_token_came() -> None:
    rig = MovesRig()
    rig.decoding(20)
    rig.replica.drain()
    taker = rig.join()
    rig.now = 5.0
    rig.advance()
    rig.plan()
    rig.taken(2)
    rig.now = 6.0
    rig.advance()  # it is held, and a step of it is in flight
    rig.taken(3)
    rig.work()
    rig.now = 7.0
    rig.advance()
    (landing,) = taker.landed
    assert landing.since == 7.0


def test_for_what_comes_from_a_worker_that_prefills_no_plan_waits() -> None:
    rig = MovesRig("prefill")
    rig.decoding(20)
    taker = rig.join(role="decode")
    rig.advance()
    rig.taken(2)
    rig.advance()
    assert taker.expected == {} and rig.moves._moves


def test_a_taker_waits_for_the_last_of_those_that_it_expects() -> None:
    rig = MovesRig()
    for move, until in ((1, 5.0), (2, 9.0), (3, 7.0)):
        rig.replica.expect(move, until)
    assert [rig.replica.has_enough(lambda now=now: now) for now in (8.9, 9.0)] == [True, False]


def test_of_those_that_have_landed_the_one_that_is_given_up_goes() -> None:
    rig = MovesRig()
    seq = rig.decoding(20)
    landings = [Landing(move, seq, 0, 0.0) for move in (1, 2)]
    for landing in landings:
        rig.replica.reserve(landing.move, [], 1)
        rig.replica.land(landing)
    rig.replica.give_up(1)
    assert rig.replica.landed == landings[1:]


def test_one_that_stays_after_all_decodes_where_its_prompt_was_computed() -> None:
    rig = MovesRig("prefill", max_num_batched_tokens=16)
    uid = rig.submit(30, max_tokens=4)
    rig.step()
    (seq,) = rig.replica.prefilling
    rig.replica.hold_when_prefilled(seq)
    rig.replica.let_go_on(seq)
    rig.run()
    assert len(rig.tokens[uid, 0]) == 4
