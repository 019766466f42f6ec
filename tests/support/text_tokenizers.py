"""Tokenizers of three kinds whose tokens cut characters and words in every way, for models made in tests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't stop, it's 1,234.56 o'clock!",
    "naïve café — Größe, 你好世界，こんにちは。 Привет мир! नमस्ते",
    "emoji 😀 👩‍👩‍👧‍👦 🇩🇪 e\u0301 o\u0308 combining, tabs\tand\nnewlines   spaces",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}",
] * 3


def byte_level() -> Tokenizer:
    """Bytes and merges of them: most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama's: words begin with ▁, the first loses its blank, unknown characters fall back to byte tokens."""
    text = " ".join(CORPUS[:4])
    long = [f"▁{word}" for word in text.split() if len(word) > 1]
    words = ["▁", "▁▁", *dict.fromkeys([*text.replace(" ", ""), *long])]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE({token: n for n, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def wordpiece() -> Tokenizer:
    """As BERT's: ## continues a word, everything else begins one."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {"byte-level BPE": byte_level, "SentencePiece": sentencepiece, "WordPiece": wordpiece}


def save(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write it into a model folder, in place of the one there."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.save_pretrained(folder)
