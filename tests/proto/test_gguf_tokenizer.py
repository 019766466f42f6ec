"""Tokenizers and chat templates out of GGUF files, held against transformers' and plain encoders."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from vocabularies import CORPUS, encode_pieces, make_pieces

from quire.client.offline.tokenizer import load_tokenizer as transformers_tokenizer
from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto.checkpoint.gguf_tokenizer import gguf_tokenizer
from quire.proto.checkpoint.model_config import demo_model_path, load_model_config
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.grammars.grammar import token_table

ATOMS = [
    *" ".join(CORPUS[:4]).split(" "), " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "12345", "1", "don't", "I'LL",
    "e\u0301", "嘿", "😀", "!?…", "x" * 20, "</s>", "<|im_end|>", "Straße", "▁", "<0x0A>", "a.b(c)=$", "HTTPServer",
]  # fmt: skip
# As the tokenizer.json of GPT-2, Llama 3, Qwen 2 and Mistral Nemo have it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
NEMO = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
    "qwen2": [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated")],
    "tekken": [pre_tokenizers.Split(Regex(NEMO), "isolated")],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


def texts(count: int = 200) -> list[str]:
    draw = random.Random(0)
    return [
        "".join(draw.choice(ATOMS) + draw.choice(["", " "]) for _ in range(draw.randrange(1, 9))) for _ in range(count)
    ]


def write(file: Path, model: str, tokens: list[str], types: list[int], **more: Any) -> Path:
    """A file of a vocabulary alone; ``more`` are arguments of the writer's methods by name."""
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in (("context_length", 64), ("embedding_length", 8), ("feed_forward_length", 8), ("head_count", 2),
                        ("block_count", 1)):  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_the_demo_models_tokenizer_is_the_same_out_of_a_file(tmp_path: Path) -> None:
    demo = Path(demo_model_path())
    file = gguf_files.export(demo, tmp_path / "demo.gguf")
    own, want = load_tokenizer(str(file)), load_tokenizer(str(demo))
    slow = transformers_tokenizer(EngineArgs(model=str(demo)))
    made = transformers_tokenizer(EngineArgs(model=str(file)))
    for text in texts():
        ids = own.encode(text, True)
        assert ids == want.encode(text, True) == slow.encode(text) == made.encode(text)
        assert own.decode(ids, False) == text
    assert (own.bos_id, own.eos_id) == (want.bos_id, want.eos_id)
    assert own.templates == want.templates
    chat = [{"role": "user", "content": "Hi"}]
    assert made.apply_chat_template(chat, tokenize=False) == slow.apply_chat_template(chat, tokenize=False)
    config = load_model_config(str(file))
    assert set(load_model_config(str(demo)).eos_token_ids) <= set(config.eos_token_ids)
    token_table(str(file), config)  # of structured outputs


@pytest.mark.parametrize("pre", CUTS)
def test_words_are_cut_as_the_models_own_tokenizers_do(pre: str, tmp_path: Path) -> None:
    whole = pre in ("llama-bpe", "tekken")
    reference = Tokenizer(models.BPE(ignore_merges=whole))
    last = [] if pre in ("gpt-2", "smollm") else [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    reference.pre_tokenizer = pre_tokenizers.Sequence([*CUTS[pre], *last])
    reference.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        reference.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = [*CORPUS, "1234567 12 don't I'LL HTTPServer Straße..."] * 3
    reference.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet,
                                                              show_progress=False, special_tokens=[]))  # fmt: skip
    reference.add_special_tokens(["<s>", "</s>"])
    merges = [" ".join(each) for each in json.loads(reference.to_str())["model"]["merges"]]
    tokens = [reference.id_to_token(i) for i in range(reference.get_vocab_size())]
    types = [3 if token in ("<s>", "</s>") else 1 for token in tokens]
    bos = tokens.index("<s>")
    file = write(tmp_path / "a.gguf", "gpt2", tokens, types, tokenizer_pre=pre, token_merges=merges, bos_token_id=bos)
    own = load_tokenizer(str(file))
    for text in texts():
        assert own.encode(text, False) == reference.encode(text).ids
    assert own.encode("a", True)[: -len(own.encode("a", False))] == ([bos] if whole else [])
    file = write(tmp_path / "b.gguf", "gpt2", tokens, types, tokenizer_pre=pre, token_merges=merges, bos_token_id=bos,
                 eos_token_id=bos + 1, add_bos_token=True, add_eos_token=True)  # fmt: skip
    assert load_tokenizer(str(file)).encode("", True) == [bos, bos + 1]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_merged_by_score(prefix: bool, tmp_path: Path) -> None:
    pieces = make_pieces(["▁▁▁▁", "<eoa>"], ["<control>"])
    tokens, scores, types = ([piece[n] for piece in pieces] for n in range(3))
    file = write(tmp_path / "a.gguf", "llama", tokens, types, token_scores=scores, bos_token_id=1, eos_token_id=2,
                 unk_token_id=0, add_space_prefix=prefix)  # fmt: skip
    own = load_tokenizer(str(file))
    for text in texts():
        if not any(special in text for special in ("</s>", "<s>", "▁")):
            assert own.encode(text, False) == encode_pieces(pieces, text, prefix)
            assert own.decode(own.encode(text, True), True) == text
    assert own.encode("</s>", True)[:1] == [1] and own.encode("</s>", False)[-1] == 2
    assert (own.bos_id, own.eos_id) == (1, 2)


def test_named_templates_and_tokens_that_end_a_reply(tmp_path: Path) -> None:
    tokens = [*"abcdefgh", "<s>", "</s>", "<|im_end|>"]
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    file = write(tmp_path / "a.gguf", "gpt2", tokens, [1] * 8 + [3] * 3, tokenizer_pre="gpt-2", eos_token_id=9,
                 eot_token_id=7, chat_template=templates)  # fmt: skip
    own = load_tokenizer(str(file))
    assert own.templates == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert (own.eos_id, own.end_ids) == (9, [7, 10])
    assert load_model_config(str(file)).eos_token_ids == [9, 7, 10]
    assert load_tokenizer(str(file), chat_template="{{ 3 }}").templates == {"default": "{{ 3 }}"}


BAD = {
    "no model": ("bert", {}, r"tokenizer\.ggml\.model must be 'gpt2' or 'llama', with tokens, got 'bert'.*--tokenizer"),
    "pre": ("gpt2", {"tokenizer_pre": "odd"}, r"tokenizer\.ggml\.pre 'odd' is not supported.*--tokenizer"),
    "merges": ("gpt2", {"token_merges": ["ab"]}, r"key 'tokenizer\.ggml\.merges' has no pair at 0"),
    "merges of what is not there": ("gpt2", {"token_merges": ["x y"]}, r"key 'tokenizer\.ggml\.merges'"),
    "scores": ("llama", {"token_scores": [1.0]}, r"key 'tokenizer\.ggml\.scores' must be a list of 3 floats"),
    "eos": ("llama", {"bool": ("tokenizer.ggml.eos_token_id", True)}, r"eos_token_id' must be a token's id, got True"),
    "flag": ("llama", {"uint32": ("tokenizer.ggml.add_bos_token", 1)}, r"add_bos_token' must be true or false, got 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_fault_of_the_tokenizer_names_file_and_key(name: str, tmp_path: Path) -> None:
    kind, more, said = BAD[name]
    plain = {key: value for key, value in more.items() if not isinstance(value, tuple)}
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(["a", "b", "<s>"])
    writer.add_bos_token_id(2)
    for key, value in more.items():
        getattr(writer, f"add_{key}")(*(value if isinstance(value, tuple) else (plain[key],)))
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=said) as raised:
        gguf_tokenizer(tmp_path / "a.gguf")
    assert "a.gguf" in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_does_not_say_how_texts_are_cut_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, types = ["a", "b", "ab", "</s>"], [1, 1, 1, 3]
    merges = {"token_merges": ["a b"]}
    gguf_tokenizer(write(tmp_path / "told.gguf", "gpt2", tokens, types, tokenizer_pre="default", **merges))
    assert not caplog.records
    gguf_tokenizer(write(tmp_path / "untold.gguf", "gpt2", tokens, types, **merges))
    (said,) = (record.getMessage() for record in caplog.records)
    assert "untold.gguf has no tokenizer.ggml.pre" in said and "--tokenizer" in said
