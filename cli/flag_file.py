"""``--config FILE.yaml``: the flags of a command in a file, as vLLM's. What the command line says goes before it."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

from ..proto.config import ConfigError, EngineArgs, flags_of


def with_config_file(argv: list[str]) -> list[str]:
    """The command line with the flags of the file that its ``--config`` names, but for those that it has itself.

    Raises ConfigError where the file cannot be read or holds no flags.
    """
    path, rest = _taken(argv)
    if path is None:
        return argv
    end = rest.index("--") if "--" in rest else len(rest)
    given = {_plain(word) for word in rest[:end] if word.startswith("-")}
    has_model = len(rest) > 1 and not rest[1].startswith("-")
    flags: list[str] = []
    for name, value in read(path).items():
        if _plain("--" + name) in given or (name in ("model", "model_tag") and (has_model or "model" in given)):
            continue
        flags += _words("model" if name == "model_tag" else name.replace("_", "-"), value)
    return [*rest[:1], *(rest[1:2] if has_model else []), *flags, *rest[2 if has_model else 1 :]]


def read(path: str) -> dict[str, Any]:
    """The flags of a YAML file. Raises ConfigError."""
    import yaml  # transformers brings it; a server without the flag does not load it

    if not path.endswith((".yaml", ".yml")):
        raise ConfigError(f"--config must name a .yaml or .yml file, got {path!r:.200}.")
    try:
        found = yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is no YAML: {error}.") from error
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"--config {path} must hold one flag a line, such as `port: 8001`.")
    return found


def _taken(argv: list[str]) -> tuple[str | None, list[str]]:
    """The file that is named, and the command line without it."""
    path, rest, words = None, [], iter(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word == "--config" or word.startswith("--config="):
            if path is not None:
                raise ConfigError("--config is given twice; put the flags into one file.")
            path = next(words, None) if word == "--config" else word.removeprefix("--config=")
            if not path:
                raise ConfigError("--config names no file; write --config FILE.yaml.")
        else:
            rest.append(word)
    return path, rest


def _plain(word: str) -> str:
    """A flag's name, whichever way it is written: ``--no-x_y=1`` is ``x-y``; a short form is itself."""
    name = word.partition("=")[0].partition(".")[0].replace("_", "-")
    return _other_names().get(name, name).removeprefix("--").removeprefix("no-")


@cache
def _other_names() -> dict[str, str]:
    return {also: flags_of(fld)[-1] for fld in dataclasses.fields(EngineArgs) for also in flags_of(fld)[:-1]}


def _words(name: str, value: Any) -> list[str]:
    """A flag of the file as the command line has it. Each value is one word, for it may begin with a dash."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if value is None:
        return []
    if isinstance(value, list) and _takes_several(name):
        return [f"--{name}={_text(each)}" for each in value]
    return [f"--{name}={_text(value)}"]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _takes_several(name: str) -> bool:
    """Whether a flag takes a list value by value, and not as JSON."""
    field = EngineArgs.__dataclass_fields__.get(_plain("--" + name).replace("-", "_"))
    if field is None:  # one of vLLM's other flags, whose value does not count
        return True
    return bool(field.metadata["several"]) or "list[" in str(field.type)
