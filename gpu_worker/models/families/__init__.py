"""The table of families: architecture in config.json -> (its spec from the config's values, the names of its weights).

A family is a function of the config's values that differ from Llama's, and a ``WeightNames``; docs/adding-a-model.md
adds one step by step.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ....proto.config import ConfigError
from ...spec import DecoderSpec, WeightNames
from . import gpt, layernorm, llama, modern, moe, remote
from .common import Config, Family, with_aliases

FAMILIES: Mapping[str, Family] = {
    **llama.FAMILIES, **modern.FAMILIES, **moe.FAMILIES, **gpt.FAMILIES, **layernorm.FAMILIES, **remote.FAMILIES,
}  # fmt: skip


def find_family(hf: Config) -> tuple[DecoderSpec, WeightNames]:
    """The spec and weight names of ``hf``. Raises ConfigError for an architecture the table does not hold."""
    names = hf.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            make, weights = FAMILIES[name]
            hf = with_aliases({**hf, "architectures": [name]})
            return make(hf), weights(hf) if callable(weights) else weights
    near = difflib.get_close_matches(str(names[0]), FAMILIES, n=3, cutoff=0.5) if names else []
    hint = f"the nearest that are: {', '.join(near)}; " if near else ""
    raise ConfigError(f"architectures {names} in config.json are not supported; {hint}docs/models.md lists all.")
