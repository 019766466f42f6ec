"""``--profiler-config``: whether workers may be profiled, and where the traces go. Names are vLLM's."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from .config_error import ConfigError

_DEVICE = "/start_profile and /stop_profile are for torch's profiler"


class ProfilerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What torch's profiler records of a worker's steps, and the folder that its traces are written to."""

    torch_profiler_dir: str
    profiler: str = "torch"
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_use_gzip: bool = True


def profiler_config(text: str | None) -> ProfilerConfig | None:
    """What the flag says; None where it is not given. Raises ConfigError."""
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text, type=ProfilerConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"profiler_config {text!r:.200}: {error}; give an object such as "
            f"{json.dumps({'profiler': 'torch', 'torch_profiler_dir': '/tmp/traces'})}."
        ) from error
    if found.profiler != "torch":
        raise ConfigError(f"profiler_config: profiler must be 'torch', got {found.profiler!r}; {_DEVICE}.")
    if not Path(found.torch_profiler_dir).is_absolute():
        raise ConfigError(
            f"profiler_config: torch_profiler_dir must be an absolute path, as each worker writes there, got "
            f"{found.torch_profiler_dir!r}."
        )
    return found
