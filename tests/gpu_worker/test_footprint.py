"""A model that is larger than the memory is refused before it is loaded, by the numbers; one that fits is not."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from worker_fakes import TINY_LLAMA

from quire.gpu_worker import footprint
from quire.gpu_worker.footprint import Footprint, Room, check_footprint, footprint_of, refuse_larger
from quire.gpu_worker.memory import GIB, available_memory, memory_limits
from quire.gpu_worker.parallel.parallel import shard_of
from quire.gpu_worker.spec import WHOLE
from quire.proto.checkpoint.model_config import ModelConfig, config_of
from quire.proto.config import ConfigError, EngineArgs

CPU = torch.device("cpu")
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16", "rope_theta": 500000.0,
}  # fmt: skip
PARAMETERS = 70_553_706_496


def config_in(folder: Path, values: dict, **flags: object) -> tuple[EngineArgs, ModelConfig]:
    (folder / "config.json").write_text(json.dumps(values))
    args = EngineArgs(model=str(folder), load_format="dummy", device="cpu", **flags)
    return args, config_of(args, str(folder))


def need_of(folder: Path, values: dict, dtype: torch.dtype = torch.float32, **flags: object) -> Footprint:
    args, config = config_in(folder, values, **flags)
    shard = shard_of(args.rank, args.tensor_parallel_size, args.pipeline_parallel_size)
    return footprint_of(args, config, None, dtype, shard)


# ---------------------------------------------------------------- what is free


def group(root: Path, folder: str, limit: str, used: int, files: dict[str, int] | None = None, old: bool = False):
    """A memory cgroup below ``root``, with the figures ``files`` in its memory.stat."""
    at = root / "sys/fs/cgroup" / folder
    at.mkdir(parents=True, exist_ok=True)
    names = ("limit_in_bytes", "usage_in_bytes") if old else ("max", "current")
    for name, text in zip(names, (limit, used), strict=True):
        (at / f"memory.{name}").write_text(f"{text}\n")
    if files is not None:
        (at / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in files.items()))


def system(root: Path, cgroup: str | None, available: int = 20 * GIB) -> Path:
    """A /proc below ``root`` of a process in ``cgroup``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\n")
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
    return root


def test_without_cgroups_it_is_what_the_system_has(tmp_path):
    assert memory_limits(system(tmp_path, None)) == [(20 * GIB, "MemAvailable")]


def test_nested_cgroups_each_have_a_say(tmp_path):
    root = system(tmp_path, "0::/user.slice/quire\n")
    group(root, "user.slice", str(8 * GIB), 3 * GIB)
    group(root, "user.slice/quire", "max", GIB)
    assert min(memory_limits(root)) == (5 * GIB, "within the memory limit of cgroup /user.slice")
    group(root, "user.slice/quire", str(2 * GIB), GIB)
    assert min(memory_limits(root)) == (GIB, "within the memory limit of cgroup /user.slice/quire")


def test_a_cgroups_page_cache_gives_way(tmp_path):
    root = system(tmp_path, "0::/\n")
    group(root, "", str(8 * GIB), 7 * GIB, {"anon": GIB, "inactive_file": 4 * GIB, "active_file": GIB, "shmem": GIB})
    assert min(memory_limits(root)) == (6 * GIB, "within the memory limit of cgroup /")


def test_version_one(tmp_path):
    root = system(tmp_path, "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n")
    group(root, "memory", str(2**63 - 4096), 9 * GIB, {}, old=True)
    assert min(memory_limits(root)) == (20 * GIB, "MemAvailable")
    files = {"inactive_file": 0, "active_file": 0, "total_inactive_file": GIB, "total_active_file": GIB}
    group(root, "memory/docker/x", str(8 * GIB), 4 * GIB, files, old=True)
    assert min(memory_limits(root)) == (6 * GIB, "within the memory limit of cgroup /docker/x")


def test_a_cgroup_of_another_namespace_is_seen_by_its_mount_alone(tmp_path):
    root = system(tmp_path, "0::/../elsewhere\n")
    group(root, "", str(3 * GIB), 4 * GIB)  # over its limit: nothing is left, and no less
    assert min(memory_limits(root)) == (0, "within the memory limit of cgroup /")
    (root / "proc/self/cgroup").write_text("0::/system.slice/docker-1.scope\n")  # as seen without a namespace
    assert min(memory_limits(root))[0] == 0


# ---------------------------------------------------------------- what a model needs


def test_the_floor_of_a_known_model(tmp_path):
    need = need_of(tmp_path, LLAMA_70B)
    assert (need.parameters, need.weights) == (PARAMETERS, 4 * PARAMETERS)
    assert (need.tokens, need.token_bytes) == (8192, 80 * 2 * 8 * 128 * 4) and need.cache == 5 * GIB
    half = need_of(tmp_path, LLAMA_70B, torch.bfloat16, max_model_len=4096)
    assert (half.weights, half.cache) == (2 * PARAMETERS, 5 * GIB // 4)
    assert need_of(tmp_path, LLAMA_70B, max_model_len=-1).tokens == 1
    assert need_of(tmp_path, LLAMA_70B, kv_cache_memory_bytes=GIB).cache == 0


def test_tied_embeddings_count_once(tmp_path):
    tied = need_of(tmp_path, {**LLAMA_70B, "tie_word_embeddings": True})
    assert tied.parameters == PARAMETERS - 8192 * 128256


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (4, 2), (1, 8)])
def test_a_process_of_several_needs_its_share(tmp_path, size, stages):
    flags = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
    shares = [need_of(tmp_path, LLAMA_70B, rank=rank, **flags) for rank in range(size * stages)]
    whole = need_of(tmp_path, LLAMA_70B)
    assert sum(share.parameters for share in shares) == pytest.approx(whole.parameters, rel=1e-4)
    assert sum(share.token_bytes for share in shares) == whole.token_bytes


def test_transformers_own_models_are_counted_by_their_files(tmp_path):
    save_file(
        {"a": torch.zeros(1000, 7, dtype=torch.bfloat16), "b": torch.zeros(3)}, str(tmp_path / "model.safetensors")
    )
    values = {**TINY_LLAMA, "vocab_size": 10}
    args, config = config_in(tmp_path, values, model_impl="transformers")
    args.load_format = "auto"
    assert footprint_of(args, config, None, torch.float32, WHOLE) == Footprint(7003, 4, 0, 0, 0)
    config.vocab_size = 2**40  # a table that the files lack would be made
    assert footprint_of(args, config, None, torch.float32, WHOLE).parameters >= 2**40


# ---------------------------------------------------------------- refusing


def refusal(
    folder: Path, free: int, whole: int = 0, dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None, **flags: object,
) -> str:  # fmt: skip
    """What is said of the 70B model where ``free`` bytes are."""
    args, config = config_in(folder, LLAMA_70B, **flags)
    shard = shard_of(args.rank, args.tensor_parallel_size, args.pipeline_parallel_size)
    need = footprint_of(args, config, None, dtype, shard, cache_dtype)
    try:
        refuse_larger(config, need, Room(free, "MemAvailable", whole or free), dtype, CPU, shard)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_narrower_model_does_not_halve_a_cache_of_its_own_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr(footprint, "cpu_has_bf16", lambda: True)
    room = 2 * PARAMETERS + 2 * GIB  # half of the weights, and less than a cache of 8192 tokens in bfloat16
    assert "--dtype bfloat16" not in refusal(tmp_path, room)
    assert "--dtype bfloat16" in refusal(tmp_path, room, cache_dtype=torch.float8_e4m3fn)
    assert "--dtype bfloat16" not in refusal(tmp_path, room - GIB, cache_dtype=torch.float8_e4m3fn)


def test_the_line_has_the_numbers_and_what_would_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(footprint, "cpu_has_bf16", lambda: True)
    assert refusal(tmp_path, 200 * GIB) == (
        f"{tmp_path} does not fit the memory: 70.55 billion parameters take 262.83 GiB in float32, the cache of 8192 "
        "tokens and a step 5.00 GiB; 200.00 GiB are free (MemAvailable). Use --dtype bfloat16 (131.42 GiB of weights), "
        "or --tensor-parallel-size 2 on as many such machines, or a smaller model."
    )
    monkeypatch.setattr(footprint, "cpu_has_bf16", lambda: False)
    assert "--dtype" not in refusal(tmp_path, 200 * GIB)
    said = refusal(tmp_path, 22 * GIB, tensor_parallel_size=2, rank=1)
    assert "35.28 billion parameters of one of 2 processes take 131.42 GiB" in said
    assert "Use --tensor-parallel-size 16 on as many such machines, or a smaller model." in said
    said = refusal(tmp_path, 264 * GIB)
    assert "--max-model-len 1907 at most" in said and "utilization" not in said
    assert refusal(tmp_path, 264 * GIB, max_model_len=1907) == ""
    assert refusal(tmp_path, 264 * GIB, max_model_len=1908)
    assert "a larger --gpu-memory-utilization" in refusal(tmp_path, 264 * GIB, whole=268 * GIB)


def test_nothing_is_refused_that_fits(tmp_path):
    least = need_of(tmp_path, LLAMA_70B).total
    assert refusal(tmp_path, least) == ""
    assert refusal(tmp_path, least - 1)


def test_a_gpu_gives_its_share_of_the_whole_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    room = footprint.room_of(torch.device("cuda", 0), 0.75)
    assert (room.free, room.whole) == (30 * GIB, 50 * GIB)
    assert room.source == "50.00 GiB of 80.00 GiB on cuda:0, with gpu_memory_utilization 0.75"


def test_a_cast_that_widens_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    args, config = config_in(tmp_path, {**TINY_LLAMA, "torch_dtype": "bfloat16"})
    check_footprint(args, config, None, torch.float32, CPU, WHOLE)
    assert not caplog.records  # dummy weights are made as they are needed
    args.load_format = "auto"
    check_footprint(args, config, None, torch.float32, CPU, WHOLE)
    assert "the weights are cast from bfloat16 (0.00 GiB) to float32 (0.00 GiB)" in caplog.text
    caplog.clear()
    check_footprint(args, config, None, torch.bfloat16, CPU, WHOLE)
    assert not caplog.records


# ---------------------------------------------------------------- the process


@pytest.mark.slow
@pytest.mark.skipif(available_memory() > 280 * GIB, reason="it would fit here")
@pytest.mark.parametrize("values", [LLAMA_70B, {**TINY_LLAMA, "vocab_size": 2**31 - 1}], ids=["70B", "vocabulary"])
def test_a_worker_refuses_before_it_takes_the_memory(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    command = [sys.executable, "-m", "quire.gpu_worker", f"--scheduler=ipc://{tmp_path}/none", f"--model={tmp_path}",
               "--load-format=dummy", "--device=cpu"]  # fmt: skip
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({3 * GIB}, {3 * GIB}));"
    runs = f"{limit} import os; os.execv({sys.executable!r}, {command!r})"
    done = subprocess.run([sys.executable, "-c", runs], capture_output=True, text=True, timeout=120)
    assert done.returncode == 78 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"quire.gpu_worker: error: {tmp_path} does not fit the memory: ")
    assert "GiB are free" in last and last.endswith("a smaller model.")
