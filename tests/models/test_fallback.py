"""Architectures that the table does not know run as transformers' own models over the paged cache, or are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paged_runner
import pytest
import tiny_models
import torch
from family_rig import FamilyRig
from paged_runner import PagedRunner, Row

from quire import LLM, SamplingParams
from quire.gpu_worker.models import loader
from quire.gpu_worker.models.fallback import TransformersModel, uses_fallback
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.spec import Shard
from quire.proto.checkpoint.model_config import ModelConfig, load_model_config
from quire.proto.config import ConfigError

CPU = torch.device("cpu")
NEW = 24
_MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 6, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4.0, 8.0]}
# name -> (transformers' class prefix, what differs from tiny_models.BASE)
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "num_key_value_heads": 3}),
    "exaone4-window": ("Exaone4", {"sliding_window": 24, "sliding_window_pattern": 3}),
    "nemotron": ("Nemotron", {"head_dim": 16, "partial_rotary_factor": 0.5}),
}


def folder_of(row: str, folder: Path, **changes: Any) -> Path:
    prefix, values = ROWS[row]
    return tiny_models.write(prefix, folder, 5, {**values, **changes})


def config_of(folder: Path, **flags: Any) -> ModelConfig:
    config = load_model_config(str(folder), flags.pop("max_model_len", 256))
    for name, value in flags.items():
        setattr(config, name, value)
    return config


def load(config: ModelConfig, **kwargs: Any) -> Any:
    return load_model(config, torch.float32, CPU, **kwargs)


@torch.inference_mode()
def wanted(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits [T, vocab] of each."""
    longest = max(map(len, sequences))
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in sequences])
    logits = tiny_models.reference(folder)(ids).logits  # causal: no token sees the padding behind it
    return [each[: len(tokens)] for each, tokens in zip(logits, sequences, strict=True)]


def assert_greedy(folder: Path, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    whole = [prompt + list(output) for prompt, output in zip(prompts, outputs, strict=True)]
    for prompt, output, logits in zip(prompts, outputs, wanted(folder, whole), strict=True):
        assert list(output) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert len(output) == NEW


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_logits_and_tokens_are_transformers_own(row: str, tmp_path: Path) -> None:
    """Chunked, cached, many at once; then with so few blocks that sequences are preempted."""
    torch.set_num_threads(1)
    folder = folder_of(row, tmp_path)
    prompts = tiny_models.random_prompts(8, seed=6, shortest=4, longest=80)
    prompts += [max(prompts, key=len)[:30] + prompts[0][:9]]  # a beginning that is in the cache by then
    rig = FamilyRig(folder)
    assert isinstance(rig.model, TransformersModel)
    tokens = rig.greedy(prompts, NEW)
    assert_greedy(folder, prompts, tokens)
    assert rig.worker.chunks and rig.hits
    for logits, want in zip(rig.prompt_logits(prompts[::3]), wanted(folder, prompts[::3]), strict=True):
        torch.testing.assert_close(logits, want[:-1], atol=1e-4, rtol=1e-5)
    few = FamilyRig(folder, blocks=32)
    assert few.greedy(prompts, NEW) == tokens
    assert few.core.preemptions


@pytest.mark.slow
def test_it_is_served_by_real_processes(tmp_path: Path) -> None:
    folder = folder_of("smollm3", tmp_path)
    prompts = tiny_models.random_prompts(6, seed=7, shortest=4, longest=60)
    with LLM(str(folder), dtype="float32", max_model_len="auto", num_gpu_blocks_override=14, block_size=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        with pytest.raises(ValueError, match="maximum context length is 112 tokens"):  # as many as the 14 blocks hold
            llm.generate(prompt_token_ids=[[1] * 112], sampling_params=params, use_tqdm=False)
    assert_greedy(folder, prompts, [output.outputs[0].token_ids for output in outputs])


@pytest.mark.parametrize(
    ("prefix", "values"),
    [
        ("DeepseekV3", _MLA),  # values narrower than keys, experts
        ("Gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),  # soft caps, windows by turns
        ("GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),  # sinks
        ("GPTBigCode", {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256}),  # one key head
    ],
)  # fmt: skip
def test_what_attention_may_ask_for(prefix: str, values: dict[str, Any], tmp_path: Path) -> None:
    """Also families that the table knows, where --model-impl says transformers."""
    torch.set_num_threads(1)
    folder = tiny_models.write(prefix, tmp_path, 5, values)
    model = load(config_of(folder, model_impl="transformers"))
    assert isinstance(model, TransformersModel)
    (tokens,) = tiny_models.random_prompts(1, seed=2, shortest=70, longest=70)
    row, runner = Row(tokens), PagedRunner(model)
    got = torch.cat([runner.step([(row, count)]) for count in (30, 39, 1)])
    torch.testing.assert_close(got, wanted(folder, [tokens])[0], atol=1e-4, rtol=1e-5)


def test_longrope_has_one_set_of_factors_throughout(tmp_path: Path) -> None:
    folder = folder_of("smollm3", tmp_path, rope_parameters={**_LONG, "original_max_position_embeddings": 64})
    (tokens,) = tiny_models.random_prompts(1, seed=2, shortest=80, longest=80)
    row, runner = Row(tokens), PagedRunner(load(config_of(folder)))
    got = torch.cat([runner.step([(row, 40)]), runner.step([(row, 40)])])
    torch.testing.assert_close(got, wanted(folder, [tokens])[0], atol=1e-4, rtol=1e-5)


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

open({witness!r}, "a").write("ran\\n")


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_remote_code_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, witness = tiny_models.make("llama", tmp_path / "model"), tmp_path / "witness"
    (want,) = wanted(folder, [[5, 6, 7]])
    change(folder, architectures=["OwnForCausalLM"], model_type="own", auto_map={
        "AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM",
    })  # fmt: skip
    (folder / "own.py").write_text(REMOTE.format(witness=str(witness)))
    with pytest.raises(ConfigError, match=r"Failed to load the model config\. .*`--trust-remote-code` flag in the CLI"):
        load(config_of(folder))
    assert not witness.exists()
    model = load(config_of(folder, trust_remote_code=True))
    assert witness.exists()
    torch.testing.assert_close(PagedRunner(model).step([(Row([5, 6, 7]), 3)]), want, atol=1e-4, rtol=1e-5)


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def test_remote_code_of_a_known_family_is_never_needed(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    change(folder, auto_map={"AutoConfig": "absent.Config", "AutoModelForCausalLM": "absent.Model"})
    assert not uses_fallback(config_of(folder))
    assert load(config_of(folder)).layers


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("Mamba", "it keeps a recurrent state"),
        ("Bloom", "its attention cannot be replaced"),
        ("MiniMax", "attention runs 2 times in its 3 layers"),
        ("Lfm2", "attention runs 1 times in its 3 layers"),
    ],
)
def test_models_that_cannot_be_paged_are_refused(prefix: str, said: str, tmp_path: Path) -> None:
    values = {"Lfm2": {"full_attn_idxs": [1]}, "Mamba": {"state_size": 8}}.get(prefix, {})
    config = config_for(prefix, tmp_path, values)
    words = f"{tmp_path}: transformers' {prefix}ForCausalLM cannot be served with paged attention: {said}"
    with pytest.raises(ConfigError, match=words) as caught:
        load(config, load_format="dummy")
    assert "\n" not in str(caught.value)


def config_for(prefix: str, folder: Path, values: dict[str, Any]) -> ModelConfig:
    """A folder with a config alone."""
    import transformers

    made = getattr(transformers, f"{prefix}Config")(**{**tiny_models.BASE, **values})
    made.architectures = [f"{prefix}ForCausalLM"]
    made.save_pretrained(folder)
    return config_of(folder, model_impl="transformers")


def test_what_cannot_be_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("smollm3", tmp_path)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="batch_invariant is for the architectures"):
        patch.setattr(loader, "batch_invariant", lambda: True)
        load(config_of(folder))
    with pytest.raises(ConfigError, match="runs in one process; leave out --tensor-parallel-size"):
        load(config_of(folder), group=Group(Shard(0, 2)))
    with pytest.raises(ConfigError, match=r"\['SmolLM3ForCausalLM'\] in config.json are not supported"):
        load(config_of(folder, model_impl="quire"))
    with pytest.raises(ConfigError, match=r"'dynamic' turns positions .*; --max-model-len 64 is short enough"):
        change(
            folder,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        )
        load(config_of(folder))
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut short"):
        load(config_of(folder))
    (folder / "model.safetensors").write_bytes(data)
    change(folder, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 1], layer_types=["full_attention"] * 4)
    with pytest.raises(ConfigError, match=r"the weights lack model\.layers\.3\..* and \d+ more, which SmolLM3"):
        load(config_of(folder, max_model_len=64))
    change(folder, architectures=["NobodysForCausalLM"])
    with pytest.raises(ConfigError, match="transformers has no decoder for architectures"):
        load(config_of(folder, model_impl="transformers"))


KERNELS = """
import sys, torch
sys.path[:0] = sys.argv[2:]
import test_fallback as t
from quire.gpu_worker.layers import dispatch
model = t.load(t.config_of(sys.argv[1]))
results = []
for use in (False, True):
    dispatch.use_kernels = lambda x, use=use: use
    runner, row = t.PagedRunner(model, 16), t.Row(list(range(10)))
    results.append(torch.cat([runner.step([(row, 9)]), runner.step([(row, 1)])]))
torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)
print("same")
"""


@pytest.mark.slow
def test_the_gpu_path_under_the_interpreter(tmp_path: Path) -> None:
    folder = folder_of("exaone4-window", tmp_path, sliding_window=6, num_hidden_layers=2, sliding_window_pattern=2)
    command = [
        sys.executable,
        "-c",
        KERNELS,
        str(folder),
        str(Path(__file__).parent),
        str(Path(paged_runner.__file__).parent),
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == "same", done.stderr
