"""Grammars over tokenizers of several kinds: what is drawn under the masks reads as the grammar says."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.detokenizer.detokenize import Streams
from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.grammars.grammar import grammar_of, start_matcher, token_table
from quire.proto.structured import StructuredOutputsParams

END = "</s>"
FORMS = ["Hello", " x", "(Hello|Help) me", '\\{"name": "[a-z]{2}"\\}', "[a-z]{2} [0-9]{1,3}"]


def byte_level(first: pre_tokenizers.PreTokenizer) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [END, *alphabet, "He", "ll", "ĠHe", "Hell", "ĠHell", "Ġm", '{"']
    merges = [("H", "e"), ("l", "l"), ("Ġ", "He"), ("He", "ll"), ("ĠHe", "ll"), ("Ġ", "m"), ("{", '"')]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = first
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = [(END, 0.0), ("▁", -2.0), ("▁He", -1.0), ("He", -1.5), ("llo", -1.0), ("▁me", -1.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def blank_first() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=True)


KINDS = {
    "byte-level": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "a blank put first": lambda: byte_level(blank_first()),
    "a blank put first, after another step": lambda: byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), blank_first()])
    ),
    "Metaspace": metaspace,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_reads_as_the_grammar_says(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    end, size = tokenizer.token_to_id(END), tokenizer.get_vocab_size()
    table = token_table(str(tmp_path), ModelConfig(str(tmp_path), {}, 64, size, [end]))
    streams = Streams(load_tokenizer(str(tmp_path)))
    draw = random.Random(1)
    for form in FORMS:
        fresh = start_matcher(table, grammar_of(StructuredOutputsParams(regex=form)))
        for _ in range(8):
            matcher, stream, text = fresh.deep_copy(), streams.open([tokenizer.token_to_id("a")], True), ""
            while not matcher.is_stopped():
                mask = matcher.compute_bitmask()
                allowed = [token for token in range(size) if mask[token // 8] >> token % 8 & 1]
                assert allowed, (form, text, matcher.get_error())
                token = draw.choice(allowed)
                matcher.consume_token(token)
                text += stream.push(token) if token != end else ""
            assert re.fullmatch(form, text + stream.finish()), (form, text)
