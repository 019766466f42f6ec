"""Bad words as token ids: every way in which the vocabulary spells a word that must not come out.

A tokenizer gives one spelling of a text; a model may write the same text in others: " Paris" as one token, or as " P"
and "aris". So each form of a word is banned as the tokenizer spells it, and in the other spellings, the shortest first,
as far as the limits go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

from ..proto.errors import Refused
from .tokenizer import TextTokenizer

MAX_SPELLINGS = 128
"""Spellings of one form that are banned beside the tokenizer's own."""
MAX_BYTES = 64
"""A longer form is banned in the tokenizer's own spelling alone: its others are too many to matter one by one."""
MAX_LISTED = 16384
"""Spellings of all words of a request together, shared equally among them; each costs a comparison a token drawn."""


class BadWords:
    """What every request's words are looked up in. Thread-safe: its table is built once, by whoever is first."""

    def __init__(self, tokenizer: TextTokenizer, piece: Callable[[int], str | bytes] | None):
        """``piece`` gives the text that a token adds after other text; None where that is slow to find out, and only
        the tokenizer's own spellings are banned then."""
        self._tokenizer, self._piece = tokenizer, piece
        self._ids: dict[bytes, list[int]] | None = None

    def forms(self, words: list[str], vocab_size: int) -> list[list[int]]:
        """Token ids of every spelling of each form of each word, without special tokens.

        A word's forms are the word as written, without the blanks before it, and with one blank before it. One of
        blanks and line breaks alone has one form, as it is. Raises Refused for a word that the tokenizer gives no
        tokens, or a token that the model lacks.
        """
        texts = [_forms(word) for word in words]
        count = sum(len(forms) for forms in texts)
        found: dict[tuple[int, ...], None] = {}
        for word, forms in zip(words, texts, strict=True):
            for text in forms:
                found[self._own(word, text, vocab_size)] = None
                found.update(dict.fromkeys(self._spellings(text, min(MAX_SPELLINGS, MAX_LISTED // count), vocab_size)))
        return [list(form) for form in found]

    def _own(self, word: str, text: str, vocab_size: int) -> tuple[int, ...]:
        """The tokenizer's spelling."""
        try:
            ids = self._tokenizer.encode(text, False)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise Refused(f"bad_words: {word!r:.80} cannot be encoded: {error}"[:300], "bad_words") from error
        if not ids:
            raise Refused(f"bad_words: {word!r:.80} encodes to no tokens.", "bad_words")
        if (highest := max(ids)) >= vocab_size:
            raise Refused(
                f"bad_words: {word!r:.80} has the token id {highest}, which is out of vocabulary (0 to "
                f"{vocab_size - 1}).",
                "bad_words",
            )
        return tuple(ids)

    def _spellings(self, text: str, most: int, vocab_size: int) -> Iterator[tuple[int, ...]]:
        """At most ``most`` sequences of tokens whose texts joined are ``text``, those of few tokens first."""
        data, table = text.encode(), self._table()
        if not table or len(data) > MAX_BYTES:
            return
        steps = [
            [
                (token, end)
                for end in range(len(data), at, -1)
                for token in table.get(data[at:end], ())
                if token < vocab_size
            ]
            for at in range(len(data))
        ]
        reach = _reach(steps)
        spellings = (_walk(steps, 0, count, reach) for count, starts in enumerate(reach) if 0 in starts)
        yield from islice(chain.from_iterable(spellings), most)

    def _table(self) -> dict[bytes, list[int]]:
        """Token ids by the bytes that they add to a text."""
        if self._ids is None:
            ids: dict[bytes, list[int]] = {}
            backend = self._tokenizer.backend
            if self._piece is not None and backend is not None:
                for token in sorted(backend.get_vocab(with_added_tokens=True).values()):
                    piece = self._piece(token)
                    ids.setdefault(piece.encode() if isinstance(piece, str) else piece, []).append(token)
            self._ids = ids
        return self._ids


def _forms(word: str) -> list[str]:
    bare = word.lstrip()
    return list(dict.fromkeys([word, bare, " " + bare])) if bare else [word]


def _reach(steps: list[list[tuple[int, int]]]) -> list[set[int]]:
    """By number of tokens: the places from which so many reach the end exactly."""
    reach = [{len(steps)}]
    for _ in steps:
        reach.append({at for at, tokens in enumerate(steps) if any(end in reach[-1] for _, end in tokens)})
    return reach


def _walk(steps: list[list[tuple[int, int]]], at: int, count: int, reach: list[set[int]]) -> Iterator[tuple[int, ...]]:
    """Every spelling from ``at`` on in exactly ``count`` tokens."""
    if not count:
        yield ()
        return
    for token, end in steps[at]:
        if end in reach[count - 1]:
            for rest in _walk(steps, end, count - 1, reach):
                yield (token, *rest)
