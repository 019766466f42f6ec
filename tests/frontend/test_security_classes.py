"""The classes of attack of docs/security.md that no other test is about. Each test's name has the class's number."""

from __future__ import annotations

import ast
import json
import pickle
import re
import shutil
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import adapter_folder
from support.http_asks import CHAT, HI, ask, error_of

from quire.client.adapter_folders import AdapterFolders
from quire.detokenizer.template import ChatTemplate
from quire.detokenizer.tokenizer import load_tokenizer
from quire.frontend.fake import FakeServer
from quire.proto import messages as m
from quire.proto.checkpoint.model_config import config_of
from quire.proto.codec import BadFrame, Decoder
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.errors import Refused
from quire.proto.hashing import hash_block, root_of

ROOT = Path(__file__).parents[2]
SERVICES = ("proto", "scheduler", "gpu_worker", "detokenizer", "frontend", "client")


@pytest.fixture(scope="module")
def server() -> Any:
    with FakeServer(max_n=8) as running:
        yield running


RAN: list[str] = []


def run(what: str) -> None:
    RAN.append(what)


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return run, ("it ran",)


def test_class_1_no_socket_reads_a_pickle() -> None:
    unions = [m.ToDetokenizer, m.FromDetokenizer, m.ToSchedulerFront, m.FromSchedulerFront, m.ToSchedulerWorkers,
              m.FromSchedulerWorkers, m.BetweenWorkers]  # fmt: skip
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        bomb = pickle.dumps(Bomb(), protocol)
        for union in unions:
            with pytest.raises(BadFrame):
                Decoder(union)(bomb)
    assert RAN == []
    pickle.loads(bomb)  # noqa: S301 - our own
    assert RAN == ["it ran"], "the bomb is sound"


def test_class_4_no_code_of_a_folder_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "trap"
    shutil.copytree(ROOT / "demo_model", folder)
    trap = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Trap: pass\n"
    for name in ("configuration_trap", "modeling_trap", "tokenization_trap", "processing_trap"):
        (folder / f"{name}.py").write_text(trap)
    kinds = {"AutoConfig": "configuration_trap.Trap", "AutoModelForCausalLM": "modeling_trap.Trap",
             "AutoTokenizer": ["tokenization_trap.Trap", "tokenization_trap.Trap"],
             "AutoProcessor": "processing_trap.Trap"}  # fmt: skip
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        before = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**before, "auto_map": kinds}))
    assert config_of(EngineArgs(), str(folder)).max_model_len > 0
    load_tokenizer(str(folder))
    adapter = adapter_folder(tmp_path / "adapter")
    (adapter / "modeling_trap.py").write_text(trap)
    config = json.loads((adapter / "adapter_config.json").read_text())
    change = {"auto_mapping": {"base_model_class": "Trap", "parent_library": "modeling_trap"}, "auto_map": kinds}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match="is not known here"):
        AdapterFolders(16).adapter("x", str(adapter))
    assert not (tmp_path / "ran").exists()


def test_class_5_tensors_of_clients_are_refused(server: FakeServer) -> None:
    for path, body in (("/v1/completions", HI), ("/v1/chat/completions", CHAT)):
        for name in ("prompt_embeds", "image_embeds", "mm_processor_kwargs"):
            status, answer, _ = ask(server, "POST", path, {**body, name: "gASVAA=="})
            assert status == 400 or name == "image_embeds", (path, name, answer)
    assert error_of(ask(server, "POST", "/v1/completions", {"prompt_embeds": "gASVAA=="}), 400)


FETCHERS = {"requests", "httpx", "urllib3", "ftplib", "pycurl"}


@pytest.mark.parametrize("service", SERVICES)
def test_class_6_nothing_is_fetched_for_a_client(service: str) -> None:
    for path in (ROOT / service).rglob("*.py"):
        text = path.read_text("utf-8")
        if not re.search(r"requests|httpx|urllib|ftplib|pycurl|ClientSession|http\.client", text):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                assert name.partition(".")[0] not in FETCHERS, path
                assert name not in ("urllib.request", "http.client"), path
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "ClientSession":
                (connector,) = [ast.unparse(each.value) for each in node.keywords if each.arg == "connector"]
                assert "UnixConnector" in connector, path  # another frontend's socket, and nothing of a client's


def test_class_6_parts_that_name_media_are_refused() -> None:
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, {})
    for part in ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
                 {"type": "input_audio", "input_audio": {"data": "aa", "format": "wav"}},
                 {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}):  # fmt: skip
        with pytest.raises(Refused, match="text"):
            template.render([{"role": "user", "content": [part]}], None)


def test_class_8_hashes_of_blocks_are_cryptographic() -> None:
    parent, tokens = bytes(range(16)), bytes(range(64))
    assert hash_block(parent, tokens) == blake2b(parent + tokens, digest_size=16).digest()
    assert (
        root_of("a") != root_of("b")
        and root_of("a", b"x") not in (root_of("a", b"y"), root_of("b", b"x"))
        and len(root_of("a")) == 16
    )


def test_class_12_templates_of_clients_are_refused(server: FakeServer) -> None:
    for extra in ({"chat_template": "{{ cycler.__init__.__globals__.os.popen('id').read() }}"},
                  {"chat_template": "x"}):  # fmt: skip
        assert error_of(ask(server, "POST", "/v1/chat/completions", {**CHAT, **extra}), 400)["param"] == "chat_template"


def test_class_12_values_of_clients_override_nothing_and_reach_no_attribute() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}{{ thinking }}"}, {})
    chat = [{"role": "user", "content": "{{ 7 * 7 }}"}]
    for name in ("tokenize", "chat_template", "messages", "tools", "add_generation_prompt", "self", "__class__", "a.b"):
        with pytest.raises(Refused, match="may not set"):
            template.render(chat, {"chat_template_kwargs": {name: True}})
    assert template.render(chat, {"chat_template_kwargs": {"thinking": "{{ 1 }}"}}) == "{{ 7 * 7 }}{{ 1 }}"
    for source in ("{{ messages.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{{ ''.__class__() }}",
                   "{{ raise_exception.__globals__ }}", "{{ messages.append(1) }}"):  # fmt: skip
        try:
            assert ChatTemplate({"default": source}, {}).render(chat, None) == ""
        except Refused as refused:
            assert refused.param == "messages"


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 10**9), ("n", 9), ("best_of", 10**9), ("stop", ["x"] * 10**4),
     ("min_tokens", 10**12),
     ("stop_token_ids", [-1]), ("prompt", ["x"] * 10**4)],
)  # fmt: skip
def test_class_14_what_a_request_may_ask_for_is_bounded(server: FakeServer, name: str, value: Any) -> None:
    before = len(server.engine.requests)
    message = error_of(ask(server, "POST", "/v1/completions", {**HI, name: value}), 400)["message"]
    assert len(message) < 700 and len(server.engine.requests) == before


OPTIMIZED = """
import http.client, json, sys
from quire.frontend.fake import FakeServer

def status(server, path, headers, body=None):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json", **headers})
    return connection.getresponse().status

key = {"Authorization": "Bearer right"}
with FakeServer(api_key="right", admin_api_key="admin", local_only=True, max_json_depth=8, max_n=2) as server:
    print(sys.flags.optimize, *[status(server, "/v1/completions", *each) for each in (
        ({},), ({"Authorization": "Bearer wrong"},), (key, {"prompt": "a", "n": 3}), (key, {"prompt": "a", "n": -1}),
        (key, {"prompt": "a", "max_tokens": 1}), ({**key, "Host": "evil.example"},), ({**key, "Origin": "http://e"},),
        (key, {"prompt": "a", "metadata": [[[[[[[[[]]]]]]]]]}), (key, {"prompt": 5}),
    )], status(server, "/sleep", key), status(server, "/v1/completions", {**key, "X": "y" * 20000}))
"""


def test_class_19_every_check_is_there_without_asserts() -> None:
    """``test_source_keeps_the_rules`` looks for checks that are asserts; here the server runs under ``python -O``."""
    done = subprocess.run([sys.executable, "-O", "-c", OPTIMIZED], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "401", "401", "400", "400", "200", "403", "403", "400", "400", "403", "431"], (
        done
    )


def test_class_20_an_error_tells_no_address_and_no_path(server: FakeServer) -> None:
    class Strange(ValueError):
        def __str__(self) -> str:
            return f"{object()} at /home/me/secret.py line 3"

    def submit(**_: Any) -> None:
        raise Strange

    real, server.engine.submit = server.engine.submit, submit  # type: ignore[method-assign, assignment]
    try:
        for stream in (False, True):
            answer = ask(server, "POST", "/v1/completions", {**HI, "stream": stream})
            assert not re.search(r"0x[0-9a-f]|/home|\.py|Traceback|Strange", str(answer[1])) and answer[0] == 500
    finally:
        server.engine.submit = real  # type: ignore[method-assign]


def test_class_21_a_packed_body_is_not_unpacked(server: FakeServer) -> None:
    import gzip

    packed = gzip.compress(json.dumps({**HI, "user": "x" * 10**6}).encode())
    for kind in ("gzip", "deflate", "br", "zstd", "GZIP, identity"):
        answer = ask(server, "POST", "/v1/completions", packed, {"Content-Encoding": kind})
        assert "compressed" in error_of(answer, 400)["message"]
