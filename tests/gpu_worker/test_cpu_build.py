"""The CPU kernels are compiled at install, by gcc or clang, for x86 and Arm; and where there is no compiler, quire
installs and answers without them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.gpu_worker.kernels.cpu import build, library

ROOT = Path(__file__).resolve().parents[2]
ASK = """
import logging
logging.basicConfig()
import quire
from quire import LLM, SamplingParams
if __name__ == "__main__":
    print(quire.__file__)
    with LLM(quire.__path__[0] + "/demo_model", device="cpu") as llm:
        print(len(llm.generate(["Hello"], SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids))
"""


def test_functions_are_found_at_their_places_in_the_table() -> None:
    header = (build.SOURCES / "kernels.h").read_text()
    table = header[header.index("the table of one instruction set") : header.index("} q_kernels;")]
    assert tuple(re.findall(r"\(\*(\w+)\)\(", table)) == library.FUNCTIONS


def test_no_compiler_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(build.NotBuilt, match="no C compiler"):
        build.compiler()


def test_what_the_compiler_said_is_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wrong.c").write_text("int x = nothing;\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "COMMON", ("wrong.c",))
    cc = compiler_or_skip("cc")
    with pytest.raises(build.NotBuilt, match="nothing"):
        build.compile_kernels(tmp_path / "kernels.so", cc)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cc", "machine"), [("clang", None), ("aarch64-linux-gnu-gcc", "aarch64")], ids=["clang", "Arm"]
)
def test_other_compilers_and_processors(
    cc: str, machine: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is compiled, and linked; no Arm is here to run it."""
    flags = ["-O1" if flag == "-O3" else flag for flag in build._FLAGS]  # a quarter of the time
    monkeypatch.setattr(build, "_FLAGS", flags)
    target = tmp_path / "kernels.so"
    build.compile_kernels(target, compiler_or_skip(cc), machine)
    assert target.stat().st_size > 0


def compiler_or_skip(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.slow
def test_an_install_without_a_compiler_answers(tmp_path: Path) -> None:
    """A wheel is made where the PATH has no compiler, and one line of the worker's log says what that means."""
    source, empty, target = tmp_path / "source", tmp_path / "empty", tmp_path / "installed"
    empty.mkdir()
    subprocess.run(["git", "-C", str(ROOT), "checkout-index", "-a", f"--prefix={source}/"], check=True)
    without = {name: value for name, value in os.environ.items() if name not in ("CC", "QUIRE_CPU_KERNELS")}
    without["PATH"] = str(empty)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", str(target)]
    done = subprocess.run([*pip, str(source)], env=without, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(target.rglob("_kernels*"))
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    without["PYTHONPATH"] = str(target)
    done = subprocess.run(
        [sys.executable, script], env=without, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(target / "quire" / "__init__.py"), "5"]
    said = [line for line in done.stderr.splitlines() if "no native CPU kernels" in line]
    assert len(said) == 1 and "install a C compiler" in said[0]


def test_a_wrong_name_of_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "avx1")
    library.library.cache_clear()
    try:
        with pytest.raises(library.ConfigError, match="'avx1' must be one of auto"):
            library.library()
    finally:
        library.library.cache_clear()
