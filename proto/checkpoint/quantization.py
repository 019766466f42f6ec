"""How a checkpoint is quantized: what its config.json says, or a file beside it; does ``--quantization`` agree?

``quantization_of`` brings every spelling into one, a config.json's ``quantization_config`` with its ``quant_method``:
nothing else looks for it. What a method's settings mean is its format's to say (``gpu_worker/layers/formats``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..readable import is_file

ONLINE = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8", "int4")
"""What float weights can become while they are loaded."""
_OTHER_NAMES = {
    "auto_gptq": "gptq", "gptq_marlin": "gptq", "marlin": "gptq", "auto_awq": "awq", "awq_marlin": "awq",
    "gpt_oss_mxfp4": "mxfp4", "modelopt": "fp8", "fbgemm_fp8": "fp8", "compressed_tensors": "compressed-tensors",
    "sparseml": "compressed-tensors",
}  # fmt: skip
"""Names for kernels, or of another tool, and the method whose checkpoints they read."""
_MODELOPT = "hf_quant_config.json"
_FILES = {
    "gptq": ("quantize_config.json",), "awq": ("quant_config.json", "quantize_config.json"),
    "squeezellm": ("quant_config.json",), "fp8": (_MODELOPT,),
}  # fmt: skip
"""Files beside config.json with a method's settings, where config.json has none: any whose name ends so."""


def quantization_of(path: str, hf: Mapping[str, Any], asked: str | None) -> dict[str, Any] | None:
    """The quantization_config of the checkpoint in ``path``, whose config.json is ``hf``, with its quant_method; None:
    its weights are floats. ``asked``: ``--quantization``. Raises ConfigError where the two contradict each other, or a
    file is not what it should be.
    """
    if "quantization_config" in hf and hf["quantization_config"] is None:  # said to be none
        return None
    found = hf.get("quantization_config") or hf.get("compression_config")
    if found is None and is_file(Path(path) / _MODELOPT):
        found = _object(Path(path) / _MODELOPT)
    elif found is None and asked is not None and asked not in ONLINE:
        found = _beside(path, method(asked))
    if found is None or not isinstance(found, dict):  # of another kind: the registry's to refuse
        return found
    found = {**found}
    if "quant_method" not in found and hf.get("compression_config"):
        found["quant_method"] = "compressed-tensors"
    if found.get("quant_method") == "sparseml":
        found["quant_method"] = "compressed-tensors"
    if found.get("quant_method") == "modelopt" or "producer" in found:
        found = _modelopt(path, found)
    check_agreement(found, asked)
    return found


def online(hf: Mapping[str, Any], asked: str | None) -> str | None:
    """What the float weights of a config.json become at load: ``asked``, or None where it names what they are already.
    Raises ConfigError where they are something else.
    """
    found = hf.get("quantization_config")
    if not found or asked is None:
        return asked
    check_agreement(found, asked)
    return None


def method(name: str) -> str:
    """The method of a name of it."""
    return _OTHER_NAMES.get(name, name)


def check_agreement(found: object, asked: str | None) -> None:
    """Raises ConfigError, with both names, where ``asked`` is not the method of a quantization_config."""
    own = found.get("quant_method") if isinstance(found, dict) else found
    if asked is not None and own != asked and method(str(own)) != method(asked):
        raise ConfigError(
            f"Quantization method specified in the model config ({own}) does not match the quantization method "
            f"specified in the `quantization` argument ({asked}). Leave the argument out, or use a model with float "
            "weights."
        )


def _beside(path: str, asked: str) -> dict[str, Any] | None:
    """The settings in a file of the folder. Raises ConfigError."""
    if asked == "gguf" and is_file(path):  # it says this of itself
        return None
    ends = _FILES.get(asked, ())
    files = sorted(file for file in Path(path).glob("*.json") if file.name.endswith(ends)) if ends else []
    if not files:
        where = f"{path} has no quantization_config in its config.json" + (
            f", and no {' or '.join(ends)}" if ends else ""
        )
        raise ConfigError(
            f"Cannot find the config file for {asked}: {where}; leave --quantization out for float weights."
        )
    if len(files) > 1:
        names = [file.name for file in files]
        raise ConfigError(f"Found multiple config files for {asked}: {names} in {path}; leave only the model's own.")
    found = _object(files[0])
    return found if "producer" in found else {"quant_method": asked, **found}


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); download it again.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds {type(found).__name__} where a JSON object is needed; download it again.")
    return found


def _modelopt(path: str, found: dict[str, Any]) -> dict[str, Any]:
    """ModelOpt's FP8 in the words of quant_method fp8, whose tensors it has. Raises ConfigError for its other kinds."""
    inside = found.get("quantization")
    inner = inside if isinstance(inside, dict) else found
    kind, skipped = inner.get("quant_algo"), inner.get("exclude_modules", inner.get("ignore")) or []
    if kind != "FP8":
        raise ConfigError(
            f"{path}: ModelOpt's {kind} is not supported, only its FP8; use the model's float weights, or a checkpoint "
            "of another method."
        )
    if not isinstance(skipped, list) or not all(isinstance(name, str) and "*" not in name for name in skipped):
        raise ConfigError(
            f"{path}: exclude_modules of ModelOpt's config must be whole names of modules, got {skipped}."
        )
    return {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": skipped,
            "kv_cache_quant_algo": inner.get("kv_cache_quant_algo")}  # fmt: skip
