"""Text to tokens and back with nothing run: what the detokenizer answers alone, and prompts that are filled in."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import text_tokenizers
from detokenizer_rig import PREPARER, Rig
from engine_rig import EngineRig
from tokenizers import AddedToken, processors

from quire.detokenizer.core import SCHEDULER
from quire.detokenizer.infill import FAMILIES
from quire.detokenizer.tokenize import Preparer
from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto import messages as m
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.codec import i32
from quire.proto.errors import Refused
from quire.proto.work import Infill, Text

ENGINE = "frontend-0"


def tell(preparer: Preparer, work: Text | None = None, **fields: Any) -> tuple[list[int], str | None, Text]:
    message = m.Tokenize(1, 0, work or Text(), 0.0, **fields)
    prepared = preparer.prepare(message, 16, 8)  # no prompt is refused for its length
    assert isinstance(prepared.work, Text)
    return array("i", prepared.ids).tolist(), prepared.prompt, prepared.work


def test_texts_conversations_and_ids(tmp_path: Path) -> None:
    ids, text, _ = tell(PREPARER, prompt="Hello <|im_start|> there and on and on")
    assert 1 in ids and len(ids) >= 8 and text == "Hello <|im_start|> there and on and on"
    assert tell(PREPARER, ids=i32(ids), echo=True)[1] == text
    plain, _, _ = tell(PREPARER, Text(plain=True), prompt=text)
    assert 1 not in plain and tell(PREPARER, ids=i32(plain), echo=True)[1] == text
    chat, text, _ = tell(PREPARER, messages=[{"role": "user", "content": "Hi"}])
    assert text is not None and "Hi" in text and chat == tell(PREPARER, prompt=text)[0]
    bos = model(tmp_path, names=("<other>", "<mark>"), begin=True)
    ids, _, _ = tell(bos, Text(["<mark>x", "<mark>"], plain=True), prompt="")
    assert bos.tokenizer is not None and ids == [1, *bos.plain("<mark>x"), *ids[-6:]] and len(ids) > 9
    mixed, _, _ = tell(PREPARER, Text(parts=[5, "Hello", 7]), prompt="")
    assert mixed == [5, *tell(PREPARER, prompt="Hello")[0], 7]
    assert tell(PREPARER, ids=b"", echo=True)[:2] == ([], "")


def test_what_each_token_stands_for() -> None:
    ids, _, work = tell(PREPARER, Text(pieces=True), prompt="é Hello 😀")
    names = work.names
    assert names == [PREPARER.tokenizer.piece(token) for token in ids] and any("Ġ" in str(name) for name in names)
    assert b"".join(work.texts).decode() == "é Hello 😀" and len(work.texts) == len(ids)


def test_ids_of_no_token_and_a_server_without_a_tokenizer() -> None:
    with pytest.raises(Refused, match="out of vocabulary"):
        tell(PREPARER, ids=i32([10**6]), echo=True)
    with pytest.raises(Refused, match="out of vocabulary"):
        tell(PREPARER, Text(parts=[2**40]), prompt="")
    with pytest.raises(Refused, match="skip-tokenizer-init"):
        tell(Preparer(None, PREPARER.model), prompt="x")


# ---------------------------------------------------------------- filling in


def model(folder: Path, kind: str = "byte-level BPE", names: tuple[str, ...] = (), begin: bool = False) -> Preparer:
    backend = text_tokenizers.KINDS[kind]()
    if begin:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    # As Qwen's: not all of them are called special.
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[1:]])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in names[:1]])
    text_tokenizers.save(backend, folder)
    return Preparer(load_tokenizer(str(folder)), ModelConfig(str(folder), {}, 64, backend.get_vocab_size()))


TYPED = "<|fim_prefix|><fim_prefix><fim-prefix>▁<PRE><｜fim▁begin｜><|code_prefix|><fim_middle>"
INFILL = Infill("def f(", "  return " + TYPED, after="x")


@pytest.mark.parametrize("family", [name for name, marks in FAMILIES.items() if marks.middle])
def test_the_prefix_the_suffix_and_then_the_middle(family: str, tmp_path: Path) -> None:
    marks = FAMILIES[family]
    preparer = model(tmp_path, names=tuple(filter(None, (*marks[:5], *marks.ends))))
    tokenizer = preparer.tokenizer
    assert tokenizer is not None
    ids, _, work = tell(preparer, Text(infill=INFILL), prompt="")
    prefix, suffix, middle = (tokenizer.token_id(name) for name in marks[:3])
    plain = preparer.plain
    assert ids == [prefix, *plain("def f("), suffix, *plain("  return " + TYPED), middle, *plain("x")]
    assert ids.count(middle) == ids.count(prefix) == 1  # what a text calls a token is text
    assert work.ends == [tokenizer.token_id(name) for name in marks.ends] and work.infill is None


def test_codestral_is_told_the_suffix_first(tmp_path: Path) -> None:
    preparer = model(tmp_path, "SentencePiece", ("[PREFIX]", "[SUFFIX]"))
    tokenizer = preparer.tokenizer
    assert tokenizer is not None
    ids, _, _ = tell(preparer, Text(infill=Infill("fox", "dog", after=" stop")), prompt="")
    prefix, suffix = tokenizer.token_id("[PREFIX]"), tokenizer.token_id("[SUFFIX]")
    words = tokenizer.encode("fox", False)
    assert [tokenizer.piece(token) for token in ids] == [
        "[SUFFIX]", "d", "o", "g", "[PREFIX]", *map(tokenizer.piece, tokenizer.encode("fox stop", False)),
    ]  # fmt: skip
    assert (ids[0], ids[4]) == (suffix, prefix) and tokenizer.piece(words[0]) == "▁"


def test_other_files_come_before(tmp_path: Path) -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
    files = [("a.py", "def f(x):"), ("b.py", "return")]
    ids, _, _ = tell(model(tmp_path / "1", names=names), Text(infill=Infill("p", "s", files)), prompt="")
    text = load_tokenizer(str(tmp_path / "1")).decode(ids, False)
    assert text == (
        "<|repo_name|>repository\n<|file_sep|>a.py\ndef f(x):<|file_sep|>b.py\nreturn<|file_sep|>filename\n"
        "<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    )
    ids, _, _ = tell(model(tmp_path / "2", names=names[:3]), Text(infill=Infill("p", "s", files)), prompt="")
    text = load_tokenizer(str(tmp_path / "2")).decode(ids, False)
    assert text == "def f(x):return<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"


def test_a_model_that_cannot_fill_in_says_so() -> None:
    with pytest.raises(Refused, match="no tokens for filling in") as refused:
        tell(PREPARER, Text(infill=INFILL), prompt="")
    assert refused.value.param == "suffix"


# ---------------------------------------------------------------- on its way


def test_the_detokenizer_answers_alone_and_forgets() -> None:
    rig = Rig()
    rig.told(SCHEDULER)
    rig.engine(ENGINE, m.Tokenize(7, 0, Text(pieces=True), 1.0, prompt="Hello"))
    rig.prepare()
    (accepted,) = rig.told(ENGINE, m.Accepted)
    assert accepted.ids == i32(tell(PREPARER, prompt="Hello")[0]) and accepted.work.names
    assert not rig.told(SCHEDULER) and not rig.core.requests


def test_an_engine_asks_again_when_its_detokenizer_is_lost() -> None:
    rig = EngineRig(2)
    request = rig.core.text(m.Tokenize(0, 0, Text(), 0.0, prompt="hi"))
    rig.carry()
    (first,) = [each for each in rig.detokenizers if each.has(m.Tokenize)]
    first.cut()
    (second,) = [each for each in rig.detokenizers if each is not first]
    sent = second.next(m.Tokenize)
    assert (sent.prompt, sent.attempt, sent.work) == ("hi", 1, Text())
    second.accept(sent)
    rig.carry()
    assert request.done and request.told is not None and request.error is None and not rig.core.open
