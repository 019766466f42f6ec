"""JSON that is still being written, read as models write it and given as JSON.

What is JSON is given as it stands. What a model writes as Python where JSON is meant is put right on its way: True,
False and None, texts between single quotes, keys and words without quotes, a comma before a bracket that closes, line
breaks within a text, and a backslash that escapes nothing. So arguments are JSON as far as they go.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator

from .literals import python_literal
from .reader import Broken, Ended, Parser, Wait

MAX_DEPTH = 200
"""Brackets within brackets at most."""
MAX_WORD = 400
"""Characters of a number that Python knows and JSON does not, as 0x1f, at most."""

Give = Callable[[str], None]

_BLANKS, _ODD_BLANK = re.compile(r"\s*"), re.compile(r"[^ \t\r\n]")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"""[^'"\\\x00-\x1f]+""")}
_WORD_END = re.compile(r"""[\s,\]}:{\["']""")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_HEX, _LOW = re.compile(r"[0-9a-fA-F]{4}"), re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSES = {"{": "}", "[": "]"}

# What may come next: a value, a key, a colon, or a comma. After an opening bracket and after a comma it may close too.
_VALUE, _ITEM, _KEY, _COLON, _NEXT = range(5)


class ValueReader(Parser):
    """Reads values of JSON."""

    def value(self, give: Give) -> Wait:
        """Give one value, in pieces. Raises Broken where none is there, or where it stops being one."""
        yield from self.blanks()
        open_: list[str] = []
        want, held = _VALUE, ""  # held: a comma, and blanks after it, which go where something follows
        while True:
            char = self.text[self.at]
            if char in "}]":
                if not open_ or open_.pop() != char or want in (_VALUE, _COLON):
                    raise Broken
                self.at += 1
                give(char)
                want, held = _NEXT, ""
            elif want in (_NEXT, _COLON):
                if char != (":" if want == _COLON else ","):
                    raise Broken
                self.at += 1
                if want == _COLON:
                    give(char)
                    want = _VALUE
                else:
                    want, held = _KEY if open_[-1] == "}" else _ITEM, char
            else:
                if held:
                    give(held)
                    held = ""
                if char in _CLOSES and want != _KEY:
                    open_.append(_CLOSES[char])
                    if len(open_) > MAX_DEPTH:
                        raise Broken
                    self.at += 1
                    give(char)
                    want = _KEY if char == "{" else _ITEM
                else:
                    yield from self._string(char, give) if char in _PLAIN else self._word(give, want == _KEY)
                    want = _COLON if want == _KEY else _NEXT
            if not open_ and want == _NEXT:
                return
            held = yield from self._gap(give, held)

    def _gap(self, give: Give, held: str) -> Generator[None, None, str]:
        """Pass on blanks, or keep them behind what is ``held`` and return that; something follows them."""
        while True:
            found = _BLANKS.match(self.text, self.at)
            if found is not None and found.end() > self.at:
                self.at = found.end()
                blanks = _ODD_BLANK.sub(" ", found[0])
                if held:
                    held += blanks
                else:
                    give(blanks)
            if self.at < len(self.text):
                return held
            yield from self.more()

    def _string(self, quote: str, give: Give) -> Wait:
        self.at += 1
        give('"')
        plain = _PLAIN[quote]
        while True:
            if (found := plain.match(self.text, self.at)) is not None:
                self.at = found.end()
                give(found[0])
            if self.at == len(self.text):
                yield from self.more()
                continue
            char = self.text[self.at]
            if char == "\\":
                yield from self._escape(give)
                continue
            self.at += 1
            if char == quote:
                give('"')
                return
            give(json.dumps(char)[1:-1])  # a line break, or a quote of the other kind

    def _escape(self, give: Give) -> Wait:
        """What begins with a backslash; one that escapes nothing is itself."""
        while len(self.text) - self.at < 2:
            yield from self.more()
        char = self.text[self.at + 1]
        size, said = 1, "\\\\"
        if char in '"\\/bfnrt':
            size, said = 2, "\\" + char
        elif char == "'":
            size, said = 2, char
        elif char == "u":
            while len(self.text) - self.at < 6:
                yield from self.more()
            if _HEX.match(self.text, self.at + 2):
                size = yield from self._unit()
                said = self.text[self.at : self.at + size] if size > 0 else "\\ufffd"
                size = abs(size)
        self.at += size
        give(said)

    def _unit(self) -> Generator[None, None, int]:
        """How many characters a unit of UTF-16 takes, with the second of its pair; less than 0 for half of a pair."""
        code = int(self.text[self.at + 2 : self.at + 6], 16)
        if not 0xD800 <= code < 0xE000:
            return 6
        while len(self.text) - self.at < 12 and "\\u".startswith(self.text[self.at + 6 : self.at + 8]):
            yield from self.more()
        return 12 if code < 0xDC00 and _LOW.match(self.text, self.at + 6) else -6

    def _word(self, give: Give, key: bool) -> Wait:
        seen = 0
        while (found := _WORD_END.search(self.text, self.at + seen)) is None:
            seen = len(self.text) - self.at
            yield from self.more()
        word, self.at = self.text[self.at : found.start()], found.start()
        give(_json_of(word, key))


def whole_object(text: str) -> str | None:
    """A text that is one object, as JSON; None where it is none."""
    reader = ValueReader()
    reader.text, reader._last = text, True
    pieces: list[str] = []
    try:
        for _ in reader.value(pieces.append):
            pass
    except (Broken, Ended):
        return None
    return "".join(pieces) if pieces[:1] == ["{"] and not text[reader.at :].strip() else None


def _json_of(word: str, key: bool) -> str:
    """A word that is no text: a number, or one that JSON or Python knows. Any other is a text; as a key a number is one
    too. Raises Broken."""
    said = _WORDS.get(word)
    if said is None and _NUMBER.fullmatch(word):
        said = word if math.isfinite(float(word)) else None
    elif said is None and not _NAME.fullmatch(word.lstrip("+-")):
        said = _python_number(word)
    if said is None or (key and word in _WORDS):
        return json.dumps(word, ensure_ascii=False)
    return json.dumps(said) if key else said


def _python_number(word: str) -> str:
    """A number as Python writes it. Raises Broken."""
    if len(word) > MAX_WORD:
        raise Broken
    try:
        number = python_literal(word)
        if type(number) not in (int, float):
            raise Broken
        return json.dumps(number, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise Broken from None
