"""The loader: sharded and single files, what it refuses and what it says, dtypes, dummy weights, old configs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from quire.gpu_worker.kernels.cpu.library import library
from quire.gpu_worker.layers.formats.dense import cpu_backend
from quire.gpu_worker.layers.linear import Linear
from quire.gpu_worker.layers.rope import rope_tables
from quire.gpu_worker.models import dtypes
from quire.gpu_worker.models.blocks import Block, Parallel, PostNorm, PreNorm, Sandwich, block_of
from quire.gpu_worker.models.families import FAMILIES as ALL_FAMILIES
from quire.gpu_worker.models.families import find_family
from quire.gpu_worker.models.families.llama import FAMILIES
from quire.gpu_worker.models.loader import load_model, resolve_dtype
from quire.gpu_worker.models.parameters import parameters
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.spec import Shard
from quire.proto.checkpoint.model_config import ModelConfig, load_model_config
from quire.proto.config import ConfigError

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


def load(folder: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto", **kwargs: Any):
    return load_model(load_model_config(str(folder)), dtype, CPU, load_format, **kwargs)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A Llama folder that a test may spoil."""
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def rewrite(folder: Path, change) -> None:
    """Save the folder's tensors again after ``change(tensors)``."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def fused(model, layer: int) -> torch.Tensor:
    """The qkv weight of a layer, read back out of its product."""
    return model.layers[layer].attention.qkv(torch.eye(model.spec.hidden_size, dtype=model.dtype)).t()


def test_qkv_is_stacked_in_order(llama: Path) -> None:
    tensors = load_file(llama / WEIGHTS)
    want = torch.cat([tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"])
    torch.testing.assert_close(fused(load(llama), 1), want)


def test_sharded_index(copy: Path) -> None:
    tensors = load_file(copy / WEIGHTS)
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, copy / file)
    (copy / WEIGHTS).unlink()
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.testing.assert_close(fused(load(copy), 2), fused(load(copy), 2))
    want = torch.cat([tensors[f"model.layers.2.self_attn.{x}_proj.weight"] for x in "qkv"])
    torch.testing.assert_close(fused(load(copy), 2), want)
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names model-00002-of-00003.safetensors, which the folder lacks"):
        load(copy)


def test_index_that_is_none(copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"is not a safetensors index .*download it again"):
        load(copy)


def test_missing_weight(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1\.self_attn\.k_proj\.weight, which LlamaForCausalLM"):
        load(copy)


def test_left_over_weight(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}))
    with pytest.raises(ConfigError, match=r"hold model\.layers\.0\.self_attn\.q_proj\.bias, which Llama.* no place"):
        load(copy)


def test_weights_nobody_needs_are_skipped(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(copy)


def test_tied_head_in_the_file(tmp_path: Path) -> None:
    folder = tiny_models.make("qwen2", tmp_path)
    before = load(folder).logits(torch.ones(1, 48))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    torch.testing.assert_close(load(folder).logits(torch.ones(1, 48)), before)


def test_wrong_shape(copy: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(copy, lambda tensors: tensors.update({name: torch.ones(48, 95)}))
    with pytest.raises(ConfigError, match=r"model\.safetensors: .*down_proj\.weight has shape \(48, 95\) .*\(48, 96\)"):
        load(copy)


def test_quantised_weight(copy: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(copy, lambda tensors: tensors.update({name: torch.ones(48, 96, dtype=torch.int8)}))
    with pytest.raises(ConfigError, match="is int8, a quantised weight, which is not supported"):
        load(copy)


@pytest.mark.parametrize("keep", [5000, 4, 0])
def test_truncated_file(copy: Path, keep: int) -> None:
    data = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(data[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut short .*download it again") as caught:
        load(copy)
    assert "\n" not in str(caught.value)


def test_no_weights(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"holds no .safetensors file; .*--load-format dummy"):
        load(copy)
    with pytest.raises(ConfigError, match=r"Unknown load format: pth"):
        load(copy, load_format="pth")


def test_unknown_architecture(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["Phi9ForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"\['Phi9ForCausalLM'\] .* are not supported; .* are: .*Phi3ForCausalLM"):
        load(copy)


@pytest.mark.parametrize("shape", [(), (0, 8, 48), (3, 8, 48)])
def test_a_tensor_of_all_experts_has_one_piece_for_each(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    folder = tiny_models.save("GptOss", tmp_path, 0, **{**tiny_models.BASE, **values})
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(shape)}))
    with pytest.raises(ConfigError, match=rf"{WEIGHTS}: model.layers.0.mlp.experts.down_proj has shape"):
        load(folder)


def test_a_rank_may_have_no_expert() -> None:
    values = {"num_local_experts": 1, "num_experts_per_tok": 1, "head_dim": 8}
    config = ModelConfig("/nowhere", tiny_config("GptOssForCausalLM", **values), 64, 100)
    for rank, held in ((0, 0), (1, 1)):
        model = load_model(config, torch.float32, CPU, "dummy", group=Group(Shard(rank, 2)))
        experts = model.layers[0].mlp.experts
        gate_up, down = experts.local[:2]
        assert [len(each) for each in (gate_up, down, gate_up.bias, down.bias)] == [held] * 4
        assert experts(torch.ones(3, 48)).any() == bool(held)


def test_bad_config_values() -> None:
    config = tiny_config(num_attention_heads=6, num_key_value_heads=4)
    with pytest.raises(ConfigError, match="num_attention_heads 6 is not a multiple of num_key_value_heads 4"):
        find_family(config)
    with pytest.raises(ConfigError, match="hidden_size must be a positive integer, got 'wide'"):
        find_family(tiny_config(hidden_size="wide"))
    with pytest.raises(ConfigError, match="hidden_act 'relu6' is not supported"):
        find_family(tiny_config(hidden_act="relu6"))


def tiny_config(architecture: str = "LlamaForCausalLM", **values: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, **values,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "values", "block"),
    [
        ("LlamaForCausalLM", {}, PreNorm),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, PreNorm),
        ("Gemma2ForCausalLM", {}, Sandwich),
        ("Olmo2ForCausalLM", {}, Sandwich),
        ("OPTForCausalLM", {"do_layer_norm_before": False}, PostNorm),
        ("CohereForCausalLM", {}, Parallel),
        ("GPTNeoXForCausalLM", {}, Parallel),
    ],
)
def test_a_layer_is_one_of_four_shapes(architecture: str, values: dict[str, Any], block: type[Block]) -> None:
    spec, _ = find_family(tiny_config(architecture, **values))
    assert block_of(spec) is block


def test_a_spec_of_two_shapes_is_refused() -> None:
    spec, _ = find_family(tiny_config("CohereForCausalLM"))
    with pytest.raises(ValueError, match="CohereForCausalLM cannot be Parallel and PostNorm at once"):
        block_of(replace(spec, post_norm=True))
    with pytest.raises(ValueError, match="no Parallel layer has this spec's residual"):
        block_of(replace(spec, residual_from_norm=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_needs_no_file(dtype: torch.dtype) -> None:
    config = ModelConfig("/nowhere", tiny_config("GemmaForCausalLM", head_dim=16), 64, 100)
    models = [load_model(config, dtype, CPU, "dummy", seed) for seed in (1, 1, 2)]
    first, same, other = (fused(model, 1) for model in models)
    assert first.dtype == dtype
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert 0.015 < first.float().std() < 0.025
    assert models[0].final_norm.weight.float().mean().abs() < 0.05
    llama = load_model(ModelConfig("/nowhere", tiny_config(), 64, 100), dtype, CPU, "dummy")
    assert (llama.final_norm.weight.float().mean() - 1).abs() < 0.05


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_reads_a_bare_config(architecture: str) -> None:
    """The shapes a checkpoint of the family must have follow from a minimal config."""
    spec, names = find_family(tiny_config(architecture))
    stems = {p.name.split(".")[2] for p in parameters(spec) if p.name.startswith("layers.")}
    assert stems <= set(names.layer)
    assert len(spec.windows) == len(spec.kv_heads) == spec.num_layers


def classes() -> dict[str, Any]:
    """Architecture -> transformers' class of its config, where there is one."""
    import transformers

    prefixes = {name: name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in ALL_FAMILIES}
    found = {name: prefix + ("TextConfig" if prefix == "Gemma3" else "Config") for name, prefix in prefixes.items()}
    return {name: getattr(transformers, kind) for name, kind in found.items() if hasattr(transformers, kind)}


SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 40, "ffn_dim": 40, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8, "max_position_embeddings": 512,
    "num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
}  # fmt: skip


def test_a_value_that_is_left_out_is_the_classs() -> None:
    """Of a config.json that holds sizes alone comes the same model as of one with everything written out."""
    found = classes()
    assert len(found) > 30
    for name, kind in found.items():
        sizes = {key: size for key, size in SIZES.items() if key in kind.__annotations__ or key in kind.attribute_map}
        bare = {kind.attribute_map.get(key, key): size for key, size in sizes.items()}
        one = find_family({**kind(**sizes).to_dict(), "architectures": [name]})[0]
        other = find_family({**bare, "architectures": [name]})[0]
        for given, assumed in zip(one.ropes, other.ropes, strict=True):
            assert (given is None) == (assumed is None), name
            if given is not None and assumed is not None:
                assert all(map(torch.equal, rope_tables(given, 64), rope_tables(assumed, 64))), name
        assert replace(one, ropes=()) == replace(other, ropes=()), name


OLD_SPELLINGS: dict[str, dict[str, Any]] = {
    "llama-linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "phi3-partial-window": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "phi3-longrope": {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "su", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.5, 2.0, 4.0, 8.0],
        },
    },
    "qwen2-window": {"rope_theta": 10000.0, "layer_types": None},
    "mistral-window": {"rope_theta": 10000.0},
}  # fmt: skip


@pytest.mark.parametrize("row", OLD_SPELLINGS)
def test_old_spellings_mean_the_same(row: str, tmp_path: Path) -> None:
    config = json.loads((tiny_models.make(row, tmp_path) / "config.json").read_text())
    new, _ = find_family(config)
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype", "layer_types")}
    found, _ = find_family({**old, **OLD_SPELLINGS[row], "torch_dtype": "float32"})
    for field in ("windows", "attn_scales", "kv_heads", "head_dim"):
        assert getattr(found, field) == getattr(new, field)
    one, other = found.ropes[0], new.ropes[0]
    assert one is not None and other is not None
    assert (one.type, one.rotary_dim, one.theta) == (other.type, other.rotary_dim, other.theta)


def dtype_of(name: str, asked: str = "auto", device: str = "cpu", **hf: Any) -> torch.dtype:
    config = ModelConfig("/m", {"dtype": name, **hf}, 64, 100)
    return resolve_dtype(asked, config, torch.device(device))


def test_resolve_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16 in (True, False):
        monkeypatch.setattr(dtypes, "cpu_has_bf16", lambda has=has_bf16: has)
        narrow = torch.bfloat16 if has_bf16 else torch.float32
        for name in ("float32", "torch.float16"):
            assert dtype_of(name) == torch.float32
        for backend in ("native", "onednn"):  # others round a token as its batch has it
            monkeypatch.setattr(dtypes, "cpu_backend", lambda dtype, backend=backend: backend)
            assert dtype_of("bfloat16") == (narrow if backend == "native" else torch.float32)
        monkeypatch.setattr(dtypes, "uses_fallback", lambda config: True)
        assert dtype_of("bfloat16") == torch.float32
        monkeypatch.undo()
        monkeypatch.setattr(dtypes, "cpu_has_bf16", lambda has=has_bf16: has)
        assert dtype_of("float32", "bfloat16") == narrow
        assert dtype_of("float32", "half") == narrow
        assert dtype_of("bfloat16", "float") == torch.float32
    monkeypatch.setattr(dtypes, "gpu_capability", lambda device: (9, 0))
    assert dtype_of("float32", device="cuda") == torch.float16
    assert dtype_of("float32", device="cuda", model_type="gemma2") == torch.bfloat16
    assert dtype_of("float32", "float32", device="cuda") == torch.float32
    assert dtype_of("bfloat16", device="cuda") == torch.bfloat16
    assert dtype_of("bfloat16", "float16", device="cuda") == torch.float16
    assert resolve_dtype("auto", ModelConfig("/m", {"torch_dtype": "float16"}, 64, 100), torch.device("cuda")) == (
        torch.float16
    )
    with pytest.raises(ConfigError, match="Unknown dtype: int7"):
        dtype_of("float32", "int7")
    with pytest.raises(ConfigError, match=r"Unknown dtype: int7 in /m/config.json"):
        dtype_of("int7")


@pytest.mark.parametrize("backend", ["native", "onednn", "mkl", "plain"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_packing_gives_the_product(backend: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "native" and library() is None:
        pytest.skip("no native CPU kernels here")
    if backend == "mkl" and not torch.backends.mkl.is_available():
        pytest.skip("torch has no MKL here")
    monkeypatch.setenv("QUIRE_CPU_LINEAR", backend)
    assert cpu_backend() == backend
    torch.manual_seed(0)
    weight, shift = torch.randn(300, 280), torch.randn(300) if bias else None
    product = Linear.of(weight, shift)
    for rows in (1, 3, 32, 33, 200):
        x = torch.randn(rows, 280)
        want = torch.nn.functional.linear(x.double(), weight.double(), shift if shift is None else shift.double())
        torch.testing.assert_close(product(x), want.float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rms_norm_eps": "a"}, r"rms_norm_eps must be a number of at most 1e\+30, got 'a'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta must be a positive number, got 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}}, "needs a factor above 0"),
    ],
)
def test_a_config_whose_numbers_cannot_work_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=said):
        load_model(load_model_config(str(folder)), torch.float32, torch.device("cpu"), "auto", 0, False)
