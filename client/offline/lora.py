"""LoRARequest: an adapter that a prompt of LLM is run with, with vLLM's names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ...proto.work import Adapter
from ..adapter_folders import AdapterFolders


@dataclass(frozen=True, eq=False)
class LoRARequest:
    """An adapter by a name of the caller's. ``lora_path`` is a PEFT folder or a hub id; ``lora_int_id`` is at least 1.

    Its files are looked at with each call: where they have changed, it is another adapter from then on, and nothing
    that was cached for the older one is used. ``load_inplace`` is accepted for vLLM's sake. Two are equal where their
    names are.

    Raises:
        ValueError: no name, no path, or an id below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {self.lora_int_id!r}")
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name must be a non-empty string, got {self.lora_name!r}.")
        if not self.lora_path:
            raise ValueError("lora_path cannot be empty")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)

    @property
    def adapter_id(self) -> int:
        """``lora_int_id``."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """``lora_name``."""
        return self.lora_name

    @property
    def path(self) -> str:
        """``lora_path``."""
        return self.lora_path


def parse_lora(asked: Any, count: int, folders: AdapterFolders | None) -> list[tuple[Any, Adapter | None]]:
    """What is asked for each of ``count`` prompts, and its adapter. ``asked``: one for all, or a list with one or None
    for each.

    Raises ValueError (ConfigError where an adapter cannot be used), TypeError.
    """
    each = list(asked) if isinstance(asked, list | tuple) else [asked] * count
    if len(each) != count:
        raise ValueError("The lengths of prompts and lora_request must be the same.")
    made: dict[tuple[str, str], Adapter] = {}
    return [(one, None if one is None else _adapter(one, folders, made)) for one in each]


def _adapter(one: Any, folders: AdapterFolders | None, made: dict[tuple[str, str], Adapter]) -> Adapter:
    if folders is None:
        raise ValueError(f"Got lora_request {one!r:.200} but LoRA is not enabled! Use LLM(..., enable_lora=True).")
    if not all(hasattr(one, name) for name in ("lora_name", "lora_path")):
        raise TypeError(f"lora_request must be a LoRARequest, got {type(one).__name__}.")
    key = one.lora_name, os.fspath(one.lora_path)
    if key not in made:
        made[key] = folders.adapter(*key)
    return made[key]
