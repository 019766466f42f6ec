"""The command line as users of vLLM know it: every flag is honoured, taken without effect, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from quire.cli import serve
from quire.cli.flag_file import with_config_file
from quire.cli.flag_table import written
from quire.cli.main import make_parser, run
from quire.client.offline.llm import _check_kwargs
from quire.proto.config import ConfigError, EngineArgs, flags_of
from quire.proto.foreign_flags import COMMANDS as HINTS
from quire.proto.foreign_flags import FOREIGN
from quire.proto.vllm_flags import HONOURED, NOTES, Row, rows

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"
OURS = {flag for fld in dataclasses.fields(EngineArgs) for flag in flags_of(fld)}


def parsed(*argv: str) -> EngineArgs:
    return serve.engine_args_of(make_parser("serve").parse_args(["serve", *argv]))


def complaint(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        run(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    return said


# ---------------------------------------------------------------- vLLM's flags


def test_every_flag_of_vllm_has_one_fate() -> None:
    others = [f"--{row.name}" for row in rows()] + [short for row in rows() for short in row.shorts]
    honoured = [name if name.startswith("-") else f"--{name}" for name in HONOURED]
    assert len(others) == len(set(others)) and len(honoured) == len(set(honoured))
    assert sorted(OURS.intersection(others)) == [], "these are fields of EngineArgs now: move them to HONOURED"
    assert sorted(set(honoured) - OURS) == ["--config"]
    assert set(NOTES) <= set(HONOURED)
    assert len(honoured) + len(others) > 350


def test_the_page_of_flags_is_made_of_the_table() -> None:
    page = PAGE.read_text("utf-8")
    assert written(page) == page, "run python -m quire.cli.flag_table docs/flags.md"
    assert max(map(len, page.splitlines())) <= 150


def test_a_batch_is_given_them_too() -> None:
    args = make_parser("run-batch").parse_args(["run-batch", "-i", "a", "-o", "b", "m", "--async-scheduling"])
    assert [flag for flag, _ in args.without_effect] == ["--async-scheduling"]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_other_flags_of_vllm_are_taken_or_refused(row: Row) -> None:
    for flag in (f"--{row.name}", *row.shorts):
        value = {"switch": [], "values": ["a", "b"]}.get(row.takes, [(row.values or ("7",))[0]])
        argv = ["serve", "m", flag, *value]
        if row.refused:
            with pytest.raises(ConfigError, match=f"^{flag} is a flag of vLLM that quire has not: ") as refused:
                PARSER.parse_args(argv)
            assert row.said in str(refused.value)
            continue
        args = PARSER.parse_args(argv)
        assert args.without_effect == [(flag, row.said)] and args.model_tag == "m"
        if row.values:
            with pytest.raises(ConfigError, match=f"{flag} 1234 is not possible here: .* give {row.told()}"):
                PARSER.parse_args(["serve", flag, "1234"])


PARSER = make_parser("serve")


def test_switches_may_be_turned_off_and_levels_stand_behind_their_letter() -> None:
    args = PARSER.parse_args(["serve", "--no-async-scheduling", "--no-grpc", "-O3", "-O.mode=3", "-cc.level", "1"])
    assert [flag for flag, _ in args.without_effect] == ["--no-async-scheduling", "--no-grpc", "-O", "-O", "-cc"]
    assert PARSER.parse_args(["serve"]).without_effect == ()


def test_short_forms_and_other_names() -> None:
    assert parsed("-pp=2").pipeline_parallel_size == 2
    args = parsed("m", "-tp", "2", "-dp", "3", "-asc", "2", "-q", "fp8", "--spec-tokens", "3",
                  "--spec-model", "[ngram]", "--ngram-prompt-lookup-max", "4",
                  "--cuda-graph-sizes", "1", "2k")  # fmt: skip
    assert (args.tensor_parallel_size, args.data_parallel_size) == (2, 3)
    assert (args.api_server_count, args.quantization, args.cudagraph_capture_sizes) == (2, "fp8", [1, 2000])
    assert "--cudagraph-capture-sizes=2000" in args.argv_for("gpu_worker")
    assert json.loads(args.speculative_config or "")["num_speculative_tokens"] == 3
    assert parsed("--attention-backend", "TRITON_ATTN").attention_backend == "triton"
    assert parsed("--model-impl=vllm").model_impl == EngineArgs(model_impl="vllm").check().model_impl == "quire"
    assert parsed("--generation-config", "vllm").generation_config == "quire"
    assert parsed("--load-format=gguf", "--tokenizer-mode=hf").load_format == "auto"
    assert parsed("--no-disable-log-requests").enable_log_requests is True
    assert parsed("--root-path=/a/").root_path == "/a" and parsed("--root-path=").root_path is None
    assert parsed("--hf-token").hf_token == "" and parsed("--hf-token", "x").hf_token == "x"


def test_a_json_flag_may_be_given_key_by_key() -> None:
    args = parsed("m", "--hf-overrides.a.b", "1", "--hf_overrides.a.c_d=x", "--hf-overrides.l+", "1,2",
                  "--default-chat-template-kwargs.enable_thinking", "false")  # fmt: skip
    assert json.loads(args.hf_overrides or "") == {"a": {"b": 1, "c_d": "x"}, "l": [1, 2]}
    assert json.loads(args.default_chat_template_kwargs or "") == {"enable_thinking": False}
    assert args.model == "m"


def test_a_switch_may_be_given_a_value() -> None:
    args = parsed("--enable-chunked-prefill=False", "--enable_lora=true", "--no-enforce-eager=true")
    assert (args.enable_chunked_prefill, args.enable_lora, args.enforce_eager) == (False, True, False)
    assert parsed("--no-enable-prefix-caching=false").enable_prefix_caching is True
    args = parsed("--enable-chunked-prefill", "False", "--enable-lora", "true", "--served-model-name", "true")
    assert (args.enable_chunked_prefill, args.enable_lora, args.served_model_name) == (False, True, ["true"])
    assert PARSER.parse_args(["serve", "--grpc=false"]).without_effect[0][0] == "--no-grpc"


COMMANDS = (  # as they stand in guides of vLLM
    "m --tensor-parallel-size 2 --max-model-len 32768 --gpu-memory-utilization 0.95 --enable-chunked-prefill "
    "--max-num-batched-tokens 8192 --trust-remote-code --disable-log-requests --kv-cache-dtype fp8 --swap-space 16",
    "m --enable-reasoning --reasoning-parser deepseek_r1 --enable-auto-tool-choice --tool-call-parser hermes "
    "--uvicorn-log-level warning --limit-mm-per-prompt.image 2 --mm-processor-kwargs.num_crops 4",
    "m --enable-lora --lora-modules a=/x b=/y --max-loras 4 --max-lora-rank 64 --max-cpu-loras 8",
    'm --speculative_config {"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4} -cc {"mode":3} -O 2',
    "m -dp 2 --data-parallel-backend ray --enable-expert-parallel --all2all-backend pplx --enable-eplb "
    "--distributed-executor-backend ray --compilation-config 3 --num-scheduler-steps 8 --no-enable-log-requests",
    "m --guided-decoding-backend xgrammar:no-fallback --generation-config vllm --override-generation-config "
    '{"temperature":0.2} --hf-overrides {"architectures":["A"]} --disable-fastapi-docs --ssl-certfile c',
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_vllms_guides_are_read(command: str) -> None:
    assert parsed(*command.split()).model == "m"


def test_a_task_is_a_runner() -> None:
    for task, runner, convert in (("generate", "generate", "auto"), ("embed", "pooling", "embed"),
                                  ("classify", "pooling", "classify"), ("reward", "pooling", "auto")):  # fmt: skip
        args = parsed("--task", task)
        assert (args.runner, args.convert) == (runner, convert)
    with pytest.raises(ConfigError, match="task embed means runner pooling, and runner is generate"):
        parsed("--task", "embed", "--runner", "generate")


def test_structured_outputs_are_set_up_in_one_place() -> None:
    args = parsed("--structured-outputs-config", '{"backend": "xgrammar", "reasoning_parser": "qwen3"}',
                  "--guided-decoding-disable-any-whitespace")  # fmt: skip
    assert args.reasoning_parser == "qwen3"
    assert args.structured_outputs_config == '{"disable_any_whitespace": true}'
    assert parsed("--guided-decoding-backend", "outlines").structured_outputs_config is None
    for argv, words in (
        (["--guided-decoding-backend", "magic"], "no backend 'magic'"),
        (["--structured-outputs-config", "{"], "must be a JSON object, got"),
        (["--structured-outputs-config.nope", "1"], "has no 'nope'; it has backend"),
        (["--structured-outputs-config.disable_any_whitespace", "1"], "must be a bool"),
        (["--structured-outputs-config.reasoning_parser=a", "--reasoning-parser=b"], "two reasoning parsers"),
    ):
        with pytest.raises(ConfigError, match=words):
            parsed(*argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--uds=/x", "-asc", "2"], "a Unix socket has one frontend"),
        (["--ssl-keyfile=/x"], "give --ssl-certfile"),
        (["--ssl-certfile=/x", "--ssl-cert-reqs=3"], r"must be 0 \(none\), 1 \(optional\) or 2"),
        (["--ssl-certfile=/x", "--ssl-cert-reqs=2"], "give --ssl-ca-certs"),
        (["--root-path=x"], "must begin with /"),
        (["--max-log-len=-1"], "at least 0"),
        (["--enable-log-outputs"], "give --enable-log-requests"),
        (["--headless"], "name it with --scheduler"),
        (["--response-role="], "name a role"),
        (["--cudagraph-capture-sizes", "0"], "at least 1 each"),
        (["--sse-keep-alive-interval=-1"], "at least 0"),
        (["--profiler-config={}"], "torch_profiler_dir"),
    ],
)
def test_what_cannot_work_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(*argv)


def test_a_program_may_give_vllms_words_too() -> None:
    given = {
        "disable_log_stats": False,
        "distributed_executor_backend": "mp",
        "async_scheduling": True,
        "max_num_seqs": 4,
    }
    _check_kwargs(given)
    assert given == {"disable_log_stats": False, "max_num_seqs": 4}
    given = {}
    _check_kwargs(given)
    assert given == {"disable_log_stats": True}  # as in vLLM
    with pytest.raises(TypeError, match=r"LLM\(\) has not vLLM's kv_transfer_config: use --worker-role"):
        _check_kwargs({"kv_transfer_config": {}})
    with pytest.raises(ValueError, match=r"cpu_offload_gb=4 is not possible here: weights stay on the device"):
        _check_kwargs({"cpu_offload_gb": 4})
    given = {"kv_transfer_config": None, "enable_mfu_metrics": False, "cpu_offload_gb": 0, "disable_log_stats": True}
    _check_kwargs(given)  # vLLM's own defaults, which programs pass on
    assert given == {"disable_log_stats": True}
    with pytest.raises(TypeError, match="unexpected keyword arguments: 'nope'"):
        _check_kwargs({"nope": 1})


# ---------------------------------------------------------------- a file of flags


def test_a_file_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(
        "model: in-file\nport: 8001\nserved_model_name: [a, b]\nenable-prefix-caching: false\nenforce-eager: true\n"
        "hf-overrides: {x: 1}\ntensor-parallel-size: 4\nrevision:\nallowed-origins: ['http://a', 'http://b']\n"
        "enable-lora: true\nlora-modules: [{name: a, path: /a}, b=/b]\napi-key: [k, l]\nseed: -1\n"
    )

    def merged(*argv: str) -> EngineArgs:
        return parsed(*with_config_file(["serve", *argv])[1:])

    args = merged("--config", str(path))
    assert (args.model, args.port, args.served_model_name, args.hf_overrides) == (
        "in-file",
        8001,
        ["a", "b"],
        '{"x": 1}',
    )
    assert (args.enable_prefix_caching, args.enforce_eager, args.tensor_parallel_size) == (False, True, 4)
    assert json.loads(args.allowed_origins or "") == ["http://a", "http://b"]
    assert args.lora_modules == ['{"name": "a", "path": "/a"}', "b=/b"]
    assert (args.api_key, args.seed) == ("k,l", -1)
    args = merged("said", f"--config={path}", "--port=1", "--served-model-name", "c", "--enable_prefix_caching", "-tp",
                  "2", "--hf-overrides.y", "2")  # fmt: skip
    assert (args.model, args.port, args.served_model_name, args.hf_overrides) == ("said", 1, ["c"], '{"y": 2}')
    assert (args.enable_prefix_caching, args.tensor_parallel_size, args.enforce_eager) == (True, 2, True)
    assert with_config_file(["serve", "m", "--", "--config"]) == ["serve", "m", "--", "--config"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "port: 1", "must name a .yaml"),
        ("a.yaml", None, "cannot be read: No such file"),
        ("a.yaml", "a: [", "is no YAML"),
        ("a.yaml", "- port", "one flag a line"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "is no YAML"),
    ],
)
def test_a_file_that_holds_no_flags(name: str, text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        with_config_file(["serve", "--config", str(tmp_path / name)])
    with pytest.raises(ConfigError, match="names no file"):
        with_config_file(["serve", "--config"])


# ---------------------------------------------------------------- help and errors


def test_what_is_misspelled_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(["serve", "m", "--gpu-memory-utilisation", "0.5"], capsys)
    assert said.startswith("quire serve: error: unrecognized arguments: --gpu-memory-utilisation; did you mean "
                           "--gpu-memory-utilization?; usage: quire serve [MODEL] [--FLAG VALUE ...]; ")  # fmt: skip
    assert "did you mean --max-model-len?" in complaint(["serve", "--max-model-le=5"], capsys)  # no abbreviations
    assert "did you mean serve?" in complaint(["serv", "m"], capsys)
    assert "did you mean" not in complaint(["serve", "--xyzzy"], capsys)
    said = complaint(["serve", "--api-keys=secret", "m", "n"], capsys)
    assert "secret" not in said and "did you mean --api-key?" in said
    assert "'80a' is not a port, which is a number from 0 to 65535" in complaint(["serve", "--port", "80a"], capsys)
    said = complaint(["bench", "throughputt"], capsys)
    assert said.startswith("quire bench: error: argument KIND: invalid choice: 'throughputt'")
    assert "; did you mean throughput?" in said
    assert "did you mean bfloat16?" in complaint(["serve", "--dtype=bloat16"], capsys)
    assert "quire bench serve: error: unrecognized" in complaint(["bench", "serve", "--nope"], capsys)


def shown(topic: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        run(["serve", topic])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("--help", capsys)
    assert text.splitlines()[0] == "usage: quire serve [MODEL] [--FLAG VALUE ...]"
    lines = [number for number, line in enumerate(text.splitlines()) if "--host" in line]
    assert lines[0] < 8 and "address to listen on" in text
    named = text.partition("all, in groups")[2]
    missing = [flag for fld in dataclasses.fields(EngineArgs) if (flag := flags_of(fld)[-1]) not in named]
    assert missing == []
    assert "--async-scheduling" not in shown("--help=all", capsys)
    log = shown("--help=LOG", capsys)
    assert "  --max-log-len" in log and "--host" not in log
    assert shown("--help=max-log-len", capsys).count("--") == 2  # usage, and the one
    assert "--flight-recorder-size" in shown("--help=recorder", capsys)
    assert {"HTTP", "Log", "Scheduling"} <= set(shown("--help=listgroup", capsys).splitlines())
    assert "the groups are" in shown("--help=xyzzy", capsys)


# ---------------------------------------------------------------- other servers' words, and several errors


def test_flags_of_llama_cpp_are_answered_with_those_that_do_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "-m", "x.gguf", "-c", "4096", "-ngl", "99", "-t", "8", "-b", "512", "-np", "4", "--port", "1",
             "-hf", "a/b"]  # fmt: skip
    said = complaint(words, capsys)
    for flag in ("-m", "-c", "-ngl", "-t", "-b", "-np", "-hf"):
        assert f"{flag} is not a flag here: {FOREIGN[flag]}" in said
    assert "flag of vLLM" not in said and "--port is" not in said


def test_what_is_named_in_place_of_a_foreign_flag_exists() -> None:
    named = {flag for said in FOREIGN.values() for flag in re.findall(r"--[a-z][\w-]+", said)}
    named = {flag.replace("--no-", "--") for flag in named}
    assert sorted(named - OURS) == [] and sorted(set(FOREIGN) & OURS) == []


@pytest.mark.parametrize("command", HINTS)
def test_commands_of_ollama_are_answered(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"there is no command {command!r}: {HINTS[command]}" in complaint([command, "x"], capsys)


def test_all_that_cannot_be_read_is_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(["serve", "--prt", "1", "--port", "x", "--max-model-len", "y", "--dtype", "z", "--grpc"], capsys)
    for part in ("--prt; did you mean --port?", "'x' is not a port", "'y' is not a number", "'z'", "--grpc is a flag"):
        assert part in said


def test_refused_flags_are_told_together() -> None:
    with pytest.raises(ConfigError, match=r"^2 errors: \(1\) -n is .* \(2\) --grpc is a flag of vLLM"):
        PARSER.parse_args(["serve", "-n", "3", "--grpc"])
