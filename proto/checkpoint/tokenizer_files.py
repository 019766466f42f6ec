"""What the JSON files beside a vocabulary say of a tokenizer: which tokens are special, and the chat templates.

They are tokenizer_config.json, special_tokens_map.json and chat_template.jinja, read as transformers 5 reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..config import ConfigError
from .model_config import read_json

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, over the special tokens of special_tokens_map.json (files of old transformers)."""
    return {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}


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


def chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The folder's templates by name ("default", "tool_use")."""
    templates: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates.update(
            (t["name"], t["template"]) for t in value if isinstance(t, dict) and {"name", "template"} <= set(t)
        )
    files = {"default": folder / "chat_template.jinja"}
    files.update((p.stem, p) for p in sorted((folder / "additional_chat_templates").glob("*.jinja")))
    found = {name: _own_text(folder, file) for name, file in files.items() if file.is_file()}
    return found or templates


def _own_text(folder: Path, file: Path) -> str:
    """A file's text. What a template says can be had by asking the model, so a link must not lead out of the folder;
    those of the hub's cache lead from snapshots/REVISION to blobs/ beside it. Raises ConfigError."""
    home, target = folder.resolve(), file.resolve()
    roots = [home]
    if home.parent.name == "snapshots":
        roots.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in roots):
        raise ConfigError(f"{file} leads out of its folder, to {target}; put the template itself there.")
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; download it again.") from error
