"""What some flags may say together, or with a model. Below ``config.py``, which has the flags."""

from __future__ import annotations

import math
from typing import Any

from .config_error import ConfigError


def check_offload(args: Any) -> None:
    """Refuse sizes and pairs of an EngineArgs that cannot work. Raises ConfigError."""
    for name in ("swap_space", "kv_offloading_size", "kv_disk_size"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be at least 0 (GiB), got {value}.")
    if args.swap_space and args.kv_offloading_size:
        raise ConfigError(
            f"swap_space ({args.swap_space:g} GiB for each worker) and kv_offloading_size ({args.kv_offloading_size:g} "
            "GiB for all) are two ways to say one thing; give one of them."
        )
    if bool(args.kv_disk_path) != bool(args.kv_disk_size):
        given, missing = ("kv_disk_path", "kv_disk_size") if args.kv_disk_path else ("kv_disk_size", "kv_disk_path")
        raise ConfigError(f"{given} needs {missing}: a folder, and how many GiB blocks may take there.")
    if (args.swap_space or args.kv_offloading_size or args.kv_disk_path) and not args.enable_prefix_caching:
        raise ConfigError(
            "blocks outside of the device are found by the prefix cache's hashes; leave --no-enable-prefix-caching "
            "out, or swap_space, kv_offloading_size and kv_disk_path."
        )


def check_split(heads: object, layers: object, size: int, stages: int) -> None:
    """Raises ConfigError where a model of so many attention heads and layers cannot be shared out so."""
    if isinstance(heads, int) and heads % size:
        raise ConfigError(
            f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({size})."
        )
    if isinstance(layers, int) and stages > layers:
        raise ConfigError(f"Pipeline parallel size ({stages}) must be at most the model's number of layers ({layers}).")
