"""``quire completion``: the scripts do in a shell what they are for."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from quire.cli.main import COMMANDS, run

ASK = """
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _quire; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    import contextlib
    import io

    found = {}
    for shell in ("bash", "zsh", "fish"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert run(["completion", shell]) == 0
        found[shell] = out.getvalue()
    return found


def test_bash_completes(scripts: dict[str, str]) -> None:
    def complete(*words: str) -> list[str]:
        script = scripts["bash"] + ASK.format(words=" ".join(f"'{word}'" for word in words))
        told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert told.stderr == ""
        return told.stdout.split()

    assert set(COMMANDS) <= set(complete("quire", ""))
    assert complete("quire", "cha") == ["chat"]
    assert complete("quire", "serve", "--gpu-memory") == ["--gpu-memory-utilization"]
    assert complete("quire", "serve", "--dtype", "b") == complete("quire", "serve", "--dtype", "=", "b") == ["bfloat16"]
    assert complete("quire", "workers", "dr") == ["drain"]
    assert "--top-p" in complete("quire", "chat", "--")
    assert complete("quire", "completion", "z") == ["zsh"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_a_shell_reads_its_script(scripts: dict[str, str], shell: str) -> None:
    for word in (*COMMANDS, "gpu-memory-utilization", "bfloat16"):
        assert word in scripts[shell]
    if shell == "fish":
        assert all(line.count("'") % 2 == 0 for line in scripts[shell].splitlines())
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=scripts[shell], text=True, timeout=60, check=True)
