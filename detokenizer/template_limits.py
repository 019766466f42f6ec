"""What a chat template may use up, and the forms in which it is given a message's content. See ``sandbox.py``."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from ..proto.errors import Refused

MAX_RENDERED = 16 * 2**20
"""Characters a rendered chat may have, and characters or items that one operation may make."""
MAX_MADE = 64
"""Times MAX_RENDERED: what all operations of one rendering may make together."""
MAX_SECONDS = 5.0
"""Processor time one rendering may take."""

SIZED = (str, list, tuple, dict, bytes)
_LONG_NUMBER = re.compile(r"\d{6}|\*")


class WrongForm(TypeError):
    """Message ``n``'s content was used as a text and is a list of parts, or the other way round."""

    def __init__(self, n: int):
        super().__init__(f"messages[{n}].content is in the other form")
        self.n = n


class Text(str):
    """A message's content as a text: whoever walks over it wants parts."""

    n: int

    def __iter__(self) -> Any:
        raise WrongForm(self.n)


class Parts(list[Any]):
    """A message's content as a list of parts: whoever shows it, or adds to it, wants a text."""

    n: int

    def _is_no_text(self, *_: Any) -> Any:
        raise WrongForm(self.n)

    __str__ = __repr__ = __format__ = _is_no_text
    __add__ = __radd__ = _is_no_text

    def __contains__(self, item: Any) -> bool:
        return self._is_no_text() if isinstance(item, str) else super().__contains__(item)


class _Use(threading.local):
    """What the rendering in this thread has used up."""

    until: float | None = None
    calls: int = 0
    made: int = 0

    def __init__(self) -> None:
        self.weights: dict[int, tuple[int, Any]] = {}  # by id, with what keeps that id taken


_use = _Use()


class Limits:
    """``with Limits():`` around a rendering."""

    def __enter__(self) -> None:
        _use.until, _use.made = time.thread_time() + MAX_SECONDS, 0

    def __exit__(self, *_: object) -> None:
        _use.until = None
        _use.weights.clear()


def tick() -> None:
    """Called by everything a template does; ends one that runs too long."""
    _use.calls += 1
    if _use.calls & 63 == 0 and _use.until is not None and time.thread_time() > _use.until:
        raise Refused(f"the chat template took longer than {MAX_SECONDS:g} s; shorten the messages.", "messages")


def made(result: Any) -> Any:
    """Count what an operation has made."""
    if isinstance(result, SIZED):
        _use.made += len(result)
        if _weight(result) > MAX_RENDERED or _use.made > MAX_MADE * MAX_RENDERED:
            raise too_large()
    return result


def _weight(value: Any) -> int:
    """What showing or comparing it walks over: a list that holds another twice weighs twice as much, though it takes no
    more memory. Nothing in a template changes a container, so each is weighed once."""
    if isinstance(value, str | bytes) or not isinstance(value, SIZED):
        return len(value) if isinstance(value, str | bytes) else 1
    if id(value) not in _use.weights:
        items = [*value, *value.values()] if isinstance(value, dict) else value
        _use.weights[id(value)] = 1 + sum(map(_weight, items)), value
    return _use.weights[id(value)][0]


def concat(texts: Any) -> str:
    """The texts in one, which are counted before."""
    listed = list(texts)
    if sum(map(len, listed)) > MAX_RENDERED:
        raise too_large()
    return made("".join(listed))


def too_large() -> Refused:
    text = f"the chat template makes texts of more than {MAX_RENDERED} characters; shorten the messages."
    return Refused(text, "messages")


def check_sizes(values: list[Any]) -> None:
    """Before a call: no operation makes more than its numbers times its texts."""
    sizes = sum(len(value) for value in values if isinstance(value, SIZED))
    most = max((abs(value) for value in values if isinstance(value, int)), default=0)
    if most * max(1, sizes) > MAX_MADE * MAX_RENDERED:
        raise too_large()


def check_replaced(text: Any = "", old: Any = "", new: Any = "") -> None:
    if isinstance(text, str) and len(text) + text.count(str(old)) * len(str(new)) > MAX_RENDERED:
        raise too_large()


def check_joined(items: Any, between: Any) -> list[Any]:
    listed = list(items)
    size = len(listed) * len(str(between)) + sum(len(item) for item in listed if isinstance(item, SIZED))
    if size > MAX_RENDERED:
        raise too_large()
    return listed


def check_format(form: Any) -> None:
    """A width stands in the format itself, or is asked for by a star."""
    if isinstance(form, str) and _LONG_NUMBER.search(form):
        raise too_large()
