"""adapter_config.json of a PEFT folder: which modules a LoRA adapter changes, their ranks and scales, what is refused.

PEFT's rules are those of ``peft/tuners/lora/config.py`` and ``peft/tuners/tuners_utils.py``. A name in a list of
targets is a module's own or its last parts. Keys of ``rank_pattern`` and ``alpha_pattern`` are regular expressions of a
module's last parts, and the first that matches counts. The scale is alpha / r, with rsLoRA alpha / sqrt(r).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..readable import is_file, is_folder
from .model_config import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What ``--max-lora-rank`` may be."""

_TOKEN = re.compile(r"(?P<wild>(?:\.|\\[dw]|\[[\w-]+\])[*+])|(?P<group>\((?:\?:)?)|\\[.dw-]|\[[\w-]+\]|[\w.)|^$-]")
"""What patterns are made of: characters, classes of them, alternatives in brackets; only one place is repeated."""
MAX_PATTERNS, MAX_PATTERN, MAX_FREE, MAX_REPEATED = 1024, 500, 64, 2
"""Of one key: patterns, characters of each, patterns that repeat or group, places that one repeats, or groups."""
_REFUSED = {
    "use_dora": "vLLM does not yet support DoRA, nor does quire",
    "modules_to_save": "whole copies of modules are not supported",
    "lora_bias": "Adapter bias is not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "layer_replication": "replicated layers are not supported",
    "trainable_token_indices": "trained rows of the embedding are not supported",
    "ensure_weight_tying": "tied adapters are not supported",
    "use_qalora": "QALoRA is not supported",
}
_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` that change the base model's weights too."""
_WITHOUT_EFFECT = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size",
    "r", "rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora",
})  # fmt: skip
"""Keys that are read here, or that say nothing about what the adapter computes."""


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says. ``targets``: the last parts of the modules that it changes; None where a regular
    expression or "all-linear" says which, so that the tensors alone tell."""

    folder: Path
    r: int
    alpha: float
    rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    targets: tuple[str, ...] | None = None
    excluded: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None

    def rank_of(self, module: str) -> int:
        """The rank of ``module``, which is named as in the model (model.layers.0.self_attn.q_proj)."""
        return _first(self.ranks, self._matched(module), self.r)

    def scale_of(self, module: str) -> float:
        """By what B A x is multiplied."""
        rank, alpha = self.rank_of(module), _first(self.alphas, self._matched(module), self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    @property
    def most_rank(self) -> int:
        """The largest rank that a module may have."""
        return max(self.r, *self.ranks.values()) if self.ranks else self.r

    def changes(self, module: str) -> bool | None:
        """Whether its list of targets, or of parameters, names ``module``; None where there is no list of targets."""
        if self.by_parameter(module):
            return True
        if self.targets is None:
            return None
        if _named(module, self.excluded) or not _named(module, self.targets):
            return False
        if self.layers is None or module in self.targets:
            return True
        found = re.match(r".*?\.[^.]*\.(\d+)\.", "." + module)
        return found is not None and int(found[1]) in self.layers

    def by_parameter(self, module: str) -> bool:
        """Whether target_parameters has the weight of ``module``, as PEFT writes the router that "all-linear" finds."""
        return bool(self.parameters) and _named(f"{module}.weight", self.parameters)

    def _matched(self, module: str) -> str:
        """What keys of patterns are held against."""
        return f"{module}.weight" if self.by_parameter(module) else module


def _named(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    return next((value for key, value in patterns.items() if _pattern(key).match(module)), otherwise)


@functools.lru_cache(4 * 1024)
def _pattern(key: str) -> re.Pattern[str]:
    """Of the end of a module's name; ``re`` itself keeps too few of them."""
    return re.compile(rf"(.*\.)?({key})$")


def check_adapter(folder: Path, max_lora_rank: int | None = None) -> AdapterConfig:
    """What can be refused without reading a tensor: the folder's files, the config, and ranks over ``max_lora_rank``.

    Raises ConfigError, one line that names the file and the value.
    """
    if not is_folder(folder):
        raise ConfigError(f"{folder} is no folder with a LoRA adapter; give the path of one that PEFT saved.")
    for name in (CONFIG, WEIGHTS):
        if not is_file(folder / name):
            pickles = sorted(each.name for each in folder.glob("adapter_model.*") if each.suffix in (".bin", ".pt"))
            more = f"; {pickles[0]} is pickled and is not read, save it as safetensors" if pickles else ""
            raise ConfigError(f"{folder} lacks {name}, which PEFT writes{more or '; save the adapter again'}.")
    config = read_adapter_config(folder)
    if max_lora_rank is not None and config.most_rank > max_lora_rank:
        raise ConfigError(
            f"{folder / CONFIG}: LoRA rank {config.most_rank} is greater than max_lora_rank {max_lora_rank}."
        )
    return config


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The adapter_config.json in ``folder``. Raises ConfigError, one line that names the file and the key."""
    file = folder / CONFIG
    said = read_json(file)
    _refuse(file, said)
    targets, layers = said.get("target_modules"), said.get("layers_to_transform")
    if layers is not None:
        layers = [layers] if isinstance(layers, int) else layers
        if not isinstance(layers, list) or not all(type(each) is int for each in layers):
            raise _wrong(file, "layers_to_transform", layers, "a number or a list of numbers")
    if targets is not None and not isinstance(targets, str):
        targets = _names(file, "target_modules", targets)
    excluded = said.get("exclude_modules")
    names = excluded if isinstance(excluded, list) else []
    regular = isinstance(targets, str) or isinstance(excluded, str) or said.get("layers_pattern")
    return AdapterConfig(
        folder,
        _rank(file, "r", said.get("r", 8)),
        _number(file, "lora_alpha", said.get("lora_alpha", 8)),
        said.get("use_rslora") is True,
        {key: _rank(file, "rank_pattern", rank) for key, rank in _patterns(file, "rank_pattern", said)},
        {key: _number(file, "alpha_pattern", alpha) for key, alpha in _patterns(file, "alpha_pattern", said)},
        None if regular else tuple(targets or ()),
        tuple(_names(file, "exclude_modules", names)),
        tuple(_names(file, "target_parameters", said.get("target_parameters") or [])),
        tuple(layers) if layers else None,
    )


def _refuse(file: Path, said: Mapping[str, Any]) -> None:
    if (kind := said.get("peft_type")) != "LORA":
        raise ConfigError(f"{file}: peft_type {kind!r} is not supported; only 'LORA' is.")
    for key, why in _REFUSED.items():
        if said.get(key):
            raise ConfigError(f"{file}: {key} {str(said[key])[:80]} is refused: {why}.")
    if (bias := said.get("bias", "none")) != "none":
        raise ConfigError(f"{file}: bias {bias!r} is refused: Adapter bias is not supported; train with bias 'none'.")
    init = str(said.get("init_lora_weights", True)).lower()
    if init.startswith(_CHANGED):
        raise ConfigError(f"{file}: init_lora_weights {init!r} is refused, for it changes the base model's weights; "
                          "convert it to plain LoRA (PEFT: path_initial_model_for_weight_conversion).")  # fmt: skip
    unknown = [key for key in said if said[key] and key not in _WITHOUT_EFFECT and key not in _REFUSED]
    if unknown:
        raise ConfigError(f"{file}: {unknown[0]} {str(said[unknown[0]])[:80]} is not known here; leave it out.")


def _wrong(file: Path, key: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{file}: {key} is {str(value)[:80]!r}, where {wanted} is wanted; save the adapter again.")


def _rank(file: Path, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(file, key, value, "a number from 1 up")
    return int(value)


def _number(file: Path, key: str, value: Any) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer that no float can be
        pass
    raise _wrong(file, key, value, "a number")


def _names(file: Path, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _wrong(file, key, value, "a list of names")
    return value


def _patterns(file: Path, key: str, said: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The patterns that have a value. What would take long to match is refused: it comes from a stranger's file."""
    found = said.get(key) or {}
    if not isinstance(found, dict):
        raise _wrong(file, key, found, "an object")
    if len(found) > MAX_PATTERNS:
        raise ConfigError(f"{file}: {key} has {len(found)} patterns, over {MAX_PATTERNS}; name modules that share a "
                          "rank or an alpha by one.")  # fmt: skip
    free = 0
    for pattern in found:
        tokens = list(_TOKEN.finditer(pattern)) if len(pattern) <= MAX_PATTERN else []
        wild, groups = (sum(token[kind] is not None for token in tokens) for kind in ("wild", "group"))
        free += bool(wild + groups)
        if "".join(token[0] for token in tokens) != pattern or max(wild, groups) > MAX_REPEATED or wild + groups > 3:
            raise ConfigError(f"{file}: {key} has {pattern[:80]!r}, which repeats too often or has what is not matched "
                              "here; name the modules, with '.*' or (a|b) twice at most.")  # fmt: skip
        if free > MAX_FREE:
            raise ConfigError(
                f"{file}: {key} has over {MAX_FREE} patterns with '.*' or (a|b); name the modules instead."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{file}: {key} has {pattern[:80]!r}, no regular expression ({error}).") from error
    return list(found.items())
