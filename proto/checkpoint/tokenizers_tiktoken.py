"""A tiktoken vocabulary (one base64 token and its rank a line) as a `tokenizers.Tokenizer`, without tiktoken."""

from __future__ import annotations

import base64
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..config import ConfigError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = _WORDS % ""
"""Words of Qwen: each digit by itself."""
TRIPLES = _WORDS % "{1,3}"
"""Words of cl100k and GLM-4: up to three digits together."""


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes of every token -> its rank, which is its id. Raises ConfigError that names the line at fault."""
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number}, is no token and its rank: {error}; download it again."
            ) from error
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ConfigError(f"{path} has no token for byte {missing[0]}; it is not whole, download it again.")
    if len(set(ranks.values())) != len(ranks):
        raise ConfigError(f"{path} gives one rank to two tokens; download it again.")
    return ranks


def build(ranks: dict[bytes, int], added: dict[int, str], words: str, compose: bool = False) -> Tokenizer:
    """Byte-level BPE by rank within ``words`` (a regular expression), with added tokens by id.

    ``compose``: texts are brought to Unicode's NFC first. Nothing is put around a prompt.
    """
    shown = {token: "".join(map(ALPHABET.__getitem__, token)) for token in ranks}
    vocab = {shown[token]: rank for token, rank in ranks.items()} | {text: i for i, text in added.items()}
    merges = [
        (shown[token[:cut]], shown[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    if compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _alphabet() -> dict[int, str]:
    """Byte -> its character in a byte-level vocabulary: printable Latin-1 is itself, the rest follow 255 in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


ALPHABET = _alphabet()
