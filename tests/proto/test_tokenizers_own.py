"""Tokenizers made from vocabulary files alone, held against plain encoders, and the libraries where installed."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from text_tokenizers import CORPUS, byte_level
from vocabularies import Piece, encode_pieces, encode_ranks, make_pieces, make_ranks, model_bytes, ranks_bytes, write

from quire.client.offline.tokenizer import load_tokenizer as transformers_tokenizer
from quire.detokenizer.detokenize import ByteStream, PieceStream, Streams
from quire.detokenizer.template import ChatTemplate
from quire.detokenizer.tokenize import Preparer
from quire.detokenizer.tokenizer import TextTokenizer, load_tokenizer
from quire.proto.checkpoint import tokenizers_sentencepiece, tokenizers_tiktoken
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.grammars.grammar import grammar_of, start_matcher, token_table
from quire.proto.structured import StructuredOutputsParams

SYMBOLS = ["<eoh>", "<eoa>", "<reserved_1>", "<reserved_10>", "<reserved_11>", "▁▁▁▁", "\n\n"]
PIECES = make_pieces(SYMBOLS, ["<control>"])
RANKS = make_ranks()
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi 😀"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "More?"},
]


def texts(count: int = 300, seed: int = 0) -> list[str]:
    """Random texts of words, blanks, marks and characters that no vocabulary here has."""
    draw = random.Random(seed)
    atoms = [*" ".join(CORPUS[:4]).split(" "), " ", "  ", "    ", "\n", "\n\n", "\t", "<eoa>", "<reserved_1>"]
    atoms += ["<reserved_10>", "<res", "▁", "<0x0A>", "𝔘", "嘿", "😀", "x" * 30, "don't", "12345", "people"]
    return [
        "".join(draw.choice(atoms) + draw.choice(["", " "]) for _ in range(draw.randrange(1, 9))) for _ in range(count)
    ]


def llama_like(name: str, pieces: list[Piece] = PIECES, **config: Any) -> dict[str, Any]:
    auto = {"AutoTokenizer": [f"tokenization.{name}", None]}
    model = model_bytes(pieces)
    return {"tokenizer.model": model, "tokenizer_config.json": {"tokenizer_class": name, "auto_map": auto, **config}}


def glm4() -> dict[str, Any]:
    names = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
    names += ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    added = {str(n): {"content": name, "special": True} for n, name in enumerate(names, len(RANKS))}
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": added, "eos_token": "<|endoftext|>"}
    return {"tokenizer.model": ranks_bytes(RANKS), "tokenizer_config.json": config}


def qwen(chat_format: str = "chatml") -> dict[str, Any]:
    config = {
        "tokenizer_class": "QWenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
    }
    generation = {"chat_format": chat_format, "eos_token_id": len(RANKS)}
    return {"qwen.tiktoken": ranks_bytes(RANKS), "tokenizer_config.json": config, "generation_config.json": generation}


def baichuan(vocab_size: int) -> dict[str, Any]:
    files = llama_like("BaichuanTokenizer", add_bos_token=False, add_eos_token=False)
    roles = {"user_token_id": 7, "assistant_token_id": 8}
    return {**files, "generation_config.json": roles, "config.json": {"vocab_size": vocab_size}}


FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen": qwen(),
    "GLM-4": glm4(),
    "ChatGLM3": llama_like("ChatGLMTokenizer", name_or_path="THUDM/chatglm3-6b"),
    "ChatGLM2": llama_like("ChatGLMTokenizer", name_or_path="THUDM/chatglm2-6b"),
    "Baichuan": baichuan(64_000),
    "Baichuan2": baichuan(125_696),
    "InternLM": llama_like("InternLMTokenizer"),
    "InternLM2": llama_like("InternLM2Tokenizer", added_tokens_decoder={
        "6": {"content": "<|im_start|>", "special": True, "normalized": True}, "7": {"content": "<|im_end|>"},
        "900": {"content": "<|plugin|>"}}),
    "Orion": llama_like("OrionTokenizer", add_bos_token=False),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(write(tmp_path_factory.mktemp(name), files)) for name, files in FAMILIES.items()}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, str]) -> dict[str, TextTokenizer]:
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


def built(pieces: list[Piece], path: Path, **settings: Any) -> Any:
    path.write_bytes(model_bytes(pieces, **settings))
    return tokenizers_sentencepiece.build(tokenizers_sentencepiece.read_pieces(path), {})


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("pieces", [PIECES, make_pieces(), make_pieces(byte_tokens=False)], ids=["all", "plain", "unk"])
def test_sentencepiece_ids_equal_the_plain_encoder(pieces: list[Piece], prefix: bool, tmp_path: Path) -> None:
    tokenizer = built(pieces, tmp_path / "m", prefix=prefix)
    for text in ["", " ", "▁", "<eoa>", "<0x0A>", *texts()]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == encode_pieces(pieces, text, prefix), text
        if 0 not in ids:
            assert tokenizer.decode(ids) == text.replace("▁", " "), text


def test_blanks_are_tidied_where_the_model_says_so(tmp_path: Path) -> None:
    tokenizer = built(PIECES, tmp_path / "m", tidy=True)
    for text in texts(100):
        tidy = " ".join(part for part in text.split(" ") if part)
        assert tokenizer.encode(text).ids == encode_pieces(PIECES, tidy), text


@pytest.mark.parametrize("words", [tokenizers_tiktoken.DIGITS, tokenizers_tiktoken.TRIPLES])
def test_tiktoken_ids_equal_the_plain_encoder(words: str) -> None:
    tokenizer = tokenizers_tiktoken.build(RANKS, {}, words)
    for text in ["", " ", "\r\n x", "I'LL've", *texts()]:
        ids = tokenizer.encode(text).ids
        assert ids == encode_ranks(RANKS, words, text), text
        assert tokenizer.decode(ids) == text


def test_ids_equal_the_sentencepiece_library(tmp_path: Path) -> None:
    """Models that the library itself trained, with every setting that these families use."""
    library = pytest.importorskip("sentencepiece")
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    for settings in (
        {},
        {"byte_fallback": True, **plain, "split_digits": True},
        {"byte_fallback": True, **plain, "add_dummy_prefix": False, "allow_whitespace_only_pieces": True},
        {"byte_fallback": True, **plain, "user_defined_symbols": SYMBOLS},
        {"byte_fallback": True, "user_defined_symbols": ["<eoa>"], "control_symbols": ["<control>"]},
    ):
        out = io.BytesIO()
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=out, vocab_size=460 if settings else 250, model_type="bpe",
            hard_vocab_limit=False, minloglevel=2, character_coverage=0.98, **settings,
        )  # fmt: skip
        theirs = library.SentencePieceProcessor(model_proto=out.getvalue())
        (tmp_path / "m").write_bytes(out.getvalue())
        ours = tokenizers_sentencepiece.build(tokenizers_sentencepiece.read_pieces(tmp_path / "m"), {})
        for text in texts():
            ids = ours.encode(text, add_special_tokens=False).ids
            assert ids == theirs.encode(text), (settings, text)
            assert theirs.unk_id() in ids or ours.decode(ids) == theirs.decode(ids)


def test_ids_equal_the_tiktoken_library() -> None:
    library = pytest.importorskip("tiktoken")
    for words in (tokenizers_tiktoken.DIGITS, tokenizers_tiktoken.TRIPLES):
        ours = tokenizers_tiktoken.build(RANKS, {}, words)
        theirs = library.Encoding("small", pat_str=words, mergeable_ranks=RANKS, special_tokens={})
        for text in texts():
            assert ours.encode(text).ids == theirs.encode(text), text


# ---------------------------------------------------------------- families


def ids_of(tokenizer: TextTokenizer, *names: str) -> list[int]:
    assert tokenizer.backend is not None
    return [i for name in names if (i := tokenizer.backend.token_to_id(name)) is not None]


def test_what_goes_before_a_prompt(loaded: dict[str, TextTokenizer]) -> None:
    first = {
        "ChatGLM3": ["[gMASK]", "<sop>"], "ChatGLM2": ["[gMASK]", "<sop>"], "GLM-4": ["[gMASK]", "<sop>"],
        "InternLM": ["<s>"], "InternLM2": ["<s>"],
    }  # fmt: skip
    for name, tokenizer in loaded.items():
        bare = tokenizer.encode("people 12 你好", False)
        assert tokenizer.encode("people 12 你好", True) == [*ids_of(tokenizer, *first.get(name, [])), *bare], name
        if name not in ("Qwen", "GLM-4"):
            assert bare == encode_pieces(PIECES, "people 12 你好")  # sop and eop are no tokens within a text
    pieces = len(PIECES)
    assert ids_of(loaded["ChatGLM3"], "[MASK]", "[gMASK]", "<sop>", "<|observation|>") == [
        pieces, pieces + 1, pieces + 3, pieces + 8,
    ]  # fmt: skip
    assert ids_of(loaded["Qwen"], "<|endoftext|>", "<|im_end|>", "<|extra_204|>") == [420, 422, 627]


def test_what_ends_a_reply(loaded: dict[str, TextTokenizer]) -> None:
    ends = {
        "Qwen": ["<|im_end|>", "<|endoftext|>"], "GLM-4": ["<|endoftext|>", "<|user|>", "<|observation|>"],
        "ChatGLM3": ["</s>", "<|user|>", "<|observation|>"], "InternLM": ["</s>", "<eoa>"],
        "InternLM2": ["</s>", "<|im_end|>"],
    }  # fmt: skip
    for name, tokenizer in loaded.items():
        preparer = Preparer(tokenizer, ModelConfig("", {}, 64, 1000))
        assert [*preparer.eos, *preparer.more_eos] == ids_of(tokenizer, *ends.get(name, ["</s>"])), name


def test_named_tokens_and_renamed_ones(loaded: dict[str, TextTokenizer], tmp_path: Path) -> None:
    assert loaded["ChatGLM3"].special == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"
    }  # fmt: skip
    tokenizer = loaded["InternLM2"]
    assert ids_of(tokenizer, "<|im_start|>", "<|im_end|>", "<|plugin|>") == [6, 7, 900]
    assert tokenizer.encode("<|im_start|>a<|plugin|>", False) == [6, *encode_pieces(PIECES, "a"), 900]
    assert tokenizer.decode([6, *tokenizer.encode("fox", False), 900], True) == "fox"
    files = llama_like("LlamaTokenizer", legacy=False, bos_token={"content": "<s>"}, add_eos_token=True)
    llama = load_tokenizer(str(write(tmp_path, files)))
    assert llama.encode("The<s>fox", True) == [
        1, *encode_pieces(PIECES, "The"), 1, *encode_pieces(PIECES, "fox", prefix=False), 2
    ]  # fmt: skip


def test_the_architecture_chooses_where_no_class_is_named(tmp_path: Path) -> None:
    files = {"tokenizer.model": model_bytes(PIECES), "config.json": {"architectures": ["ChatGLMModel"]}}
    tokenizer = load_tokenizer(str(write(tmp_path, files)))
    assert tokenizer.encode("a", True)[:2] == ids_of(tokenizer, "[gMASK]", "<sop>")


def test_streams_give_the_whole_text(loaded: dict[str, TextTokenizer]) -> None:
    for name, tokenizer in loaded.items():
        streams = Streams(tokenizer)
        for text in texts(60):
            ids = tokenizer.encode(text, False)
            stream = streams.open((), True)
            assert isinstance(stream, ByteStream if name in ("Qwen", "GLM-4") else PieceStream)
            whole = "".join([*map(stream.push, ids), stream.finish()])
            expected = normalize("NFC", text) if name == "Qwen" else text
            if isinstance(stream, PieceStream):
                expected = text.replace("▁", " ")
            if name.startswith("Baichuan"):
                expected = tokenizer.decode(ids, True)  # it hides the tokens of roles
            assert whole == expected == tokenizer.decode(ids, True), (name, text)


@pytest.mark.parametrize("bos", [True, False])
def test_vocab_json_and_merges_equal_transformers(bos: bool, tmp_path: Path) -> None:
    """OPT's and Aquila's folders."""
    from transformers import AutoTokenizer

    byte_level().model.save(str(tmp_path))
    config = {"bos_token": "</s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": "<pad>"}
    files = {
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", **config},
        "added_tokens.json": {"<new>": 500},
    }
    ours = load_tokenizer(str(write(tmp_path, files)))
    assert ours.backend is not None and ours.encode("a<new>", False)[-1] == 500
    (tmp_path / "added_tokens.json").unlink()
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    for text in texts(100):
        ids = theirs.encode(text, truncation=False)
        assert ours.encode(text, True) == ids and ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


# ---------------------------------------------------------------- chats

WRITTEN = {
    "Qwen": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi 😀<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "GLM-4": "[gMASK]<sop><|system|>\nBe kind.<|user|>\nHi 😀<|assistant|>\nHello.<|user|>\nMore?<|assistant|>",
    "ChatGLM3": (
        "[gMASK]<sop><|system|>\n Be kind.<|user|>\n Hi 😀<|assistant|>\n Hello.<|user|>\n More?<|assistant|>"
    ),
    "ChatGLM2": "[gMASK]<sop>Be kind.\n\n[Round 1]\n\n问：Hi 😀\n\n答：Hello.\n\n[Round 2]\n\n问：More?\n\n答：",
    "Baichuan": "Be kind.<reserved_10>Hi 😀<reserved_11>Hello.</s><reserved_10>More?<reserved_11>",
    "Baichuan2": "Be kind.<reserved_10>Hi 😀<reserved_11>Hello.<reserved_10>More?<reserved_11>",
    "InternLM": "<s><|System|>:Be kind.\n<|User|>:Hi 😀\n<|Bot|>:Hello.<eoa>\n<|User|>:More?\n<|Bot|>:",
    "InternLM2": (
        "<s><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi 😀<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "Orion": "<s>Be kind.Human: Hi 😀\n\nAssistant: </s>Hello.</s>Human: More?\n\nAssistant: </s>",
}


def test_chats_are_written_as_the_families_write_them(loaded: dict[str, TextTokenizer]) -> None:
    for name, tokenizer in loaded.items():
        chat = ChatTemplate(tokenizer.templates, tokenizer.special)
        assert chat.render(CHAT, None) == WRITTEN[name], name
    chat = ChatTemplate(loaded["Qwen"].templates, {})
    assert chat.render(CHAT[1:2], None).startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")


def test_chats_become_the_ids_that_the_families_code_puts_together(loaded: dict[str, TextTokenizer]) -> None:
    """Their code encodes each message by itself and puts the ids of roles between."""

    def ids(name: str) -> list[int]:
        chat = ChatTemplate(loaded[name].templates, loaded[name].special)
        return loaded[name].encode(chat.render(CHAT[1:], None), False)

    def said(text: str) -> list[int]:
        return encode_pieces(PIECES, text)

    user, assistant = ids_of(loaded["Baichuan2"], "<reserved_10>", "<reserved_11>")
    assert (user, assistant) == (7, 8)
    assert ids("Baichuan2") == [user, *said("Hi 😀"), assistant, *said("Hello."), user, *said("More?"), assistant]
    prefix = ids_of(loaded["ChatGLM3"], "[gMASK]", "<sop>")
    user, assistant = ids_of(loaded["ChatGLM3"], "<|user|>", "<|assistant|>")
    line = said("\n")
    assert ids("ChatGLM3") == [
        *prefix, user, *line, *said("Hi 😀"), assistant, *line, *said("Hello."), user, *line, *said("More?"), assistant
    ]  # fmt: skip
    assert ids("ChatGLM2") == [*prefix, *said(WRITTEN["ChatGLM2"].split("\n\n", 1)[1])]


def test_a_folder_keeps_its_own_template(tmp_path: Path) -> None:
    own = "{{ '[gMASK]sop' }}{% for m in messages %}<|{{ m.role }}|>\n {{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(str(write(tmp_path, llama_like("ChatGLMTokenizer", chat_template=own))))
    rendered = ChatTemplate(tokenizer.templates, tokenizer.special).render(CHAT[1:2], None)
    assert rendered == "[gMASK]<sop><|user|>\n Hi 😀"
    assert tokenizer.encode(rendered, False)[:3] == ids_of(tokenizer, "[gMASK]", "<sop>", "<|user|>")
    base = load_tokenizer(str(write(tmp_path, qwen("raw"))))
    assert (base.templates, base.eos_id) == ({}, 420)


# ---------------------------------------------------------------- grammars


def test_grammars_know_the_bytes_and_the_ends_of_every_family(
    folders: dict[str, str], loaded: dict[str, TextTokenizer]
) -> None:
    """Random tokens that the grammar allows, until it allows those that end a reply alone."""
    draw = random.Random(0)
    form = StructuredOutputsParams(regex=r"[a-z]{4} (fox|你😀) (\[MASK\]|<s>|people  sop)")
    for name, tokenizer in loaded.items():
        model = ModelConfig(folders[name], {}, 64, 1000)
        preparer = Preparer(tokenizer, model)
        matcher = start_matcher(token_table(folders[name], model), grammar_of(form))
        for _ in range(20):
            here, ids = matcher.deep_copy(), []
            while not here.is_accepting():
                ids.append(draw.choice(bits(here.compute_bitmask())))
                assert here.consume_token(ids[-1])
            text = tokenizer.decode([*tokenizer.encode("!", False), *ids], False)[1:]
            assert re.fullmatch(form.regex or "", text), (name, text)
            assert bits(here.compute_bitmask()) == sorted([*preparer.eos, *preparer.more_eos]), name


def bits(mask: bytes) -> list[int]:
    return [i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1]


# ---------------------------------------------------------------- transformers


def test_the_tokenizer_that_llm_gives_is_the_detokenizers(
    folders: dict[str, str], loaded: dict[str, TextTokenizer], tmp_path: Path
) -> None:
    """Itself, and saved and read again as ``LLM(tokenizer=...)`` does."""
    for name, ours in loaded.items():
        theirs = transformers_tokenizer(EngineArgs(model=folders[name]))
        theirs.save_pretrained(tmp_path / name)
        saved = load_tokenizer(str(tmp_path / name))
        for text in texts(30):
            ids = ours.encode(text, True)
            assert theirs.encode(text) == ids == saved.encode(text, True), (name, text)
            assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids, True), (name, text)
        assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id) == (saved.bos_id, saved.eos_id)
        assert theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == WRITTEN[name]


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("files", "last", "size"),
    [
        ({**qwen(), "config.json": {"vocab_size": 419}}, 419, 419),
        ({**FAMILIES["Orion"], "config.json": {"vocab_size": 470}}, len(PIECES) - 1, 470),
        ({**FAMILIES["ChatGLM3"], "config.json": {"padded_vocab_size": len(PIECES)}}, len(PIECES) + 4, len(PIECES)),
    ],
)  # fmt: skip
def test_a_vocabulary_beyond_vocab_size_is_of_another_model(
    files: dict[str, Any], last: int, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, files)
    message = f"has tokens up to id {last}, but config.json's vocab_size is {size}: .*download both"
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        token_table(str(tmp_path), ModelConfig(str(tmp_path), {}, 64, size))
    write(tmp_path, {"config.json": {"vocab_size": last + 1}})
    load_tokenizer(str(tmp_path))  # added tokens may be beyond
    assert not caplog.records
    write(tmp_path, {"config.json": {"vocab_size": 50_000}})
    load_tokenizer(str(tmp_path))
    assert "ids beyond have no text" in caplog.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({**qwen(), "qwen.tiktoken": b"IQ== 0\nIg== one\n"}, "qwen.tiktoken, line 2, is no token .*download"),
        ({**qwen(), "qwen.tiktoken": b"IQ== 0\n"}, r"qwen.tiktoken has no token for byte 0; .*download"),
        ({**qwen(), "qwen.tiktoken": ranks_bytes({**RANKS, b"zzz": 5})}, "gives one rank to two tokens"),
        ({"tokenizer_config.json": {"tokenizer_class": "QWenTokenizer"}}, r"lacks qwen.tiktoken, .*QWenTokenizer"),
        (llama_like("OrionTokenizer") | {"tokenizer.model": model_bytes(PIECES)[:-1]},
         "SentencePiece model.*download"),
        (llama_like("OrionTokenizer") | {"tokenizer.model": model_bytes(PIECES)[:700]}, "SentencePiece model"),
        (llama_like("OrionTokenizer") | {"tokenizer.model": b""}, "no whole SentencePiece model"),
        (llama_like("OrionTokenizer") | {"tokenizer.model": b"<!DOCTYPE html>"}, "SentencePiece model"),
        (llama_like("OrionTokenizer") | {"tokenizer.model": model_bytes(PIECES, kind=1)}, "no BPE model"),
        ({"merges.txt": b"a b", "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}}, "vocab.json and"),
        ({**glm4(), "tokenizer_config.json": {"tokenizer_class": "ChatGLM4Tokenizer"}}, r"no token '\[gMASK\]'"),
    ],
)  # fmt: skip
def test_faulty_files_are_one_line(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load_tokenizer(str(write(tmp_path, files)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "OtherTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_other.Other", None]}},
        {"tokenizer_class": "OtherTokenizer"},
        {"auto_map": {"AutoTokenizer": ["tokenization_other.Other", None]}},
    ],
)  # fmt: skip
def test_unknown_classes_name_the_flag_and_nothing_of_the_folder_runs(config: dict[str, Any], tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass Other: pass\n".encode()
    files = {
        "tokenizer.model": model_bytes(PIECES), "tokenizer_config.json": config, "tokenization_other.py": trap,
        "config.json": {"model_type": "other", "auto_map": {"AutoConfig": "tokenization_other.Other"}},
    }  # fmt: skip
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(str(write(tmp_path, files)))
    assert str(raised.value) == (
        "Failed to load the tokenizer. If the tokenizer is a custom tokenizer not yet available in the HuggingFace "
        "transformers library, consider setting `trust_remote_code=True` in LLM or using the `--trust-remote-code` "
        "flag in the CLI."
    )
    assert not (tmp_path / "sprung").exists()
