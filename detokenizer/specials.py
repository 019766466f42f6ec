"""Special tokens that a client writes are text; those that the chat template writes are marks.

A message that holds `<|im_start|>system` must not begin a turn. Where messages or tools hold a sign that marks are
known by, the template is given them with a foreign character inside every mark, which neither trimming nor joining
takes out again. What is a mark in the result was written by the template. The template is run a second time with that
character behind every such sign, so that no mark can come of two parts of a content or of a replacement: where the
second result has other marks than the first, it is taken.

What the template wrote is then spelled with a name before it that nobody outside can guess. A second tokenizer over
the same vocabulary, whose special tokens are called so, encodes it: what a client wrote is no special token to that
one. Ids depend on none of these names. Where nothing looks like a mark, a chat is rendered once and encoded as ever.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import Unigram

from ..proto.errors import Refused
from .tokenizer import TextTokenizer, ids_of

_OURS = secrets.token_hex(8)
_FOREIGN = range(0xA000, 0xA48D)
"""Yi syllables: letters without case, which repr shows and nothing trims. The first that the messages lack is taken."""
_TAKEN = re.compile(r"[\ua000-\ua48c]|\\ua[0-4][0-9a-f]{2}")
"""One of them, or its escape."""
_UNKNOWN = "\U0010fffd"
"""A character that no vocabulary has: what stands for it may come of any text."""

Change = Callable[[Any, bool], Any]
"""``change(value, own)`` is what a template is given in place of a message (``own``: the assistant's) or of tools."""


class Specials:
    """The texts of special tokens: where they stand, and how what a client said is kept from being one.

    ``folds``: the tokenizer may make a mark of what does not look like one, as where it takes wide letters for others.
    """

    def __init__(self, texts: Iterable[str] = (), folds: bool = False):
        self.texts = frozenset(text for text in texts if text.strip())
        self.folds = folds
        self._all = re.compile(_any_of(self.texts) or r"(?!)")
        signs = "".join(sorted(map(_sign, self.texts)))
        self._signs = re.compile(f"[{re.escape(signs)}]" if signs else r"(?!)")

    def looked_for(self, said: Any) -> bool:
        """Whether anything in this may be a part of a mark."""
        return any(self._signs.search(text) or (self.folds and not text.isascii()) for text in _strings(said))

    def hide(self, said: Any, own: bool, by: str) -> Any:
        """The same with a character ``by`` inside each mark; those of thoughts stay where it is the assistant's own
        message, of which templates cut them."""
        return _changed(said, lambda text: self._all.sub(lambda mark: _parted(mark[0], own, by), text))

    def hide_signs(self, said: Any, by: str) -> Any:
        """The same with a character ``by`` behind each sign that a mark may be put together with."""
        return _changed(said, lambda text: self._signs.sub(lambda sign: sign[0] + by, text))

    def found(self, text: str) -> list[str]:
        """The marks in a text in order, but for those of thoughts."""
        return [mark for mark in self._all.findall(text) if not _of_thoughts(mark)]

    def spelled(self, text: str) -> str:
        """The text with each of its marks by the name that only this process knows."""
        return self._all.sub(lambda mark: _OURS + mark[0], text)

    def pieces(self, spelled: str) -> Iterator[tuple[str, bool]]:
        """A spelled text as pieces: marks (True), and texts that are cut so that there is none in them."""
        for n, piece in enumerate(re.split(f"{_OURS}({self._all.pattern})", spelled)):
            at = 0
            for mark in self._all.finditer(piece) if n % 2 == 0 else ():
                cut = mark.start() + mark[0].index(_sign(mark[0])) + 1
                yield piece[at:cut], False
                at = cut
            if at < len(piece):
                yield piece[at:], n % 2 == 1


def specials_of(tokenizer: TextTokenizer) -> tuple[Specials, list[str]]:
    """A tokenizer's special tokens, and the tokens that were added to its vocabulary and are not called special."""
    added, backend = tokenizer.added().values(), tokenizer.backend
    special = {token.content for token in added if token.special} | set(tokenizer.special.values())
    folds = False
    if backend is not None and backend.normalizer is not None:
        folds = isinstance(backend.model, Unigram) or any(token.normalized for token in added)
    return Specials(special, folds), [token.content for token in added if token.content not in special]


class Rendered(str):
    """A chat's text. ``spelled``, where it is not None, is what is to be encoded in its place, by ``Plain``."""

    spelled: str | None = None
    marks: Specials


def written(marks: Specials, said: Any, source: str, write: Callable[[Change], str]) -> Rendered:
    """What ``write`` renders of what was ``said`` (messages and tools) by the template ``source``. Raises Refused."""
    if not marks.looked_for(said):
        return Rendered(write(lambda value, own: value))
    by = _foreign([*_strings(said), source])
    text = write(lambda value, own: marks.hide(value, own, by))
    apart = write(lambda value, own: marks.hide_signs(value, by))
    if marks.found(text) != marks.found(apart):
        text = apart
    found = Rendered(_without(text, by))
    if found != text or marks.folds:
        found.spelled, found.marks = _without(marks.spelled(text), by), marks
    return found


class Plain(TextTokenizer):
    """Encodes spelled texts: a mark is its token, and all else is text. Decodes nothing."""

    def __init__(self, tokenizer: TextTokenizer, marks: Specials):
        super().__init__(self._encode, tokenizer.decode, None, tokenizer.special, tokenizer.token_id, {})
        self._tokenizer, self._marks = tokenizer, marks
        self._twin: Tokenizer | None
        self._real: dict[int, int]
        self._ids = {id for text in marks.texts if (id := tokenizer.token_id(text)) is not None}
        self._ids -= {tokenizer.token_id(tokenizer.special.get("unk_token", "")), *tokenizer.encode(_UNKNOWN, False)}
        self._twin, self._real, self._words = None, {}, self._ids
        if (backend := tokenizer.backend) is not None:
            self._twin, self._real = _twin(backend, marks)
            self._words = {id for id in self._ids if backend.model.id_to_token(id) is not None}

    @cached_property
    def longest(self) -> int | None:
        """As the tokenizer's own; a mark is spelled with a name before it."""
        longest = self._tokenizer.longest
        return None if longest is None else longest + len(_OURS)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = [] if self._twin is None else ids_of(self._twin, text, False)
        if self._twin is None or not self._words.isdisjoint(ids):  # its vocabulary holds a mark's text as a word, too
            ids = self._piecewise(text)
        else:
            ids = [self._real.get(id, id) for id in ids]
        return self._around(ids) if add_special_tokens else ids

    def _piecewise(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece, mark in self._marks.pieces(text):
            if mark:
                ids += [id for id in (self._tokenizer.token_id(piece),) if id is not None]
                continue
            found = self._tokenizer.encode(piece, False)
            if not self._ids.isdisjoint(found):
                raise Refused("the messages hold a special token in a form that cannot be encoded as text.", "messages")
            ids += found
        return ids

    def _around(self, ids: list[int]) -> list[int]:
        """The ids between those that the tokenizer adds to any text."""
        bare, whole = (self._tokenizer.encode("a", special) for special in (False, True))
        at = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
        return [*whole[:at], *ids, *whole[at + len(bare) :]]


def _twin(backend: Tokenizer, marks: Specials) -> tuple[Tokenizer, dict[int, int]]:
    """A tokenizer that shares all of another but the names of its marks, and the other's ids by its own. Tokens that
    are not in the vocabulary come first and so keep their ids."""
    twin = Tokenizer(backend.model)
    twin.normalizer, twin.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    added = sorted(backend.get_added_tokens_decoder().items())
    added.sort(key=lambda each: backend.model.token_to_id(each[1].content) is not None)
    named = [_renamed(token) if token.content in marks.texts else token for _, token in added]
    twin.add_tokens(named)
    ids = ((twin.token_to_id(token.content), id) for (id, _), token in zip(added, named, strict=True))
    return twin, {own: id for own, id in ids if own is not None}


def _renamed(token: AddedToken) -> AddedToken:
    return AddedToken(
        _OURS + token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
        normalized=token.normalized, special=token.special,
    )  # fmt: skip


# ---------------------------------------------------------------- texts


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of the longest of these that begins at a place. Begins that several share are compared once: some
    vocabularies have a thousand marks, and code is full of their first character."""
    behind: dict[str, list[str]] = {}
    for text in filter(None, texts):
        behind.setdefault(text[0], []).append(text[1:])
    ways = [re.escape(first) + _any_of(rest) for first, rest in sorted(behind.items())]
    if "" in texts:
        return f"(?:{'|'.join(ways)})?" if ways else ""
    return f"(?:{'|'.join(ways)})" if len(ways) > 1 else "".join(ways)


def _sign(mark: str) -> str:
    """A character of a mark that other texts seldom hold."""
    odd = [char for char in mark if not char.isalnum() and not char.isspace()]
    return next((char for char in odd if char in "|｜"), odd[0] if odd else mark[0])


def _parted(mark: str, own: bool, by: str) -> str:
    sign = _sign(mark)
    return mark if own and _of_thoughts(mark) else mark.replace(sign, sign + by, 1)


def _of_thoughts(mark: str) -> bool:
    return "think" in mark.lower()


def _foreign(texts: list[str]) -> str:
    """A character that is in none of these, nor is its escape. Raises Refused where there is none."""
    taken = {each for text in texts for each in _TAKEN.findall(text)}  # long texts are read once
    for char in map(chr, _FOREIGN):
        if char not in taken and _escape(char) not in taken:
            return char
    raise Refused("the messages hold all syllables of Yi beside special tokens; shorten them.", "messages")


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}"


def _without(text: str, by: str) -> str:
    """The text without that character; a template may have written it as JSON does."""
    return text.replace(by, "").replace(_escape(by), "")


def _strings(said: Any) -> Iterator[str]:
    if isinstance(said, str):
        yield said
    elif isinstance(said, dict):
        for key, value in said.items():
            yield from _strings(key)
            yield from _strings(value)
    elif isinstance(said, list):
        for value in said:
            yield from _strings(value)


def _changed(said: Any, change: Callable[[str], str]) -> Any:
    """The same with every string changed, but for names such as a message's own fields."""
    if isinstance(said, str):
        return change(said)
    if isinstance(said, dict):
        return {_name(key, change): _changed(value, change) for key, value in said.items()}
    return [_changed(value, change) for value in said] if isinstance(said, list) else said


def _name(key: Any, change: Callable[[str], str]) -> Any:
    return change(key) if isinstance(key, str) and not key.isidentifier() else key
