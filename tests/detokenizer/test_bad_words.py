"""Bad words: each form of a word, in every spelling that the vocabulary has, and nothing else."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from quire import SamplingParams
from quire.detokenizer import bad_words
from quire.detokenizer.bad_words import BadWords
from quire.detokenizer.detokenize import Streams
from quire.detokenizer.tokenizer import TextTokenizer, load_tokenizer
from quire.proto.checkpoint.model_config import demo_model_path
from quire.proto.errors import Refused
from quire.proto.params import ParamError

DEMO = load_tokenizer(demo_model_path())


def of(tokenizer: TextTokenizer) -> BadWords:
    return BadWords(tokenizer, Streams(tokenizer).quick_piece)


def toy(tokens: list[str], merges: list[tuple[str, str]]) -> TextTokenizer:
    """A vocabulary in which "▁" stands for a blank."""
    backend = Tokenizer(models.BPE({t: n for n, t in enumerate([*tokens, "<unk>"])}, merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Replace("▁", " ")
    return TextTokenizer(
        lambda text, special: backend.encode(text, add_special_tokens=special).ids,
        lambda ids, skip, spaces=True: backend.decode(ids, skip_special_tokens=skip),
        backend, {}, backend.token_to_id, {},
    )  # fmt: skip


def spelled(tokenizer: TextTokenizer, text: str) -> set[tuple[int, ...]]:
    """Every way to write ``text`` with this vocabulary, the plain way."""
    piece = Streams(tokenizer).piece
    assert tokenizer.backend is not None
    texts = {i: piece(i) for i in tokenizer.backend.get_vocab().values()}

    def rest(text: str) -> list[tuple[int, ...]]:
        if not text:
            return [()]
        starts = [(i, t) for i, t in texts.items() if isinstance(t, str) and t and text.startswith(t)]
        return [(i, *more) for i, t in starts for more in rest(text[len(t) :])]

    return set(rest(text))


def test_a_word_that_is_one_token_only_after_a_blank_is_banned_there() -> None:
    """ " Paris" is one token, "Paris" are two: by the number of tokens alone they would be different words."""
    tokens = ["Pa", "ris", "▁Paris", "P", "a", "r", "i", "s", "▁", "▁Pa"]
    tokenizer = toy(tokens, [])
    for word in ("Paris", " Paris", "   Paris"):
        forms = set(map(tuple, of(tokenizer).forms([word], 11)))
        assert forms >= spelled(tokenizer, "Paris") | spelled(tokenizer, " Paris")
        assert (2,) in forms and (0, 1) in forms and (9, 1) in forms and (8, 0, 1) in forms


@pytest.mark.parametrize("word", ["Paris", " the", "cat", "HELLO", "\nfoo", "é", "a b", "x-y", "1234", "😀"])
def test_every_spelling_of_each_form_and_no_other_text(word: str) -> None:
    forms = of(DEMO).forms([word], 2048)
    bare = word.lstrip()
    texts = {word, bare, " " + bare}
    assert {DEMO.decode(form, False) for form in forms} == texts
    assert len(set(map(tuple, forms))) == len(forms)
    for text in texts:
        assert DEMO.encode(text, False) in forms
        every = spelled(DEMO, text) if len(text) < 6 else set()
        if len(every) <= bad_words.MAX_SPELLINGS:
            assert every <= set(map(tuple, forms))


@pytest.mark.parametrize("word", ["\n", "\n\n", " ", "\t", " \n"])
def test_blanks_are_words_too(word: str) -> None:
    assert SamplingParams(bad_words=[word]).bad_words == [word]
    forms = of(DEMO).forms([word], 2048)
    assert forms[0] == DEMO.encode(word, False)
    assert {DEMO.decode(form, False) for form in forms} == {word}


def test_whatever_is_drawn_the_word_does_not_come_out() -> None:
    """Random tokens of few letters, drawn as a worker would draw them: none that ends a banned form."""
    tokens = ["a", "b", "c", "ab", "bc", "ca", "abc", "▁", "▁a", "▁ab", "▁abc", "bca", "cab"]
    tokenizer = toy(tokens, [])
    for word in ("abc", " abc", "ab", "cab", "bca b"):
        forms = of(tokenizer).forms([word], len(tokens))
        draw, out = random.Random(word), []
        ends = {form[-1]: [f[:-1] for f in forms if f[-1] == form[-1]] for form in forms}
        while len(out) < 4000:
            token = draw.randrange(len(tokens))
            if not any(out[len(out) - len(before) :] == before for before in ends.get(token, [])):
                out.append(token)
        starts = {n for n in range(len(out)) if tokenizer.decode(out[n : n + 12], False).startswith(word)}
        ended = {n for n in starts if any(tokenizer.decode(out[n : n + k], False) == word for k in range(1, 7))}
        assert not ended


@pytest.mark.slow
def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    table = of(DEMO)
    long = "x" * 1000
    assert table.forms([long], 2048) == [DEMO.encode(long, False), DEMO.encode(" " + long, False)]
    words = [f"word number {n}" for n in range(1000)]
    assert len(table.forms(words, 2048)) <= bad_words.MAX_LISTED + 2 * len(words)
    monkeypatch.setattr(bad_words, "MAX_SPELLINGS", 3)
    forms = table.forms(["something"], 2048)
    assert len(forms) <= 2 * (1 + 3)
    lengths = [len(form) for form in forms if DEMO.decode(form, False) == "something"]
    assert max(lengths) <= 4  # those of few tokens first


def test_what_is_refused() -> None:
    with pytest.raises(ParamError, match="bad_words cannot contain an empty string"):
        SamplingParams(bad_words=["a", ""])
    with pytest.raises(Refused, match=r"out of vocabulary \(0 to 9\)"):
        of(DEMO).forms(["Paris"], 10)
    tokenizer = toy(["q"], [])
    tokenizer.encode = lambda text, special: []
    with pytest.raises(Refused, match="'q' encodes to no tokens"):
        of(tokenizer).forms(["q"], 2)


def test_a_slow_tokenizer_gives_its_own_spellings() -> None:
    words = BadWords(DEMO, None)
    assert words.forms(["Paris"], 2048) == [DEMO.encode("Paris", False), DEMO.encode(" Paris", False)]


LETTERS = toy(["a", "aa", "aaa", "▁", "▁a", "b"], [])  # ids 0, 1, ... and <unk> 6


def forms(word: str, vocab_size: int = 6) -> list[tuple[int, ...]]:
    return list(map(tuple, of(LETTERS).forms([word], vocab_size)))


def test_the_tokenizers_own_spelling_is_first_then_those_of_few_tokens() -> None:
    assert forms("aaa") == [
        (0, 0, 0), (2,), (1, 0), (0, 1),
        (3, 0, 0, 0), (4, 1), (3, 2), (4, 0, 0), (3, 1, 0), (3, 0, 1),
    ]  # fmt: skip


def test_tokens_that_the_model_lacks_spell_nothing() -> None:
    assert forms("aa", 4) == [(0, 0), (1,), (3, 0, 0), (3, 1)]  # without ▁a, the fifth


def test_a_form_of_so_many_bytes_is_spelled_in_every_way_and_a_longer_one_is_not(monkeypatch) -> None:
    monkeypatch.setattr(bad_words, "MAX_BYTES", 2)
    assert forms("aa") == [(0, 0), (1,), (3, 0, 0)]  # with its blank it has three


@pytest.mark.parametrize(("most", "count"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_so_many_other_spellings_of_a_form_at_most(monkeypatch, most: int, count: int) -> None:
    monkeypatch.setattr(bad_words, "MAX_SPELLINGS", most)
    own = {(0, 0, 0), (3, 0, 0, 0)}
    mine = [form for form in forms("aaa") if LETTERS.decode(list(form), False) == "aaa"]
    assert len([form for form in mine if form not in own]) == count


@pytest.mark.parametrize(("listed", "found"), [(0, 2), (1, 2), (2, 4), (3, 4), (4, 6)])
def test_all_words_share_the_limit_equally(monkeypatch, listed: int, found: int) -> None:
    monkeypatch.setattr(bad_words, "MAX_LISTED", listed)
    assert len(forms("aaa")) == found


def test_forms_that_words_share_are_listed_once() -> None:
    table = of(LETTERS)
    assert table.forms(["aa", " aa", "aa"], 6) == table.forms(["aa"], 6)


def test_a_word_that_cannot_be_encoded_is_refused() -> None:
    tokenizer = toy(["q"], [])

    def encode(text: str, special: bool) -> list[int]:
        raise RuntimeError("x" * 500)

    tokenizer.encode = encode
    with pytest.raises(Refused, match="bad_words: 'q' cannot be encoded: xxx") as caught:
        of(tokenizer).forms(["q"], 2)
    assert (len(caught.value.message), caught.value.param) == (300, "bad_words")


def test_the_highest_id_of_a_word_is_named() -> None:
    with pytest.raises(Refused, match=r"'ab' has the token id 5, which is out of vocabulary \(0 to 4\)"):
        of(LETTERS).forms(["ab"], 5)


def test_the_highest_id_of_the_vocabulary_is_in_it() -> None:
    assert of(toy(["q", "▁"], [])).forms(["q"], 2)


def test_the_table_of_pieces_is_made_once() -> None:
    asked: list[int] = []

    def piece(token: int) -> str:
        asked.append(token)
        return "ab"[token % 2]

    words = BadWords(LETTERS, piece)
    for _ in range(2):
        words.forms(["a"], 6)
    assert sorted(asked) == list(range(7))


def test_no_special_tokens_are_put_around_a_word() -> None:
    tokenizer = toy(["q", "▁"], [])
    tokenizer.encode = lambda text, special: [2, 0] if special else [0]
    assert of(tokenizer).forms(["q"], 3)[0] == [0]


def test_added_tokens_spell_words_too() -> None:
    tokenizer = toy(["q", "▁"], [])
    assert tokenizer.backend is not None
    tokenizer.backend.add_tokens(["qq"])
    added = tokenizer.backend.token_to_id("qq")
    assert [0, added] in of(tokenizer).forms(["qqq"], 4) and tokenizer.encode("qqq", False) == [added, 0]
