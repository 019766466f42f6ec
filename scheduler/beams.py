"""What a beam search does to plans and messages; ``beam_group.py`` has the search itself. A room above the books."""

from __future__ import annotations

from .beam_group import BeamGroup, Scores
from .books import Books
from .draft import Draft
from .replica import Replica


def advance(books: Books, group: BeamGroup, scores: list[Scores]) -> None:
    """A step's log-probs have come, one of each beam: choose the candidates, and decide on them unless text does."""
    group.offer(scores)
    if group.request.params.stop and group.candidates:
        books.outbox.put(group.owner, group.ask())
    else:
        _decide(books, group, [])


def answered(books: Books, group: BeamGroup, step: int, stopped: list[int]) -> None:
    """The detokenizer says which candidates of a step end. BadFrame where it was not asked about them."""
    if group.answers(step, stopped):
        _decide(books, group, stopped)


def _decide(books: Books, group: BeamGroup, stopped: list[int]) -> None:
    if not group.decide(stopped, books.replicas[group.replica].pool, books.max_model_len):
        return
    if not group.ended:
        books.fail(group.request, 400, "Masks and bad words left no token that a beam could go on with.")
        return
    output = group.output()
    books.answer(group, output, tokens=len(output.tokens) // 4)


def plan_beams(books: Books, replica: Replica, draft: Draft, group: BeamGroup) -> None:
    """One decode of each beam, where they are decided."""
    if not group.ready:
        return
    pool, slot = replica.pool, group.scheduled // replica.block_size
    tables = [beam.blocks for beam in group.beams]
    held = len({table[slot] for table in tables}) if slot < len(tables[0]) else 0
    while pool.free_count < len(tables) - held:
        if replica.drafts and replica.draft_room.take_back():
            continue
        if replica.draft_room.coming():
            return
        if replica.tier is not None and replica.tier.make_room(pool):
            continue
        victim = replica.last()
        books.preempt(victim)
        if victim is group:
            return
    forks, dropped = group.place()
    replica.drop_rows(dropped)
    for source, row in forks:
        draft.fork(source, row, group.seed())
    for beam in group.beams:
        last = beam.blocks[slot] if slot < len(beam.blocks) else None
        beam.blocks[slot:] = [draft.own_block(pool, beam.row, slot, last)]
        assert beam.node is not None
        draft.append_token(beam.row, beam.node.token)
    draft.search(group)
