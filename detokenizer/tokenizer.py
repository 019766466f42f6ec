"""Loading a tokenizer: tokenizer.json through `tokenizers`, and the few facts beside it.

Folders without it get a tokenizer made from their vocabulary file where tokenizers_own knows the family. transformers
is imported only for the others and with ``--tokenizer-mode slow``: importing it takes seconds and brings torch along.
What `tokenizer.json` leaves out (which tokens are special, the chat template) is in the files beside it; as in
transformers 5, its own post-processor decides what is added around a prompt and add_bos_token is ignored beside it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # requests are the parallelism; extra threads only fight

from tokenizers import Tokenizer

from ..proto.checkpoint.chat_templates import templates_of, tokenizer_config
from ..proto.checkpoint.tokenizer_files import NAMED, mark_special, named_tokens
from ..proto.config import ConfigError
from ..proto.readable import is_file
from ..proto.rust import RustPanic, no_panics

log = logging.getLogger(__name__)

_REMOTE_CODE = (
    "Failed to load the tokenizer. If the tokenizer is a custom tokenizer not yet available in the HuggingFace "
    "transformers library, consider setting `trust_remote_code=True` in LLM or using the `--trust-remote-code` flag "
    "in the CLI."
)


_MANY = 1000
"""Ids that are decoded with the interpreter's lock let go, as ``ids_of`` does it; for fewer that costs more."""


class TextTokenizer:
    """A loaded tokenizer. Every method may be called from any thread.

    ``encode(text, add_special_tokens)`` gives ids; ``decode(ids, skip_special_tokens, spaces=True)`` gives text, where
    ``spaces`` matters to slow tokenizers alone: whether added tokens stand between spaces. ``piece(id)`` is a token's
    own name in the vocabulary, or None.
    ``backend`` is the `tokenizers.Tokenizer`, or None for a slow one. ``special`` maps bos_token and the other names
    to their text; ``bos_id`` and ``eos_id`` are their ids, ``end_ids`` those of other tokens that end a reply.
    ``templates`` maps names ("default", "tool_use") to chat templates. ``token_id(text)`` is the id of what a
    vocabulary calls ``text``, or None.
    ``added()`` are the tokens beside the vocabulary's own, by id.
    """

    def __init__(
        self,
        encode: Callable[[str, bool], list[int]],
        decode: Callable[..., str],
        backend: Tokenizer | None,
        special: dict[str, str],
        token_id: Callable[[str], int | None],
        templates: dict[str, str],
        piece: Callable[[int], str | None] = lambda token: None,
        ends: Iterable[str] = (),
        added: Callable[[], dict[int, Any]] | None = None,
    ):
        self.token_id = token_id
        self.encode, self.decode, self.backend = encode, decode, backend
        self.special, self.templates, self.piece = special, templates, piece
        self.added = added or (backend.get_added_tokens_decoder if backend is not None else dict)
        self.bos_id, self.eos_id = (
            token_id(special[name]) if name in special else None for name in ("bos_token", "eos_token")
        )
        self.end_ids = [i for text in ends if (i := token_id(text)) is not None]

    @property
    def begin(self) -> list[int]:
        """The id that begins every prompt; nothing where none does."""
        return [self.bos_id] if self.bos_id is not None and self.encode("", True)[:1] == [self.bos_id] else []

    @cached_property
    def longest(self) -> int | None:
        """The most characters one token can stand for; None where an unknown token may stand for any number.

        It takes a walk through the vocabulary, so only a prompt that may be too long asks for it.
        """
        return None if self.backend is None else _longest(self.backend)


def ids_of(backend: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """A text's ids. `tokenizers` holds the interpreter's lock while it encodes one text, which may take a minute and
    would stop every stream of this process; for a list of texts it lets go of it."""
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def load_tokenizer(
    path: str, mode: str = "auto", chat_template: str | None = None, trust_remote_code: bool = False
) -> TextTokenizer:
    """Load the tokenizer of a model's folder. Raises ConfigError with the remedy where there is none."""
    folder = Path(path)
    config = tokenizer_config(folder)
    templates = templates_of(folder, config, chat_template)
    ends: Iterable[str] = ()
    if not is_file(folder / "tokenizer.json"):
        from ..proto.checkpoint.tokenizers_own import own_tokenizer  # only such folders need it

        try:
            with no_panics():
                own = own_tokenizer(folder)
        except RustPanic as error:
            raise ConfigError(f"the tokenizer of {folder} cannot be made: {error}; download it again.") from error
        if own is None:
            return _load_slow(path, mode, config, templates, trust_remote_code)
        backend, config, ends, templates = own.backend, own.config, own.ends, own.templates(templates)
    elif mode == "slow":
        return _load_slow(path, mode, config, templates, trust_remote_code)
    else:
        try:
            with no_panics():
                backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # `tokenizers` raises plain Exception for any fault of the file
            raise ConfigError(f"{folder / 'tokenizer.json'} cannot be read: {error}; download it again.") from error
        mark_special(backend, config)
    backend.no_truncation()
    backend.no_padding()
    special = named_tokens(config)

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return ids_of(backend, text, add_special_tokens)

    def decode(ids: list[int], skip_special_tokens: bool, spaces: bool = True) -> str:
        if len(ids) > _MANY:
            return backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return backend.decode(ids, skip_special_tokens=skip_special_tokens)

    return TextTokenizer(encode, decode, backend, special, backend.token_to_id, templates, backend.id_to_token, ends)


def _longest(backend: Tokenizer) -> int | None:
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    kinds = {state.get("type"), *(d.get("type") for d in state.get("decoders", []))}
    if not kinds & {"ByteLevel", "ByteFallback"}:
        return None
    shrink = 1 if backend.normalizer is None else 4  # composing (NFC) makes at most four characters one
    return shrink * max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)


# ---------------------------------------------------------------- the slow way


def _load_slow(
    path: str, mode: str, config: dict[str, Any], templates: dict[str, str], trust_remote_code: bool
) -> TextTokenizer:
    """transformers' own tokenizer. Slow to import and to run; only for folders without tokenizer.json."""
    if not any(is_file(Path(path) / name) for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model",
                                                         "vocab.json", "vocab.txt", "tekken.json")):  # fmt: skip
        raise ConfigError(f"{path} holds no tokenizer; add a tokenizer.json or name another folder with --tokenizer.")
    log.warning("using transformers' tokenizer for %s (%s); it starts and runs slowly", path,
                "--tokenizer-mode slow" if mode == "slow" else "it has no tokenizer.json")  # fmt: skip
    own = config.get("auto_map")
    if not trust_remote_code and own and (isinstance(own, list) or "AutoTokenizer" in own) and not _known(config):
        raise ConfigError(_REMOTE_CODE)
    from transformers import AutoTokenizer

    slow: Any

    try:
        slow = AutoTokenizer.from_pretrained(path, use_fast=mode != "slow", trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds; each ends as one line for the user
        text = str(error)
        if not trust_remote_code and (
            "trust_remote_code" in text or (config.get("tokenizer_class") and not _known(config))
        ):
            raise ConfigError(_REMOTE_CODE) from error
        first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        raise ConfigError(f"the tokenizer of {path} cannot be loaded: {first}") from error
    size = len(slow)

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return slow.encode(text, add_special_tokens=add_special_tokens)

    added = () if slow.is_fast else frozenset(slow.get_added_vocab())

    def decode(ids: list[int], skip_special_tokens: bool, spaces: bool = True) -> str:
        ids = [i for i in ids if 0 <= i < size]
        if added:
            return _join_added(slow, slow.convert_ids_to_tokens(ids, skip_special_tokens), added, spaces)
        return slow.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def piece(token: int) -> str | None:
        return slow.convert_ids_to_tokens(token) if 0 <= token < size else None

    special = {name: str(slow.special_tokens_map[name]) for name in NAMED if slow.special_tokens_map.get(name)}
    return TextTokenizer(encode, decode, None, special, _slow_id(slow), templates, piece,
                         added=lambda: slow.added_tokens_decoder)  # fmt: skip


def _slow_id(slow: Any) -> Callable[[str], int | None]:
    """transformers gives the unknown token's id for what it does not know."""

    def token_id(text: str) -> int | None:
        found = slow.convert_tokens_to_ids(text)
        return None if found is None or (found == slow.unk_token_id and text != slow.unk_token) else found

    return token_id


def _known(config: dict[str, Any]) -> bool:
    """Whether transformers has the class that the folder names for its tokenizer."""
    import transformers

    name = config.get("tokenizer_class")
    return isinstance(name, str) and any(hasattr(transformers, each) for each in (name, f"{name}Fast"))


def _join_added(slow: Any, tokens: list[str], added: frozenset[str], spaces: bool) -> str:
    """Text of tokens where added ones stand for themselves, between spaces or not (as vLLM does it)."""
    parts: list[str] = []
    run: list[str] = []
    for token in tokens:
        if token not in added:
            run.append(token)
            continue
        if run:
            parts.append(slow.convert_tokens_to_string(run))
            run = []
        parts.append(token)
    if run:
        parts.append(slow.convert_tokens_to_string(run))
    return (" " if spaces else "").join(parts)
