"""Small vocabulary files of the kinds that old repositories ship, and plain encoders that say what they mean."""

from __future__ import annotations

import base64
import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex
from text_tokenizers import CORPUS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
Piece = tuple[str, float, int]


# ---------------------------------------------------------------- SentencePiece


def make_pieces(
    symbols: list[str] | None = None, control: list[str] | None = None, byte_tokens: bool = True
) -> list[Piece]:
    """A BPE vocabulary as sentencepiece lays it out: special pieces, bytes, merged pieces, characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    text = ["▁" + line.replace(" ", "▁") for line in CORPUS]
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=220, show_progress=False, special_tokens=[]))
    vocab = {piece: n for piece, n in tokenizer.get_vocab().items() if not set(piece) & set("😀🇩🇪嘿")}  # unknown
    merged = sorted((piece for piece in vocab if len(piece) > 1), key=vocab.__getitem__)
    letters = sorted(piece for piece in vocab if len(piece) == 1)
    pieces: list[Piece] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(each, 0.0, CONTROL) for each in control or []]
    pieces += [(each, 0.0, USER_DEFINED) for each in symbols or []]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256) if byte_tokens]
    return pieces + [(piece, -float(n), NORMAL) for n, piece in enumerate([*merged, *letters])]


def model_bytes(
    pieces: list[Piece], *, prefix: bool = True, tidy: bool = False, kind: int = 2, **trainer: int
) -> bytes:
    """The protobuf of a model. ``prefix``: a text gets a blank in front; ``tidy``: blanks are trimmed and joined."""
    trained = {3: kind, 35: int(any(p[2] == BYTE for p in pieces)), 40: 0, 41: 1, 42: 2, 43: -1}
    body = b"".join(
        _field(
            1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + (_field(3, k) if k != NORMAL else b"")
        )
        for text, score, k in pieces
    )
    body += _field(2, b"".join(_field(number, value) for number, value in trained.items()))
    return body + _field(3, _field(1, b"identity") + _field(3, int(prefix)) + _field(4, int(tidy)))


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value & (1 << 64) - 1)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def encode_pieces(pieces: list[Piece], text: str, prefix: bool = True) -> list[int]:
    """Sentencepiece's BPE, step by step: symbols first, then always the best pair, the leftmost of equal ones."""
    if not text:
        return []
    text = ("▁" if prefix else "") + text.replace(" ", "▁")
    ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    best = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    symbols = sorted((piece for piece, _, kind in pieces if kind == USER_DEFINED), key=len, reverse=True)
    parts: list[tuple[str, bool]] = []
    while text:
        symbol = next((s for s in symbols if text.startswith(s)), "")
        parts.append((symbol or text[0], bool(symbol)))
        text = text[len(symbol) or 1 :]
    while True:
        pairs = [
            (best[a + b], -n)
            for n, ((a, fixed), (b, also)) in enumerate(pairwise(parts))
            if not fixed and not also and a + b in best
        ]
        if not pairs:
            break
        n = -max(pairs)[1]
        parts[n : n + 2] = [(parts[n][0] + parts[n + 1][0], False)]
    out: list[int] = []
    for part, fixed in parts:
        if fixed or part in best:
            out.append(ids[part])
        elif "<0x00>" in ids:
            out += [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        elif not out or out[-1] != ids["<unk>"]:
            out.append(ids["<unk>"])
    return out


# ---------------------------------------------------------------- tiktoken


def make_ranks(size: int = 420) -> dict[bytes, int]:
    """Bytes of tokens -> rank, from merges learned on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[])
    tokenizer.train_from_iterator(CORPUS, trainer)
    shown = {chr(b): b for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    shown |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in {*shown.values()})}
    tokens = [bytes([byte]) for byte in range(256)]
    vocab = tokenizer.get_vocab()
    tokens += [bytes(map(shown.__getitem__, t)) for t in sorted(vocab, key=vocab.__getitem__) if len(t) > 1]
    return {token: rank for rank, token in enumerate(tokens)}


def ranks_bytes(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items())


def encode_ranks(ranks: dict[bytes, int], words: str, text: str) -> list[int]:
    """Tiktoken's BPE: in each word always the pair whose joined bytes rank lowest, the leftmost of equal ones."""
    out: list[int] = []
    for word in regex.findall(words, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            joined = [a + b for a, b in pairwise(parts)]
            n = min(range(len(joined)), key=lambda n: ranks.get(joined[n], 1 << 30), default=0)
            if not joined or joined[n] not in ranks:
                break
            parts[n : n + 2] = [parts[n] + parts[n + 1]]
        out += [ranks[part] for part in parts]
    return out


def write(folder: Path, files: dict[str, Any]) -> Path:
    """A model's folder with these files: bytes as they are, the rest as JSON."""
    for name, value in files.items():
        (folder / name).write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return folder
