"""What the JSON files beside a vocabulary say of a tokenizer's special tokens, read as transformers 5 reads them."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def content(token: Any) -> str | None:
    """A token's text: written as a string, or as an object with flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the other names -> the tokens' texts."""
    return {name: text for name in NAMED if (text := content(config.get(name))) is not None}


def extra_tokens(config: dict[str, Any]) -> list[str]:
    """Texts of the special tokens without a name."""
    extra: list[Any] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(name)
        extra += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for token in extra if (text := content(token))]


def mark_special(backend: Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that tokenizer_config.json names and the backend lacks, or does not mark as special."""
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    order = sorted((k for k in listed if str(k).isdigit()), key=int)
    backend.add_tokens([_added(listed[k]) for k in order if (t := content(listed[k])) and t not in known])
    names = [*named_tokens(config).values(), *extra_tokens(config)]
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    missing = [n for n in dict.fromkeys(names) if not known.get(n)]
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in missing])


def _added(token: Any) -> AddedToken:
    if not isinstance(token, dict):
        return AddedToken(token, special=True, normalized=False)
    flags = {k: bool(token[k]) for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in token}
    return AddedToken(token["content"], **flags)
