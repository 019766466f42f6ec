"""``--profiler-config``: whether workers may be profiled, and where the traces go. Names are vLLM's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from .config_error import ConfigError

_USAGE = json.dumps({"profiler": "torch", "torch_profiler_dir": "/tmp/traces"})


@dataclasses.dataclass(frozen=True)
class ProfilerConfig:
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
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"profiler_config {text!r:.200} is not JSON: {error}; give such as {_USAGE}.") from error
    if not isinstance(given, dict) or "torch_profiler_dir" not in given:
        raise ConfigError(f"profiler_config {text!r:.200} names no torch_profiler_dir; give such as {_USAGE}.")
    kinds = {each.name: bool if each.type == "bool" else str for each in dataclasses.fields(ProfilerConfig)}
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"profiler_config has no {name!r:.80}; its keys are {', '.join(kinds)}.")
        if type(value) is not kinds[name]:
            raise ConfigError(f"profiler_config: {name} must be a {kinds[name].__name__}, got {value!r:.80}.")
    found = ProfilerConfig(**given)
    if found.profiler != "torch":
        raise ConfigError(f"profiler_config: profiler must be 'torch', got {found.profiler!r:.80}.")
    if not Path(found.torch_profiler_dir).is_absolute():
        raise ConfigError(
            f"profiler_config: torch_profiler_dir must be an absolute path, as each worker writes there, got "
            f"{found.torch_profiler_dir!r}."
        )
    return found
