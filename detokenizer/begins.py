"""A prompt's first token that was written by hand, where the tokenizer puts it before every prompt anyway."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .tokenizer import TextTokenizer

log = logging.getLogger(__name__)

AGAIN_S = 60.0
"""Seconds until the same warning is given again."""


class Begins:
    """What begins the prompts of one tokenizer, or of none. ``clock`` gives seconds."""

    def __init__(self, tokenizer: TextTokenizer | None, clock: Callable[[], float] = time.monotonic):
        self._tokenizer, self._clock = tokenizer, clock
        self._name = "" if tokenizer is None else tokenizer.special.get("bos_token", "")
        self._told: float | None = None

    def once(self, text: str, special: bool) -> str:
        """The text of a raw prompt without the first token that it writes, where ``special`` tokens are added around
        it and that one is among them: models have never seen it twice, and answer worse."""
        tokenizer = self._tokenizer
        if not (special and self._name and text.startswith(self._name)) or tokenizer is None or not tokenizer.begin:
            return text
        now = self._clock()
        if self._told is None or now - self._told >= AGAIN_S:
            self._told = now
            log.warning(
                "a prompt begins with %s, which is put before every prompt, and is taken to have it once; leave it "
                "out, or send add_special_tokens: false.", self._name,
            )  # fmt: skip
        return text[len(self._name) :]
