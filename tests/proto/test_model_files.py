"""Model folders: paths, the demo model, downloads from a fake hub on this machine, and what config.json must hold."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.proto.checkpoint import model_config
from quire.proto.checkpoint.model_config import (
    config_of,
    demo_model_path,
    load_model_config,
    model_folder,
    resolve_model,
    rope_parameters,
)
from quire.proto.config import ConfigError, EngineArgs

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"vocab_size": 8, "max_position_embeddings": 64}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"never wanted",
    "README.md": b"neither",
}


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as a download asks for: the list of a revision's files, and the files."""

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, body):
        self.server.asked.append(self.path)
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "tiny"] and parts[-1] in ("main", "v1", COMMIT, "tiny"):
            listing = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            if "tree" in parts:
                listing = [{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in FILES.items()]
            self.reply(200, json.dumps(listing).encode(), body)
        elif parts[:2] == ["org", "tiny"] and parts[-1] in FILES:
            data = FILES[parts[-1]]
            self.reply(200, data, body, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self.reply(404, b'{"error": "not found"}', body, {"X-Error-Code": "RepoNotFound"})

    def reply(self, status, data, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(hub, cache, *args, **env):
    """``resolve_model`` in a process of its own: the hub's client reads its address when it is imported."""
    code = (
        "import sys; from quire.proto.checkpoint.model_config import resolve_model\n"
        "from quire.proto.config import ConfigError\n"
        "try: print(resolve_model(sys.argv[1], *(a or None for a in sys.argv[2:4]), weights=sys.argv[4] == 'True'))\n"
        "except ConfigError as error: print('refused:', error)"
    )
    name, revision, weights = args
    environment = {
        **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", **env,
    }  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in env else None
    command = [sys.executable, "-P", "-c", code, name, revision or "", str(cache), str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_hub_id_is_downloaded_without_what_is_not_needed(hub, tmp_path, revision):
    folder = resolve(hub, tmp_path, "org/tiny", revision, True)
    assert folder.endswith(f"models--org--tiny/snapshots/{COMMIT}")
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert load_model_config(folder).max_model_len == 64
    assert any(f"/revision/{revision or 'main'}" in path or path.endswith("org/tiny") for path in hub.asked)


def test_weights_stay_where_they_are_when_only_text_is_needed(hub, tmp_path):
    folder = resolve(hub, tmp_path, "org/tiny", None, False)
    assert sorted(os.listdir(folder)) == ["config.json", "tokenizer.json"]


@pytest.mark.slow
def test_what_was_downloaded_is_found_with_no_hub(hub, tmp_path):
    folder = resolve(hub, tmp_path, "org/tiny", None, True)
    asked = len(hub.asked)
    assert resolve(hub, tmp_path, "org/tiny", None, True, HF_HUB_OFFLINE="1") == folder
    assert len(hub.asked) == asked


@pytest.mark.slow
def test_an_unknown_id_is_one_line_that_names_it(hub, tmp_path):
    said = resolve(hub, tmp_path, "org/none", None, True)
    assert said.startswith("refused:") and "'org/none'" in said


def test_modelscope_is_an_extra_that_says_so(monkeypatch):
    monkeypatch.setenv("QUIRE_USE_MODELSCOPE", "True")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[modelscope\]'"):
        resolve_model("org/tiny")


def test_modelscope_is_asked_when_told_to(monkeypatch, tmp_path):
    asked = []
    module = type(sys)("modelscope")
    module.snapshot_download = lambda model, **kwargs: asked.append((model, kwargs["revision"])) or str(tmp_path)
    monkeypatch.setitem(sys.modules, "modelscope", module)
    monkeypatch.setenv("QUIRE_USE_MODELSCOPE", "True")
    assert resolve_model("org/tiny", "v2") == str(tmp_path)
    assert asked == [("org/tiny", "v2")]


def test_the_demo_model_needs_no_hub():
    assert resolve_model(None) == resolve_model("quire-demo") == demo_model_path()


def test_a_missing_folder_is_not_looked_for_on_a_hub():
    for name in ("/no/such/folder", "./no/such", "a/b/c"):
        with pytest.raises(ConfigError, match="does not exist"):
            resolve_model(name)


def write(tmp_path, config, generation=None):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "where a JSON object"),
        ({"vocab_size": "x"}, "vocab_size"),
        ({}, "vocab_size"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(tmp_path, config, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load_model_config(write(tmp_path, config))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_model_config(str(tmp_path))


@pytest.mark.parametrize(
    ("extra", "length"),
    [
        ({}, 100),
        ({"n_positions": 80}, 80),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 400),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 200),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}}, 200),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 100),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, 100),
    ],
)
def test_the_longest_request_follows_from_the_config(tmp_path, extra, length, monkeypatch):
    folder = write(tmp_path, {"vocab_size": 8, "max_position_embeddings": 100, **extra})
    assert load_model_config(folder).max_model_len == length
    assert load_model_config(folder, 10).max_model_len == 10
    with pytest.raises(ConfigError, match=rf"\({length + 1}\) is greater than the derived max_model_len \({length}\)"):
        load_model_config(folder, length + 1)
    monkeypatch.setenv("QUIRE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert load_model_config(folder, length + 1).max_model_len == length + 1


def test_a_sliding_window_may_be_the_limit(tmp_path):
    sizes = {"vocab_size": 8, "max_position_embeddings": 100}
    folder = write(tmp_path, {**sizes, "sliding_window": 40})
    assert config_of(EngineArgs(disable_sliding_window=True), folder).max_model_len == 40
    assert config_of(EngineArgs(disable_sliding_window=True, max_model_len=30), folder).max_model_len == 30
    assert config_of(EngineArgs(), folder).max_model_len == 100
    with pytest.raises(ConfigError, match=r"max_model_len \(41\) is over the model's sliding window \(40\)"):
        config_of(EngineArgs(disable_sliding_window=True, max_model_len=41), folder)
    for windowless in ({}, {"sliding_window": None}, {"sliding_window": 40, "use_sliding_window": False}):
        folder = write(tmp_path, {**sizes, **windowless})
        assert config_of(EngineArgs(disable_sliding_window=True), folder).max_model_len == 100


def test_a_token_of_the_hub_is_put_where_its_client_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "before")
    assert model_folder(EngineArgs(model=str(tmp_path), hf_token="")) == str(tmp_path)
    assert os.environ["HF_TOKEN"] == "before"
    model_folder(EngineArgs(model=str(tmp_path), hf_token="secret"))
    assert os.environ["HF_TOKEN"] == "secret"


def test_one_token_is_too_short_for_any_request(tmp_path):
    with pytest.raises(ConfigError, match="at least 2"):
        load_model_config(write(tmp_path, {"vocab_size": 8, "max_position_embeddings": 100}), 1)


def test_no_length_at_all_is_2048(tmp_path):
    assert load_model_config(write(tmp_path, {"vocab_size": 8})).max_model_len == model_config._DEFAULT_LENGTH


def test_eos_ids_come_from_the_generation_config_first(tmp_path):
    config = {"vocab_size": 8, "eos_token_id": 1}
    assert load_model_config(write(tmp_path, config)).eos_token_ids == [1]
    assert load_model_config(write(tmp_path, config, {"eos_token_id": [3, 4]})).eos_token_ids == [3, 4]
    assert load_model_config(write(tmp_path, {"vocab_size": 8, "eos_token_id": None}, {"x": 1})).eos_token_ids == []
    with pytest.raises(ConfigError, match="eos_token_id must be a token id"):
        load_model_config(write(tmp_path, {"vocab_size": 8, "eos_token_id": "x"}))


def test_rope_settings_are_read_in_both_spellings():
    assert rope_parameters({"rope_theta": 5.0}) == {"rope_type": "default", "rope_theta": 5.0}
    old = rope_parameters({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = rope_parameters({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}})
    assert old == new == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
