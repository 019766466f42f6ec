"""Bad words that are blanks or line breaks alone: banned as they are, not taken for empty ones."""

from __future__ import annotations

import pytest

from quire import SamplingParams
from quire.detokenizer.checks import bad_word_ids
from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto.checkpoint.model_config import demo_model_path
from quire.proto.params import ParamError


@pytest.mark.parametrize("word", ["\n", "\n\n", " ", "\t", " \n"])
def test_blanks_are_words_too(word: str) -> None:
    tokenizer = load_tokenizer(str(demo_model_path()))
    assert SamplingParams(bad_words=[word]).bad_words == [word]
    assert bad_word_ids([word, "cat"], tokenizer, 2048)[0] == tokenizer.encode(word, False)
    assert bad_word_ids([word], tokenizer, 2048) == [tokenizer.encode(word, False)]


def test_an_empty_word_is_refused() -> None:
    with pytest.raises(ParamError, match="bad_words cannot contain an empty string"):
        SamplingParams(bad_words=["a", ""])
