"""auto-round's own config (quant_method auto-round), whose tensors are those of GPTQ or AWQ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ....proto.config import ConfigError
from .awq import awq
from .gptq import gptq
from .registry import Quantization, register

_FLOAT_BITS = 16


@register("auto-round")
@register("auto_round")
@register("intel/auto-round")
def auto_round(config: Mapping[str, Any]) -> Quantization:
    """``packing_format`` says whose tensors, ``extra_config`` what differs in a module or pattern; 16 bits: a float."""
    layout = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")
    kind, bits = str(config.get("data_type") or "int"), config.get("act_bits") or _FLOAT_BITS
    if kind != "int" or bits != _FLOAT_BITS or not re.search("gptq|awq|^auto_round$", layout):
        raise ConfigError(
            f"config.json: quantization_config's packing_format {layout} with data_type {kind} and act_bits {bits} is "
            "not supported; quantize the model with the format auto_round:auto_gptq or auto_round:auto_awq."
        )
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(said, Mapping) for said in extra.values()):
        raise ConfigError("config.json: quantization_config's extra_config is no object of modules.")
    for name, said in extra.items():
        if type(bits := said.get("bits", 0)) is not int:
            raise ConfigError(f"config.json: quantization_config's extra_config has bits={bits!r} of {name!r}; it must "
                              "be a whole number.")  # fmt: skip
    floats = [name for name, said in extra.items() if said.get("bits", 0) >= _FLOAT_BITS]
    if "awq" in layout:
        return awq({**config, "version": "gemm", "modules_to_not_convert": floats})
    dynamic = {
        ("-:" if name in floats else "+:") + (f"{re.escape(name)}$" if name.replace("_", "").replace(".", "").isalnum()
                                              else f".*(?:{name})"): said
        for name, said in extra.items()
    }  # fmt: skip
    # Its own packer keeps zeros as they are, as GPTQModel's second version does; auto_gptq's takes one off.
    second = "gptqmodel" in layout or layout == "auto_round"
    return gptq({**config, "checkpoint_format": "gptq_v2" if second else "gptq", "dynamic": dynamic})
