"""The columns of a step taken apart and put together, and what a step makes of each row; a rule at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest

from quire.detokenizer.beams import BeamTexts, LostBeams
from quire.detokenizer.columns import Outbox, check_tokenize, pairs_of, rows_of
from quire.detokenizer.logprobs import TokenTexts
from quire.detokenizer.request import Request
from quire.detokenizer.sequence import News, TextSequence
from quire.detokenizer.step import Step
from quire.detokenizer.stops import StopSet
from quire.proto.codec import BadFrame, f32, from_i8, from_i32, from_i64, i8, i32, i64
from quire.proto.messages import Finish, Logprobs, Resume, TextBatch, TokenBatch, Tokenize
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate, Pool

NONE, STOP, LENGTH = Finish.NONE, Finish.STOP, Finish.LENGTH
Row = tuple[int, int, int, str, int, int]


class Letters:
    """A stream in which a token is the letter of that code."""

    def push(self, token: int) -> str:
        return chr(token)

    def finish(self) -> str:
        return ""

    def copy(self) -> Letters:
        return Letters()


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def request(uid: int = 1, stop: str = "", children: int = 1, peer: str = "engine", silent: bool = False) -> Request:
    made = Request(uid, 1, peer, 0)
    made.silent = silent
    stops = StopSet([stop], False) if stop else None
    for index in range(children):
        made.sequences[index] = TextSequence(None if silent else Letters(), stops)
    return made


def record(text: str) -> Logprobs:
    return Logprobs(i32(ids(text)), f32([-0.5] * len(text)), i32(range(1, len(text) + 1)))


def batch(*rows: Row, attempt: int = 1, records: dict[int, Logprobs] | None = None, **columns: Any) -> TokenBatch:
    """Rows are (uid, index, offset, text, finish, stop id)."""
    uids, indexes, offsets, texts, finishes, stops = zip(*rows, strict=True) if rows else ((),) * 6
    records = records or {}
    given = {
        "uids": i64(uids), "attempts": i32([attempt] * len(rows)), "indexes": i32(indexes), "offsets": i32(offsets),
        "counts": i32(map(len, texts)), "tokens": i32(chain(*map(ids, texts))), "finishes": i8(finishes),
        "stop_ids": i32(stops), "logprob_rows": i32(records), "logprobs": list(records.values()),
    }  # fmt: skip
    return TokenBatch(**{**given, **columns})


def take(requests: Sequence[Request], message: TokenBatch) -> Step:
    step = Step({each.uid: each for each in requests}, TokenTexts(chr))
    step.take(message)
    return step


def out(step: Step, peer: str = "engine") -> TextBatch:
    return step.outboxes[peer].batch()


# ---------------------------------------------------------------- what comes in


def test_a_row_has_all_its_columns() -> None:
    message = batch((5, 1, 7, "ab", NONE, -1), (6, 0, 0, "", STOP, 9), attempt=3)
    assert rows_of(message) == [(5, 3, 1, 7, 2, NONE, -1), (6, 3, 0, 0, 0, STOP, 9)]


def test_no_rows_are_no_rows() -> None:
    assert rows_of(batch()) == []


@pytest.mark.parametrize("name", ["uids", "attempts", "indexes", "offsets", "counts", "finishes", "stop_ids"])
def test_a_column_of_another_length_is_a_bad_frame(name: str) -> None:
    with pytest.raises(BadFrame, match="has columns of"):
        rows_of(batch((5, 1, 7, "ab", NONE, -1), **{name: b""}))


@pytest.mark.parametrize(("counts", "tokens"), [([1], 2), ([2], 1), ([0], 1), ([2, -1], 1), ([-1, 2], 1)])
def test_counts_that_do_not_agree_with_the_tokens_are_a_bad_frame(counts: list[int], tokens: int) -> None:
    rows: list[Row] = [(5, 1, 7, "", NONE, -1)] * len(counts)
    with pytest.raises(BadFrame, match=f"counts {sum(counts)} tokens and holds {4 * tokens} bytes of them"):
        rows_of(batch(*rows, counts=i32(counts), tokens=i32([1] * tokens)))


@pytest.mark.parametrize("finish", [-1, max(Finish) + 1, 127])
def test_an_unknown_finish_is_a_bad_frame(finish: int) -> None:
    for finishes in ([finish, NONE], [NONE, finish]):
        with pytest.raises(BadFrame, match="unknown finish"):
            rows_of(batch((5, 1, 7, "", NONE, -1), (5, 1, 7, "", NONE, -1), finishes=i8(finishes)))


@pytest.mark.parametrize("finish", list(Finish))
def test_every_finish_is_known(finish: Finish) -> None:
    assert rows_of(batch((5, 1, 7, "", finish, -1)))[0][5] == finish


def test_two_columns_side_by_side() -> None:
    assert pairs_of(i64([5, 2**40]), i32([1, -2])) == [(5, 1), (2**40, -2)]
    with pytest.raises(BadFrame, match="columns of 1 uids and 2 other items"):
        pairs_of(i64([5]), i32([1, 2]))


# ---------------------------------------------------------------- what Engine sends


def tokenize(uid: int = 0, attempt: int = 0, n: int = 2, **fields: Any) -> Tokenize:
    work = fields.pop("work", Generate(SamplingParams(n=n), 1))
    return Tokenize(uid=uid, attempt=attempt, work=work, arrival=0.0, prompt="hi", **fields)


@pytest.mark.parametrize(
    "message",
    [
        tokenize(-(2**63)), tokenize(2**63 - 1), tokenize(attempt=2**31 - 1),
        tokenize(resume=[Resume(0, b"", 0), Resume(1, b"", 5)]), tokenize(prompt_logprobs_from=2**31 - 1),
        tokenize(work=Pool(PoolingParams())),
    ],
)  # fmt: skip
def test_numbers_at_the_edges_of_their_columns_are_taken(message: Tokenize) -> None:
    check_tokenize(message)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (tokenize(2**63), "uid 9223372036854775808 or attempt 0 is out of range"),
        (tokenize(-(2**63) - 1), "is out of range"), (tokenize(attempt=2**31), "attempt 2147483648 is out of range"),
        (tokenize(attempt=-1), "attempt -1 is out of range"),
        (tokenize(resume=[Resume(2, b"", 0)]), r"resumed children \[2\] of n=2 are out of range or named twice"),
        (tokenize(resume=[Resume(-1, b"", 0)]), "named twice"),
        (tokenize(resume=[Resume(1, b"", 0), Resume(1, b"", 0)]), "named twice"),
        (tokenize(resume=[Resume(0, b"", 0)], work=Pool(PoolingParams())), "of n=0"),
        (tokenize(resume=[Resume(0, b"", 0), Resume(1, b"", -1)]), "negative text_sent"),
        (tokenize(prompt_logprobs_from=-1), "prompt_logprobs_from -1 is out of range"),
        (tokenize(prompt_logprobs_from=2**31), "prompt_logprobs_from 2147483648 is out of range"),
    ],
)  # fmt: skip
def test_numbers_beyond_their_columns_are_a_bad_frame(message: Tokenize, said: str) -> None:
    with pytest.raises(BadFrame, match=said):
        check_tokenize(message)


# ---------------------------------------------------------------- what goes out


def test_an_outbox_puts_each_row_into_its_columns() -> None:
    box = Outbox()
    box.add(5, 1, 0, 7, [1], News("a", 1, NONE, None, -1))
    box.add(6, 2, 3, 0, [2, 3], News("bc", 2, NONE, None, -1))
    box.add(7, 3, 1, 9, [], News("", 0, STOP, "S", 4), record("x"))
    box.add(8, 4, 2, 1, [4], News("d", 1, LENGTH, None, 2))
    box.started.append((9, 16))
    sent = box.batch()
    assert (from_i64(sent.uids), from_i32(sent.attempts)) == ([5, 6, 7, 8], [1, 2, 3, 4])
    assert (from_i32(sent.indexes), from_i32(sent.offsets)) == ([0, 3, 1, 2], [7, 0, 9, 1])
    assert (from_i32(sent.counts), from_i32(sent.tokens)) == ([1, 2, 0, 1], [1, 2, 3, 4])
    assert (sent.texts, from_i8(sent.finishes)) == (["a", "bc", "", "d"], [NONE, NONE, STOP, LENGTH])
    assert (sent.stop_reasons, from_i32(sent.lengths)) == ([None, None, "S", None], [-1, -1, 4, 2])
    assert (from_i64(sent.started_uids), from_i32(sent.started_cached)) == ([9], [16])
    assert (from_i32(sent.logprob_rows), sent.logprobs) == ([2], [record("x")])


def test_an_empty_outbox_is_an_empty_batch() -> None:
    sent = Outbox().batch()
    assert (sent.uids, sent.tokens, sent.texts, sent.stop_reasons, sent.finishes) == (b"", b"", [], [], b"")
    assert (sent.started_uids, sent.started_cached, sent.logprob_rows, sent.logprobs) == (b"", b"", b"", [])


# ---------------------------------------------------------------- a step


def test_each_row_goes_to_the_engine_of_its_request() -> None:
    requests = [request(1, peer="a"), request(2, peer="b"), request(3, peer="a")]
    rows: list[Row] = [(1, 0, 0, "x", NONE, -1), (2, 0, 0, "y", NONE, -1), (3, 0, 0, "z", NONE, -1)]
    step = take(requests, batch(*rows, (1, 0, 1, "w", NONE, -1)))
    assert list(step.outboxes) == ["a", "b"]
    assert (from_i64(out(step, "a").uids), out(step, "a").texts) == ([1, 3, 1], ["x", "z", "w"])
    assert (from_i64(out(step, "b").uids), out(step, "b").texts) == ([2], ["y"])


def test_a_plain_row_has_its_own_token() -> None:
    step = take([request(1), request(2)], batch((9, 0, 0, "pq", NONE, -1), (1, 0, 0, "a", NONE, -1),
                                                (2, 0, 0, "b", NONE, -1)))  # fmt: skip
    assert (out(step).texts, from_i32(out(step).tokens)) == (["a", "b"], ids("ab"))


def test_a_plain_row_is_counted() -> None:
    mine = request()
    step = take([mine], batch((1, 0, 0, "a", NONE, -1), (1, 0, 1, "b", NONE, -1)))
    assert mine.sequences[0].count == 2 and from_i32(out(step).offsets) == [0, 1]


def test_a_row_of_two_tokens_is_taken_whole() -> None:
    mine = request()
    step = take([mine], batch((1, 0, 0, "ab", NONE, -1)))
    assert (out(step).texts, from_i32(out(step).counts), mine.sequences[0].count) == (["ab"], [2], 2)


def test_a_plain_row_may_begin_a_stop_string() -> None:
    mine = request(stop="bc")
    step = take([mine], batch((1, 0, 0, "a", NONE, -1), (1, 0, 1, "b", NONE, -1), (1, 0, 2, "d", NONE, -1)))
    assert out(step).texts == ["a", "", "bd"]


def test_a_row_of_another_attempt_is_dropped() -> None:
    mine = request()
    step = take([mine], batch((1, 0, 0, "a", NONE, -1), attempt=2))
    assert not step.outboxes and mine.sequences[0].count == 0


def test_a_row_of_a_child_that_has_ended_is_dropped() -> None:
    mine = request(children=2)
    del mine.sequences[0]
    assert not take([mine], batch((1, 0, 0, "a", NONE, -1))).outboxes


def test_who_has_started_is_told_to_the_engine_of_each() -> None:
    requests = [request(1, peer="a"), request(2, peer="b")]
    step = take(requests, batch(started_uids=i64([1, 2, 9]), started_cached=i32([16, 0, 5])))
    assert (step.outboxes["a"].started, step.outboxes["b"].started) == ([(1, 16)], [(2, 0)])


@pytest.mark.parametrize(("uids", "cached"), [([1], []), ([], [1])])
def test_who_has_started_comes_in_pairs(uids: list[int], cached: list[int]) -> None:
    with pytest.raises(BadFrame):
        take([request()], batch(started_uids=i64(uids), started_cached=i32(cached)))


def test_a_gap_loses_the_request() -> None:
    mine, other = request(1), request(2)
    step = Step(requests := {1: mine, 2: other}, None)
    step.take(batch((1, 0, 1, "a", NONE, -1), (2, 0, 0, "b", NONE, -1), (1, 0, 2, "c", NONE, -1)))
    assert (step.lost, list(requests), out(step).texts) == ([mine], [2], ["b"])


def test_tokens_that_are_here_bring_nothing() -> None:
    mine = request()
    mine.sequences[0].advance(ids("ab"), NONE, -1, False)
    assert not take([mine], batch((1, 0, 0, "ab", NONE, -1), (1, 0, 1, "b", NONE, -1))).outboxes


def test_the_rest_of_a_row_is_taken() -> None:
    mine = request()
    mine.sequences[0].advance(ids("ab"), NONE, -1, False)
    step = take([mine], batch((1, 0, 1, "bcd", NONE, -1)))
    assert (out(step).texts, from_i32(out(step).offsets), from_i32(out(step).tokens)) == (["cd"], [2], ids("cd"))


def test_an_end_that_brings_no_token_is_an_end() -> None:
    mine = request()
    mine.sequences[0].advance(ids("ab"), NONE, -1, False)
    step = Step(requests := {1: mine}, None)
    step.take(batch((1, 0, 2, "", LENGTH, -1)))
    assert not requests and from_i32(out(step).lengths) == [2]


def test_a_row_of_no_tokens_is_a_row() -> None:
    step = take([request()], batch((1, 0, 0, "", NONE, -1)))
    assert (from_i32(out(step).counts), out(step).texts) == ([0], [""])


def test_a_request_goes_with_its_last_child() -> None:
    step = Step(requests := {1: request(children=2)}, None)
    step.take(batch((1, 0, 0, "a", LENGTH, -1)))
    assert list(requests) == [1] and list(requests[1].sequences) == [1]
    step.take(batch((1, 1, 0, "a", LENGTH, -1)))
    assert not requests


def test_an_end_by_the_scheduler_is_not_told_to_it() -> None:
    assert take([request()], batch((1, 0, 0, "a", STOP, 97))).stopped == []


def test_an_end_by_a_stop_string_is_told_to_the_scheduler() -> None:
    step = take([request(stop="b", children=2)], batch((1, 1, 0, "abc", NONE, -1)))
    assert [(each.uid, each.attempt, each.index, each.length) for each in step.stopped] == [(1, 1, 1, 2)]
    assert (from_i32(out(step).counts), from_i32(out(step).tokens), out(step).texts) == ([2], ids("ab"), ["a"])


def test_a_stop_string_in_a_row_that_ends_anyway_is_not_told() -> None:
    assert take([request(stop="b")], batch((1, 0, 0, "abc", LENGTH, -1))).stopped == []


@pytest.mark.parametrize(
    ("include", "beams", "last", "stop_id", "text"),
    [
        (False, False, "x", -1, "a"), (False, False, "x", 120, "a"), (True, False, "x", 120, "ax"),
        (False, True, "x", -1, "ax"), (False, True, "x", 120, "a"), (False, True, "!", -1, "a"),
    ],
)  # fmt: skip
def test_whether_the_token_that_ends_a_child_is_shown(
    include: bool, beams: bool, last: str, stop_id: int, text: str
) -> None:
    mine = request()
    mine.include, mine.beam_search, mine.eos = include, beams, ids("!")
    assert out(take([mine], batch((1, 0, 0, "a" + last, STOP, stop_id)))).texts == [text]


def test_logprobs_have_texts_where_text_is_wanted() -> None:
    rows: list[Row] = [(1, 0, 0, "a", NONE, -1), (2, 0, 0, "b", NONE, -1)]
    step = take([request(1), request(2, silent=True)], batch(*rows, records={0: record("a"), 1: record("b")}))
    assert [each.texts for each in out(step).logprobs] == [["a"], []]


def test_logprobs_have_no_texts_where_there_is_no_tokenizer() -> None:
    step = Step({1: request()}, None)
    step.take(batch((1, 0, 0, "a", NONE, -1), records={0: record("a")}))
    assert [each.texts for each in out(step).logprobs] == [[]]


def test_logprobs_of_tokens_that_are_here_are_cut_off() -> None:
    mine = request(stop="d")
    mine.sequences[0].advance(ids("a"), NONE, -1, False)
    step = take([mine], batch((1, 0, 0, "abcde", NONE, -1), records={0: record("abcde")}))
    (sent,) = out(step).logprobs
    assert (from_i32(sent.ids), from_i32(sent.ranks), sent.texts) == (ids("bcd"), [2, 3, 4], list("bcd"))


def test_nothing_is_changed_by_a_batch_that_makes_no_sense() -> None:
    mine = request()
    with pytest.raises(BadFrame):
        take([mine], batch((1, 0, 0, "a", NONE, -1), (1, 0, 1, "b", 99, -1)))
    assert mine.sequences[0].count == 0


# ---------------------------------------------------------------- beams


def beams(stop: str = "ab", least: int = 0) -> BeamTexts:
    return BeamTexts(Letters(), StopSet([stop], False), least)


@pytest.mark.parametrize("parent", [-1, 2])
def test_a_parent_that_is_not_there_is_a_loss(parent: int) -> None:
    group = beams()
    group.advance(1, [0, 0], ids("xy"))
    with pytest.raises(LostBeams, match=f"candidate 1 of step 2 has the parent {parent}, which is not to be had"):
        group.advance(2, [0, parent], ids("xy"))


def test_a_step_that_is_lost_changes_nothing() -> None:
    group = beams()
    group.advance(1, [0, 0], ids("ax"))
    for step, parents, tokens in ((2, [0, 5], "bb"), (3, [0], "b"), (2, [0], "bb")):
        with pytest.raises(LostBeams):
            group.advance(step, parents, ids(tokens))
    assert group.advance(2, [1, 0], ids("bb")) == [1]


def test_a_group_begins_with_its_first_step() -> None:
    with pytest.raises(LostBeams, match="step 2 came after 0"):
        beams().advance(2, [0], ids("a"))


def test_the_first_step_may_come_at_any_time() -> None:
    group = beams()
    group.advance(1, [0], ids("a"))
    group.advance(2, [0], ids("x"))
    assert group.advance(1, [0, 0], ids("ab")) == [] and group.advance(2, [0, 1], ids("bb")) == [0]


def test_a_group_that_begins_again_has_no_text() -> None:
    group = beams()
    group.advance(1, [0], ids("a"))
    assert group.advance(1, [0], ids("b")) == []


@pytest.mark.parametrize(("least", "stopped"), [(0, [0]), (1, [0]), (2, []), (3, [])])
def test_a_beam_may_end_after_min_tokens(least: int, stopped: list[int]) -> None:
    group = beams(least=least)
    group.advance(1, [0], ids("a"))
    assert group.advance(2, [0], ids("b")) == stopped
