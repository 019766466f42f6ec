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
