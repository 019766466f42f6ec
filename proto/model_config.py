"""A model's folder as every process reads it: config.json and generation_config.json, with no torch.

The folder itself comes from a path, the Hugging Face hub, or ModelScope (``resolve_model``); the demo model is part
of the package.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import ConfigError

log = logging.getLogger(__name__)

DEMO_MODEL = "quire-demo"
_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
_DEFAULT_LENGTH = 2048
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.jinja", "*.txt"]


@dataclass
class ModelConfig:
    """What config.json says, and what follows from it. Lengths are tokens."""

    path: str
    hf: dict[str, Any]
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int] = field(default_factory=list)
    generation: dict[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The first of config.json's architectures."""
        return (self.hf.get("architectures") or [""])[0]


def demo_model_path() -> str:
    """The folder of the model that is part of the package."""
    return str(Path(__file__).resolve().parent.parent / "demo_model")


def resolve_model(
    model: str | None, revision: str | None = None, download_dir: str | None = None, weights: bool = True
) -> str:
    """The local folder of ``model``: a path as it is, a hub id downloaded (or found in the hub's cache).

    ``None`` and ``quire-demo`` are the demo model. ``weights=False`` leaves the weight files where they are.
    With QUIRE_USE_MODELSCOPE=True hub ids are ModelScope's. Raises ConfigError.
    """
    if model is None or model == DEMO_MODEL:
        return demo_model_path()
    if os.path.isdir(model):
        return model
    if os.path.isabs(model) or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"model folder {model!r} does not exist.")
    patterns = [p for p in _PATTERNS if weights or p != "*.safetensors"]
    if os.environ.get("QUIRE_USE_MODELSCOPE", "").lower() in ("true", "1"):
        return _from_modelscope(model, revision, download_dir, patterns)
    return _from_hub(model, revision, download_dir, patterns)


def _from_hub(model: str, revision: str | None, download_dir: str | None, patterns: list[str]) -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=patterns)
    except Exception as error:  # the hub's client raises many kinds; each ends as one line for the user
        where = f"{model}@{revision}" if revision else model
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model {where!r} is neither a local folder nor to be had from the hub: {first}") from error


def _from_modelscope(model: str, revision: str | None, download_dir: str | None, patterns: list[str]) -> str:
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise ConfigError("QUIRE_USE_MODELSCOPE needs ModelScope's client: pip install 'quire[modelscope]'") from None
    try:
        return snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=patterns)
    except Exception as error:
        raise ConfigError(f"model {model!r} is not to be had from ModelScope: {error}") from error


def load_model_config(path: str, max_model_len: int | None = None) -> ModelConfig:
    """Read a model folder. Raises ConfigError that names the file and the remedy."""
    hf = _read_json(Path(path) / "config.json", required=True)
    text = {**hf, **hf["text_config"]} if isinstance(hf.get("text_config"), dict) else hf
    generation = _read_json(Path(path) / "generation_config.json", required=False)
    vocab = text.get("vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise ConfigError(f"{path}/config.json has no usable vocab_size (got {vocab!r}).")
    return ModelConfig(
        path=path,
        hf=text,
        max_model_len=_max_len(path, text, max_model_len),
        vocab_size=vocab,
        eos_token_ids=_eos(path, generation) or _eos(path, text),
        generation=generation,
    )


def _read_json(path: Path, required: bool) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path} does not exist; a model is a Hugging Face folder with a config.json.") from None
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__} where a JSON object is needed.")
    return data


def _eos(path: str, config: dict[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(v) is int for v in values):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}.")
    return values


def rope_parameters(hf: dict[str, Any]) -> dict[str, Any]:
    """Rope settings in one form: transformers 5 writes ``rope_parameters``, older files ``rope_scaling``."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope:
        rope["rope_theta"] = hf.get("rope_theta", 10000.0)
    return rope


def _max_len(path: str, hf: dict[str, Any], asked: int | None) -> int:
    lengths = [v for key in _LENGTH_KEYS if type(v := hf.get(key)) is int and v > 0]
    if not lengths:
        log.warning("%s/config.json names no maximum length; using %d", path, asked or _DEFAULT_LENGTH)
        return asked or _DEFAULT_LENGTH
    if asked is not None and asked < 2:
        raise ConfigError(f"max_model_len must be at least 2 (a token in and a token out), got {asked}.")
    derived = min(lengths)
    rope = rope_parameters(hf)
    kind, factor = rope["rope_type"], rope.get("factor") or 1.0
    if kind == "yarn":
        derived = int((rope.get("original_max_position_embeddings") or derived) * factor)
    elif kind in ("linear", "dynamic"):
        derived = int(derived * factor)
    if asked is None:
        return derived
    if asked > derived and os.environ.get("QUIRE_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        raise ConfigError(
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len ({derived}) of "
            f"{path}/config.json; lower it, or set QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1 if the model can go further."
        )
    return asked
