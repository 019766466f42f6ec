"""Make an image to build on where none can be pulled: ``python base.py TAG``.

Debian's own Python from debootstrap, which trusts the certificates that this machine trusts and has pip's settings
and local wheel folders. Needs root and a Docker engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"


def pip_settings() -> dict[str, str]:
    """pip's settings on this machine: file and environment together, names without their section."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = (line.partition("=") for line in listed.splitlines() if "=" in line)
    return {name.rpartition(".")[2]: value.strip("'\"") for name, _, value in pairs}


def make(tag: str) -> None:
    """Debootstrap, add what pip needs, import. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)  # it becomes the container's /
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, folder], check=True)
        shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
        bundle = root / "etc/ssl/certs/ca-certificates.crt"
        settings = pip_settings()
        if os.path.isfile(settings.get("cert", "")):
            shutil.copyfile(settings["cert"], bundle)
        lines = ["[global]", "cert = /etc/ssl/certs/ca-certificates.crt", "timeout = 180"]
        wheels = settings.get("find-links", "")
        if os.path.isdir(wheels):
            shutil.copytree(wheels, root / wheels.lstrip("/"))
            lines.append(f"find-links = {wheels}")
        (root / "etc/pip.conf").write_text("\n".join(lines) + "\n")
        packed = subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["docker", "import", "-", tag], stdin=packed.stdout, check=True)
        if packed.wait():
            raise subprocess.CalledProcessError(packed.returncode, "tar")


if __name__ == "__main__":
    make(sys.argv[1])
