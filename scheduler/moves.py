"""Sequences that go from one replica to another with their keys and values: from a worker that drains, and from one
that prefills to one that decodes. A room above the planner. No IO.

From one that drains, a sequence goes on decoding while its full blocks are copied (pre-copy). When those of all that
go to the same taker have come, they are held together, their last blocks follow what is in flight, and the next plan of
the taker takes them over: what they wait is the copy of those last blocks. From a worker for prefills the blocks of a
sequence follow each chunk of its prompt, and it is held when the prompt ends, because its next step there would have
the length of somebody's prompt.

A move changes nothing until it is complete: whatever fails, a sequence that still runs at the giver goes on there, and
one that does not is in line as after any loss. Pages for a move that was given up are dropped by the taker: Forget goes
before every plan that gives its blocks to somebody else.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from ..proto.codec import i32
from ..proto.messages import Forget, Give, NotMoved, Take, Taken
from ..proto.request_name import about
from .beam_group import BeamGroup
from .block_pool import blocks_for
from .books import Books
from .placement import cached_prefix, can_ever_hold
from .replica import Landing, Replica
from .request import Sequence, State

log = logging.getLogger(__name__)

AT_ONCE, AT_ONCE_PREFILLED = 16, 64
"""Moves at once from a giver that drains, whose sequences decode there until it is their turn, and from one for
prefills, where a next token would take as long as somebody's prompt. (A worker that is busy lets 256 messages wait.)"""
PIECE_BYTES, WINDOW_BYTES = 4 * 2**20, 32 * 2**20
"""Of one Give, and of one giver's pages that were asked for and are not known to have come."""
BESIDE_BYTES, BESIDE_RATE = 2**20, 2**29
"""The same while sequences decode at the giver: so much, or so much for each second that a step of theirs takes, if
that is more. On a CPU nothing is computed while pages are copied, at 1 to 10 GiB/s, so this is how much longer a step
may take, here and where they go."""
PATIENCE_S = 5.0
"""A move that gets no further for so long is given up, and those two workers are left alone for as long."""
HOLD_S = 0.01
"""The taker's next step waits so long at most for the pages after which sequences are held, for those that follow then,
and when their last tokens elsewhere have come: a step is most often longer than that takes, and they would wait for it.
"""
TOGETHER_S = 1.0
"""So long those that go the same way wait for each other, and a quarter of a drain's time at most; after that each is
held when its own pages have come."""
SPARE_BLOCKS = 2
"""Reserved beyond what a sequence has, for tokens that it draws while it is on its way: what it holds in the end is
asked for without another word of the taker's."""


class Move:
    """One sequence on its way. Slots: places of its block table."""

    __slots__ = (
        "asked_at",
        "began_at",
        "generation",
        "given",
        "giver",
        "known",
        "number",
        "offered",
        "pages",
        "seq",
        "since",
        "taker",
        "waits",
    )

    def __init__(self, number: int, seq: Sequence, giver: Replica, taker: Replica, cached: int, now: float):
        self.number, self.seq, self.generation = number, seq, seq.generation
        self.giver, self.taker, self.since = giver, taker, now
        self.began_at = self.asked_at = now  # when it began, and when pages were asked for last
        self.waits = math.inf  # since when: its last token at the giver has come
        self.given = self.pages = self.offered = cached  # slots asked for, there, and to be found in the taker's cache
        # Slots whose blocks the taker knows. Of the first Take that is so when pages come; of later ones it says so.
        self.known = len(taker.reserved[number].blocks)

    @property
    def awaits(self) -> bool:
        """A worker owes an answer."""
        return self.pages < self.given or self.known < len(self.taker.reserved[self.number].blocks)

    @property
    def alive(self) -> bool:
        """The sequence is where it was."""
        return self.seq.generation == self.generation and self.seq.state is State.RUNNING

    @property
    def full(self) -> int:
        """Blocks of its sequence that nothing is written into any more. What a plan that was sent writes is there when
        a Give that is sent now is read."""
        return (self.seq.scheduled if self.seq.prefilling else self.seq.computed) // self.giver.block_size

    def next_pages(self, goal: int, allowed: int) -> tuple[int, int] | None:
        """The slots to ask for next, where some are wanted before ``goal`` and so many more are ``allowed``: from, to
        before."""
        end = min(goal, self.known, self.given + self.blocks(PIECE_BYTES), self.given + allowed)
        return (self.given, end) if end > self.given else None

    def blocks(self, size: int) -> int:
        """Blocks in so many bytes, one at least."""
        return max(1, size // self.giver.block_bytes)


class Moves:
    """All that are under way."""

    def __init__(self, books: Books):
        self._books = books
        self._moves: dict[int, Move] = {}
        self._moving: dict[Sequence, Move] = {}
        self._numbers = 0
        self._apart: dict[tuple[int, int], float] = {}  # leases of giver and taker, and until when they are left alone
        self._outgoing: list[tuple[str, Any]] = []
        self.wake_at = math.inf  # when a plan is to be made that waits for pages

    @property
    def due(self) -> bool:
        """Something moves, or is to move, or a Forget is to go before the next plan."""
        if self._moves or self._outgoing:
            return True
        replicas = self._books.replicas.values()
        return any(replica.draining or replica.role == "prefill" for replica in replicas)

    def patience(self, giver: Replica | None) -> float:
        """Seconds that a worker which is to leave at once may take to give away what runs there: none where nobody is
        there to take it."""
        others = [] if giver is None or not giver.kv_format else self._books.replicas.values()
        could = any(r is not giver and not r.draining and r.kv_format == giver.kv_format for r in others)  # type: ignore[union-attr]
        return min(PATIENCE_S, self._books.config.drain_timeout) if could else 0.0

    def heard(self, replica: Replica, message: Taken | NotMoved) -> None:
        """A worker says how far a move is, or that it cannot be done."""
        move = self._moves.get(message.move)
        if move is None:
            return
        if isinstance(message, NotMoved):
            if replica in (move.giver, move.taker):
                self._give_up(move, f"worker {replica.number} says: {message.error}"[:300], apart=True)
        elif replica is move.taker and move.number in replica.reserved and message.pages <= move.given:
            blocks = len(replica.reserved[move.number].blocks)
            move.known, move.since = max(move.known, min(message.slots, blocks)), self._books.clock()
            move.pages = max(move.pages, message.pages)

    def advance(self) -> list[tuple[str, Any]]:
        """Begin moves, and bring those under way as far as they can go. Returns what is to be sent, in order, before
        the plans that are made next: messages, each with its peer."""
        for giver in self._books.replicas.values():
            if giver.kv_format and (giver.draining or giver.role == "prefill"):
                self._begin_from(giver)
        groups = self._groups()
        for group in groups:
            self._hold(group)
        for move in list(self._moves.values()):
            self._advance(move)
        for group in groups:
            self._expect(group)
        outgoing, self._outgoing = self._outgoing, []
        now = self._books.clock()
        untils = [until for move in self._moves.values() for until in move.taker.expected.values()]
        self.wake_at = min((until for until in untils if until > now), default=math.inf)
        return outgoing

    # -- where to

    def _begin_from(self, giver: Replica) -> None:
        most = AT_ONCE if giver.draining else AT_ONCE_PREFILLED
        room = most - sum(move.giver is giver for move in self._moves.values())
        for seq in [*giver.decoding, *(() if giver.draining else giver.prefilling)]:
            if room <= 0:
                return
            if self._may_move(seq) and not (giver.draining and self._shares(seq)):
                if (taker := self._taker(giver, seq)) is None:
                    continue
                self._begin(giver, taker, seq)
                room -= 1

    def _may_move(self, seq: Sequence) -> bool:
        """Another step is due after those that are planned, and nothing binds it: a beam search and one that may be
        what ends workers stay."""
        if seq in self._moving or isinstance(seq, BeamGroup) or seq.quarantined:
            return False
        return (seq.total if seq.prefilling else seq.computed if seq.loose else seq.scheduled) < seq.end

    def _shares(self, seq: Sequence) -> bool:
        """Another child of its request is on its way with the prompt that both have: it finds that there later."""
        if len(seq.request.live) < 2:
            return False
        others = (move for other, move in self._moving.items() if other.request is seq.request)
        return any(move.offered < seq.prompt_len // move.taker.block_size for move in others)

    def _taker(self, giver: Replica, seq: Sequence) -> Replica | None:
        """The best of the replicas that have room: one that decodes, if there is one, and the least loaded. Where it
        has not the adapter of ``seq`` ready it is told to load it, and ``seq`` goes on where it is until then."""
        now, found, adapter = self._books.clock(), None, seq.request.adapter
        best: tuple[bool, bool, int] = (False, False, 0)
        for replica in self._books.replicas.values():
            if replica is giver or replica.draining or replica.quarantined or replica.kv_format != giver.kv_format:
                continue
            if replica.role == "prefill" and not giver.draining:
                continue
            if self._apart.get((giver.lease.counter, replica.lease.counter), now) > now or replica.stalled(now):
                continue
            ready = adapter is None
            if adapter is not None:
                if replica.adapters is None or not replica.adapters.could_take(adapter, now):
                    continue
                ready = replica.adapters.takes(adapter)
            rank = (replica.role != "prefill", ready, -replica.running)
            if (found is None or rank > best) and replica.endpoint and self._has_room(replica, seq):
                found, best = replica, rank
        if found is None or best[1]:
            return found
        assert found.adapters is not None and adapter is not None  # which is what is not ready
        found.adapters.want(adapter, now)
        return None

    def _has_room(self, replica: Replica, seq: Sequence) -> bool:
        if not replica.free_rows or not can_ever_hold(replica, seq):
            return False
        need = blocks_for(seq.total, replica.block_size) + SPARE_BLOCKS
        return replica.pool.free_count - need > replica.running

    def _begin(self, giver: Replica, taker: Replica, seq: Sequence) -> None:
        self._numbers += 1
        seq.keep_drawn(seq.total)
        cached = cached_prefix(taker, seq)
        reserved = taker.reserve(
            self._numbers, cached, blocks_for(seq.total, taker.block_size) + SPARE_BLOCKS - len(cached),
            seq.request.adapter,
        )  # fmt: skip
        move = Move(self._numbers, seq, giver, taker, len(cached), self._books.clock())
        self._moves[move.number] = self._moving[seq] = move
        self._outgoing.append((taker.peer, Take(taker.lease, move.number, 0, i32(reserved.blocks), len(cached))))
        if seq.prefilling:
            giver.hold_when_prefilled(seq)
        elif not giver.draining:
            giver.hold(seq)

    # -- together

    def _groups(self) -> list[list[Move]]:
        """Those that decode, and leave one replica that drains for the same other one."""
        groups: dict[tuple[Replica, Replica], list[Move]] = {}
        for move in self._moves.values():
            if move.giver.draining and move.alive and not move.seq.prefilling:
                groups.setdefault((move.giver, move.taker), []).append(move)
        return list(groups.values())

    def _hold(self, group: list[Move]) -> None:
        """They are held where of each one full block at most has not come: it follows with the last. A plan that is
        behind another is their last there, so that its worker finds what is to follow when it is done with it; where
        none comes for a while, they are held all the same."""
        now = self._books.clock()
        late = now - min(TOGETHER_S, self._books.config.drain_timeout / 4)
        ready = [move for move in group if move.pages >= move.full - 1]
        behind = len(group[0].giver.in_flight) > 1 or now - HOLD_S > max(move.asked_at for move in group)
        for move in ready:
            if (behind and len(ready) == len(group)) or move.began_at < late:
                move.giver.hold(move.seq)

    def _expect(self, group: list[Move]) -> None:
        """The taker's next step waits where what has been asked for is the last before they are held, and no more than
        comes meanwhile."""
        coming = [move for move in group if move.pages < move.full - 1 and move.number in move.taker.reserved]
        missing = sum(move.full - 1 - move.pages for move in coming)
        if coming and missing <= coming[0].blocks(PIECE_BYTES) and all(m.given >= m.full - 1 for m in coming):
            for move in coming:
                move.taker.expect(move.number, move.asked_at + HOLD_S)

    # -- how far

    def _advance(self, move: Move) -> None:
        books, taker, seq = self._books, move.taker, move.seq
        if books.replicas.get(taker.number) is not taker:
            self._end(move, "its taker is gone")
        elif move.number not in taker.reserved:  # a plan has taken it over, or found that it has ended
            self._outgoing.append((taker.peer, Forget(taker.lease, move.number)))
            del self._moves[move.number], self._moving[seq]
        elif not move.alive:
            self._give_up(move)
        elif books.clock() - move.since > PATIENCE_S:
            self._give_up(move, f"it got no further for {PATIENCE_S:g} s", apart=True)
        elif taker.draining or taker.quarantined:
            self._give_up(move, "its taker drains" if taker.draining else "its taker runs another alone")
        elif not any(landing.move == move.number for landing in taker.landed):
            self._go_on(move)

    def _go_on(self, move: Move) -> None:
        giver, taker, seq = move.giver, move.taker, move.seq
        held = seq in giver.held
        goal = blocks_for(seq.scheduled, giver.block_size) if held else move.full
        if not self._ask(move, goal):
            self._give_up(move, f"worker {taker.number} has no room any more")
            return
        if ended := held and seq.drew and seq.computed == seq.scheduled:
            move.waits = min(move.waits, self._books.clock())
        if ended and move.pages >= goal:
            taker.land(Landing(move.number, seq, move.generation, move.waits))
        elif giver.draining and held and move.given >= goal:
            taker.expect(move.number, (move.waits if ended else move.asked_at) + HOLD_S)
        if not move.awaits:
            move.since = self._books.clock()

    def _ask(self, move: Move, goal: int) -> bool:
        """Have pages of slots before ``goal`` sent, and blocks reserved for them. False where there is no room."""
        giver, taker, seq = move.giver, move.taker, move.seq
        full = min(move.pages, seq.computed // giver.block_size)
        if full > move.offered:
            seq.keep_drawn(seq.total)
            taker.offer(move.number, seq, move.offered, full)
            move.offered = full
        blocks = taker.reserved[move.number].blocks
        # Of one that is held the taker's first plan writes another token, which may be the first of a block.
        needed = max(goal, blocks_for(seq.total, taker.block_size)) if seq in giver.held else goal
        missing, room = needed - len(blocks), taker.pool.free_count - taker.running
        if missing >= 0 and seq not in giver.held and missing + SPARE_BLOCKS <= room:
            missing += SPARE_BLOCKS
        if missing > 0:
            if missing > room:
                return False
            more = taker.reserve_more(move.number, missing)
            take = Take(taker.lease, move.number, len(blocks) - len(more), i32(more))
            self._outgoing.append((taker.peer, take))
        table, allowed = seq.blocks, self._allowed(move)
        while (slots := move.next_pages(goal, allowed)) is not None:
            first, end = slots
            give = Give(giver.lease, move.number, first, i32(table[first:end]), taker.endpoint, taker.lease)
            self._outgoing.append((giver.peer, give))
            move.given, move.asked_at = end, self._books.clock()
            allowed -= end - first
        return True

    def _allowed(self, move: Move) -> int:
        """Blocks of it that may be asked for now: while it decodes on a CPU, so many that the giver's steps stay
        short."""
        giver, most = move.giver, WINDOW_BYTES
        if move.seq not in giver.held and giver.device.startswith("cpu"):
            most = min(most, max(BESIDE_BYTES, int(BESIDE_RATE * giver.pace.decode_s)))
        asked = sum(other.given - other.pages for other in self._moves.values() if other.giver is giver)
        return max(0, move.blocks(most) - asked)

    # -- how it ends early

    def _give_up(self, move: Move, why: str = "", apart: bool = False) -> None:
        """The taker forgets it. ``apart``: these two workers are left alone for a while."""
        if move.number in move.taker.reserved:  # else a plan has taken it over, or found that it has ended
            move.taker.give_up(move.number)
        self._outgoing.append((move.taker.peer, Forget(move.taker.lease, move.number)))
        if apart:
            until = self._books.clock() + PATIENCE_S
            self._apart = {pair: at for pair, at in self._apart.items() if at > self._books.clock()}
            self._apart[move.giver.lease.counter, move.taker.lease.counter] = until
        self._end(move, why)

    def _end(self, move: Move, why: str) -> None:
        if why:
            log.info("sequence %d does not move from replica %d to %d: %s", move.seq.index, move.giver.number,
                     move.taker.number, why, extra=about(move.seq.uid))  # fmt: skip
        if move.alive:
            move.giver.let_go_on(move.seq)
        del self._moves[move.number], self._moving[move.seq]
