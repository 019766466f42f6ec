"""Loading a checkpoint takes at most a fifth more memory than the model itself, at its peak, whatever the files are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
MOST = 1.2
# Loads the last of ``ranks`` tensor ranks' part of each folder in turn, and prints by how much memory grew at the peak,
# in shares of the bytes of that part's parameters.
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
for folder, load_format, ranks in json.loads(sys.argv[1]):
    shard = Shard(ranks - 1, ranks)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = status("VmRSS")
    model = load_model(load_model_config(folder), torch.float32, torch.device("cpu"), load_format, group=Group(shard))
    size = sum(torch.Size(p.shape).numel() for p in parameters(model.whole, shard)) * 4
    grown.append((status("VmHWM") - before) / size)
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
    command = [sys.executable, "-c", CHILD, json.dumps(work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert len(grown) == 4
    assert all(0.9 < share <= MOST for share in grown), grown
