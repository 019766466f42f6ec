"""Flags that say what others say too: vLLM's older words, JSON objects, and what a list on the command line becomes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .config_error import ConfigError

JSON_FLAGS = ("hf_overrides", "rope_scaling", "override_generation_config", "pooler_config", "profiler_config",
              "structured_outputs_config", "default_chat_template_kwargs", "reasoning_config")  # fmt: skip
"""Those that hold a JSON object; a program may give a dict."""

TASKS = {
    "auto": {}, "generate": {"runner": "generate"}, "embedding": {"runner": "pooling", "convert": "embed"},
    "embed": {"runner": "pooling", "convert": "embed"}, "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"}, "reward": {"runner": "pooling"}, "encode": {"runner": "pooling"},
}  # fmt: skip
"""What ``task`` once said of a model, as it is said now."""

_GRAMMARS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer", "quire")
_VALUES = {
    "attention_backend": {"FLASH_ATTN": "flash", "TRITON_ATTN": "triton"},
    "generation_config": {"vllm": "quire"}, "model_impl": {"vllm": "quire"}, "tokenizer_mode": {"hf": "auto"},
    "load_format": {"gguf": "auto", "bitsandbytes": "auto"},  # which the folder says by itself
}  # fmt: skip
"""vLLM's words for values of flags."""
_STRUCTURED = {
    "backend": str, "reasoning_parser": str, "disable_any_whitespace": bool, "disable_additional_properties": bool,
    "allow_additional_properties": bool,
}  # fmt: skip


def resolve_words(args: Any) -> None:
    """Bring what an EngineArgs says in older words into the fields that are read. Raises ConfigError."""
    for name in JSON_FLAGS:
        if isinstance(value := getattr(args, name), dict):  # LLM's callers write it so
            setattr(args, name, json.dumps(value))
    for name, words in _VALUES.items():
        value = getattr(args, name)
        setattr(args, name, words.get(value, value))
    if not args.disable_log_requests:
        args.enable_log_requests = True
    args.root_path = (args.root_path or "").rstrip("/") or None
    _resolve_task(args)
    _resolve_structured(args)
    json_object("default_chat_template_kwargs", args.default_chat_template_kwargs)


def reader_of(name: str) -> Callable[[str], str] | None:
    """What reads a flag's value from the command line where vLLM has other words for it."""
    words = _VALUES.get(name)
    return None if words is None else lambda value: words.get(value, value)


def json_object(name: str, text: str | None) -> dict[str, Any]:
    """The object that a flag holds as JSON; an empty one for None. Raises ConfigError."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be a JSON object, got {text!r:.200}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, got {text!r:.200}.")
    return value


def structured_rules(args: Any) -> dict[str, bool]:
    """What --structured-outputs-config says of JSON for requests that do not say: the switches that are on."""
    found = json_object("structured_outputs_config", args.structured_outputs_config)
    return {name: True for name, on in found.items() if on}


def _resolve_task(args: Any) -> None:
    for name, meant in TASKS.get(args.task, {}).items():
        if (given := getattr(args, name)) not in ("auto", meant):
            raise ConfigError(f"task {args.task} means {name} {meant}, and {name} is {given}; leave --task out.")
        setattr(args, name, meant)


def _resolve_structured(args: Any) -> None:
    """One JSON object of all that is said about structured output; what it names for others is theirs."""
    found = json_object("structured_outputs_config", args.structured_outputs_config)
    for name, value in found.items():
        if name not in _STRUCTURED:
            told = ", ".join(_STRUCTURED)
            raise ConfigError(f"structured_outputs_config has no {name!r:.80}; it has {told}.")
        if not isinstance(value, _STRUCTURED[name]):
            kind = _STRUCTURED[name].__name__
            raise ConfigError(f"structured_outputs_config: {name} must be a {kind}, got {value!r:.80}.")
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(args, f"guided_decoding_{name}"):
            found[name] = True
    if found.get("disable_additional_properties") and found.get("allow_additional_properties"):
        raise ConfigError("structured_outputs_config has disable_additional_properties and "
                          "allow_additional_properties; leave one of them out.")  # fmt: skip
    named = found.pop("backend", None)
    backend = str(args.guided_decoding_backend or named or "auto")
    backend, _, options = backend.partition(":")  # as older versions of vLLM write it
    if backend not in _GRAMMARS:
        raise ConfigError(f"structured output has no backend {backend!r:.80}; leave it out, or give auto.")
    if "disable-any-whitespace" in options.split(","):
        found["disable_any_whitespace"] = True
    if (parser := found.pop("reasoning_parser", None)) is not None:
        if args.reasoning_parser not in (None, parser):
            raise ConfigError(f"two reasoning parsers are named, {args.reasoning_parser!r} and {parser!r}; name one.")
        args.reasoning_parser = parser
    args.structured_outputs_config = json.dumps(found) if found else None
