"""What answers carry beside text where it was asked for: logprobs in OpenAI's two forms, prompt logprobs, token ids."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any

from ..client.offline.outputs import to_dict
from ..client.results import TokenLogprobs

FLOOR = -9999.0
"""What stands for a log-probability of minus infinity, which JSON cannot hold."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What one request asks for. Counts are of the most likely tokens beside the token itself; -1 is all there are."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    names_are_ids: bool = False


class ChatLogprobs:
    """``logprobs`` of a chat's choice."""

    def __init__(self, extras: Extras):
        self._extras = extras

    def of(self, tokens: list[TokenLogprobs]) -> dict[str, Any] | None:
        """The object for these tokens; None where none was asked for."""
        if self._extras.logprobs is None:
            return None
        return {"content": [self._token(token) for token in tokens]}

    def _token(self, token: TokenLogprobs) -> dict[str, Any]:
        likeliest = [self._entry(token, place) for place in range(1, _end(token, self._extras.logprobs or 0))]
        return {**self._entry(token, 0), "top_logprobs": likeliest}

    def _entry(self, token: TokenLogprobs, place: int) -> dict[str, Any]:
        data = raw_bytes(token, place)
        return {
            "token": token.texts[place] if token.texts and not self._extras.names_are_ids else _id_name(token, place),
            "logprob": floored(token.values[place]),
            "bytes": None if data is None else list(data),
        }


class CompletionLogprobs:
    """``logprobs`` of a completion's choice, whose tokens are told in order: each begins where the last one ended."""

    def __init__(self, extras: Extras):
        self._extras = extras
        self._at = 0  # characters told so far
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def of(self, tokens: list[TokenLogprobs]) -> dict[str, Any] | None:
        """The object for these tokens; None where none was asked for."""
        if self._extras.logprobs is None:
            return None
        return {
            "text_offset": [self._pass(token) for token in tokens],
            "token_logprobs": [floored(token.values[0]) for token in tokens],
            "tokens": [self._name(token, 0) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def echo(self, text: str, ids: list[int], logprobs: list[TokenLogprobs | None] | None) -> dict[str, Any] | None:
        """The object for the prompt, whose text this is ("" where nobody knows it); its first token has no logprob, as
        nothing comes before it."""
        found = self.of([token for token in logprobs or () if token is not None])
        if found is None:
            return None
        head = max(0, len(text) - self._at)  # what the others leave of the text is the first token's
        self._at = len(text)
        found["text_offset"] = [0, *(head + offset for offset in found["text_offset"])]
        found["token_logprobs"].insert(0, None)
        found["tokens"].insert(0, f"token_id:{ids[0]}" if self._extras.names_are_ids or not text else text[:head])
        found["top_logprobs"].insert(0, None)
        return found

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for place in range(_end(token, self._extras.logprobs or 0)):
            top.setdefault(self._name(token, place), floored(token.values[place]))
        return top

    def _name(self, token: TokenLogprobs, place: int) -> str:
        if self._extras.names_are_ids or not token.texts:
            return _id_name(token, place)
        if (raw := token.raw.get(place)) is not None:  # part of a character: by its bytes, as OpenAI names it
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return token.texts[place]

    def _pass(self, token: TokenLogprobs) -> int:
        """Where this token begins; counts it."""
        at = self._at
        self._at += len(self._decode(raw_bytes(token, 0) or b""))
        return at


def prompt_logprobs(found: list[TokenLogprobs | None] | None, k: int) -> list[dict[int, Any] | None]:
    """vLLM's form: for each token of the prompt its own and the ``k`` most likely, by id; None for the first."""
    return [None if token is None else _ranked(token, k) for token in found or ()]


def _ranked(token: TokenLogprobs, k: int) -> dict[int, Any]:
    entries = to_dict(token, k)
    for entry in entries.values():
        entry.logprob = floored(entry.logprob)
    return entries


def _end(token: TokenLogprobs, k: int) -> int:
    """One past the last entry of the ``k`` most likely."""
    return len(token.ids) if k < 0 else min(k + 1, len(token.ids))


def _id_name(token: TokenLogprobs, place: int) -> str:
    return f"token_id:{token.ids[place]}"


def raw_bytes(token: TokenLogprobs, place: int) -> bytes | None:
    """The bytes of an entry's text; None where nobody knows them."""
    if not token.texts:
        return None
    raw = token.raw.get(place)
    return token.texts[place].encode() if raw is None else raw


def floored(value: float) -> float:
    """A log-probability that JSON can hold."""
    return value if value > FLOOR else FLOOR
