"""Loading a checkpoint takes at most a fifth more memory than the model itself, at its peak, whatever the files are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.gpu_worker.kernels.cpu.library import library

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
MOST = 1.2
# Loads the last of ``ranks`` tensor ranks' part of each folder in turn, and prints by how much memory grew at the peak,
# in bytes, and how many parameters that part has.
CHILD = """
import ctypes, gc, json, sys, torch
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.models.parameters import parameters
from quire.gpu_worker.spec import Shard
from quire.gpu_worker.parallel.parallel import Group
from quire.proto.checkpoint.model_config import load_model_config

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

torch.set_num_threads(1)
grown = []
for folder, load_format, ranks, dtype in json.loads(sys.argv[1]):
    shard = Shard(ranks - 1, ranks)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = status("VmRSS")
    config, dtype = load_model_config(folder), getattr(torch, dtype)
    model = load_model(config, dtype, torch.device("cpu"), load_format, group=Group(shard))
    size = sum(torch.Size(p.shape).numel() for p in parameters(model.whole, shard))
    grown.append((status("VmHWM") - before, size))
    del model
print(json.dumps(grown))
"""


def names() -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors and their shapes."""
    hidden, wide, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(CONFIG["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        shapes |= {f"{base}self_attn.{each}_proj.weight": (hidden, hidden) for each in "qkvo"}
        shapes |= {f"{base}mlp.{each}_proj.weight": (wide, hidden) for each in ("gate", "up")}
        shapes[f"{base}mlp.down_proj.weight"] = (hidden, wide)
        shapes |= {f"{base}{each}_layernorm.weight": (hidden,) for each in ("input", "post_attention")}
    return shapes


def write(folder: Path, dtype: torch.dtype, shards: int, pickled: bool = False) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    stem, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    shapes, weight_map = names(), {}
    each = -(-len(shapes) // shards)
    drawn = torch.rand(max(torch.Size(shape).numel() for shape in shapes.values())).to(dtype)
    for shard in range(shards):
        part = {
            name: drawn[: torch.Size(shape).numel()].view(shape).clone()
            for name, shape in list(shapes.items())[shard * each : (shard + 1) * each]
        }
        file = folder / (f"{stem}-{shard}.{ending}" if shards > 1 else f"{stem}.{ending}")
        torch.save(part, file) if pickled else save_file(part, file)
        weight_map |= dict.fromkeys(part, file.name)
    if shards > 1:
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """A place for large files, which do not stay."""
    yield tmp_path / "folders"
    shutil.rmtree(tmp_path / "folders")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="tells peaks by Linux's /proc")
def test_the_peak_of_loading_is_little_more_than_the_model(folders: Path) -> None:
    write(folders / "shards", torch.float32, 3)
    write(folders / "widened", torch.bfloat16, 1)
    write(folders / "pickled", torch.float32, 2, pickled=True)
    work = [(str(folders / "shards"), "auto", 1), (str(folders / "widened"), "auto", 1),
            (str(folders / "pickled"), "pt", 1), (str(folders / "shards"), "auto", 2)]  # fmt: skip
    grown = [peak / (size * 4) for peak, size in loaded([(*each, "float32") for each in work])]
    assert len(grown) == 4
    assert all(0.9 < share <= MOST for share in grown), grown


def loaded(work: list[tuple[str, str, int, str]]) -> list[tuple[int, int]]:
    """What CHILD prints of ``work``, the least growth of each of two runs.

    Which freed pages the allocator keeps differs from run to run, by up to a tenth of a model. It can only add to what
    loading takes, so the smaller figure is the nearer one.
    """
    command = [sys.executable, "-c", CHILD, json.dumps(work)]
    runs = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    return [min(both) for both in zip(*runs, strict=True)]


def write_quantized(folder: Path, layers: int, experts: int) -> tuple[float, float]:
    """A checkpoint of GPTQ with 4 bits, in bfloat16 where it is not quantized, as transformers saves it: the scales of
    all of the weights lie behind the last one's codes. The bytes of its file, and those of a layer's in it.
    """
    folder.mkdir(parents=True)
    hidden, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"] // (4 if experts else 1) // 128 * 128
    random = torch.randint(-(2**31), 2**31, (hidden * CONFIG["intermediate_size"] // 8,)).int()
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in names().items() if "layers" not in name}
    for layer in range(layers):
        base = f"model.layers.{layer}."
        shapes = {f"{base}self_attn.{each}_proj": (hidden, hidden) for each in "qkvo"}
        tensors |= {
            f"{base}{each}_layernorm.weight": tensors["model.norm.weight"] for each in ("input", "post_attention")
        }
        if experts:
            tensors[f"{base}block_sparse_moe.gate.weight"] = torch.ones(experts, hidden, dtype=torch.bfloat16)
        for expert in range(experts or 1):
            stem = f"{base}block_sparse_moe.experts.{expert}." if experts else f"{base}mlp."
            gate, up, down = ("w1", "w3", "w2") if experts else ("gate_proj", "up_proj", "down_proj")
            shapes |= {f"{stem}{gate}": (wide, hidden), f"{stem}{up}": (wide, hidden), f"{stem}{down}": (hidden, wide)}
        for module, (rows, columns) in shapes.items():
            tensors |= {
                f"{module}.qweight": random[: rows * columns // 8].view(-1, rows),
                f"{module}.qzeros": torch.full((columns // 128, rows // 8), 0x77777777, dtype=torch.int32),
                f"{module}.scales": torch.ones(columns // 128, rows, dtype=torch.float16),
                f"{module}.g_idx": torch.arange(columns, dtype=torch.int32) // 128,
            }
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        **CONFIG, "num_hidden_layers": layers, "intermediate_size": wide,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    }  # fmt: skip
    if experts:
        config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": experts, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(config))
    size = (folder / "model.safetensors").stat().st_size
    return size, (size - 4 * CONFIG["vocab_size"] * hidden) / layers


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="tells peaks by Linux's /proc")
@pytest.mark.skipif(library() is None, reason="without the native CPU kernels quantized weights become floats")
def test_a_quantized_model_is_loaded_in_little_more_than_its_files(folders: Path) -> None:
    write_quantized(folders / "first", 1, 0)  # loads libraries, and counts for nothing
    sizes = [write_quantized(folders / "dense", 16, 0), write_quantized(folders / "experts", 8, 8)]
    work = [(str(folders / name), "auto", 1, "bfloat16") for name in ("first", "dense", "experts")]
    grown = [peak for peak, _ in loaded(work)[1:]]
    shares = [(peak - layer) / size for peak, (size, layer) in zip(grown, sizes, strict=True)]
    assert all(0.8 < share <= MOST for share in shares), shares


def write_gguf(file: Path, layers: int) -> tuple[float, float]:
    """A GGUF file with matrices of Q8_0, Q4_0 and Q6_K. The bytes of the file, and those of a layer's in it."""
    file.parent.mkdir(parents=True)
    writer = gguf.GGUFWriter(file, "llama")
    hidden, wide, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    for key, value in (
        ("block_count", layers), ("embedding_length", hidden), ("feed_forward_length", wide), ("context_length", 512),
        ("attention.head_count", CONFIG["num_attention_heads"]),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    kinds = {"attn": gguf.GGMLQuantizationType.Q4_0, "ffn": gguf.GGMLQuantizationType.Q8_0}

    def add(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> None:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor(name, np.zeros((rows, columns // block * size), np.uint8), raw_dtype=kind)

    for name in ("token_embd.weight", "output.weight"):
        add(name, vocab, hidden, gguf.GGMLQuantizationType.Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        for part in ("attn", "ffn"):
            writer.add_tensor(f"blk.{layer}.{part}_norm.weight", np.ones(hidden, np.float32))
        for part in ("q", "k", "v", "output"):
            add(f"blk.{layer}.attn_{part}.weight", hidden, hidden, kinds["attn"])
        for part in ("gate", "up"):
            add(f"blk.{layer}.ffn_{part}.weight", wide, hidden, kinds["ffn"])
        add(f"blk.{layer}.ffn_down.weight", hidden, wide, kinds["ffn"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    size = file.stat().st_size
    return size, (size - 2 * vocab * hidden * 210 / 256) / layers


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="tells peaks by Linux's /proc")
@pytest.mark.skipif(library() is None, reason="without the native CPU kernels quantized weights become floats")
def test_a_gguf_file_is_loaded_in_little_more_than_its_size(folders: Path) -> None:
    files = [folders / "first" / "model.gguf", folders / "whole" / "model.gguf"]
    (_, _), (size, layer) = write_gguf(files[0], 1), write_gguf(files[1], 12)
    _, (peak, _) = loaded([(str(file), "auto", 1, "bfloat16") for file in files])
    assert 0.8 < (peak - layer) / size <= MOST
