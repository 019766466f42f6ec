"""Starts that cannot work: one line that names the cause, a code other than 0, and no hang.

Others are tested beside what they are of: a port in use (test_client_launch, test_frontend_process), too little device
memory (test_worker_process, test_worker_memory), an unknown model (test_stack), other cuts (test_loader).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import quire

DEMO = Path(quire.__file__).parent / "demo_model"

NO_DISK = """
import errno, os, sys, tempfile
def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tempfile.gettempdir())
tempfile.mkdtemp = full
from quire.cli.main import main
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0"]))
"""


def one_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    said = [line for line in done.stderr.splitlines() if "error:" in line]
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    assert len(said) == 1, done.stderr
    return said[0]


def test_a_model_file_that_was_cut_short(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    line = one_line([sys.executable, "-m", "quire.cli", "serve", str(folder), "--host=127.0.0.1", "--port=0"])
    assert "model.safetensors" in line


def test_a_disk_that_is_full() -> None:
    assert "No space left on device" in one_line([sys.executable, "-c", NO_DISK])
