"""A SentencePiece model file (tokenizer.model) as a `tokenizers.Tokenizer`, without the sentencepiece library.

The file is a small protobuf, read here field by field. What the result does equals sentencepiece's own encoding:
its normalisation, its merges in order of score, bytes for unknown characters, and user-defined symbols as units that
nothing merges with and that take no space of their own before what follows.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..config import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_BPE = 2
_SPACE = "▁"


@dataclass
class Pieces:
    """What a model file says. ``pieces[id]`` is (text, score, kind); ids of named tokens are -1 where there is none."""

    pieces: list[tuple[str, float, int]]
    model_type: int = 1
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    suffix: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    def named(self) -> dict[str, str]:
        """The texts of the tokens that tokenizer_config.json may leave out."""
        ids = {"unk_token": self.unk_id, "bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        return {name: self.pieces[i][0] for name, i in ids.items() if 0 <= i < len(self.pieces)}


_TRAINER = {3: "model_type", 24: "suffix", 35: "byte_fallback", 40: "unk_id", 41: "bos_id", 42: "eos_id", 43: "pad_id"}
_NORMALIZER = {2: "charsmap", 3: "add_dummy_prefix", 4: "remove_extra_whitespaces"}


def read_pieces(path: Path) -> Pieces:
    """Read a model file. Raises ConfigError that names it where it is something else."""
    model = Pieces([])
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                model.pieces.append(_piece(value))
            elif number in (2, 3):
                names = _TRAINER if number == 2 else _NORMALIZER
                for field, setting in _fields(value):
                    if name := names.get(field):
                        setattr(model, name, type(getattr(model, name))(setting))  # a flag is a number in the file
    except (OSError, ValueError, IndexError, TypeError, struct.error) as error:
        raise ConfigError(f"{path} cannot be read as a SentencePiece model: {error}; download it again.") from error
    if len({text for text, _, _ in model.pieces}) != len(model.pieces) or not 0 <= model.unk_id < len(model.pieces):
        raise ConfigError(f"{path} is no whole SentencePiece model; download it again.")
    if model.model_type != _BPE or model.suffix:
        raise ConfigError(
            f"{path} is no BPE model that marks where words start, which alone is read; add a tokenizer.json."
        )
    return model


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = value.decode()
        elif number == 2:
            (score,) = struct.unpack("<f", value)
        elif number == 3:
            kind = value
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a protobuf message: numbers (signed 64 bits) or bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            number, at = _varint(data, at)
            yield key >> 3, number - (1 << 64) if number >> 63 else number
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"no field starts at byte {at}")
        if at + size > end:
            raise ValueError("the file is cut short")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    while byte >= 128:
        at += 1
        byte = data[at]
        value |= (byte & 127) << shift
        shift += 7
        if shift > 70:
            raise ValueError(f"no number ends at byte {at}")
    return value, at + 1


# ---------------------------------------------------------------- the tokenizer


def build(model: Pieces, added: dict[int, str], first_only: bool = False) -> Tokenizer:
    """The tokenizer of a model file with added tokens by id, which may rename pieces. Nothing is put around a prompt.

    Where the model gives a text a space in front, each part between added tokens gets one; with ``first_only`` the
    start of the whole text alone.
    """
    tokens = {i: text for i, (text, _, _) in enumerate(model.pieces)} | added
    vocab = {text: i for i, text in tokens.items()}
    symbols = [t for i, (t, _, kind) in enumerate(model.pieces) if kind == USER_DEFINED and i not in added and t]
    splits: list[Any] = []
    if first_only:
        scheme = "first" if model.add_dummy_prefix else "never"
        splits.append(pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False))
    if symbols:
        # Each a word of its own, found in the vocabulary as it is; text that looks like a byte token must not be.
        longest_first = sorted(symbols, key=len, reverse=True)
        splits += [
            pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated"),
            pre_tokenizers.Split(Regex(r"\A<(?=0x[0-9A-F]{2}>\z)"), "isolated"),
        ]
    algorithm = models.BPE(
        vocab, _merges(model, added), unk_token=tokens[model.unk_id], fuse_unk=True, byte_fallback=model.byte_fallback,
        ignore_merges=bool(symbols),
    )  # fmt: skip
    tokenizer = Tokenizer(algorithm)
    steps = _normalizers(model, first_only)
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    control = [t for i, (t, _, kind) in enumerate(model.pieces) if kind == CONTROL and i not in added]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    return tokenizer


def _normalizers(model: Pieces, first_only: bool) -> list[Any]:
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if not first_only:
        if model.add_dummy_prefix:
            steps.append(normalizers.Prepend(_SPACE))
        steps.append(normalizers.Replace(" ", _SPACE))
    return steps


def _merges(model: Pieces, added: dict[int, str]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best piece first, as sentencepiece chooses."""
    normal = {
        text: score for i, (text, score, kind) in enumerate(model.pieces) if kind in (NORMAL, UNUSED) and i not in added
    }
    found = []
    for text in sorted(normal, key=normal.__getitem__, reverse=True):  # stable: equal scores go by id
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                found.append((left, right))
    return found
