"""``quire quantize`` around an auto-round that only copies: what it is asked for, what is refused, what is left."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from quire.cli.main import run
from quire.proto.checkpoint.model_config import demo_model_path

FAKE = """
import json, pathlib, shutil
class AutoRound:
    def __init__(self, model, **asked):
        self.model, self.asked = pathlib.Path(model), asked
    def quantize_and_save(self, out, format):
        made = pathlib.Path(out) / "model-w4g128"  # as the real one does for some formats
        made.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            made.joinpath(name).write_bytes(self.model.joinpath(name).read_bytes())
        made.joinpath("asked.json").write_text(json.dumps({**self.asked, "format": format}))
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in place of auto-round."""
    folder = tmp_path / "packages"
    (folder / "auto_round").mkdir(parents=True)
    (folder / "auto_round" / "__init__.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return folder


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ([], {"scheme": "W4A16", "iters": 0, "disable_opt_rtn": True, "format": "auto_gptq"}),
        (["--method=fp8"], {"scheme": "FP8_BLOCK", "iters": 0, "disable_opt_rtn": True, "format": "fp8"}),
        (["--method=awq", "--group-size=32"],
         {"scheme": "W4A16", "iters": 0, "disable_opt_rtn": True, "group_size": 32, "format": "auto_awq"}),
    ],
)  # fmt: skip
def test_what_the_tool_is_asked_for(flags: list[str], asked: dict[str, object], tool: Path, tmp_path: Path) -> None:
    assert run(["quantize", "quire-demo", str(tmp_path / "out"), "--no-perplexity", *flags]) == 0
    out = tmp_path / "out"
    assert json.loads((out / "asked.json").read_text()) == asked
    assert {file.name for file in Path(demo_model_path()).glob("*.json")} <= {file.name for file in out.iterdir()}
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_a_calibration_text_is_tuned_on_and_its_end_is_kept(tool: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{n}" for n in range(3000)))
    assert run(["quantize", "quire-demo", str(tmp_path / "out"), "--no-perplexity", "--iters=2",
                f"--calibration={text}"]) == 0  # fmt: skip
    asked = json.loads((tmp_path / "out" / "asked.json").read_text())
    assert asked["nsamples"] == 8 and asked["dataset"][0].startswith("w0 w1 ") and "w2400" not in asked["dataset"][-1]


@pytest.mark.slow
def test_the_perplexity_before_and_after(tool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "quire-demo", str(tmp_path / "out")]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    before, after = (float(word) for word in line.replace(",", "").split() if word[0].isdigit())
    assert line.endswith("(+0.00%)") and before == after > 1


@pytest.mark.parametrize(
    ("prepare", "flags", "said"),
    [
        (lambda f: (f / "out" / "x").mkdir(parents=True), [], "out exists already; name another folder"),
        (lambda f: None, ["--iters=3"], "--iters needs a text: add --calibration FILE"),
        (lambda f: None, ["--calibration=/none"], "/none cannot be read as text"),
        (lambda f: (f / "t").write_text("few words"), ["--calibration=t"], "give a longer text"),
        (lambda f: None, ["--group-size=0"], "--group-size at least 1"),
        (lambda f: None, ["--method=int8", "--group-size=64"], "int8 has no groups: leave --group-size 64 out"),
    ],
)
def test_what_cannot_be_is_one_line(
    prepare, flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    assert run(["quantize", "quire-demo", str(tmp_path / "out"), *flags]) != 0
    assert said in capsys.readouterr().err


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(demo_model_path(), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    assert run(["quantize", str(model), str(tmp_path / "out")]) != 0
    assert "is quantized already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["BertModel", "RobertaForSequenceClassification", "Qwen2ForSequenceClassification"])
def test_a_model_that_pools_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(demo_model_path(), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    assert run(["quantize", str(model), str(tmp_path / "out")]) == 78
    said = capsys.readouterr().err
    assert f"is a {name}, which pools and does not generate" in said and said.count("\n") == 1


@pytest.mark.parametrize("given", ["m.gguf", "."])
def test_a_gguf_is_refused(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert run(["quantize", str(tmp_path / given), str(tmp_path / "out")]) == 78
    said = capsys.readouterr().err
    assert "is a GGUF model" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise ImportError('none')", "needs auto-round: pip install 'quire[quantize]'"),
     ("raise SystemExit(3)", "auto-round failed with exit code 3")],
)  # fmt: skip
def test_a_tool_that_is_not_there_or_fails(
    code: str, said: str, tool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tool / "auto_round" / "__init__.py").write_text(code)
    assert run(["quantize", "quire-demo", str(tmp_path / "out"), "--no-perplexity"]) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_stays_where_it_is_ended(tool: Path, tmp_path: Path) -> None:
    (tool / "auto_round" / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    with pytest.raises(SystemExit) as ended:
        run(["quantize", "quire-demo", str(tmp_path / "out"), "--no-perplexity"])
    assert ended.value.code == 143
    assert [each.name for each in tmp_path.iterdir()] == ["packages"]
