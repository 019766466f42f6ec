"""Token ids to text, one token at a time, at a cost that does not depend on what came before.

Three kinds of stream, chosen once for a tokenizer and checked against its whole decode before they are trusted:

- ``ByteStream``: byte-level BPE. A token is bytes; whole characters go out, the rest (3 bytes at most) waits.
- ``PieceStream``: decoders that turn tokens into text one by one (SentencePiece-like, WordPiece, Metaspace). A run of
  byte-fallback tokens is text or replacement characters as a whole, so it waits for its end.
- ``WindowStream``: any other decoder: decode a short window twice and take the difference.

All tokens of a stream joined with its ``finish()`` are exactly what decoding all ids at once gives.
"""

from __future__ import annotations

import json
import logging
import random
import re
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol

from tokenizers import Tokenizer

from ..proto.checkpoint.tokenizers_tiktoken import ALPHABET
from .tokenizer import TextTokenizer

log = logging.getLogger(__name__)

MAX_RUN = 48
"""Byte-fallback tokens held at most; a longer run goes out character by character as it comes."""

MAX_WINDOW = 64
"""Tokens a WindowStream holds at most while its text ends in an incomplete character."""

_CONTEXT = 6
_PIECEWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Stream(Protocol):
    """One sequence being decoded."""

    def push(self, token: int) -> str:
        """New whole characters that this token completes; "" where it completes none."""

    def finish(self) -> str:
        """What was held back, as decoding everything at once would show it."""

    def copy(self) -> Stream:
        """An independent stream at the same place."""


class Streams:
    """Makes streams for one tokenizer; tables of pieces are shared and filled as ids are met."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self.piece: Callable[[int], str | bytes] = self._piece_by_window
        self._open: dict[bool, _Opener] = {s: self._choose(s) for s in (True, False)}
        self._anchor: list[int] | None = None

    @property
    def quick_piece(self) -> Callable[[int], str | bytes] | None:
        """``piece`` where it is a look-up, None where each id costs a decode."""
        return None if self.piece == self._piece_by_window else self.piece

    def open(self, context: Sequence[int], skip_special_tokens: bool, spaces: bool = True) -> Stream:
        """A stream for what follows the prompt ``context`` (a word after a prompt keeps its leading space).

        ``spaces`` is vLLM's spaces_between_special_tokens. Where special tokens are shown and it is False, decoders
        that put spaces between tokens put none between one added token and the next, and slow tokenizers none
        around added tokens. To the other decoders it means nothing.
        """
        return self._open[skip_special_tokens](context, spaces)

    def _choose(self, skip: bool) -> _Opener:
        """How to open streams. ``piece`` becomes the text, or the bytes, that a token adds after other text."""
        backend = self._tokenizer.backend

        def window(context: Sequence[int], spaces: bool) -> Stream:
            return WindowStream(lambda ids: self._tokenizer.decode(ids, skip, spaces), context)

        if backend is None:
            return window
        kinds = _decoder_kinds(backend)
        made: _Opener
        piece: Callable[[int], str | bytes]
        if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
            table = BytePieces(backend, skip)
            piece = table.__getitem__

            def made(context: Sequence[int], spaces: bool) -> Stream:
                return ByteStream(table)
        elif kinds <= _PIECEWISE:
            pieces = Pieces(backend, skip)
            piece = pieces.whole

            def made(context: Sequence[int], spaces: bool) -> Stream:
                return PieceStream(pieces, context, pieces.added if not (spaces or skip) else None)
        else:
            return window
        if _agrees(backend, made, skip):
            if not skip:
                self.piece = piece
            return made
        log.warning("the tokenizer's decoder %s is not what its parts suggest; decoding by window", sorted(kinds))
        return window

    def _piece_by_window(self, token: int) -> str | bytes:
        """The text of a token by decoding it after another; its bytes where that is known and no whole character."""

        def decode(ids: list[int]) -> str:
            return self._tokenizer.decode(ids, False, False)

        if self._anchor is None:
            words = (i for i in range(4096) if (text := decode([i])).isascii() and text.isalpha())
            self._anchor = [*islice(words, 1)]
        before, after = decode(self._anchor), decode([*self._anchor, token])
        text = after[len(before) :] if after.startswith(before) else decode([token])
        if text and "�" not in text:
            return text
        return _bytes_of(self._tokenizer.piece(token)) or text


class _Opener(Protocol):
    """Opens a stream after a prompt; Streams.open says what ``spaces`` is."""

    def __call__(self, context: Sequence[int], spaces: bool) -> Stream: ...


def _decoder_kinds(backend: Tokenizer) -> set[str]:
    """Types of the decoder and its parts; empty where tokens are joined with spaces."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in state["decoders"]} if state["type"] == "Sequence" else {state["type"]}


def _agrees(backend: Tokenizer, made: _Opener, skip: bool) -> bool:
    """Compare streams of random ids with the whole decode."""
    draw = random.Random(0)
    size = backend.get_vocab_size(with_added_tokens=True)
    for length in range(1, 25) if size else ():
        ids = [draw.randrange(size) for _ in range(length)]
        stream = made((), True)
        if "".join([*map(stream.push, ids), stream.finish()]) != backend.decode(ids, skip_special_tokens=skip):
            return False
    return True


class _Table(dict[int, Any]):
    """Id -> piece, found once. Ids that are skipped or out of the vocabulary give ``nothing``."""

    nothing: Any = ""

    def __init__(self, backend: Tokenizer, skip: bool):
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._skipped = {i for i, token in added.items() if token.special} if skip else set()

    def __missing__(self, token: int) -> Any:
        text = self._backend.id_to_token(token) if token >= 0 and token not in self._skipped else None
        piece = self.nothing if text is None else self.make(text)
        self[token] = piece
        return piece

    def make(self, text: str) -> Any:
        raise NotImplementedError


# ---------------------------------------------------------------- byte-level BPE


_ALPHABET = {character: byte for byte, character in ALPHABET.items()}


def _bytes_of(piece: str | None) -> bytes | None:
    """The bytes that a token's own name stands for, where they are no whole characters."""
    if piece is None:
        return None
    raw = b""
    if _BYTE_TOKEN.fullmatch(piece):
        raw = bytes.fromhex(piece[3:5])
    elif all(c in _ALPHABET for c in piece):
        raw = bytes([_ALPHABET[c] for c in piece])
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw
    return None


class BytePieces(_Table):
    """Id -> its text where that is whole characters, else its bytes."""

    def make(self, text: str) -> str | bytes:
        try:
            raw = bytes([_ALPHABET[c] for c in text])
        except KeyError:  # an added token, which is plain text
            return text
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return raw


class ByteStream:
    """Bytes to characters; incomplete ones wait."""

    __slots__ = ("_pending", "_table")

    def __init__(self, table: BytePieces):
        self._table = table
        self._pending = b""

    def copy(self) -> ByteStream:
        other = ByteStream(self._table)
        other._pending = self._pending
        return other

    def push(self, token: int) -> str:
        piece = self._table[token]
        if type(piece) is str:
            if not self._pending or not piece:
                return piece
            piece = piece.encode()
        data = self._pending + piece
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text


# ---------------------------------------------------------------- piece by piece


class _Joined:
    """The decoder of a tokenizer that has none."""

    @staticmethod
    def decode(tokens: list[str]) -> str:
        return " ".join(tokens)


class Pieces(_Table):
    """Id -> the text it adds after other tokens; a byte-fallback token gives an ``_Byte``; a skipped one None."""

    nothing = None

    def __init__(self, backend: Tokenizer, skip: bool):
        super().__init__(backend, skip)
        self._decoder: Any = backend.decoder if backend.decoder is not None else _Joined
        self._fallback = "ByteFallback" in _decoder_kinds(backend)
        self._anchor = len(self._decoder.decode(["a"]))
        self.added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}

    def make(self, text: str) -> str | _Byte:
        if self._fallback and _BYTE_TOKEN.fullmatch(text):
            return _Byte(text)
        return self.after([text])

    def whole(self, token: int) -> str | bytes:
        """Text that a token adds to other text; the byte it stands for where that is no character."""
        piece = self[token]
        if type(piece) is not _Byte:
            return piece or ""
        byte = int(piece[3:5], 16)
        return chr(byte) if byte < 128 else bytes([byte])

    def after(self, tokens: list[str]) -> str:
        """Text that tokens add to other text."""
        return self._decoder.decode(["a", *tokens])[self._anchor :]

    def first(self, token: int) -> str:
        """Text of a token that nothing precedes."""
        return self.first_of([self._backend.id_to_token(token) or ""])

    def first_of(self, tokens: list[str]) -> str:
        """Text of tokens that nothing precedes."""
        return self._decoder.decode(tokens)


class _Byte(str):
    """A byte-fallback token such as <0xE4>."""

    __slots__ = ()


class PieceStream:
    """Texts of tokens, one after another; a run of byte tokens waits for its end."""

    __slots__ = ("_after_added", "_first", "_loose", "_pieces", "_run", "_tight")

    def __init__(self, pieces: Pieces, context: Sequence[int], tight: dict[int, str] | None = None):
        """``tight``: added tokens by id, which follow each other with nothing between them."""
        self._pieces = pieces
        self._tight = tight
        self._after_added = False
        self._run: list[str] = []
        self._loose = False  # the run grew too long and its characters go out as they come
        self._first = all(pieces[token] is None for token in context[-64:])

    def copy(self) -> PieceStream:
        other = PieceStream(self._pieces, (), self._tight)
        other._after_added, other._first = self._after_added, self._first
        other._run, other._loose = self._run.copy(), self._loose
        return other

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if piece is None:
            return ""
        if self._tight is not None:
            added = token in self._tight
            if added and self._after_added:
                return self._tight[token]
            self._after_added = added
        if type(piece) is _Byte:
            self._run.append(piece)
            return self._overlong() if len(self._run) >= MAX_RUN or self._loose else ""
        before = self._close() if self._run or self._loose else ""
        if self._first:
            piece, self._first = self._pieces.first(token), False
        return before + piece

    def finish(self) -> str:
        return self._close() if self._run else ""

    def _close(self) -> str:
        run, self._run = self._run, []
        loose, self._loose = self._loose, False
        if loose:
            return bytes(int(token[3:5], 16) for token in run).decode("utf-8", "replace")
        if self._first:
            self._first = False
            return self._pieces.first_of(run)
        return self._pieces.after(run)

    def _overlong(self) -> str:
        data = bytes(int(token[3:5], 16) for token in self._run)
        text, used = utf_8_decode(data, "replace", False)
        self._run, self._loose = self._run[used:], True
        if self._first:
            self._first = False
            return text.removeprefix(" ") if self._pieces.first_of(["<0x20>", "a"]) == "a" else text
        return text


# ---------------------------------------------------------------- any decoder


class WindowStream:
    """Decodes the ids since the last but one output, and since the last: what the first has more is new."""

    __slots__ = ("_decode", "_ids", "_read")

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]):
        self._decode = decode
        self._ids = [*context[-_CONTEXT:]]
        self._read = len(self._ids)  # ids whose text has gone out

    def copy(self) -> WindowStream:
        other = WindowStream(self._decode, ())
        other._ids, other._read = self._ids.copy(), self._read
        return other

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._emit(len(self._ids) - self._read >= MAX_WINDOW)

    def finish(self) -> str:
        return self._emit(True)

    def _emit(self, anyway: bool) -> str:
        old = self._decode(self._ids[: self._read])
        new = self._decode(self._ids)
        if len(new) <= len(old) or (new.endswith("�") and not anyway):
            return ""
        self._ids = self._ids[max(0, min(self._read, len(self._ids) - _CONTEXT)) :]
        self._read = len(self._ids)
        return new[len(old) :]
