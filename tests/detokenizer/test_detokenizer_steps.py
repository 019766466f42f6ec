"""What one message of the scheduler becomes: logprobs with texts, rows cut by stop strings, beams, grammars."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest
from detokenizer_toys import KINDS, STREAMS, wrap

from quire.detokenizer import gate
from quire.detokenizer.beams import BeamTexts, LostBeams
from quire.detokenizer.columns import Outbox
from quire.detokenizer.detokenize import Streams
from quire.detokenizer.gate import Gate
from quire.detokenizer.logprobs import TokenTexts, cut
from quire.detokenizer.request import Request
from quire.detokenizer.sequence import TextSequence
from quire.detokenizer.step import Step
from quire.detokenizer.stops import StopSet
from quire.proto.codec import BadFrame, f32, from_f32, from_i32, i8, i32, i64
from quire.proto.errors import Refused
from quire.proto.messages import Finish, Logprobs, TokenBatch
from quire.proto.structured import StructuredOutputsParams

BACKEND, BYTES = KINDS["byte_level"][0], STREAMS["byte_level"]


def ids_of(text: str) -> list[int]:
    """A token for each byte."""
    return [BACKEND.encode(c, add_special_tokens=False).ids[0] for c in text]


# ---------------------------------------------------------------- texts of tokens


def test_texts_of_byte_level_tokens() -> None:
    texts = TokenTexts(BYTES.piece)
    emoji = BACKEND.encode("\U0001f680", add_special_tokens=False).ids
    assert len(emoji) > 1
    assert b"".join(texts.raw[i] for i in emoji if texts[i]) == "\U0001f680".encode()
    assert all("\ufffd" in texts[i] for i in emoji)
    space = BACKEND.encode("a quick", add_special_tokens=False).ids
    assert "".join(texts[i] for i in space) == "a quick"
    added = [BACKEND.token_to_id(t) for t in ("</s>", "<plain>", "日本")]
    assert [texts[i] for i in added] == ["</s>", "<plain>", "日本"]  # special tokens are shown
    assert texts[10**6] == "" and texts[-1] == "" and not {*space, *added, 10**6} & set(texts.raw)


def test_texts_of_byte_fallback_tokens_and_spaces() -> None:
    texts = TokenTexts(STREAMS["sentencepiece"].piece)
    backend = KINDS["sentencepiece"][0]
    the, newline, byte, end = (backend.token_to_id(t) for t in ("▁the", "<0x0A>", "<0xE4>", "</s>"))
    assert [texts[i] for i in (the, newline, byte, end)] == [" the", "\n", "\ufffd", "</s>"]
    assert texts.raw == {byte: b"\xe4"}
    words = TokenTexts(STREAMS["wordpiece"].piece)
    backend = KINDS["wordpiece"][0]
    inner = next(t for t in backend.get_vocab() if t.startswith("##"))
    assert words[backend.token_to_id("t")] == " t" and words[backend.token_to_id(inner)] == inner[2:]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_texts_of_a_decoder_not_known_are_the_same(name: str) -> None:
    """Where tokens are decoded by window, their texts and bytes come out alike."""
    backend = KINDS[name][0]
    tokenizer = wrap(backend)
    tokenizer.backend = None
    known, window = TokenTexts(STREAMS[name].piece), TokenTexts(Streams(tokenizer).piece)
    tokens = range(min(330, backend.get_vocab_size(with_added_tokens=True)))
    assert [known[i] for i in tokens] == [window[i] for i in tokens]
    assert known.raw == window.raw


def record(tokens: list[int], k: int = 1) -> Logprobs:
    """Each token itself at -0.5, then k others at -1, -2, ..."""
    others = [[token, *(40 + n for n in range(k))] for token in tokens]
    values = [[-0.5, *(-1.0 - n for n in range(k))] for _ in tokens]
    return Logprobs(i32(chain(*others)), f32(chain(*values)), i32(range(1, len(tokens) + 1)))


def test_records_are_filled_and_cut() -> None:
    half = next(i for i in range(3, 300) if isinstance(BYTES.piece(i), bytes))
    texts = TokenTexts(BYTES.piece)
    whole = record([*ids_of("ab"), half])
    texts.fill(whole)
    assert whole.texts == ["a", texts[40], "b", texts[40], "\ufffd", texts[40]] and whole.raw == {4: texts.raw[half]}
    assert cut(whole, 3, 0, 3) is whole and cut(whole, 3, 1, 1) is None
    part = cut(record([5, 6, 7], 2), 3, 1, 3)
    assert part is not None
    assert (from_i32(part.ids), from_i32(part.ranks)) == ([6, 40, 41, 7, 40, 41], [2, 3])
    assert from_f32(part.values) == [-0.5, -1.0, -2.0] * 2


# ---------------------------------------------------------------- a step


def request(uid: int, stop: str = "", children: int = 1, beams: bool = False, silent: bool = False) -> Request:
    made = Request(uid, 1, "engine", 0)
    made.silent, made.beam_search, made.eos = silent, beams, [1]
    stops = StopSet([stop], False) if stop else None
    for index in range(children):
        made.sequences[index] = TextSequence(None if silent else BYTES.open([], True), stops)
    return made


Row = tuple[int, int, int, list[int], int, int]


def batch(*rows: Row, records: dict[int, Logprobs] | None = None) -> TokenBatch:
    """Rows are (uid, index, offset, tokens, finish, stop id)."""
    uids, indexes, offsets, tokens, finishes, stops = zip(*rows, strict=True)
    records = records or {}
    return TokenBatch(
        i64(uids), i32([1] * len(rows)), i32(indexes), i32(offsets), i32(map(len, tokens)), i32(chain(*tokens)),
        i8(finishes), i32(stops), logprob_rows=i32(records), logprobs=list(records.values()),
    )  # fmt: skip


def take(requests: list[Request], message: TokenBatch) -> tuple[Step, Any]:
    step = Step({r.uid: r for r in requests}, TokenTexts(BYTES.piece))
    step.take(message)
    return step, step.outboxes.get("engine", Outbox()).batch()


def test_logprobs_follow_their_rows() -> None:
    first, second, third = request(1), request(2, children=2), request(3, silent=True)
    a, b, c = ids_of("abc")
    message = batch(
        (9, 0, 0, [a], 0, -1), (1, 0, 0, [a, b], 0, -1), (2, 0, 0, [a], 0, -1), (2, 1, 0, [c], 0, -1),
        (3, 0, 0, [b], 0, -1), records={0: record([a]), 1: record([a, b], 0), 3: record([c]), 4: record([b])},
    )  # fmt: skip
    _, out = take([first, second, third], message)
    assert from_i32(out.logprob_rows) == [0, 2, 3]  # of the rows that went out
    assert [lp.texts for lp in out.logprobs] == [["a", "b"], ["c", BYTES.piece(40)], []]
    assert [from_i32(lp.ids)[0] for lp in out.logprobs] == [a, c, b] and out.texts == ["ab", "a", "c", ""]
    plain = take([request(1)], batch((1, 0, 0, [a], 0, -1)))[1]
    assert (plain.logprob_rows, plain.logprobs) == (b"", [])


def test_a_stop_string_cuts_logprobs_with_the_tokens() -> None:
    ids = ids_of("x END y")
    step, out = take([request(1, "END")], batch((1, 0, 0, ids, 0, -1), records={0: record(ids)}))
    assert (out.texts, out.stop_reasons, from_i32(out.counts)) == (["x "], ["END"], [5])
    assert len(out.logprobs[0].texts) == 10 and from_i32(out.logprobs[0].ids)[::2] == ids[:5]
    assert [(s.index, s.length) for s in step.stopped] == [(0, 5)]


def test_tokens_that_are_here_are_dropped_with_their_logprobs() -> None:
    ids = ids_of("abcd")
    held = request(1)
    held.sequences[0].advance(ids[:2], Finish.NONE, -1, False)
    _, out = take([held], batch((1, 0, 1, ids[1:], 0, -1), records={0: record(ids[1:])}))
    assert (from_i32(out.offsets), from_i32(out.tokens), out.texts) == ([2], ids[2:], ["cd"])
    assert from_i32(out.logprobs[0].ids)[::2] == ids[2:]
    assert from_i32(out.logprobs[0].ranks) == [2, 3]
    _, out = take([held], batch((1, 0, 0, ids, 0, -1), records={0: record(ids)}))
    assert out.texts == [] and out.logprobs == []
    _, out = take([held], batch((1, 0, 2, ids[2:], Finish.LENGTH, -1), records={0: record(ids[2:])}))
    assert from_i32(out.counts) == [0] and out.logprobs == [] and from_i32(out.lengths) == [4]
    lost = request(2)
    step, out = take([lost], batch((2, 0, 3, ids, 0, -1)))
    assert step.lost == [lost] and out.texts == []


@pytest.mark.parametrize(
    "records",
    [
        {5: record([40])},
        {-1: record([40])},
        {0: record([40, 41])},
        {0: Logprobs(b"", b"", i32([1]))},
        {0: Logprobs(i32([1, 2]), f32([1.0]), i32([1]))},
        {0: Logprobs(i32([1]), f32([1.0]), i32([1, 2]))},
        {1: record([])},
    ],
)
def test_logprobs_that_make_no_sense_are_a_bad_frame(records: dict[int, Logprobs]) -> None:
    held = request(1)
    with pytest.raises(BadFrame):
        take([held], batch((1, 0, 0, [40], 0, -1), (2, 0, 0, [], 0, -1), records=records))
    assert held.sequences[0].count == 0
    message = batch((1, 0, 0, [40], 0, -1), records={0: record([40])})
    message.logprob_rows = b""
    with pytest.raises(BadFrame):
        take([held], message)


def test_a_beam_search_sends_all_at_once_and_is_not_stopped_twice() -> None:
    whole, ended, string = ids_of("one "), [*ids_of("two"), 1], ids_of("xENDq")
    rows: list[Row] = [
        (1, 0, 0, whole, Finish.LENGTH, -1),
        (1, 1, 0, ended, Finish.STOP, -1),
        (1, 2, 0, string[:4], Finish.STOP, -1),
        (1, 3, 0, string, Finish.LENGTH, -1),
        (1, 4, 0, [*whole, 7], Finish.STOP, 7),
    ]
    records = {n: record(row[3], 0) for n, row in enumerate(rows)}
    step, out = take([request(1, "END", 5, beams=True)], batch(*rows, records=records))
    assert out.texts == ["one ", "two", "x", "x", "one "]
    assert out.stop_reasons == [None, None, "END", "END", 7]
    assert from_i32(out.lengths) == [4, 4, 4, 4, 5] and step.stopped == []
    assert [len(lp.texts) for lp in out.logprobs] == [4, 4, 4, 4, 5]


# ---------------------------------------------------------------- beams


def test_beams_follow_their_parents() -> None:
    beams = BeamTexts(BYTES.open([], True), StopSet(["ab", "é"], False), 0)
    a, b, c = ids_of("abc")
    half, rest = (i for i in range(300) if BYTES.piece(i) in (b"\xc3", b"\xa9"))
    if BYTES.piece(half) != b"\xc3":
        half, rest = rest, half
    assert beams.advance(1, [0, 0, 0], [a, b, half]) == []
    assert beams.advance(2, [0, 1, 0, 2, 1], [b, b, c, rest, a]) == [0, 3]
    assert beams.advance(3, [2, 4, 1], [b, b, b]) == [1]
    with pytest.raises(LostBeams, match="parent 1"):
        beams.advance(4, [1], [a])  # it had ended
    with pytest.raises(LostBeams, match="parent 9"):
        beams.advance(4, [9], [a])
    for step, parents, tokens in ((5, [0], [a]), (3, [0], [a]), (4, [0], [a, b])):
        with pytest.raises(LostBeams, match="step"):
            beams.advance(step, parents, tokens)
    assert beams.advance(1, [0, 0], [a, b]) == []  # the group starts again
    assert beams.advance(2, [1, 0], [b, b]) == [1]


def test_beams_mind_min_tokens() -> None:
    a, b = ids_of("ab")
    for least, stopped in ((0, [0]), (1, [0]), (2, []), (3, [])):
        beams = BeamTexts(BYTES.open([], True), StopSet(["ab"], False), least)
        beams.advance(1, [0], [a])
        assert beams.advance(2, [0], [b]) == stopped
    beams = BeamTexts(BYTES.open([], True), StopSet(["ab"], False), 2)
    for step, token in enumerate([a, b, a], 1):
        assert beams.advance(step, [0], [token]) == []
    assert beams.advance(4, [0], [b]) == [0]


# ---------------------------------------------------------------- grammars


class FakeChecker:
    """Passes what is not "bad"; waits for ``go`` where it is "slow"."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.closed = False

    async def check(self, spec: StructuredOutputsParams) -> None:
        if spec.regex == "slow":
            await self.go.wait()
        if spec.regex == "bad":
            raise Refused("no such form", "structured_outputs")
        if spec.regex == "broken":
            raise RuntimeError("inside")

    def close(self) -> None:
        self.closed = True


def test_the_gate_holds_back_what_is_being_checked_and_no_other() -> None:
    async def main() -> None:
        checkers: list[FakeChecker] = []

        def make() -> FakeChecker:
            checkers.append(FakeChecker())
            return checkers[-1]

        held = Gate(make)
        assert checkers == []  # nothing is started before it is needed
        done: dict[str, Exception | None] = {}
        for name in ("slow", "fine", "bad", "broken"):
            held.check(StructuredOutputsParams(regex=name), lambda error, name=name: done.update({name: error}))
        await asyncio.sleep(0.01)
        assert set(done) == {"fine", "bad", "broken"} and done["fine"] is None
        assert isinstance(done["bad"], Refused) and isinstance(done["broken"], RuntimeError)
        checkers[0].go.set()
        await asyncio.sleep(0.01)
        assert done["slow"] is None and len(checkers) == 1
        held.check(StructuredOutputsParams(regex="fine"), lambda error: done.update(late=error))
        held.close()
        await asyncio.sleep(0.01)
        assert checkers[0].closed and "late" not in done

    asyncio.run(main())


def test_a_request_submitted_again_is_not_refused_for_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "RETRY_S", 0.001)
    calls = []

    class Full(FakeChecker):
        async def check(self, spec: StructuredOutputsParams) -> None:
            calls.append(spec)
            if len(calls) < 4:
                raise Refused("full", "structured_outputs", 429)

    async def main(patient: bool) -> Exception | None:
        done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        Gate(Full).check(StructuredOutputsParams(regex="a"), done.set_result, patient)
        return await done

    first = asyncio.run(main(False))
    assert isinstance(first, Refused) and first.status == 429 and len(calls) == 1
    assert asyncio.run(main(True)) is None and len(calls) == 4


def test_a_missing_library_is_a_refusal_with_the_remedy() -> None:
    def make() -> FakeChecker:
        raise ModuleNotFoundError("No module named 'llguidance'", name="llguidance")

    async def main() -> Exception | None:
        done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        Gate(make).check(StructuredOutputsParams(regex="a"), done.set_result)
        return await done

    error = asyncio.run(main())
    assert isinstance(error, Refused) and error.status == 400 and "pip install llguidance" in error.message
