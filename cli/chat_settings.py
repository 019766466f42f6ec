"""How a chat samples: flags of the command line, and ``/set`` while one talks."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..proto.flag_parser import nearest
from .errors import CommandError

SETTINGS = {
    "temperature": (float, "how much chance there is; 0 takes the likeliest token"),
    "top_p": (float, "draw from the likeliest tokens that make up this share"),
    "top_k": (int, "draw from this many of the likeliest tokens"),
    "min_p": (float, "draw from tokens at least this share as likely as the likeliest"),
    "max_tokens": (int, "tokens of an answer at most"),
    "seed": (int, "the same seed gives the same answer"),
    "presence_penalty": (float, "against tokens that were said"),
    "frequency_penalty": (float, "against tokens by how often they were said"),
    "repetition_penalty": (float, "above 1: against tokens that were said or asked"),
    "stop": (str, "end an answer before this text"),
}
"""Fields of a request by name: their type, and what they do. vLLM's names; the server checks their range."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting."""
    group = parser.add_argument_group("sampling")
    for name, (kind, help) in SETTINGS.items():
        metavar = {float: "X", int: "N", str: "TEXT"}[kind]
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=help)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a command line."""
    return {name: value for name in SETTINGS if (value := getattr(args, name)) is not None}


def change(settings: dict[str, Any], text: str) -> str:
    """Obey ``/set``: ``name=value``, ``name=`` for the server's own value, or nothing. What to tell the user, in one
    line or a table. Raises CommandError for a name or a value that is none."""
    if not text:
        return "\n".join(f"{name:20}{settings.get(name, 'default'):<10}{help}" for name, (_, help) in SETTINGS.items())
    name, _, value = (text if "=" in text else text.replace(" ", "=", 1)).partition("=")
    name, value = name.strip(), value.strip()
    name = name.replace("-", "_")
    if name not in SETTINGS:
        raise CommandError(f"there is no setting {name!r:.60}{nearest(name, SETTINGS) or '.'} `/set` lists them.")
    if not value:
        settings.pop(name, None)
        return f"{name} is the server's default again"
    settings[name] = _value(name, value)
    return f"{name} = {json.dumps(settings[name])}"


def _value(name: str, text: str) -> Any:
    kind = SETTINGS[name][0]
    try:
        return kind(text)
    except ValueError:
        wanted = {int: "a whole number, such as 64", float: "a number, such as 0.7"}[kind]
        raise CommandError(f"{name} takes {wanted}, got {text!r:.60}.") from None
