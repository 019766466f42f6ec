"""Incremental decoding and stop strings: whatever way text is cut into tokens, the whole comes out."""

from __future__ import annotations

import json

import pytest
from detokenizer_toys import KINDS, STREAMS, TEXT, no_decoder, wrap
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from quire.detokenizer import detokenize
from quire.detokenizer.detokenize import Streams, WindowStream
from quire.detokenizer.logprobs import TokenTexts
from quire.detokenizer.sequence import TextSequence, first_finish
from quire.detokenizer.stops import StopSet, StopWatch
from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto.messages import Finish

kinds = st.sampled_from(sorted(KINDS))


def size(name: str) -> int:
    return KINDS[name][0].get_vocab_size(with_added_tokens=True)


def longest_run(name: str, ids: list[int]) -> int:
    """Byte-fallback tokens in a row at most, whatever has no text between them."""
    longest = run = 0
    for token in ids:
        piece = KINDS[name][0].id_to_token(token) or "<>"
        run = run + 1 if piece.startswith("<0x") else run if piece.startswith("<") else 0
        longest = max(longest, run)
    return longest


@st.composite
def some_ids(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Ids of a tokenizer: random ones, those of real text, and ids out of the vocabulary, mixed."""
    name = draw(kinds)
    random_ids = st.lists(st.integers(0, size(name) + 5), max_size=12)
    cut = st.tuples(st.integers(0, len(TEXT)), st.integers(1, 12)).map(
        lambda c: KINDS[name][0].encode(TEXT[c[0] : c[0] + c[1]], add_special_tokens=False).ids
    )
    parts = draw(st.lists(st.one_of(random_ids, cut), max_size=5))
    ids = [i for part in parts for i in part]
    assume(longest_run(name, ids) < detokenize.MAX_RUN)  # of longer ones see the test of their name
    return name, ids


@pytest.mark.parametrize("name", sorted(KINDS))
def test_each_tokenizer_gets_its_fast_stream(name: str) -> None:
    assert type(STREAMS[name].open([], True)) is KINDS[name][1]


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(some_ids(), st.booleans())
def test_stream_is_the_whole_decode(case: tuple[str, list[int]], skip: bool) -> None:
    name, ids = case
    stream = STREAMS[name].open([], skip)
    parts = [*map(stream.push, ids), stream.finish()]
    whole = KINDS[name][0].decode(ids, skip_special_tokens=skip)
    assert "".join(parts) == whole
    for n in range(len(parts)):  # what has gone out is never taken back
        assert whole.startswith("".join(parts[:n]))


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "gemma", "unigram"])
def test_no_character_is_cut(name: str) -> None:
    backend = KINDS[name][0]
    text = "ok 👩‍👩‍👧‍👦 e\u0301 你好"
    ids = backend.encode(text, add_special_tokens=False).ids
    stream = STREAMS[name].open([], True)
    assert name == "unigram" or not any("�" in stream.push(i) for i in ids)


def test_text_after_a_prompt_keeps_its_leading_space() -> None:
    backend, streams = KINDS["sentencepiece"][0], STREAMS["sentencepiece"]
    ids = backend.encode("a bc", add_special_tokens=False).ids
    assert "".join(map(streams.open([], True).push, ids)) == "a bc"
    assert "".join(map(streams.open([3 + 256 + 1], True).push, ids)) == " a bc"
    bos = backend.token_to_id("<s>")
    assert "".join(map(streams.open([bos], True).push, ids)) == "a bc"
    assert "".join(map(streams.open([bos], False).push, ids)) == " a bc"


def test_ids_beyond_the_vocabulary_are_nothing() -> None:
    for name, streams in STREAMS.items():
        stream = streams.open([], True)
        assert (
            stream.push(size(name) + 1000) == ""
            and stream.push(-1) == ""
            and stream.push(2**31 - 1) == ""
            and stream.finish() == ""
        )


def test_special_tokens_are_shown_when_asked_for() -> None:
    backend, streams = KINDS["byte_level"][0], STREAMS["byte_level"]
    ids = [backend.token_to_id("<|tool|>"), backend.token_to_id("é"), backend.token_to_id("日本")]
    assert "".join(map(streams.open([], False).push, ids)) == backend.decode(ids, skip_special_tokens=False)
    assert streams.open([], True).push(ids[0]) == ""


def test_spaces_between_special_tokens() -> None:
    backend, streams = KINDS["wordpiece"][0], STREAMS["wordpiece"]
    ids = [backend.token_to_id(t) for t in ("<s>", "<|tool|>", "t", "</s>", "[UNK]", "<s>")]

    def text(skip: bool, spaces: bool) -> str:
        stream = streams.open([], skip, spaces)
        return "".join([*map(stream.push, ids), stream.finish()])

    assert text(False, True) == backend.decode(ids, skip_special_tokens=False) == "<s> <|tool|> t </s> [UNK] <s>"
    assert text(False, False) == "<s><|tool|> t </s>[UNK]<s>"
    assert text(True, False) == text(True, True) == backend.decode(ids, skip_special_tokens=True)
    for name in ("byte_level", "sentencepiece", "gemma"):  # nothing stands between tokens anyway
        some = [*KINDS[name][0].encode("a bc", add_special_tokens=False).ids, 0, 2, 1, 0]
        stream = STREAMS[name].open([], False, False)
        assert "".join(map(stream.push, some)) == KINDS[name][0].decode(some, skip_special_tokens=False)


def test_slow_tokenizers_put_spaces_around_added_tokens(tmp_path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer(extra_ids=2).save_pretrained(str(tmp_path))
    slow = load_tokenizer(str(tmp_path), "slow")
    assert slow.backend is None
    some = slow.encode("né", False)
    end, extra = slow.eos_id or 1, slow.encode("<extra_id_0>", False)[0]
    ids = [*some, extra, end, *some]
    assert slow.decode(ids, False) == slow.decode(ids, False, True) == "né <extra_id_0> </s> né"
    assert slow.decode(ids, False, False) == "né<extra_id_0></s>né"
    assert slow.decode(ids, True) == slow.decode(ids, True, False) == "néné"
    streams = Streams(slow)
    for spaces in (True, False):
        stream = streams.open([], False, spaces)
        assert "".join([*map(stream.push, ids), stream.finish()]) == slow.decode(ids, False, spaces)
    texts = TokenTexts(streams.piece)
    assert [texts[i] for i in ids[:5]] == ["n", "\ufffd", "\ufffd", "<extra_id_0>", "</s>"]
    assert texts.raw == {some[1]: b"\xc3", some[2]: b"\xa9"}


def test_a_very_long_run_of_byte_tokens_still_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detokenize, "MAX_RUN", 8)
    text = "ᚠᛇᚻ᛫ᛒᛦᚦ᛫ᚠᚱᚩᚠᚢᚱ"
    ids = [3 + b for b in text.encode()] + [3 + 256 + 1]
    stream = STREAMS["sentencepiece"].open([], True)
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) == text + "a" and max(map(len, parts)) < 5
    stream = STREAMS["sentencepiece"].open([], True)
    parts = [stream.push(3 + b) for b in [32, *text.encode(), 0xE1]]
    assert "".join(parts) + stream.finish() == text + "�"


@pytest.mark.parametrize("name", sorted(KINDS))
def test_window_stream_gives_the_whole_decode_of_text(name: str) -> None:
    backend = KINDS[name][0]
    ids = backend.encode(TEXT, add_special_tokens=False).ids[:60]
    stream = WindowStream(lambda ids: backend.decode(ids, skip_special_tokens=True), [])
    assert "".join([*map(stream.push, ids), stream.finish()]) == backend.decode(ids, skip_special_tokens=True)


def test_a_decoder_that_disagrees_with_its_parts_is_decoded_by_window(caplog: pytest.LogCaptureFixture) -> None:
    backend = no_decoder()
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")])
    assert type(Streams(wrap(backend)).open([], True)) is WindowStream
    backend.decoder = decoders.BPEDecoder()
    assert type(Streams(wrap(backend)).open([], True)) is WindowStream


# ---------------------------------------------------------------- stop strings


def earliest(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """(start, end, string) of the stop string that is complete first; of several there, the longest."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return None
    end, length, string = min(found)
    return end + length, end, string


small = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(small, stop_lists, st.lists(st.integers(1, 4), min_size=30, max_size=30), st.booleans())
def test_stop_strings_do_not_depend_on_the_cut(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    watch = StopWatch(StopSet(stops, include))
    out, hit, at, shown = "", None, 0, earliest(text, stops)
    for cut in cuts:
        part, hit = watch.feed(text[at : at + cut])
        at += cut
        out += part
        if hit or at >= len(text):
            break
        assert include or earliest(out, stops) is None
        for stop in stops:  # nothing that could still become a stop string is out
            overlap = next((k for k in range(len(stop) - 1, 0, -1) if text[:at].endswith(stop[:k])), 0)
            assert include or len(out) <= at - overlap
    if shown is None:
        assert hit is None and out + watch.rest() == text
    else:
        assert hit == shown[2] and out == text[: shown[1] if include else shown[0]]
        assert at - cut < shown[1] <= at


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(some_ids(), st.data(), st.booleans(), st.booleans(), st.sampled_from([Finish.STOP, Finish.LENGTH]))
def test_stop_strings_over_real_tokens(case, data, include: bool, skip: bool, finish: Finish) -> None:
    """Stop strings taken from the text itself, over every kind of tokenizer, however tokens come together."""
    name, ids = case
    backend = KINDS[name][0]
    end = len(ids) - (finish == Finish.STOP and not include)
    whole = backend.decode(ids[:end] if ids else [], skip_special_tokens=skip)
    place = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 6)).map(
        lambda p: whole[p[0] : p[0] + p[1]]
    )
    stops = [s for s in data.draw(st.lists(st.one_of(place, st.just("zzz")), min_size=1, max_size=3)) if s] or ["zzz"]
    sequence = TextSequence(STREAMS[name].open([], skip), StopSet(stops, include))
    out, used, at = "", 0, 0
    while at < len(ids):
        size = data.draw(st.sampled_from([1, 1, 1, 2, 5]))
        last = finish if at + size >= len(ids) else Finish.NONE
        news = sequence.advance(ids[at : at + size], last, -1, include)
        out, used, at = out + news.text, used + news.used, at + size
        if sequence.done:
            break
    if not ids:
        return
    shown = earliest(whole, stops)
    assert sequence.done and news.length == used == sequence.count
    if shown is None:
        assert out == whole and news.reason is None and news.finish == finish and used == len(ids)
    else:
        assert out == whole[: shown[1] if include else shown[0]]
        assert news.reason == shown[2] and news.finish == Finish.STOP


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(some_ids(), st.data(), st.booleans(), st.integers(0, 12))
def test_stop_strings_count_after_min_tokens(case, data, include: bool, least: int) -> None:
    """The first match whose last character comes from a later token wins; earlier ones are text."""
    name, ids = case
    streams = STREAMS[name]
    stream = streams.open([], True)
    parts = [*map(stream.push, ids), stream.finish()]
    whole, early = "".join(parts), len("".join(parts[:least]))
    if least >= len(ids):
        early = len(whole)
    place = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 4)).map(lambda p: whole[p[0] : sum(p)])
    stops = [s for s in data.draw(st.lists(place, min_size=1, max_size=3)) if s] or ["zzz"]
    sequence = TextSequence(streams.open([], True), StopSet(stops, include), min_tokens=least)
    out, used = "", 0
    for n, token in enumerate(ids):
        news = sequence.advance([token], Finish.LENGTH if n == len(ids) - 1 else Finish.NONE, -1, include)
        out, used = out + news.text, used + news.used
        if sequence.done:
            break
    ends = [(at, stop) for at in range(early + 1, len(whole) + 1) for stop in stops if whole[:at].endswith(stop)]
    if not ids:
        return
    if not ends:
        assert (out, news.reason, used) == (whole, None, len(ids))
        return
    end = min(ends)[0]
    stop = max((s for at, s in ends if at == end), key=len)
    assert (out, news.reason) == (whole[: end if include else end - len(stop)], stop)
    assert used > least


def test_min_tokens_on_both_sides_of_the_border() -> None:
    backend, streams = KINDS["byte_level"][0], STREAMS["byte_level"]
    ids = [backend.token_to_id(c) for c in "xENDyENDz"]

    def run(least: int, stop: str = "END") -> tuple[str, str | int | None, int]:
        sequence = TextSequence(streams.open([], True), StopSet([stop], False), min_tokens=least)
        text = ""
        for n, token in enumerate(ids):
            news = sequence.advance([token], Finish.LENGTH if n == len(ids) - 1 else Finish.NONE, -1, False)
            text += news.text
            if sequence.done:
                break
        return text, news.reason, news.length

    assert run(0) == run(3) == ("x", "END", 4)  # "D" is the fourth token: complete after three
    assert run(4) == run(7) == ("xENDy", "END", 8)
    assert run(8) == run(9) == run(99) == ("xENDyENDz", None, 9)
    assert run(9, "z") == ("xENDyENDz", None, 9) and run(8, "z") == ("xENDyEND", "z", 9)
    sequence = TextSequence(streams.open([], True), StopSet(["END"], False), min_tokens=7)
    assert sequence.advance(ids[:4], Finish.NONE, -1, False).text == "xEND"  # complete and no stop: not held back
    assert sequence.advance(ids[4:], Finish.LENGTH, -1, False) == ("y", 4, Finish.STOP, "END", 8)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_copies_of_a_sequence_go_their_own_ways(name: str) -> None:
    backend = KINDS[name][0]
    ids = backend.encode(TEXT, add_special_tokens=False).ids[:40]
    for window in (False, True):
        stream = STREAMS[name].open([], False)
        if window:
            stream = WindowStream(lambda ids: backend.decode(ids, skip_special_tokens=False), [])
        head = ""
        for n, token in enumerate(ids):
            other = stream.copy()
            tail = ids[: n % 7]
            got = head + "".join(map(other.push, tail)) + other.finish()
            assert window or got == backend.decode([*ids[:n], *tail], skip_special_tokens=False)
            head += stream.push(token)
        assert head + stream.finish() == backend.decode(ids, skip_special_tokens=False)


def test_many_tokens_at_once_are_cut_where_the_stop_string_ends() -> None:
    ids = KINDS["byte_level"][0].encode("one STOP two", add_special_tokens=False).ids
    once = TextSequence(STREAMS["byte_level"].open([], True), StopSet(["STOP"], False)).advance(
        ids, Finish.LENGTH, -1, False
    )
    assert once.text == "one " and once.reason == "STOP" and once.finish == Finish.STOP
    assert 0 < once.used == once.length < len(ids)
    assert "STOP" in KINDS["byte_level"][0].decode(ids[: once.used])


def test_stop_token_text_is_removed_unless_included() -> None:
    backend = KINDS["byte_level"][0]
    ids = backend.encode("Hello.", add_special_tokens=False).ids
    for include, text in ((False, backend.decode(ids[:-1])), (True, "Hello.")):
        news = TextSequence(STREAMS["byte_level"].open([], True), None).advance(ids, Finish.STOP, ids[-1], include)
        assert news == (text, len(ids), Finish.STOP, ids[-1], len(ids))
    news = TextSequence(STREAMS["byte_level"].open([], True), None).advance(ids, Finish.STOP, -1, False)
    assert news.reason is None


def test_hostile_stop_strings_cost_little() -> None:
    stops = StopSet(["a" * 4000 + "b"], False)
    watch = StopWatch(stops)
    out = "".join(watch.feed("a" * 7)[0] for _ in range(3000))
    assert len(out) == 21000 - 4000 and watch.feed("b") == ("", "a" * 4000 + "b")


def test_replay_gives_the_rest_of_the_text_only() -> None:
    backend = KINDS["byte_level"][0]
    ids = backend.encode("Replay 😀 this text", add_special_tokens=False).ids
    for have in range(len(ids)):
        first = TextSequence(STREAMS["byte_level"].open([], True), None)
        sent = "".join(first.advance([i], Finish.NONE, -1, False).text for i in ids[:have])
        for chars in {0, len(sent) // 2, len(sent)}:
            again = TextSequence(STREAMS["byte_level"].open([], True), None, chars)
            news = again.advance(ids[:have], Finish.NONE, -1, False)
            rest = again.advance(ids[have:], Finish.LENGTH, -1, False)
            assert sent[:chars] + news.text + rest.text == backend.decode(ids)
            assert rest.length == len(ids)


def test_first_finish() -> None:
    assert first_finish([5, 6, 7], [9], [], 10) == (3, Finish.NONE, -1)
    assert first_finish([5, 9], [9], [9], 2) == (2, Finish.STOP, -1)
    assert first_finish([5, 8, 7], [9], [8], 3) == (2, Finish.STOP, 8)
    assert first_finish([5, 6], [9], [], 2) == (2, Finish.LENGTH, -1)
    assert first_finish([], [9], [], 2) == (0, Finish.NONE, -1)


def test_decoder_states_are_json_as_expected() -> None:
    """The one thing read from `tokenizers` that is not its documented interface."""
    assert json.loads(decoders.ByteLevel().__getstate__())["type"] == "ByteLevel"
