"""Quantized checkpoints to measure with, written from a float one: their sizes are real, their codes are noise.

Nothing is calibrated or rounded here. What such a model writes is noise, as what the models of ``models.py`` write.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from .report import BenchError

GPTQ = {"gptq4": 4, "gptq8": 8}
"""Bits of the codes, in groups of 128 inputs with a float16 scale and the middle of the codes as zero."""
GROUP = 128
GGUF_TYPES = ("Q4_0", "Q8_0")
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gptq(name: str, model: Path, out: Path) -> Path:
    """``model``'s shape as the checkpoint that ``name`` of GPTQ says, in the folder ``out``; returns that.

    Raises BenchError where inputs of a matrix are no whole groups.
    """
    import torch
    from safetensors.torch import load_file, save_file

    bits, tensors = GPTQ[name], {}
    torch.manual_seed(0)
    for key, tensor in _read(model, load_file).items():
        if not key.endswith("_proj.weight"):
            tensors[key] = tensor
            continue
        outputs, inputs = tensor.shape
        if inputs % GROUP or outputs % 8:
            raise BenchError(f"{key} is {outputs} x {inputs}, which is no whole groups of {GROUP}.")
        module, groups = key.removesuffix("weight"), inputs // GROUP
        zeros = sum((1 << (bits - 1)) - 1 << at for at in range(0, 32, bits))
        tensors[module + "qweight"] = torch.randint(-(2**31), 2**31, (inputs * bits // 32, outputs)).int()
        tensors[module + "qzeros"] = torch.full((groups, outputs * bits // 32), zeros - (zeros >> 31 << 32)).int()
        tensors[module + "scales"] = torch.rand(groups, outputs).half() * (0.08 / 2**bits)
        tensors[module + "g_idx"] = (torch.arange(inputs) // GROUP).int()
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": True,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config), "utf-8")
    return out


def write_gguf(name: str, model: Path, out: Path) -> Path:
    """The weights of a Qwen2 folder as a GGUF file whose matrices have a type of GGUF_TYPES; returns its path.

    Raises BenchError where the package gguf is missing or the model is of another family.
    """
    try:
        import gguf
    except ImportError as error:
        raise BenchError("writing GGUF files needs the package gguf: pip install gguf.") from error
    from safetensors.torch import load_file

    config = json.loads((model / "config.json").read_text("utf-8"))
    if config["model_type"] != "qwen2":
        raise BenchError(f"{model} is of the family {config['model_type']}; only qwen2 is written as GGUF here.")
    kind = gguf.GGMLQuantizationType[name]
    file = out / f"{model.name}-{name}.gguf"
    writer = gguf.GGUFWriter(file, "qwen2")
    _gguf_metadata(writer, config, gguf.LlamaFileType[f"MOSTLY_{name}"])
    _gguf_tokenizer(writer, gguf, model, config["vocab_size"])
    for key, tensor in _read(model, load_file).items():
        values = tensor.float().numpy()
        if tensor.dim() == 1:
            writer.add_tensor(_gguf_name(key), values)
        else:
            writer.add_tensor(_gguf_name(key), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _read(model: Path, load: Any) -> dict[str, Any]:
    return {key: tensor for file in sorted(model.glob("*.safetensors")) for key, tensor in load(file).items()}


def _gguf_metadata(writer: Any, config: dict[str, Any], file_type: int) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config).get("rope_theta", 10000.0))
    writer.add_file_type(file_type)


def _gguf_tokenizer(writer: Any, gguf: Any, model: Path, size: int) -> None:
    """The tokenizer's entries and, up to the size of the vocabulary, ones that no text has."""
    found = json.loads((model / "tokenizer.json").read_text("utf-8"))
    tokens = [f"<unused{at}>" for at in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for token, at in found["model"]["vocab"].items():
        tokens[at], types[at] = token, gguf.TokenType.NORMAL
    for added in found["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = found["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    config = json.loads((model / "config.json").read_text("utf-8"))
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _gguf_name(key: str) -> str:
    """GGUF's name of a tensor of Qwen2."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if key in whole:
        return whole[key]
    _, _, layer, *module, last = key.split(".")
    return f"blk.{layer}.{_GGUF_NAMES['.'.join(module)]}.{last}"
