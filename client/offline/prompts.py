"""Every form of prompt that LLM takes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, NotRequired, TypedDict, TypeVar

from ..sendable import priority_of, unsendable

Params = TypeVar("Params")


class TextPrompt(TypedDict):
    """A prompt as text; a plain dict does as well. Cached blocks are shared only where ``cache_salt`` is the same."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. ``prompt``: its text, which the output then repeats."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Input:
    """One prompt: text, ids (which are run where both are given), or chat messages with their template options.

    ``pair`` is the second text of a pair whose first is ``text``.
    ``special``: special tokens are added to the text, as they are not to one that a template has rendered.
    ``salt``: cached blocks are shared only with prompts of the same.
    """

    text: str | None = None
    ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] | None = None
    special: bool = True
    pair: str | None = None
    salt: str = ""

    def asked(self) -> dict[str, Any]:
        """The same as arguments of ``Engine.submit``, or of ``Engine.pool``, which alone takes pairs."""
        fields: dict[str, Any] = {
            "prompt": self.text if self.ids is None else None, "ids": self.ids, "messages": self.messages,
            "template": self.template, "add_special_tokens": self.special,
        }  # fmt: skip
        if self.pair is not None:
            fields["pair"] = self.pair
        if self.salt:
            fields["cache_salt"] = self.salt
        return fields


def parse_prompts(prompts: Any, prompt_token_ids: Any, tokenization: Any = None) -> list[Input]:
    """Prompts in any of vLLM's forms. ``tokenization``: its tokenization_kwargs. Raises ValueError or TypeError."""
    inputs = _parse_prompts(prompts, prompt_token_ids)
    return inputs if _special(tokenization) else [replace(each, special=False) for each in inputs]


def _special(tokenization: Any) -> bool:
    """Whether texts get special tokens."""
    if not isinstance(tokenization, dict | NoneType):
        raise TypeError(f"tokenization_kwargs must be a dict, got {type(tokenization).__name__}.")
    options = {"add_special_tokens": True, **(tokenization or {})}
    special = options.pop("add_special_tokens")
    if options:
        raise ValueError(
            f"tokenization_kwargs has {next(iter(options))!r}; it may have add_special_tokens, and parameters have "
            "truncate_prompt_tokens."
        )
    if not isinstance(special, bool):
        raise TypeError(f"add_special_tokens must be true or false, got {special!r}.")
    return special


def _parse_prompts(prompts: Any, prompt_token_ids: Any) -> list[Input]:
    if prompts is None and prompt_token_ids is None:
        raise ValueError("Either prompts or prompt_token_ids must be provided.")
    if prompt_token_ids is None:
        return [_one(prompt) for prompt in ([prompts] if _single(prompts) else _listed(prompts, "prompts"))]
    ids = [prompt_token_ids] if _is_ids(prompt_token_ids) else _listed(prompt_token_ids, "prompt_token_ids")
    if prompts is None:
        return [Input(ids=_ids(each)) for each in ids]
    texts = [prompts] if isinstance(prompts, str) else _listed(prompts, "prompts")
    if len(texts) != len(ids):
        raise ValueError("The lengths of prompts and prompt_token_ids must be the same.")
    return [Input(text=_text(text), ids=_ids(each)) for text, each in zip(texts, ids, strict=True)]


def parse_params(params: Any, count: int, kind: type[Params], name: str) -> list[Params]:
    """One ``kind`` for each prompt, of the argument ``name``. Raises ValueError or TypeError."""
    if isinstance(params, kind):
        return [params] * count
    must = f"{name} must be {kind.__name__} or a list of them"
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise TypeError(f"{must}, got {type(params).__name__}.")
    if len(params) != count:
        raise ValueError("The lengths of prompts and params must be the same.")
    for each in params:
        if not isinstance(each, kind):
            raise TypeError(f"{must}, got one {type(each).__name__}.")
    return list(params)


def parse_priority(priority: Any, count: int) -> list[int]:
    """One priority for each prompt. Raises ValueError or TypeError."""
    if priority is None or _integer(priority):
        return [priority_of(priority or 0)] * count
    if not isinstance(priority, Sequence) or isinstance(priority, str | bytes):
        raise TypeError(f"priority must be an integer or a list of them, got {type(priority).__name__}.")
    if len(priority) != count:
        raise ValueError("The lengths of prompts and priority must be the same.")
    return [priority_of(each) for each in priority]


def parse_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation (a list of messages) or a list of them. Raises ValueError."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a conversation (a list of messages) or a list of conversations.")
    single = isinstance(messages[0], dict)
    conversations = [messages] if single else messages
    for number, conversation in enumerate(conversations):
        if not isinstance(conversation, list) or not all(isinstance(each, dict) for each in conversation):
            raise ValueError('each message must be a dict such as {"role": "user", "content": "..."}.')
        if not conversation:
            raise ValueError("a conversation must have at least one message.")
        for place, message in enumerate(conversation):
            if (why := unsendable(message, dict[str, Any])) is not None:
                where = f"messages[{place}]" if single else f"messages[{number}][{place}]"
                raise ValueError(f"{where} must hold what JSON can: {why}.")
    return conversations


def check_template(template: dict[str, Any]) -> None:
    """Refuse tools and template arguments that could not be sent. Raises ValueError."""
    for name, value in template.items():
        if (why := unsendable(value, Any)) is not None:
            raise ValueError(f"{name} must hold what JSON can: {why}.")


def _single(prompts: Any) -> bool:
    return isinstance(prompts, str | dict) or _is_ids(prompts)


def _is_ids(value: Any) -> bool:
    """A list of integers, and not an empty one: that is a list of no prompts."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > 0 and _integer(value[0])


def _integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:  # an array has __index__ too
        return False
    return not isinstance(value, bool)


def _listed(value: Any, name: str) -> list[Any]:
    if isinstance(value, str | bytes | dict) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a prompt or a list of prompts, got {type(value).__name__}.")
    return list(value)


def _one(prompt: Any) -> Input:
    if isinstance(prompt, str):
        return Input(text=_text(prompt))
    if isinstance(prompt, dict):
        return _from_dict(prompt)
    return Input(ids=_ids(prompt))


def _from_dict(prompt: dict[str, Any]) -> Input:
    if prompt.get("multi_modal_data"):
        raise ValueError("multi_modal_data is not supported yet by this version; leave it out.")
    given = {key for key, value in prompt.items() if value is not None}
    unknown = given - {"prompt", "prompt_token_ids", "multi_modal_data", "cache_salt"}
    if unknown:
        raise ValueError(
            f"a prompt has no {sorted(unknown)[0]!r}; its keys are prompt, prompt_token_ids and cache_salt."
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise ValueError("Either prompts or prompt_token_ids must be provided.")
    salt = prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ValueError(f"cache_salt must be a non-empty string, got {salt!r:.80}.")
    return Input(
        text=None if text is None else _text(text),
        ids=None if ids is None else _ids(ids),
        salt=_text(salt or "", "cache_salt"),
    )


def _text(text: Any, name: str = "prompt") -> str:
    if not isinstance(text, str):
        raise TypeError(f"a prompt must be a string or a list of token ids, got {type(text).__name__}.")
    text = str.__str__(text)  # what numpy and jinja make of strings could not be sent
    if not text.isascii() and (why := unsendable(text, str)) is not None:
        raise ValueError(f"{name} {text[:80]!r} cannot be sent: {why}.")
    return text


def _ids(ids: Any) -> list[int]:
    if isinstance(ids, str | bytes | dict) or not isinstance(ids, Sequence):
        raise TypeError(f"a prompt must be a string or a list of token ids, got {type(ids).__name__}.")
    for token in ids:
        if not _integer(token):
            raise TypeError(f"token ids must be integers, got {token!r}.")
    return [token.__index__() for token in ids]
