"""Streams of text, token by token: what goes out at once, what waits, and for how long; a rule at a time."""

from __future__ import annotations

import random

import pytest
from detokenizer_toys import KINDS, STREAMS, TEXT, no_decoder, wordpiece, wrap
from tokenizers import decoders

from quire.detokenizer import detokenize
from quire.detokenizer.detokenize import MAX_RUN, MAX_WINDOW, PieceStream, Stream, Streams, WindowStream, _bytes_of

SP = KINDS["sentencepiece"][0]
BL = KINDS["byte_level"][0]
BYTE = 3  # of the toy sentencepiece: the id of <0x00>
A, SPACE_A, BOS = (SP.token_to_id(token) for token in ("a", "▁a", "<s>"))


def byte_ids(text: str) -> list[int]:
    """Byte-fallback tokens of the toy sentencepiece."""
    return [BYTE + byte for byte in text.encode()]


def raw_ids(data: bytes) -> list[int]:
    """Tokens of the toy byte-level vocabulary, one for each byte."""
    table = {}
    for token in BL.get_vocab(with_added_tokens=False).values():
        piece = STREAMS["byte_level"].piece(token)
        table[piece.encode() if isinstance(piece, str) else piece] = token
    return [table[bytes([byte])] for byte in data]


def sp(context: tuple[int, ...] = (A,), skip: bool = True) -> Stream:
    return STREAMS["sentencepiece"].open(context, skip)


# ---------------------------------------------------------------- against the whole decode


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", sorted(KINDS))
def test_any_tokens_give_what_decoding_them_at_once_gives(name: str, skip: bool) -> None:
    backend, draw = KINDS[name][0], random.Random(name)
    real = backend.encode(TEXT, add_special_tokens=False).ids
    for _ in range(40):
        ids = [draw.randrange(backend.get_vocab_size(with_added_tokens=True) + 3) for _ in range(draw.randrange(9))]
        at = draw.randrange(len(real))
        ids += [*real[at : at + draw.randrange(9)], *ids[: draw.randrange(4)]]
        stream = STREAMS[name].open([], skip)
        parts = [*map(stream.push, ids), stream.finish()]
        whole = backend.decode(ids, skip_special_tokens=skip)
        assert "".join(parts) == whole
        assert all(whole.startswith("".join(parts[:n])) for n in range(len(parts)))


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_tokenizer_that_is_loaded_gets_its_own_kind_of_stream(name: str) -> None:
    backend, kind = KINDS[name]
    streams, draw = Streams(wrap(backend)), random.Random(0)
    for skip in (True, False):
        assert type(streams.open([], skip)) is kind
        for _ in range(10):
            ids = [draw.randrange(backend.get_vocab_size(with_added_tokens=True)) for _ in range(12)]
            stream = streams.open([], skip)
            assert "".join([*map(stream.push, ids), stream.finish()]) == backend.decode(ids, skip_special_tokens=skip)


# ---------------------------------------------------------------- bytes


def test_a_character_goes_out_with_its_last_byte() -> None:
    stream = STREAMS["byte_level"].open([], True)
    assert [stream.push(token) for token in raw_ids("日".encode())] == ["", "", "日"]


def test_a_character_that_is_cut_off_is_replaced_when_another_comes() -> None:
    stream = STREAMS["byte_level"].open([], True)
    assert [stream.push(token) for token in raw_ids("日".encode()[:2] + b"a")] == ["", "", "\ufffda"]


def test_a_token_of_nothing_leaves_waiting_bytes_alone() -> None:
    stream = STREAMS["byte_level"].open([], True)
    first, second = raw_ids("é".encode())
    assert [stream.push(token) for token in (first, BL.token_to_id("</s>"), second)] == ["", "", "é"]


def test_what_waits_at_the_end_is_replaced_and_gone() -> None:
    stream = STREAMS["byte_level"].open([], True)
    stream.push(raw_ids("é".encode())[0])
    assert (stream.finish(), stream.finish()) == ("\ufffd", "")


def test_a_copy_has_the_bytes_that_wait() -> None:
    stream = STREAMS["byte_level"].open([], True)
    first, second = raw_ids("é".encode())
    stream.push(first)
    other = stream.copy()
    assert (other.push(second), stream.push(second), other.finish()) == ("é", "é", "")


# ---------------------------------------------------------------- runs of byte tokens


def test_a_run_waits_for_its_end() -> None:
    stream = sp()
    assert [stream.push(token) for token in [*byte_ids("日"), A]] == ["", "", "", "日a"]


def test_a_run_that_is_no_text_is_replaced_as_a_whole() -> None:
    stream = sp()
    ids = [*byte_ids("日")[:2], *byte_ids("ab"), A]
    assert "".join(map(stream.push, ids)) == SP.decode([A, *ids])[1:]


def test_a_run_ends_with_the_output() -> None:
    stream = sp()
    for token in byte_ids("日"):
        stream.push(token)
    assert (stream.finish(), stream.finish()) == ("日", "")


def test_a_token_that_is_skipped_does_not_end_a_run() -> None:
    stream = sp()
    first, *rest = byte_ids("日")
    assert [stream.push(token) for token in (first, BOS, *rest)] == [""] * 4 and stream.finish() == "日"


def test_a_run_at_the_beginning_loses_its_first_blank() -> None:
    stream = sp(())
    for token in byte_ids(" a"):
        stream.push(token)
    assert stream.finish() == SP.decode(byte_ids(" a")) == "a"


def test_after_a_run_at_the_beginning_a_token_keeps_its_blank() -> None:
    stream = sp(())
    assert "".join(map(stream.push, [*byte_ids("a"), SPACE_A])) == "a a"


def test_a_run_goes_out_when_it_grows_too_long_and_not_before() -> None:
    stream = sp()
    parts = [stream.push(BYTE + 120) for _ in range(MAX_RUN)]
    assert parts == [""] * (MAX_RUN - 1) + ["x" * MAX_RUN]


def test_a_run_that_is_too_long_goes_out_character_by_character() -> None:
    stream = sp()
    for _ in range(MAX_RUN):
        stream.push(BYTE + 120)
    assert [stream.push(token) for token in byte_ids("é日b")] == ["", "é", "", "", "日", "b"]


def test_after_a_run_that_was_too_long_the_next_one_waits_again() -> None:
    stream = sp()
    for _ in range(MAX_RUN):
        stream.push(BYTE + 120)
    assert [stream.push(token) for token in [A, *byte_ids("yz"), A]] == ["a", "", "", "yza"]


def test_what_is_left_of_a_run_that_was_too_long_is_replaced() -> None:
    for end, left in ((A, "é"), (None, "é"), (A, "日")):
        stream = sp()
        for _ in range(MAX_RUN):
            stream.push(BYTE + 120)
        for token in byte_ids(left)[:-1]:
            stream.push(token)
        assert (stream.push(end) if end else stream.finish()) == "\ufffd" + ("a" if end else "")


@pytest.mark.parametrize(("name", "blank"), [("sentencepiece", ""), ("gemma", " ")])
def test_a_run_too_long_at_the_beginning_loses_its_first_blank_where_the_decoder_says_so(name: str, blank: str) -> None:
    stream, ids = STREAMS[name].open([], True), byte_ids(" " + "x" * MAX_RUN)
    assert "".join(map(stream.push, ids)) == KINDS[name][0].decode(ids) == blank + "x" * MAX_RUN


def test_after_a_run_too_long_at_the_beginning_a_token_keeps_its_blank() -> None:
    stream = sp(())
    parts = [stream.push(BYTE + 120) for _ in range(MAX_RUN)]
    assert stream.push(SPACE_A) == " a" and "".join(parts) == "x" * MAX_RUN


def test_a_copy_is_in_the_midst_of_a_run_too() -> None:
    for length in (2, MAX_RUN):
        stream = sp()
        for _ in range(length):
            stream.push(BYTE + 120)
        stream.push(byte_ids("é")[0])
        other = stream.copy()
        end = [byte_ids("é")[1], A]
        assert [other.push(token) for token in end] == [stream.push(token) for token in end]


# ---------------------------------------------------------------- the first token


@pytest.mark.parametrize(
    ("context", "first"), [((), "a"), ((BOS,), "a"), ((A,), " a"), ((A, BOS), " a"), ((10**6,), "a")]
)
def test_a_first_token_has_its_blank_after_a_prompt_of_any_text(context: tuple[int, ...], first: str) -> None:
    assert sp(context).push(SPACE_A) == first


def test_only_the_end_of_a_long_prompt_is_looked_at() -> None:
    assert sp((A, *[BOS] * 63)).push(SPACE_A) == " a" and sp((A, *[BOS] * 64)).push(SPACE_A) == "a"


def test_the_second_token_has_its_blank() -> None:
    stream = sp(())
    assert [stream.push(SPACE_A) for _ in range(2)] == ["a", " a"]


# ---------------------------------------------------------------- windows


class Decode:
    """Joins the letters of the codes given; code 0 is half a character. ``most`` ids were decoded at once."""

    def __init__(self) -> None:
        self.most = 0

    def __call__(self, ids: list[int]) -> str:
        self.most = max(self.most, len(ids))
        return "".join(chr(token) if token else "\ufffd" for token in ids)


def test_what_ends_in_half_a_character_waits() -> None:
    stream = WindowStream(Decode(), [])
    assert [stream.push(token) for token in (97, 0, 98)] == ["a", "", "\ufffdb"]


def test_what_waits_goes_out_when_it_grows_too_long_and_not_before() -> None:
    stream = WindowStream(Decode(), [97])
    assert [stream.push(0) for _ in range(MAX_WINDOW)] == [""] * (MAX_WINDOW - 1) + ["\ufffd" * MAX_WINDOW]


def test_what_waits_goes_out_at_the_end_and_is_gone() -> None:
    stream = WindowStream(Decode(), [])
    stream.push(0)
    assert (stream.finish(), stream.finish()) == ("\ufffd", "")


def test_a_window_does_not_grow() -> None:
    decode = Decode()
    stream = WindowStream(decode, list(range(97, 117)))
    assert "".join(map(stream.push, range(97, 122))) == "".join(map(chr, range(97, 122)))
    assert decode.most <= 13  # those of the last output, and as many before


def test_a_window_keeps_the_last_tokens_that_went_out() -> None:
    seen: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        seen.append(ids)
        return "x" * len(ids)

    stream = WindowStream(decode, [])
    for token in range(10):
        stream.push(token)
    assert seen[-2:] == [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9]]


def test_a_window_s_copy_goes_its_own_way() -> None:
    stream = WindowStream(Decode(), [97])
    stream.push(0)
    other = stream.copy()
    assert (other.push(98), stream.push(99)) == ("\ufffdb", "\ufffdc")


def test_a_token_that_takes_text_away_shows_nothing() -> None:
    stream = WindowStream(lambda ids: "" if 9 in ids else "x" * len(ids), [])
    assert [stream.push(token) for token in (1, 9, 9)] == ["x", "", ""]
    texts = {(1,): "x", (1, 9): "", (1, 9, 2): "xyz"}
    stream = WindowStream(lambda ids: texts.get(tuple(ids), ""), [])
    assert [stream.push(token) for token in (1, 9, 2)] == ["x", "", "yz"]


def test_the_prompt_s_last_tokens_are_the_window_s_first() -> None:
    seen: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        seen.append(ids)
        return "x" * len(ids)

    WindowStream(decode, list(range(10))).push(10)
    assert seen == [[4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9, 10]]


# ---------------------------------------------------------------- which stream, and pieces


def test_a_piece_is_a_look_up_where_the_decoder_is_known_only() -> None:
    assert STREAMS["byte_level"].quick_piece is not None
    slow = wrap(BL)
    slow.backend = None
    streams = Streams(slow)
    assert streams.quick_piece is None and type(streams.open([], True)) is WindowStream
    assert streams.piece(10**6) == ""


def test_added_tokens_that_are_shown_stand_apart_where_special_ones_are_not_shown() -> None:
    backend = wordpiece()
    backend.add_tokens(["<one>", "<two>"])
    stream = Streams(wrap(backend)).open([], True, False)
    ids = [backend.token_to_id(token) for token in ("t", "<one>", "<two>")]
    assert "".join(map(stream.push, ids)) == backend.decode(ids) == "t <one> <two>"


@pytest.mark.parametrize(("spaces", "text"), [(True, "t <one> <two>"), (False, "t <one><two>")])
def test_added_tokens_follow_each_other_with_a_space_where_spaces_are_asked_for(spaces: bool, text: str) -> None:
    backend = wordpiece()
    backend.add_tokens(["<one>", "<two>"])
    stream = Streams(wrap(backend)).open([], False, spaces)
    ids = [backend.token_to_id(token) for token in ("t", "<one>", "<two>")]
    assert type(stream) is PieceStream and "".join(map(stream.push, ids)) == text


def test_a_piece_is_the_text_of_special_tokens_too() -> None:
    assert [Streams(wrap(backend)).piece(backend.token_to_id("</s>")) for backend in (SP, BL)] == ["</s>", "</s>"]


def test_a_decoder_that_disagrees_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    backend = no_decoder()
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")])
    streams = Streams(wrap(backend))
    assert "the tokenizer's decoder ['Fuse', 'Replace'] is not what its parts suggest" in caplog.text
    assert streams.quick_piece is None


@pytest.mark.parametrize(
    ("piece", "data"),
    [(None, None), ("<0xE4>", b"\xe4"), ("<0xe4>", b"\xe4"), ("<0x41>", None), ("Ã", b"\xc3"), ("a", None),
     ("日", None), ("日a", None), ("a日", None), ("", None), ("<0xE4>x", None)],
)  # fmt: skip
def test_the_bytes_that_a_token_s_name_stands_for(piece: str | None, data: bytes | None) -> None:
    assert _bytes_of(piece) == data


@pytest.mark.parametrize(
    ("token", "piece"),
    [(SPACE_A, " a"), (A, "a"), (BYTE + 0x41, "A"), (BYTE + 0x7F, "\x7f"), (BYTE + 0x80, b"\x80"), (BOS, "<s>"),
     (10**6, ""), (-1, "")],
)  # fmt: skip
def test_the_text_that_a_token_adds(token: int, piece: str | bytes) -> None:
    assert STREAMS["sentencepiece"].piece(token) == piece


def test_the_limit_of_a_run_is_read_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detokenize, "MAX_RUN", 2)
    stream = sp()
    assert [stream.push(BYTE + 120) for _ in range(3)] == ["", "xx", "x"]
