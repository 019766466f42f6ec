"""Where the settings of a quantized checkpoint are found, and what is refused, in vLLM's words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire.proto.checkpoint.model_config import config_of
from quire.proto.checkpoint.quantization import online
from quire.proto.config import ConfigError, EngineArgs

GPTQ = {"quant_method": "gptq", "bits": 4}
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.19"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


def found(folder: Path, asked: str | None, files: dict[str, Any], overrides: str | None = None) -> Any:
    """The quantization_config of a checkpoint of these files; "config" is what config.json has besides sizes."""
    sizes = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "max_position_embeddings": 64}
    for name, values in ({"config.json": {}} | files).items():
        values = {**sizes, **values} if name == "config.json" else values
        (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    args = EngineArgs(model=str(folder), quantization=asked, hf_overrides=overrides).check()
    return config_of(args, str(folder)).hf.get("quantization_config")


@pytest.mark.parametrize(
    ("asked", "files", "method"),
    [
        (None, {}, None),
        (None, {"config.json": {"quantization_config": GPTQ}}, "gptq"),
        *((name, {"config.json": {"quantization_config": GPTQ}}, "gptq")
          for name in ("gptq", "gptq_marlin", "auto_gptq", "marlin")),
        ("awq_marlin", {"config.json": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ("mxfp4", {"config.json": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
        (None, {"config.json": {"text_config": {"quantization_config": GPTQ}}}, "gptq"),
        (None, {"config.json": {"quantization_config": GPTQ, "text_config": {"quantization_config": {}}}}, "gptq"),
        (None, {"config.json": {"compression_config": {"format": "pack-quantized"}}}, "compressed-tensors"),
        (None, {"config.json": {"compression_config": {"quant_method": "sparseml"}}}, "compressed-tensors"),
        ("gptq", {"quantize_config.json": {"bits": 4}}, "gptq"),
        ("awq", {"quantize_config.json": {"w_bit": 4}}, "awq"),
        ("awq", {"quant_config.json": {"w_bit": 4}}, "awq"),
        ("squeezellm", {"quant_config.json": {"wbits": 4}}, "squeezellm"),
        ("fp8", {"hf_quant_config.json": MODELOPT}, "fp8"),
        (None, {"hf_quant_config.json": MODELOPT}, "fp8"),
        (None, {"config.json": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}}, "fp8"),
        (None, {"quantize_config.json": {"bits": 4}}, None),  # vLLM reads it where a method is named
        ("int8", {}, None), ("fp8", {}, None), ("int4", {"quantize_config.json": {"bits": 4}}, None),
    ],
)  # fmt: skip
def test_where_the_settings_are(asked: str | None, files: dict[str, Any], method: str | None, tmp_path: Path) -> None:
    config = found(tmp_path, asked, files)
    assert (config and config["quant_method"]) == method
    assert online({"quantization_config": config}, asked) == (asked if method is None else None)


def test_what_model_opt_says_of_fp8(tmp_path: Path) -> None:
    config = found(tmp_path, "modelopt", {"hf_quant_config.json": MODELOPT})
    assert (config["activation_scheme"], config["ignored_layers"]) == ("static", ["lm_head"])


def test_a_config_that_is_overridden_is_none(tmp_path: Path) -> None:
    files = {"config.json": {"quantization_config": GPTQ, "compression_config": {}}}
    assert found(tmp_path, "int8", files, '{"quantization_config": null}') is None


@pytest.mark.parametrize(
    ("asked", "files", "said"),
    [
        ("awq", {"config.json": {"quantization_config": GPTQ}},
         "Quantization method specified in the model config (gptq) does not match the quantization method specified in "
         "the `quantization` argument (awq)."),
        ("int4", {"config.json": {"quantization_config": GPTQ}}, "(gptq) does not match"),
        ("gptq", {"hf_quant_config.json": MODELOPT}, "(fp8) does not match"),
        ("awq", {}, "Cannot find the config file for awq: "), ("mxfp4", {}, "Cannot find the config file for mxfp4: "),
        ("gguf", {}, "Cannot find the config file for gguf: "),
        ("modelopt", {}, "Cannot find the config file for fp8: "),
        ("awq", {"quant_config.json": {}, "quantize_config.json": {}},
         "Found multiple config files for awq: ['quant_config.json', 'quantize_config.json']"),
        ("gptq", {"quantize_config.json": "{"}, "quantize_config.json cannot be read as JSON"),
        ("gptq", {"quantize_config.json": "[]"}, "quantize_config.json holds list where a JSON object is needed"),
        (None, {"hf_quant_config.json": {"producer": {}, "quantization": {"quant_algo": "NVFP4"}}}, "NVFP4 is not"),
        (None, {"hf_quant_config.json": {"producer": {}, "quant_algo": "FP8", "ignore": ["*"]}}, "must be whole names"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(asked: str | None, files: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        found(tmp_path, asked, files)
    assert "\n" not in str(refused.value)
