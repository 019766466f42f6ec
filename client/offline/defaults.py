"""The sampling parameters that requests start from: a model's generation_config.json, and flags over it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ...proto.config import ConfigError
from ...proto.params import ParamError, SamplingParams

log = logging.getLogger(__name__)

_FIELDS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
"""generation_config.json's name for each field of SamplingParams that it may set."""

_DRAWING = {"temperature", "top_p", "top_k", "min_p"}
"""What means nothing where ``do_sample`` is false."""


def default_sampling(generation: dict[str, Any], mode: str = "auto", override: str | None = None) -> dict[str, Any]:
    """Fields of SamplingParams with the values that a request starts from.

    Args:
        generation: the model's generation_config.json.
        mode: "auto" takes ``generation``, "quire" (or "vllm", as it is called there) nothing, anything else is a folder
            with such a file.
        override: a JSON object of values over those; null takes one away.

    What the file holds and cannot be used is left aside with a warning. Raises ConfigError for a bad flag.
    """
    if mode in ("quire", "vllm"):
        generation = {}
    elif mode != "auto":
        generation = _read(mode)
    defaults = {}
    for name, field in _FIELDS.items():
        value = generation.get(name)
        if value is None or (field in _DRAWING and generation.get("do_sample") is False):
            continue
        if (why := _unusable(field, value)) is None:
            defaults[field] = value
        else:
            log.warning("generation_config.json's %s=%r is left aside: %s", name, value, why)
    for name, value in _parse(override).items():
        field = _FIELDS.get(name, name)
        if field not in _FIELDS.values():
            raise ConfigError(f"override_generation_config has {name!r}; it may set {', '.join(_FIELDS)}.")
        defaults.pop(field, None)
        if value is None:
            continue
        if (why := _unusable(field, value)) is not None:
            raise ConfigError(f"override_generation_config: {why}")
        defaults[field] = value
    return defaults


def _read(folder: str) -> dict[str, Any]:
    path = Path(folder) / "generation_config.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"generation_config={folder!r} must be auto, quire or a folder with a generation_config.json: {error}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"generation_config={folder!r}: {path} must hold a JSON object.")
    return found


def _parse(override: str | None) -> dict[str, Any]:
    if override is None:
        return {}
    try:
        found = json.loads(override)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f'override_generation_config must be a JSON object such as {{"temperature": 0.7}}, got {override!r:.80}.'
        )
    return found


def _unusable(field: str, value: Any) -> str | None:
    """Why SamplingParams would not take it."""
    try:
        SamplingParams(**{field: value})
    except ParamError as error:
        return str(error)
    return None
