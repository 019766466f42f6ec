"""The columns of running sequences, and what steps make of them: who decodes, for whom, and what ends somebody."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
from scheduler_rig import Rig

from quire.proto.codec import BadFrame, from_i8, from_i32, from_i64, i32
from quire.proto.messages import Finish, StepResult, Submit, TokenBatch
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler.columns import FEW, Columns, Lookout, Positions, StopIds, as_u32
from quire.scheduler.request import Sequence
from quire.scheduler.snapshot import SnapshotError, dump, load


def test_what_decodes_draw_is_fetched_in_order_wherever_a_block_begins() -> None:
    columns, rows = Columns(4, 8, 9), np.array([2, 0])
    for row, computed in ((2, 10), (0, 16)):
        columns.enter(row, computed, computed, 900, [])
        columns.expect_full_block(row, computed // 8)
    columns.begin_drawn(2, 10, i32([8, 9, 10]))  # the tokens at 8 and 9 are of the prompt
    columns.begin_drawn(0, 16, i32([-8]))
    for position in range(11, 200):
        ends = np.array([position, position + 6], np.int32)
        due = columns.decoded(rows, ends, np.array([position, 2 - position], np.int32))
        assert due.tolist() == [at for at in (0, 1) if not ends[at] % 8]
        if len(due):
            columns.expect_next_blocks(rows[due], ends[due])
            full = range(position - 8, position) if not due[0] else range(10 - position, 2 - position, -1)
            assert columns.fill_blocks(rows[due]) == [i32(full)]
    assert columns.computed.of(rows).tolist() == [199, 205] and columns.computed[2] == 199
    for count in (1, 7, 8, 16, 128, 189):
        assert columns.fetch_drawn(2, 200, count) == i32(range(200 - count, 200))
    assert columns.fetch_drawn(2, 192, 9) == i32(range(183, 192))
    assert columns.fetch_drawn(0, 206, 2) == i32([-196, -197])


def test_tables_that_grow_together_are_as_if_each_grew_alone() -> None:
    together, alone, rows = Columns(4, 8, 9), Columns(4, 8, 9), np.array([3, 1, 2])
    for columns in (together, alone):
        for row, blocks in ((3, [5, 6]), (1, [7]), (2, [8, 9])):
            columns.enter(row, 3, 3, 19 if row == 3 else 60, blocks)
    starts, blocks = np.array([16, 8, 16], np.int32), np.array([20, 21, 22], np.int32)
    assert together.need_blocks(rows, starts).tolist() == [True, True, True]
    assert together.need_blocks(rows, starts + np.int32(3)).tolist() == [False, False, False]
    assert together.need_blocks(rows, np.array([19, 9, 15], np.int32)).tolist() == [False, False, False]
    assert together.grow(rows, starts, blocks).tolist() == [2, 1, 2]
    for row, start, block in zip(rows.tolist(), starts.tolist(), blocks.tolist(), strict=True):
        alone.put_block(row, start // 8, block)
        alone.expect_end_of_room(row, start)
    assert [together.table(row) for row in (1, 2, 3)] == [[7, 21], [8, 9, 22], [5, 6, 20]]
    assert (
        together.tables.tolist() == alone.tables.tolist() and together.num_blocks.tolist() == alone.num_blocks.tolist()
    )
    assert together.horizon.at.tolist() == alone.horizon.at.tolist() == [0, 16, 24, 19]
    together.leave(3)
    assert together.table(3) == [] and not together.tables[3].any()


def test_what_is_cut_off_a_table_leaves_zeros_and_who_is_at_its_end_needs_no_block() -> None:
    columns = Columns(2, 8, 5)
    columns.enter(0, 8, 8, 8, [3])
    columns.enter(1, 8, 8, 9, [4, 5, 6])
    assert columns.cut(1, 1) == [5, 6] and columns.cut(1, 1) == []
    assert columns.tables.tolist() == [[3, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    assert columns.need_blocks(np.array([0, 1]), np.array([8, 8], np.int32)).tolist() == [False, True]


def test_a_step_is_told_who_left_a_row_since() -> None:
    columns = Columns(3, 8, 9)
    columns.leave(1)
    planned = columns.departures
    columns.leave(2)
    assert (columns.left_at <= planned).tolist() == [True, True, False]


def test_a_look_is_due_at_its_step_and_no_row_is_compared_before() -> None:
    lookout, rows = Lookout(4), np.array([3, 0])
    lookout.set(3, 14)
    lookout.set(0, 12)
    positions = np.array([10, 7], np.int32)
    assert lookout.reached(rows, positions).tolist() == [] and not lookout.overlooks(rows, positions + 1)
    lookout.at[0] = 0  # not by ``set``: nobody compares until the nearest is due
    assert lookout.overlooks(rows, positions + 1)
    assert [lookout.reached(rows, positions + step).tolist() for step in (1, 2, 3)] == [[], [], []]
    lookout.at[0] = 12
    assert lookout.reached(rows, positions + 4).tolist() == [0]
    lookout.set(3, 20)
    assert lookout.reached(rows, positions + 5).tolist() == [1]
    assert lookout.reached(np.array([1, 2]), np.zeros(2, np.int32)).tolist() == [0, 1]


def test_who_was_told_of_a_look_that_is_due_overlooks_nothing() -> None:
    lookout, rows, positions = Lookout(2), np.array([0, 1]), np.array([5, 5], np.int32)
    lookout.set(rows, np.array([7, 9], np.int32))
    assert not lookout.overlooks(rows, positions + 9)  # nobody has compared them
    assert lookout.reached(rows, positions).tolist() == []
    assert lookout.overlooks(rows, positions + 3) and not lookout.overlooks(rows, positions)
    assert lookout.reached(rows, positions + 1).tolist() == []
    assert not lookout.overlooks(rows, positions + 3)  # they are compared in the next step
    assert lookout.reached(rows, positions + 2).tolist() == [0]


def test_what_is_overlooked_is_a_look_of_the_rows_that_were_compared_last() -> None:
    lookout, rows, positions = Lookout(2), np.array([0, 1]), np.array([10, 10], np.int32)
    lookout.set(rows, positions + 2)
    assert lookout.reached(rows, positions).tolist() == []
    assert not lookout.overlooks(rows, positions + 1) and lookout.overlooks(rows, positions + 2)
    assert not lookout.overlooks(rows.copy(), positions + 2)  # others are compared when they come
    lookout.set(rows, positions + 2)
    assert not lookout.overlooks(rows, positions + 3)  # the next look is at these


def test_a_look_that_is_set_nearer_is_not_overlooked() -> None:
    lookout, rows, positions = Lookout(2), np.array([0, 1]), np.array([5, 5], np.int32)
    lookout.set(0, 40)
    lookout.set(1, 50)
    assert lookout.reached(rows, positions).tolist() == []
    lookout.set(1, 7)
    assert [lookout.reached(rows, positions + step).tolist() for step in (1, 2)] == [[], [1]]


def test_rows_that_others_went_on_with_are_compared_again() -> None:
    lookout, few, more = Lookout(3), np.array([0, 1]), np.array([0, 1, 2])
    for row, position in ((0, 10), (1, 20), (2, 0)):
        lookout.set(row, position)
    assert lookout.reached(few, np.array([5, 5], np.int32)).tolist() == []
    for position in (6, 7, 8, 9):  # with one that always needs a look
        assert lookout.reached(more, np.full(3, position, np.int32)).tolist() == [2]
    assert lookout.reached(few, np.array([10, 10], np.int32)).tolist() == [0]


def test_what_was_drawn_in_a_row_before_is_nothing_to_its_next_owner() -> None:
    columns, rows = Columns(2, 8, 9), np.array([1])
    columns.enter(1, 16, 16, 900, [])
    columns.expect_full_block(1, 2)
    columns.begin_drawn(1, 16, i32([70]))
    for position in range(17, 22):
        columns.decoded(rows, np.array([position], np.int32), np.array([700 + position], np.int32))
    columns.leave(1)
    columns.enter(1, 4, 4, 900, [])
    columns.expect_full_block(1, 0)
    columns.begin_drawn(1, 4, i32([1, 2, 3, 4, 5]))
    for position in (5, 6, 7, 8):
        due = columns.decoded(rows, np.array([position], np.int32), np.array([position + 1], np.int32))
    assert due.tolist() == [0] and columns.fill_blocks(rows) == [i32(range(1, 9))]


def test_what_is_drawn_after_a_verification_is_fetched_from_there() -> None:
    columns, rows = Columns(1, 8, 9), np.array([0])
    columns.enter(0, 16, 16, 900, [])
    columns.expect_full_block(0, 2)
    columns.begin_drawn(0, 16, i32([16]))

    def draw(first: int, last: int) -> None:
        for position in range(first, last + 1):
            ends = np.array([position], np.int32)
            if len(columns.decoded(rows, ends, ends)):
                columns.expect_next_blocks(rows, ends)
                columns.fill_blocks(rows)

    draw(17, 26)  # a block of these is full
    columns.begin_drawn(0, 29, i32(range(24, 30)))  # three tokens of a verification: what was before is known
    columns.expect_full_block(0, 3)
    draw(30, 50)
    assert columns.fetch_drawn(0, 51, 22) == i32(range(29, 51)) and len(columns.kept[0]) == 3


def test_stop_ids_are_those_of_somebody_who_is_there() -> None:
    assert StopIds(9) == StopIds(9) != frozenset()
    stop_ids, tokens = StopIds(100), np.array([0, 2, 5, 7, 99], np.int32)
    assert stop_ids.among(tokens) == []
    for stops in ({2, 99}, {2}, {2}, {5, 1000, -1}):
        stop_ids.add(frozenset(stops))
    assert stop_ids.among(tokens) == [1, 2, 4]
    stop_ids.remove(frozenset({2, 99}))
    stop_ids.remove(frozenset({2}))
    assert stop_ids.among(tokens) == [1, 2]
    stop_ids.remove(frozenset({2}))
    assert stop_ids.among(tokens) == [2]


@pytest.mark.parametrize("count", [FEW - 1, FEW, 200])
def test_stop_ids_are_found_among_many_tokens_too(count: int) -> None:
    stop_ids, tokens = StopIds(100), np.arange(count, dtype=np.int32) % 100
    assert stop_ids.among(tokens) == []
    stop_ids.add(frozenset({3, 50}))
    assert stop_ids.among(tokens) == [at for at in range(count) if at % 100 in (3, 50)]
    assert stop_ids.among(tokens[:3]) == [] and stop_ids.among(tokens[51:60]) == []
    assert stop_ids.among(np.full(count, 7, np.int32)) == []
    assert stop_ids == StopIds(100, [frozenset({3, 50})]) != StopIds(100)
    assert stop_ids != {3, 50}


def test_the_first_token_of_a_vocabulary_may_be_a_stop_id() -> None:
    stop_ids = StopIds(100, [frozenset({0})])
    for count in (1, FEW):
        assert stop_ids.among(np.zeros(count, np.int32)) == list(range(count))


def test_positions_of_rows_that_go_on_together_are_those_of_each() -> None:
    positions, rows, others = Positions(5), np.array([3, 1]), np.array([0, 1])
    positions[3], positions[1] = 10, 20
    assert positions.of(rows).tolist() == [10, 20]
    positions.go_on(rows, np.array([11, 21], np.int32))
    positions.go_on(rows, np.array([12, 22], np.int32))
    assert positions.of(rows).tolist() == [12, 22] and positions.of(others).tolist() == [0, 22]
    positions.go_on(rows, np.array([13, 23], np.int32))
    positions.go_on(others, np.array([1, 24], np.int32))
    assert [positions[row] for row in range(5)] == [1, 24, 0, 13, 0]
    positions.go_on(rows, np.array([14, 25], np.int32))
    positions[1] = 7  # by itself: the others stay where they were
    assert positions.of(rows).tolist() == [14, 7] and positions[0] == 1


def test_what_a_row_is_called_and_what_it_holds() -> None:
    columns = Columns(3, 8, 4)
    columns.name(1, 77, 5, 2, 9, 20)
    assert (columns.uids[1], columns.attempts[1], columns.indexes[1], columns.sinks[1]) == (77, 5, 2, 9)
    assert columns.before_output[1] == 19
    columns.enter(1, 8, 16, 30, [4, 6])
    assert (columns.computed[1], columns.scheduled[1], columns.end[1]) == (8, 16, 30)
    assert columns.table(1) == [4, 6] and columns.horizon.at[1] == 0
    assert [columns.block_at(1, slot) for slot in (0, 1, 2)] == [4, 6, None]
    columns.put_block(1, 0, 5)
    columns.put_block(1, 2, 7)
    assert columns.table(1) == [5, 6, 7]


@pytest.mark.parametrize(
    ("scheduled", "end", "horizon"),
    [(10, 30, 16), (15, 30, 16), (16, 30, 16), (17, 30, 17), (10, 12, 12), (13, 12, 13)],
)
def test_the_next_look_is_at_the_end_of_the_room_or_at_once(scheduled: int, end: int, horizon: int) -> None:
    columns = Columns(2, 8, 4)
    columns.enter(1, 8, scheduled, end, [4, 6])
    columns.expect_end_of_room(1, scheduled)
    assert columns.horizon.at[1] == horizon


@pytest.mark.parametrize(("full", "end", "milestone"), [(0, 30, 8), (1, 30, 16), (-1, 30, 0), (1, 15, 15), (1, 16, 16)])
def test_the_next_full_block_or_the_end(full: int, end: int, milestone: int) -> None:
    columns = Columns(2, 8, 4)
    columns.enter(1, 8, 8, end, [4])
    columns.expect_full_block(1, full)
    assert columns.milestone.at[1] == milestone
    columns.expect_next_blocks(np.array([1]), np.array([16], np.int32))
    assert columns.milestone.at[1] == min(24, end)
    assert columns.at_end(np.array([1, 1, 1]), np.array([end - 1, end, end + 1], np.int32)).tolist() == [1, 2]


def test_a_column_of_part_of_a_number_is_no_column() -> None:
    assert as_u32(i32([-1, 3])).tolist() == [2**32 - 1, 3]
    with pytest.raises(BadFrame, match="5 bytes"):
        as_u32(bytes(5))


def submit(rig: Rig, owner: str, uid: int, max_tokens: int, eos: list[int]) -> None:
    work = Generate(SamplingParams(max_tokens=max_tokens), uid, eos)
    rig.core.submit(owner, Submit(uid, uid + 5, i32([1, 2, 3]), b"", work, float(uid)))


def drawn(rig: Rig, tokens: list[int]) -> dict[str, list[tuple[int, ...]]]:
    """A step in which these are drawn: for each detokenizer (uid, attempt, offset, token, finish) of its sequences."""
    plan = rig.core.plan(rig.replica)
    assert plan is not None
    rig.core.commit(rig.replica, StepResult(plan.lease, plan.step, i32(tokens)))
    rig.core.check_integrity()
    found: dict[str, list[tuple[int, ...]]] = {}
    for owner, batch in rig.core.outbox.take():
        assert isinstance(batch, TokenBatch)
        found.setdefault(owner, []).extend(zip(
            from_i64(batch.uids), from_i32(batch.attempts), from_i32(batch.offsets), from_i32(batch.tokens),
            from_i8(batch.finishes), strict=True,
        ))  # fmt: skip
    return found


def test_each_detokenizer_is_sent_its_own_and_told_who_of_them_ends() -> None:
    rig = Rig()
    for uid, owner in enumerate("abbab", 1):
        submit(rig, owner, uid, 4 if uid == 3 else 9, eos=[70 + uid])
    drawn(rig, [11, 12, 13, 14, 15])
    assert drawn(rig, [21, 22, 23, 24, 25]) == {
        "a": [(1, 6, 1, 21, 0), (4, 9, 1, 24, 0)],
        "b": [(2, 7, 1, 22, 0), (3, 8, 1, 23, 0), (5, 10, 1, 25, 0)],
    }
    assert drawn(rig, [72, 71, 33, 74, 75]) == {  # another's stop id ends nobody
        "a": [(1, 6, 2, 72, 0), (4, 9, 2, 74, Finish.STOP)],
        "b": [(2, 7, 2, 71, 0), (3, 8, 2, 33, 0), (5, 10, 2, 75, Finish.STOP)],
    }
    assert drawn(rig, [41, 42, 43]) == {"a": [(1, 6, 3, 41, 0)], "b": [(2, 7, 3, 42, 0), (3, 8, 3, 43, Finish.LENGTH)]}


def test_steps_share_their_batch_until_somebody_joins_or_leaves() -> None:
    rig = Rig()
    for uid in (1, 2):
        submit(rig, "a", uid, 30, eos=[])
    drawn(rig, [11, 12])
    batch = rig.replica.going.batch()
    drawn(rig, [21, 22])
    assert rig.replica.going.batch() is batch
    submit(rig, "a", 3, 30, eos=[])
    drawn(rig, [31, 32, 33])
    assert [seq.uid for seq in rig.replica.going.batch().seqs] == [1, 2, 3] and len(batch) == 2
    rig.core.abort(2, 99)
    assert [seq.uid for seq in rig.replica.going.batch().seqs] == [1, 3]
    rig.core.check_integrity()


def test_who_has_nothing_left_to_schedule_stays_until_its_last_token_comes() -> None:
    rig = Rig()
    submit(rig, "a", 1, 3, eos=[])
    drawn(rig, [11])
    first, second = rig.core.plan(rig.replica), rig.core.plan(rig.replica)
    assert first is not None and second is not None
    assert rig.core.plan(rig.replica) is None
    for plan, token in ((first, 21), (second, 31)):
        assert rig.replica.decoding
        rig.core.commit(rig.replica, StepResult(plan.lease, plan.step, i32([token])))
    assert not rig.replica.decoding and not rig.core.requests
    rig.core.check_integrity()


def test_outputs_are_whole_at_any_time() -> None:
    rig = Rig()
    submit(rig, "a", 1, 40, eos=[])
    seqs: list[Sequence] = []
    for number in range(30):
        drawn(rig, [100 + number])
        seqs = seqs or list(rig.replica.decoding)
        assert (seqs[0].output_len, seqs[0].total, seqs[0].computed) == (number + 1, number + 4, number + 3)
        if number % 3 == 0:
            assert seqs[0].outputs.tolist() == list(range(100, 101 + number))
    rig.core.preempt(seqs[0])
    assert seqs[0].outputs.tolist() == list(range(100, 130)) and seqs[0].total == 33


def test_columns_and_counters_are_in_a_snapshot() -> None:
    state = {"columns": Columns(3, 8, 9), "counter": Counter(a=3, b=1), "queue": deque([1])}
    state["columns"].decoded(*map(np.int32, ([2], [6], [77])))  # type: ignore[attr-defined]
    again = load(dump(state, {}), {})
    assert again["counter"] == Counter(a=3, b=1) and again["queue"] == deque([1])
    assert again["columns"].fetch_drawn(2, 7, 1) == i32([77]) and again["columns"].drawn.shape == (3, 8)
    again["columns"].leave(0)  # it can be written to
    with pytest.raises(SnapshotError, match="an array of"):
        load(dump(np.zeros(3, np.complex64), {}), {})
