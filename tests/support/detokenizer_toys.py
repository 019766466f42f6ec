"""Small tokenizers of each kind, made in a moment, for tests of text."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from quire.detokenizer.detokenize import ByteStream, PieceStream, Streams
from quire.detokenizer.tokenizer import TextTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't stop, it's 1,234.56 o'clock!",
    "naïve café — Größe, 你好世界，こんにちは。 Привет мир! नमस्ते",
    "emoji 😀 👩‍👩‍👧‍👦 🇩🇪 e\u0301 combining, tabs\tand\nnewlines\r\n   spaces",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}",
] * 3
TEXT = "".join(CORPUS[:4]) + "👩‍👩‍👧‍👦🇩🇪🏳️‍🌈 ก็ ﷽ \u200d\ufe0f 𝔘𝔫𝔦"
SPECIALS = ["<s>", "</s>", "<|tool|>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<plain>", "日本", "é"])
    return tokenizer


def sentencepiece(strip: bool = True) -> Tokenizer:
    tokens = [
        *SPECIALS,
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "▁a",
        "▁▁",
        "bc",
        "é",
        "你",
        ".",
        "▁the",
    ]
    tokenizer = Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(tokens)}, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIALS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=[*SPECIALS, "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({w: n for n, w in enumerate(["<unk>", "a", "b", "▁c", "d."])}, unk_token="<unk>"))


def wrap(backend: Tokenizer) -> TextTokenizer:
    return TextTokenizer(
        lambda text, special: backend.encode(text, add_special_tokens=special).ids,
        lambda ids, skip, spaces=True: backend.decode(ids, skip_special_tokens=skip),
        backend, {}, backend.token_to_id, {}, backend.id_to_token,
    )  # fmt: skip


KINDS = {
    "byte_level": (byte_level(), ByteStream),
    "sentencepiece": (sentencepiece(), PieceStream),
    "gemma": (sentencepiece(strip=False), PieceStream),
    "unigram": (unigram(), PieceStream),
    "wordpiece": (wordpiece(), PieceStream),
    "none": (no_decoder(), PieceStream),
}
STREAMS = {name: Streams(wrap(backend)) for name, (backend, _) in KINDS.items()}
