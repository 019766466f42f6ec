"""The command line: parsing, help, refusals, and the commands that need no model."""

from __future__ import annotations

import io
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spoken import says

from quire import __version__
from quire.cli import serve
from quire.cli.main import COMMANDS, make_parser, run
from quire.client.generation import OpenGeneration
from quire.client.results import RequestError
from quire.frontend.fake import FakeServer, Say
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.config import ConfigError, EngineArgs, parse_service_args
from quire.proto.wire.sockets import Keys

QUIRE = [sys.executable, "-P", "-m", "quire.cli"]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def one_line(text: str) -> str:
    """The error, having checked that it is one line."""
    assert text.startswith("quire: error: ")
    assert text.count("\n") == 1
    return text


# ---------------------------------------------------------------- the command itself


def test_a_flag_before_the_command_has_its_nearest_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["--versio=KEY"])
    told = capsys.readouterr().err
    assert caught.value.code == 2 and "'--versio' before a command; did you mean --version?" in told
    assert "KEY" not in told  # a value may be one


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"quire {__version__}\n"


def test_no_command_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("command", ["serve", "chat", "complete", "keygen"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: quire {command}" in capsys.readouterr().out


def test_serve_shows_the_flags_of_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["serve", "--help=all"])
    shown = capsys.readouterr().out
    for flag in ("--attention-backend", "--batch-invariant", "--disable-custom-all-reduce", "--max-seq-len-to-capture"):
        assert f"  {flag}" in shown, flag


@pytest.mark.parametrize("argv", [["nope"], ["--nope"], ["chat", "--nope"], ["keygen"], ["serve", "--port", "x"]])
def test_bad_usage_is_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(argv)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_each_command_imports_only_its_own() -> None:
    for argv, heavy in ((["--version"], {"zmq", "http.client"}), (["chat", "--help"], {"zmq", "aiohttp", "msgspec"})):
        code = (
            "import sys\nfrom quire.cli.main import run\n"
            f"try: run({argv!r})\nexcept SystemExit: pass\nprint(); print(*sys.modules)"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        loaded = out.splitlines()[-1].split()
        assert not {"torch", "aiohttp", "transformers", "numpy", *heavy}.intersection(loaded)


# ---------------------------------------------------------------- keygen


def test_keygen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    assert run(["keygen", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keys.load(str(path)).public
    assert str(path) in capsys.readouterr().out
    before = path.read_bytes()
    assert run(["keygen", str(path)]) == 1
    assert "exists" in one_line(capsys.readouterr().err)
    assert path.read_bytes() == before
    assert run(["keygen", str(tmp_path / "no" / "keys")]) == 1
    one_line(capsys.readouterr().err)


# ---------------------------------------------------------------- chat and complete


def test_one_question(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = ["--url", server.url + "/v1", "--max-tokens", "3"]
    assert run(["chat", *url, "-q", "hello", "--system-prompt", "be kind"]) == 0
    assert capsys.readouterr().out == " 0.0 0.1 0.2\n"
    request = server.engine.requests[0].message
    assert request.messages == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert run(["complete", *url, "--quick", "once upon"]) == 0
    assert capsys.readouterr().out == " 0.0 0.1 0.2\n"
    assert server.engine.requests[1].message.prompt == "once upon"


def test_a_conversation_is_remembered(server: FakeServer) -> None:
    command = [*QUIRE, "chat", "--url", server.url + "/v1", "--max-tokens", "2"]
    ended = subprocess.run(command, input="one\n\ntwo\n", capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0
    assert ended.stdout == " 0.0 0.1\n 0.0 0.1\n"
    last = server.engine.requests[-1].message.messages or []
    assert [(m["role"], m["content"]) for m in last] == [
        ("user", "one"), ("assistant", " 0.0 0.1"), ("user", "two"),
    ]  # fmt: skip


def test_thoughts_and_calls_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool's answer is asked for, and the conversation goes on with it."""
    call = '<think>Hm.</think>See.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    with FakeServer(tool_parser="hermes", reasoning_parser="qwen3") as server:
        server.engine.script = lambda request: says("Done." if len(request.message.messages) > 1 else call)(request)
        command = ["chat", "--url", server.url + "/v1", "--tools", str(tools)]
        assert run([*command, "-q", "x", "--show-reasoning"]) == 0
        assert capsys.readouterr().out == 'Hm.\nSee.\nf {"a": 1}\n'
        monkeypatch.setattr("sys.stdin", io.StringIO("go\nfive\n"))
        assert run(command) == 0
        assert capsys.readouterr().out == 'See.\nf {"a": 1}\nDone.\n'
        told = server.engine.requests[-1].message.messages or []
        assert [message["role"] for message in told] == ["user", "assistant", "tool"]
        assert told[1]["tool_calls"][0]["id"] == told[2]["tool_call_id"] and told[2]["content"] == "five"
        assert told[1]["reasoning_content"] == "Hm."
        server.engine.script = says(call)  # again and again
        monkeypatch.setattr("sys.stdin", io.StringIO("go\none\ntwo\n"))
        assert run(command) == 0 and capsys.readouterr().out.count('f {"a": 1}') == 3
        tools.write_text("{}")
        assert run(command) == 78
        assert "JSON list" in one_line(capsys.readouterr().err)


def test_the_key_is_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with FakeServer(api_key="k") as server:
        url = ["--url", server.url + "/v1", "-q", "x"]
        assert run(["complete", *url]) == 1
        assert "401" in one_line(capsys.readouterr().err)
        assert run(["complete", *url, "--api-key", "k"]) == 0
        monkeypatch.setenv("QUIRE_API_KEY", "k")
        assert run(["complete", *url]) == 0


def test_failures_are_one_line(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    base = server.url + "/v1"

    def says(*argv: str, code: int = 1) -> str:
        assert run(["complete", "-q", "x", *argv]) == code
        return one_line(capsys.readouterr().err)

    assert "quire serve" in says("--url", "http://127.0.0.1:1/v1")
    assert "no URL" in says("--url", "ftp://x", code=78)
    assert "no URL" in says("--url", "http://x:port", code=78)
    assert "404" in says("--url", server.url + "/v2")
    assert "`nope` does not exist" in says("--url", base, "--model-name", "nope")
    assert "max_tokens must be at least 1" in says("--url", base, "--max-tokens", "0")

    def script(request: OpenGeneration) -> Iterator[Say | RequestError | float]:
        yield Say(0, "some")
        yield 0.05
        yield RequestError(500, "the model failed.")

    server.engine.script = script
    assert "the model failed" in says("--url", base)


def test_leaving_ends_the_request(server: FakeServer) -> None:
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite run behind a shell's & ignores it

    def script(request: OpenGeneration) -> Iterator[Say | float]:
        yield Say(0, "some")
        yield 60.0

    server.engine.script = script
    command = [*QUIRE, "complete", "--url", server.url + "/v1", "-q", "x"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, kept)
    assert process.stdout is not None
    assert process.stdout.read(4) == b"some"
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    process.communicate()
    end = time.monotonic() + 60
    while server.engine.open_requests:
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------- serve


def parsed(*argv: str) -> EngineArgs:
    return serve.engine_args_of(make_parser("serve").parse_args(["serve", *argv]))


def test_serve_takes_the_model_either_way() -> None:
    assert parsed().model is None
    assert parsed("a/b").model == "a/b"
    assert parsed("--model", "a/b").model == "a/b"
    assert parsed("a/b", "--model", "a/b").model == "a/b"
    with pytest.raises(ConfigError, match="two models"):
        parsed("a", "--model", "b")


def test_serve_takes_vllms_flags() -> None:
    args = parsed(
        "m", "--max-model-len", "32k", "--gpu-memory-utilization", "0.5", "--served-model-name", "a", "b",
        "--no-enable-prefix-caching", "--enforce-eager", "--dtype", "float32", "--max-num-seqs=8", "--port=0",
    )  # fmt: skip
    assert (args.max_model_len, args.gpu_memory_utilization, args.served_model_name) == (32_000, 0.5, ["a", "b"])
    assert (args.enable_prefix_caching, args.enforce_eager, args.max_num_seqs) == (False, True, 8)
    args = parsed(
        "--generation-config=quire", "--override-generation-config", '{"top_p": 0.5}', "--max-logprobs=-1",
        "--logprobs-mode", "processed_logprobs", "--logits-processor", "a.b:c", "d:e",
    )  # fmt: skip
    assert args.argv_for("frontend") == ["--generation-config=quire", '--override-generation-config={"top_p": 0.5}']
    assert (args.max_logprobs, args.logprobs_mode) == (-1, "processed_logprobs")
    assert args.logits_processor == ["a.b:c", "d:e"]


@pytest.mark.parametrize("flag", ["--served-model-name", "--served_model_name", "--api-key", "--logits-processor"])
def test_serve_does_not_take_the_model_for_a_flags_last_value(flag: str) -> None:
    ways = [["one", "/path/to/model"], ["one", "org/model", "--port=0"], ["one", "two", "three"]]
    if "logits" not in flag:
        ways.append(["one", "/path/to/model:8b"])  # only a function's name has a colon for certain
    for argv in ways:
        with pytest.raises(ConfigError, match=r"no model is named, and --[a-z-]+ takes all .* `quire serve MODEL --"):
            parsed(flag, *argv)
    for argv in (
        ["/path/to/model", flag, "one", "two"], [flag, "one", "two", "--", "/path/to/model"],
        [f"{flag}=one", "/path/to/model", f"{flag}=two"], [flag, "one", "two", "--model", "/path/to/model"],
        ["--model=/path/to/model", flag, "one", flag, "two"],
    ):  # fmt: skip
        args = parsed(*argv)
        assert args.model == "/path/to/model"
        values = {"one,two": ["one", "two"]}.get(str(args.api_key)) or args.served_model_name or args.logits_processor
        assert values == ["one", "two"]
    assert parsed(flag, "one").model is None  # nothing else can have been meant
    assert parsed("--enable-lora", "--lora-modules", "a=/x", "b=/y").lora_modules == ["a=/x", "b=/y"]  # no model's name
    with pytest.raises(ConfigError, match="no model is named"):
        parsed("--served-model-name", "one", "/path/to/model", "--logits-processor", "a:f", "b:g")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--port=abc"], "quire serve: error: argument --port: 'abc' is not a port"),
        (
            ["serve", "--load-format", "npz"],
            "quire serve: error: argument --load-format: invalid choice: 'npz'",
        ),
        (["serve", "m", "n"], "quire serve: error: unrecognized arguments: n;"),
        (["workers"], "quire workers: error: the following arguments are required: ACTION;"),
        (["bench", "nothing"], "quire bench: error: argument KIND: invalid choice: 'nothing'"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(words)
    assert said.endswith("--help` lists what there is.\n") and said.count("\n") == 1


def test_a_services_bad_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_service_args("frontend", ["--port=99999"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith("python -m quire.frontend: error: port must be in [0, 65535], got 99999; ")


def test_a_refused_command_line_does_not_show_its_keys() -> None:
    with pytest.raises(ConfigError) as refused:
        parsed("--api-key", "secret", "also-secret")
    assert "secret" not in str(refused.value)


def test_flags_may_be_written_with_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    args = parsed("--max_num_seqs", "8", "--max_model_len=1k", "--no_enable_prefix_caching", "--dtype", "float32")
    assert (args.max_num_seqs, args.max_model_len, args.enable_prefix_caching) == (8, 1000, False)
    assert parsed("--chat_template=a_b=c_d").chat_template == "a_b=c_d"
    assert parsed("--logits-processors", "a:f").logits_processor == ["a:f"]
    assert parsed("--max_num_seqs=8", "--", "--a_b").model == "--a_b"
    bench = make_parser("bench").parse_args(["bench", "throughput", "--num_prompts=3", "--max_num_seqs", "8"])
    assert (bench.num_prompts, bench.max_num_seqs) == (3, 8)
    assert make_parser("bench").parse_args(["bench", "serve", "--num_prompts", "3"]).num_prompts == 3
    assert make_parser("chat").parse_args(["chat", "--model_name=a_b", "--max_tokens", "3"]).model_name == "a_b"
    args = parse_service_args("frontend", ["--served_model_name", "a_b", "--api_key", "k", "l", "--port=1"])
    assert (args.served_model_name, args.api_key, args.port) == (["a_b"], "k,l", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--served-model-name", "a", "/nowhere/at/all"], "'a' '/nowhere/at/all'"),
        (["/nowhere/at/all"], "/nowhere/at/all"),
        (["--block-size", "7"], "block_size must be 8, 16 or 32"),
        (["--keys", "/nowhere/keys"], "quire keygen"),
        (["--host", "203.0.113.7"], "203.0.113.7"),
    ],
)
def test_serve_refuses_what_cannot_work(argv: list[str], words: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([*QUIRE, "serve", *argv], capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 78
    assert words in one_line(ended.stderr)
    assert ended.stdout == ""
    assert not list(tmp_path.iterdir())


def test_a_server_whose_ready_line_nobody_reads_stays() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "from quire.proto.process import announce; announce('ready')"
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_first_line_names_a_gguf_and_no_type(tmp_path: Path) -> None:
    """Each of its tensors has a type of its own; what its head is turned into says the type of the steps."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    says = {"dtype": "bfloat16"}
    for path in (tmp_path, tmp_path / "m.gguf"):
        assert serve.stored_weights(ModelConfig(str(path), says, 8, 8)) == "a GGUF"
    assert serve.stored_weights(ModelConfig(str(tmp_path / "none"), says, 8, 8)) == "bfloat16"


def test_ready_line() -> None:
    args = EngineArgs(port=8123, served_model_name=["m", "n"])
    assert serve.ready_line(args, 5.06) == (
        "quire is ready: http://localhost:8123 (model m, 5.1 s); open it in a browser, Ctrl-C stops it"
    )
    assert serve.first_words(EngineArgs(model="/m", served_model_name=["m"], data_parallel_size=2), "bfloat16") == (
        "starting m from /m: weights stored as bfloat16, 2 workers on the GPU, or the CPU where there is none; "
        "Ctrl-C stops it"
    )
    args.host = "::1"
    assert "http://[::1]:8123 " in serve.ready_line(args, 1)
