"""`quire doctor`: what it finds here, and that it changes nothing and says what is wrong."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from quire.cli import doctor_checks
from quire.cli.doctor_checks import FAIL, OK, WARN
from quire.cli.main import run

GPU = {"name": "NVIDIA L4", "arch": 89, "free": 20 * 2**30, "total": 22 * 2**30, "flash": "none"}
CPU = {"free": 2**34, "source": "MemAvailable", "sets": ["avx2"], "kernels": "avx2", "products": "native", "why": ""}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("0.0.0.0", 0))
        return found.getsockname()[1]


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the findings by name."""
    code = run(["doctor", "--json", "--port", str(free_port()), *words])
    return code, {each["name"]: each for each in json.loads(capsys.readouterr().out)}


@pytest.mark.slow
def test_this_machine_by_a_real_probe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The demo model fits any machine that runs tests; what a worker would choose comes from a process with torch."""
    before = sorted(os.listdir(tmp_path))
    code, found = asked(capsys, "quire-demo")
    assert code == 0, [each for each in found.values() if each["state"] == FAIL]
    assert found["runs as"]["state"] == OK and "by quire's own code" in found["runs as"]["found"]
    assert found["memory"]["state"] in (OK, WARN) and found["processor"]["state"] == OK
    assert sorted(os.listdir(tmp_path)) == before


def test_what_is_wrong_is_a_failure_with_a_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "probe", lambda folder: {"error": "No module named 'torch'"})
    key = tmp_path / "quire.keys"
    key.write_text("")
    key.chmod(0o644)
    code, found = asked(capsys, str(tmp_path / "none" / "model"), "--keys", str(key), "--api-key-file", "/no/such")
    assert code == 1
    assert found["torch"]["state"] == FAIL and "No module" in found["torch"]["found"]
    assert found["--keys"] | {"found": ""} == {
        "section": "Keys", "name": "--keys", "state": FAIL, "found": "", "remedy": f"chmod 600 {key}",
    }  # fmt: skip
    assert found["--api-key-file"]["state"] == FAIL and found[str(tmp_path / "none" / "model")]["state"] == FAIL
    key.chmod(0o600)
    _, found = asked(capsys, "--keys", str(key))
    assert found["--keys"]["state"] == OK


def test_a_model_that_one_card_does_not_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """14 billion parameters on 22 GiB: not in bfloat16; the formats that would fit are named."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = {"dtype": "float16", "device": "cuda", "runs": "quire", "cache": "float16", "stored": "float16", "why": ""}
    told = {"torch": "2", "built_for": "12", "gpus": [GPU], "cpu": CPU, "model": chosen}
    monkeypatch.setattr(doctor_checks, "probe", lambda folder: told)
    code = run(["doctor", str(tmp_path), "--port", str(free_port())])
    out = capsys.readouterr().out
    assert code == 0 and "does not fit in bfloat16 (L4, 4096 tokens)" in out
    assert "-> start with --quantization fp8" in out
    gpu = GPU | {"error": "it has compute capability 7.5; use another"}
    assert [each.state for each in doctor_checks.devices(told | {"gpus": [gpu]}) if each.name == "GPU 0"] == [FAIL]


def test_a_taken_port_and_a_hub_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        (port,) = (each for each in doctor_checks.ports(taken.getsockname()[1]) if each.name.startswith("port"))
    assert (port.state, port.found) == (WARN, "taken") and "--port" in port.remedy
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://user:secret@127.0.0.1:{free_port()}")
    away = next(each for each in doctor_checks.hub() if each.name == "hub")
    assert "secret" not in away.found
    assert away.state == WARN and "refused" in away.found
