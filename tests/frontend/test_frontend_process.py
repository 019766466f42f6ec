"""``python -m quire.frontend`` as a process of its own: what it prints, how it ends, what it shares."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.front import Settings
from quire.frontend.main import settings_of
from quire.frontend.port import url_of
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.listening import listen

COMMAND = [sys.executable, "-P", "-m", "quire.frontend"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start frontends with no scheduler behind them; each ends with the test."""
    running: list[subprocess.Popen[str]] = []

    def one(*flags: str, port: int = 0, **environment: str) -> tuple[subprocess.Popen[str], int]:
        command = [*COMMAND, f"--scheduler=ipc://{tmp_path}", "--host=127.0.0.1", f"--port={port}", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        return process, int(line.rsplit(":", 1)[1])

    yield one
    for process in running:
        process.kill()
        process.wait()


def get(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_listens_answers_and_ends(start: Any, signum: signal.Signals) -> None:
    process, port = start()
    assert get(port, "/health")[0] == 503
    assert get(port, "/version")[0] == 200
    assert json.loads(get(port, "/v1/models")[1])["data"][0]["id"] == "quire-demo"
    assert b"request_success" in get(port, "/metrics")[1]
    idle = socket.create_connection(("127.0.0.1", port))  # must not hold up the end
    process.send_signal(signum)
    assert process.wait(120) == 0
    idle.close()


@pytest.mark.slow
def test_two_share_a_port_and_a_key_comes_by_the_environment(start: Any) -> None:
    _, port = start(QUIRE_API_KEY="k")
    _, same = start("--served-model-name", "a", "b", port=port, QUIRE_API_KEY="k")
    assert same == port
    assert get(port, "/v1/models")[0] == 401
    assert get(port, "/v1/models", Authorization="Bearer k")[0] == 200
    assert get(port, "/health")[0] == 503


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words", "code"),
    [
        (["--model=/nowhere/at/all"], "does not exist", 78),
        (["--host=300.1.1.1"], "--host", 78),
        (["--keys=/nowhere/keys"], "quire keygen", 78),
        (["--port=70000"], "port must be in", 2),
        (["--nonsense"], "--nonsense", 2),
        (["--override-generation-config={"], "override_generation_config", 78),
    ],
)
def test_what_cannot_work_is_one_line(flags: list[str], words: str, code: int, tmp_path: Path) -> None:
    command = [*COMMAND, f"--scheduler=ipc://{tmp_path}", "--port=0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code
    assert words in ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [*COMMAND, f"--scheduler=ipc://{tmp_path}", "--host=127.0.0.1", f"--port={port}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 78
    assert ended.stderr.strip().splitlines()[-1].startswith(f"quire.frontend: error: port {port}")


def test_imports_nothing_heavy() -> None:
    """No process loads what it does not use."""
    code = "import sys, quire.frontend.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "numpy", "transformers", "tokenizers", "jinja2", "huggingface_hub", "openai"}
    assert not heavy.intersection(loaded)


def test_listen_ipv6_and_errors() -> None:
    with listen("127.0.0.1", 0) as sock:
        assert url_of(sock).startswith("http://127.0.0.1:")
    if socket.has_ipv6:
        try:
            with listen("::1", 0) as sock:
                assert url_of(sock).startswith("http://[::1]:")
        except ConfigError:
            pytest.skip("no IPv6 here")
    with pytest.raises(ConfigError, match="--host"):
        listen("no.such.host.invalid", 0)


def test_gpt_oss_shows_how_it_thinks() -> None:
    """Without a flag, as its answers cannot be told from its thoughts otherwise; a flag goes before."""
    template = "{{ tools }}<|start|>assistant<|channel|>final<|message|>"
    found = settings_of(EngineArgs(chat_template=template))
    assert (found.tool_parser, found.reasoning_parser) == ("openai", "openai_gptoss")
    assert settings_of(EngineArgs(chat_template=template, reasoning_parser="qwen3")).reasoning_parser == "qwen3"
    assert settings_of(EngineArgs()).reasoning_parser is None


def test_settings_take_the_models_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    (tmp_path / "config.json").write_text('{"vocab_size": 10, "max_position_embeddings": 64}')
    generation = {"temperature": 0.6, "top_p": 0.9, "max_length": 5, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    settings = settings_of(EngineArgs(model=str(tmp_path)))
    assert settings.defaults == {"temperature": 0.6, "top_p": 0.9}
    assert settings.names == [str(tmp_path)]
    assert settings.api_key is None
    assert settings_of(EngineArgs(model=str(tmp_path), served_model_name=["x", "y"], api_key="k")).names == ["x", "y"]
    (tmp_path / "generation_config.json").write_text(json.dumps({**generation, "do_sample": False}))
    assert settings_of(EngineArgs(model=str(tmp_path))).defaults == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": -9.0}))
    assert settings_of(EngineArgs(model=str(tmp_path))).defaults == {}


def test_defaults_by_flag(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 10, "max_position_embeddings": 64}')
    generation = {"repetition_penalty": 1.1, "max_new_tokens": 4096, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))

    def settings(**flags: str) -> Settings:
        return settings_of(EngineArgs(model=str(tmp_path), **flags))

    def defaults(**flags: str) -> dict[str, Any]:
        return settings(**flags).defaults

    assert settings().ceiling is None
    assert settings(override_generation_config='{"top_p": 0.5}').ceiling is None
    assert settings(override_generation_config='{"max_new_tokens": 5}').ceiling == 5
    assert settings(override_generation_config='{"max_tokens": 500}', generation_config="quire").ceiling == 64
    assert settings(generation_config=str(tmp_path)).ceiling == 64
    assert defaults() == {"repetition_penalty": 1.1, "max_tokens": 64}  # never more than the context holds
    assert defaults(generation_config="quire") == {}
    assert defaults(override_generation_config='{"max_new_tokens": 5, "top_p": 0.5}') == {
        "repetition_penalty": 1.1, "max_tokens": 5, "top_p": 0.5,
    }  # fmt: skip
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.5}')
    assert defaults(generation_config=str(other)) == {"temperature": 0.5}
    for flags in ({"generation_config": "/nowhere"}, {"override_generation_config": "nonsense"},
                  {"override_generation_config": '{"n": 2}'}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(flags))):
            defaults(**flags)


def test_a_template_that_knows_no_tools_has_them_told_in_words() -> None:
    """In the form that most models have seen, unless a flag says how this one writes calls."""
    words, tools = "{{ messages[0].content }}", "{{ messages[0].content }}{{ tools }}"
    assert settings_of(EngineArgs(chat_template=words)).tool_parser == "hermes"
    assert settings_of(EngineArgs(chat_template=words, tool_call_parser="llama3_json")).tool_parser == "llama3_json"
    assert settings_of(EngineArgs(chat_template=words, enable_auto_tool_choice=False)).tool_parser is None
    assert settings_of(EngineArgs(chat_template=tools)).tool_parser is None  # it tells them in a form of its own
