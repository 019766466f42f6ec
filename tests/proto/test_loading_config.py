"""Model folders by all flags: lengths, other names of keys, overrides, what is downloaded, casts of dtypes."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.gpu_worker.memory import Budget, fit
from quire.gpu_worker.models import dtypes
from quire.gpu_worker.models.dtypes import resolve_dtype
from quire.gpu_worker.models.families import find_family
from quire.proto.checkpoint.model_config import (
    AUTO_LENGTH,
    ModelConfig,
    config_of,
    load_model_config,
    model_folder,
    rope_parameters,
    tokenizer_folder,
)
from quire.proto.config import ConfigError, EngineArgs, parse_service_args


def write(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8, **config}))
    return str(folder)


def derived(folder: Path, **config: Any) -> int:
    return load_model_config(write(folder, **config)).max_model_len


@pytest.mark.parametrize("key", [
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length",
    "max_seq_length", "seq_len",
])  # fmt: skip
def test_every_familys_name_of_the_length(key: str, tmp_path: Path) -> None:
    assert derived(tmp_path, **{key: 96}) == 96
    assert derived(tmp_path, **{key: 96, "max_position_embeddings": 64}) == 64


def test_a_model_may_be_asked_for_its_own_longer_length(tmp_path: Path) -> None:
    """Command-R's max_position_embeddings is its default, its model_max_length what it can do."""
    folder = write(tmp_path, max_position_embeddings=64, model_max_length=256)
    assert load_model_config(folder).max_model_len == 64
    assert load_model_config(folder, 256).max_model_len == 256
    with pytest.raises(ConfigError, match=r"max_model_len \(257\) is greater than the derived max_model_len \(64\)"):
        load_model_config(folder, 257)


def test_none_is_2048_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert derived(tmp_path, model_type="bloom", n_layer=2) == 2048
    assert "names no maximum length; using 2048" in caplog.text
    assert load_model_config(str(tmp_path), 512).max_model_len == 512
    with pytest.raises(ConfigError, match="at least 2"):
        load_model_config(str(tmp_path), 1)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"rope_scaling": {"type": "su", "factor": 32.0}}, 100),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 400),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 100),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0},
                              "sliding_attention": {"rope_type": "default"}}}, 800),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1], "factor": 4.0}}, 100),
    ],
)  # fmt: skip
def test_rope_scalings_stretch_the_length(config: dict[str, Any], length: int, tmp_path: Path) -> None:
    assert derived(tmp_path, max_position_embeddings=100, **config) == length


@pytest.mark.parametrize("factor", ["big", -2, math.nan, math.inf])
def test_a_factor_that_cannot_be_is_named(factor: Any, tmp_path: Path) -> None:
    said = (
        r"config\.json: (rope scaling 'linear' needs a factor above 0|rope_scaling\.factor must be a (finite )?number)"
    )
    with pytest.raises(ConfigError, match=said):
        derived(tmp_path, max_position_embeddings=100, rope_scaling={"type": "linear", "factor": factor})


def test_lengths_as_people_write_them() -> None:
    def given(*argv: str) -> int | None:
        return parse_service_args("gpu_worker", list(argv)).max_model_len

    assert given() is None
    assert [given(f"--max-model-len={text}") for text in ("4096", "32k", "32K", "1.5k")] == [4096, 32000, 32768, 1500]
    assert given("--max-model-len=auto") == given("--max-model-len=-1") == AUTO_LENGTH
    assert EngineArgs(max_model_len="auto").check().max_model_len == AUTO_LENGTH  # type: ignore[arg-type]
    assert "--max-model-len=-1" in EngineArgs(max_model_len=-1).check().argv_for("gpu_worker")
    with pytest.raises(ConfigError, match="max_model_len must be at least 1, or auto, got -2"):
        EngineArgs(max_model_len=-2).check()
    for text in ("infk", "nanK", "4.5", "1e3"):
        with pytest.raises(SystemExit):
            given(f"--max-model-len={text}")


@pytest.mark.parametrize("value", [0, -1])
def test_a_length_that_graphs_cannot_cover(value: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=f"max_seq_len_to_capture must be at least 1, got {value}"):
        EngineArgs(max_seq_len_to_capture=value).check()
    with pytest.raises(SystemExit) as ended:
        parse_service_args("gpu_worker", [f"--max-seq-len-to-capture={value}"])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [("max_model_len", "8K", "a whole number, got '8K'"), ("max_num_seqs", 2.0, "a whole number, got 2.0"),
     ("port", True, "a whole number, got True"), ("swap_space", "4", "a number, got '4'")],
)  # fmt: skip
def test_what_a_program_gives_in_place_of_a_number(name: str, value: object, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be {what}"):
        EngineArgs(**{name: value}).check()  # type: ignore[arg-type]


def test_an_auto_length_is_what_fits(tmp_path: Path) -> None:
    assert load_model_config(write(tmp_path, max_position_embeddings=4096), AUTO_LENGTH).max_model_len == 4096
    budget = Budget(total=10000, used=0, block_bytes=100, block_size=8)
    with pytest.raises(ConfigError, match=r"max seq len \(4096\)"):
        fit(EngineArgs(), budget, 4096)
    assert fit(EngineArgs(max_model_len=AUTO_LENGTH), budget, 4096) == 90


def test_other_names_of_what_every_decoder_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["ChatGLMModel"], "padded_vocab_size": 65024, "num_layers": 28, "seq_length": 8192,
        "hidden_size": 64, "ffn_hidden_size": 100,
    }))  # fmt: skip
    config = load_model_config(str(tmp_path))
    assert (config.vocab_size, config.max_model_len) == (65024, 8192)
    assert (config.hf["num_hidden_layers"], config.hf["intermediate_size"]) == (28, 100)
    hf = load_model_config(write(tmp_path, n_embd=32, n_layer=3, n_head=4, n_inner=None, d_model=5)).hf
    assert (hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]) == (32, 3, 4)
    assert "intermediate_size" not in hf


def test_a_text_model_within_a_larger_one(tmp_path: Path) -> None:
    text = {"vocab_size": 9, "architectures": None, "sliding_window": None, "max_position_embeddings": 50}
    config = load_model_config(write(tmp_path, architectures=["OuterForConditionalGeneration"], text_config=text))
    assert (config.architecture, config.vocab_size, config.max_model_len) == ("OuterForConditionalGeneration", 9, 50)
    assert config.hf["sliding_window"] is None


def test_what_a_text_models_config_leaves_out_is_its_classs(tmp_path: Path) -> None:
    """As gemma-3-4b-it's config.json, which is written without what Gemma3TextConfig has by itself."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
    }))  # fmt: skip
    config = load_model_config(str(tmp_path))
    spec, whole = find_family(config.hf)[0], transformers.Gemma3TextConfig(**text)
    assert (config.vocab_size, config.max_model_len) == (whole.vocab_size, whole.max_position_embeddings)
    assert (spec.heads, spec.kv_heads[0], spec.head_dim) == (
        whole.num_attention_heads, whole.num_key_value_heads, whole.head_dim
    )  # fmt: skip
    assert (spec.hidden_size, spec.num_layers, spec.windows[:6]) == (2560, 34, (1024,) * 5 + (None,))
    assert [rope.scaling.get("factor") for rope in spec.ropes[:6] if rope] == [None] * 5 + [8.0]


def test_what_mistrals_text_leaves_out_and_that_the_whole_models_tie_counts(tmp_path: Path) -> None:
    text = {"hidden_size": 5120, "head_dim": 128, "model_type": "mistral", "tie_word_embeddings": False}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = load_model_config(str(tmp_path))
    spec, whole = find_family(config.hf)[0], transformers.MistralConfig(**text)
    assert (config.vocab_size, config.max_model_len) == (whole.vocab_size, whole.max_position_embeddings)
    read = (spec.heads, spec.kv_heads[0], spec.hidden_size, spec.intermediate_size, spec.num_layers, spec.windows[0])
    assert read == (
        whole.num_attention_heads, whole.num_key_value_heads, 5120, whole.intermediate_size, whole.num_hidden_layers,
        whole.sliding_window,
    )  # fmt: skip
    assert spec.tied
    (tmp_path / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": False}))
    assert not find_family(load_model_config(str(tmp_path)).hf)[0].tied


def test_architectures_that_are_no_list_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: architectures must be a list of names, got 'Llama'"):
        load_model_config(write(tmp_path, architectures="Llama"))


def test_overrides(tmp_path: Path) -> None:
    folder = write(tmp_path, max_position_embeddings=100, rope_theta=5.0)
    flags = [
        "--hf-overrides", '{"max_position_embeddings": 50, "architectures": ["X"]}', "--rope-theta", "7",
        "--rope-scaling", '{"rope_type": "linear", "factor": 2.0}', "--trust-remote-code", "--code-revision=v3",
        "--model-impl=transformers",
    ]  # fmt: skip
    config = config_of(parse_service_args("gpu_worker", flags), folder)
    assert (config.architecture, config.max_model_len) == ("X", 100)
    assert rope_parameters(config.hf) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    assert (config.trust_remote_code, config.code_revision, config.model_impl) == (True, "v3", "transformers")
    assert config_of(EngineArgs(hf_overrides={"vocab_size": 6}).check(), folder).vocab_size == 6  # type: ignore[arg-type]
    for bad in ("{", "[1]", "3"):
        with pytest.raises(ConfigError, match="hf_overrides must be a JSON object, got"):
            config_of(EngineArgs(hf_overrides=bad).check(), folder)


def test_overrides_of_a_text_within_a_larger_model(tmp_path: Path) -> None:
    text = {"vocab_size": 5, "max_position_embeddings": 100, "rope_parameters": {"rope_theta": 3.0}}
    folder = write(tmp_path, architectures=["Gemma3ForConditionalGeneration"], text_config=text, vision_config={})
    inner = {"max_position_embeddings": 50, "rope_theta": 7.0}
    found = config_of(EngineArgs(hf_overrides={"text_config": inner, "sliding_window": 9}).check(), folder)  # type: ignore[arg-type]
    assert (found.max_model_len, found.hf["sliding_window"], found.vocab_size) == (50, 9, 5)
    assert found.hf["rope_parameters"]["rope_theta"] == 7.0


def test_overrides_of_the_new_spelling_of_rope(tmp_path: Path) -> None:
    new = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 5.0}
    folder = write(tmp_path, max_position_embeddings=100, rope_parameters=new)
    scaled = load_model_config(folder, None, {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert rope_parameters(scaled.hf) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    assert scaled.max_model_len == 200
    turned = load_model_config(folder, None, {"rope_theta": 9.0})
    assert rope_parameters(turned.hf) == {**new, "rope_theta": 9.0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    """What a hub was asked for."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(model: str, **kwargs: Any) -> str:
        calls.append((model, kwargs))
        return str(tmp_path)

    module = type(sys)("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, {"*.safetensors"}),
        ({"load_format": "safetensors"}, {"*.safetensors"}),
        ({"load_format": "pt"}, {"*.bin", "*.pt"}),
        ({"load_format": "dummy"}, set()),
        ({"trust_remote_code": True}, {"*.safetensors", "*.py"}),
    ],
)
def test_only_what_is_needed_is_downloaded(flags: dict[str, Any], wanted: set[str], asked: Any) -> None:
    args = EngineArgs(model="org/m", revision="v1", download_dir="/d", **flags).check()
    model_folder(args, weights=True)
    ((model, kwargs),) = asked
    assert (model, kwargs["revision"], kwargs["cache_dir"]) == ("org/m", "v1", "/d")
    kinds = {"*.safetensors", "*.bin", "*.pt", "*.py"}
    assert kinds & set(kwargs["allow_patterns"]) == wanted
    model_folder(args)
    assert not {"*.safetensors", "*.bin", "*.pt"} & set(asked[1][1]["allow_patterns"])


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, None),
        ({"tokenizer": "org/t"}, ("org/t", None)),
        ({"tokenizer": "org/t", "tokenizer_revision": "v2"}, ("org/t", "v2")),
        ({"tokenizer_revision": "v2"}, ("org/m", "v2")),
    ],
)
def test_the_tokenizer_may_be_of_another_revision(flags: dict[str, Any], wanted: Any, asked: Any) -> None:
    args = EngineArgs(model="org/m", revision="v1", download_dir="/d", **flags).check()
    folder = tokenizer_folder(args, "/model")
    if wanted is None:
        assert (folder, asked) == ("/model", [])
    else:
        ((model, kwargs),) = asked
        assert (model, kwargs["revision"]) == wanted


def test_every_process_learns_what_it_needs() -> None:
    args = EngineArgs(
        model="org/m", revision="v1", tokenizer_revision="v2", code_revision="v3", download_dir="/d",
        trust_remote_code=True, hf_overrides="{}", rope_theta=3.0, rope_scaling="{}",
    ).check()  # fmt: skip
    for service in ("frontend", "detokenizer", "gpu_worker"):
        argv = args.argv_for(service)
        for name in ("revision=v1", "download-dir=/d", "trust-remote-code", "hf-overrides={}", "rope-theta=3.0"):
            assert f"--{name}" in argv, (service, name)
        assert "--tokenizer-revision=v2" in argv
    assert "--code-revision=v3" in args.argv_for("gpu_worker")


@pytest.mark.parametrize(
    ("stored", "asked_for", "device", "said", "level"),
    [
        ("bfloat16", "float32", "cuda", "", ""),  # no value is lost
        ("float32", "bfloat16", "cuda", "Downcasting torch.float32 to torch.bfloat16.", "INFO"),
        ("float32", "auto", "cuda", "Downcasting torch.float32 to torch.float16.", "INFO"),
        ("bfloat16", "half", "cuda", "Casting torch.bfloat16 to torch.float16.", "WARNING"),
        ("float16", "bfloat16", "cuda", "Casting torch.float16 to torch.bfloat16.", "WARNING"),
        ("float16", "float16", "cuda", "", ""),
        ("bfloat16", "auto", "cpu", "", ""),
    ],
)
def test_casts_are_told(
    stored: str, asked_for: str, device: str, said: str, level: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(dtypes, "gpu_capability", lambda device: (9, 0))
    resolve_dtype(asked_for, ModelConfig("/m", {"torch_dtype": stored}, 64, 100), torch.device(device))
    assert [(record.message, record.levelname) for record in caplog.records] == ([(said, level)] if said else [])


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({"dtype": "bfloat16"}, torch.float16),
        ({"dtype": "bfloat16", "model_type": "gemma2"}, torch.float32),
        ({"dtype": "float32", "model_type": "gemma3_text"}, torch.float32),
        ({"dtype": "float32"}, torch.float16),
    ],
)
def test_a_gpu_without_bfloat16(
    values: dict[str, Any], dtype: torch.dtype, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "gpu_capability", lambda device: (7, 5))
    config, gpu = ModelConfig("/m", values, 64, 100), torch.device("cuda")
    assert resolve_dtype("auto", config, gpu) == dtype
    assert ("capability of at least 8.0; this one's is 7.5" in caplog.text) == (values != {"dtype": "float32"})
    other = "half" if dtype == torch.float16 else "float32"
    with pytest.raises(ConfigError, match=rf"capability of at least 8\.0; this one's is 7\.5\. Use --dtype {other}\."):
        resolve_dtype("bfloat16", config, gpu)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gemma3_text", "glm4"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_that_overflow_float16_are_never_run_in_it(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "gpu_capability", lambda device: (9, 0))
    config = ModelConfig("/m", {"dtype": "float16", "model_type": kind}, 64, 100)
    for name in ("half", "float16"):
        with pytest.raises(ConfigError, match=f"The model type '{kind}' does not support float16. Reason: Numerical"):
            resolve_dtype(name, config, torch.device(device))
    wide = torch.bfloat16 if device == "cuda" else torch.float32
    assert resolve_dtype("auto", config, torch.device(device)) == wide
    config.hf["model_type"] = "gemma"
    monkeypatch.setattr(dtypes, "cpu_has_bf16", lambda: True)
    assert resolve_dtype("half", config, torch.device(device)) == (
        torch.float16 if device == "cuda" else torch.bfloat16
    )


def test_a_dtype_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "cpu_has_bf16", lambda: True)
    odd = ModelConfig("/m", {"dtype": "float4"}, 64, 100)
    with pytest.raises(ConfigError, match=r"Unknown dtype: float4 in /m/config\.json; choose one with --dtype"):
        resolve_dtype("auto", odd, torch.device("cpu"))
    assert resolve_dtype("bfloat16", odd, torch.device("cpu")) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"Unknown dtype: float4\. Must be one of"):
        resolve_dtype("float4", odd, torch.device("cpu"))
