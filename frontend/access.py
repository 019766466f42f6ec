"""Flags and environment to the settings of who may ask."""

from __future__ import annotations

import json
import os
from typing import Any

from ..proto.config import ConfigError, EngineArgs
from .auth import keys_of
from .key_file import KeyFile
from .metrics import PREFIXES
from .origins import is_local

API_KEY_ENV = ("QUIRE_API_KEY", "VLLM_API_KEY")
ADMIN_KEY_ENV = ("QUIRE_ADMIN_API_KEY",)
METRICS_KEY_ENV = ("QUIRE_METRICS_KEY",)


def access_of(args: EngineArgs) -> dict[str, Any]:
    """Fields of ``Settings``. Raises ConfigError."""
    api_key = _keys(args.api_key, API_KEY_ENV)
    metrics_key = _keys(args.metrics_key, METRICS_KEY_ENV)
    if args.api_key_file:
        KeyFile(args.api_key_file)  # a line that is wrong is told now
    if args.open_metrics and metrics_key:
        raise ConfigError("open_metrics and a metrics key exclude each other; leave --open-metrics or the key out.")
    if args.metrics_prefix not in PREFIXES:
        raise ConfigError(f"metrics_prefix must be one of {', '.join(PREFIXES)}, got {args.metrics_prefix!r:.80}.")
    origins = list_of("allowed_origins", args.allowed_origins)
    if args.allow_credentials and (not origins or "*" in origins):
        raise ConfigError(
            "allow_credentials with any origin would let every page ask in its reader's name; name the origins in "
            "--allowed-origins."
        )
    return {
        "api_key": api_key,
        "api_key_file": args.api_key_file,
        "admin_api_key": _keys(args.admin_api_key, ADMIN_KEY_ENV),
        "metrics_key": metrics_key,
        "open_metrics": args.open_metrics,
        "metrics_prefix": args.metrics_prefix,
        "shared_prefix_cache": args.shared_prefix_cache,
        "allowed_hosts": list_of("allowed_hosts", args.allowed_hosts),
        "local_only": args.uds is None and is_local(args.host.strip("[]").lower()),
        "allowed_origins": origins,
        "allowed_methods": list_of("allowed_methods", args.allowed_methods) or ["*"],
        "allowed_headers": list_of("allowed_headers", args.allowed_headers) or ["*"],
        "allow_credentials": args.allow_credentials,
        "max_request_bytes": args.max_request_bytes,
        "max_header_bytes": args.max_header_bytes,
        "max_json_depth": args.max_json_depth,
        "request_s": args.request_timeout,
        "max_connections_per_address": args.max_connections_per_address,
    }


def _keys(given: str | None, names: tuple[str, ...]) -> str | None:
    """Keys by flag, or by the first of these variables that is set. Raises ConfigError where that holds none."""
    text = given or next(filter(None, map(os.environ.get, names)), None)
    keys_of(text)
    return text


def list_of(flag: str, text: str | None) -> list[str]:
    """A list in JSON, as vLLM's flags have it, or names with commas between them. Raises ConfigError."""
    if not text or not text.strip():
        return []
    if text.lstrip()[0] not in '[{"':
        return [name for name in text.replace(",", " ").split() if name]
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f'{flag} is not valid JSON: {error}; write it as \'["a", "b"]\'.') from None
    if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
        raise ConfigError(f'{flag} must be a list of texts such as \'["a", "b"]\', got {text!r:.80}.')
    return found
