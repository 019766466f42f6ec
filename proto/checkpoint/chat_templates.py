"""A model's chat templates: tokenizer_config.json and chat_template.jinja, read as transformers 5 reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..readable import is_file, unreadable
from .model_config import read_json

IN_WORDS = ("hermes", "granite4", "ernie45")
"""Parsers of the form in which tools are told where the chat template knows none; the first is the usual one."""


def names_tools(template: str) -> bool:
    """Whether a chat template knows of tools. Where it does not, they are told in the system message."""
    return "tools" in template


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, over the special tokens of special_tokens_map.json (files of old transformers)."""
    return {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}


def templates_of(folder: Path, config: dict[str, Any], chosen: str | None) -> dict[str, str]:
    """Templates by name. A ``--chat-template`` (a file, or the template itself) stands for all of the model's."""
    return chat_templates(folder, config) if chosen is None else {"default": _chosen_template(chosen)}


def _chosen_template(chosen: str) -> str:
    try:
        return Path(chosen).read_text("utf-8")
    except PermissionError as error:
        raise unreadable(chosen) from error
    except (OSError, ValueError) as error:
        if any(mark in chosen for mark in "{}\n"):
            return chosen
        raise ConfigError(f"chat template {chosen!r} is neither a readable file nor a template: {error}") from error


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
    found = {name: _own_text(folder, file) for name, file in files.items() if is_file(file)}
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
